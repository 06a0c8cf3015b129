"""The parameters of embeddings, where vLLM has them."""

from __future__ import annotations

from .offline.pooling_params import PoolingParams

__all__ = ["PoolingParams"]
