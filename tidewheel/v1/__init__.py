"""What scripts for vLLM take from `vllm.v1`."""
