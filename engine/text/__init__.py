"""Text to tokens and back: tokenizers, detokenization, stop strings."""
