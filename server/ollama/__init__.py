"""Ollama's `/api` on the chat path: messages and options to chat requests, and pieces to lines of JSON."""
