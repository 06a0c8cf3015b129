"""GGUF files that make a model see, called mmproj: a vision tower and what connects it to a language model."""
