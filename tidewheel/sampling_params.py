"""The parameters of requests, where vLLM has them."""

from __future__ import annotations

from typing import TYPE_CHECKING, NoReturn

from .offline.params import (
    BeamSearchParams,
    GuidedDecodingParams,
    RequestOutputKind,
    SamplingParams,
    StructuredOutputsParams,
)

__all__ = [
    "BeamSearchParams",
    "GuidedDecodingParams",
    "RequestOutputKind",
    "SamplingParams",
    "StructuredOutputsParams",
]

if not TYPE_CHECKING:

    def __getattr__(name: str) -> NoReturn:
        from .names_of_vllm import refuse_name

        refuse_name(__name__, name)
