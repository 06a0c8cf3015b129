"""Anthropic's `/v1/messages` on the chat path: blocks to messages, and pieces to blocks."""
