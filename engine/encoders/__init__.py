"""Encoders: embedding models and cross-encoders in ONNX, run in batches beside the chat model. Never sees HTTP."""
