"""Declaring options on the dataclasses that use them. It imports no more than errors, so that every room may use it."""
