"""Turns messages into a prompt, and a model's text into messages: templates and tool-call parsers."""
