"""Tidewheel: an OpenAI-compatible server for language models on the machines you already have."""

__version__ = "0.1.0"
