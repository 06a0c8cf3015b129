"""Kernels in Triton (https://triton-lang.org), for GPUs. Nothing here is imported where Triton is not installed."""
