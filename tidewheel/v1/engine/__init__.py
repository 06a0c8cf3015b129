"""Engines, where vLLM's second version has them."""
