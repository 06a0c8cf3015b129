"""Endpoints, one file a family."""
