"""The torch device: the readable reference. It runs a spec on paged batches with torch operations.

Numbers follow the native device: the residual stream and all that is elementwise is float32; the inputs of a matrix
product are rounded to the model's dtype and summed in float32; K and V are cached in the model's dtype.
"""

from .device import TorchDevice

__all__ = ["TorchDevice"]
