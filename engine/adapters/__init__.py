"""LoRA: small changes of a model's linear layers. Many of them are served over one model."""
