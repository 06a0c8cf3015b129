"""LoRA: small changes of a model's linear layers, many of which are served over one model."""
