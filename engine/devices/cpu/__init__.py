"""The CPU: native kernels, chosen for the processor at hand. Nothing here imports torch."""
