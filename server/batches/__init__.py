"""Batches: files of requests, in OpenAI's format, that are answered by the application without sockets."""
