"""Encoders: embedding models and cross-encoders, run in batches beside the chat model. Never sees HTTP."""
