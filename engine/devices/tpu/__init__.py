"""The TPU device: the spec in JAX. Every size of step is compiled at start; see docs/devices/tpu.md.

Nothing here imports jax before a model is loaded.
"""
