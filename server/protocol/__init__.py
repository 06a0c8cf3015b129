"""Typed requests and responses, one file an endpoint family."""
