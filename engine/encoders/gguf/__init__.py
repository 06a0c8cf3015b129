"""Encoders in GGUF files: how they compute, and their tokenizers."""
