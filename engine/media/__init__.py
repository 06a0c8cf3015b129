"""Media: images in prompts. Decoding, processing, towers, and embeddings in place of tokens."""
