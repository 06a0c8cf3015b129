"""Sandboxes: processes that do what clients may make fail, and that may crash without harm to the server."""
