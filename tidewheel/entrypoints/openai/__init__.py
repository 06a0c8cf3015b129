"""Commands, where vLLM has them."""
