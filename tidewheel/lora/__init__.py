"""LoRA adapters for `LLM` and `AsyncLLM`, where vLLM has them."""
