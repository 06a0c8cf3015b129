"""Text to be continued: from a request's prompts, perhaps around a hole, to a generation."""
