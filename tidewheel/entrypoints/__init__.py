"""Ways in, where vLLM has them."""
