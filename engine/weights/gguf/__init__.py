"""GGUF files: models in one file, mostly quantized, with config and tokenizer inside."""
