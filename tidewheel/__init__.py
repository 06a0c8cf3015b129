"""Tidewheel: an OpenAI-compatible server for language models on the machines you already have.

`LLM` and `AsyncLLM` run a model in this process, without a server. They are imported when they are asked for: the
server, which imports this package too, starts without them.
"""

from __future__ import annotations

import importlib
import os
from collections.abc import Iterator
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .engine.errors import TidewheelError
    from .offline.async_llm import AsyncLLM, AsyncLLMEngine
    from .offline.engine_args import AsyncEngineArgs, EngineArgs
    from .offline.llm import LLM
    from .offline.llm_engine import LLMEngine
    from .offline.lora_request import LoRARequest
    from .offline.outputs import (
        ClassificationOutput,
        ClassificationRequestOutput,
        CompletionOutput,
        EmbeddingOutput,
        EmbeddingRequestOutput,
        PoolingOutput,
        PoolingRequestOutput,
        RequestOutput,
        ScoringOutput,
        ScoringRequestOutput,
    )
    from .offline.params import (
        BeamSearchParams,
        GuidedDecodingParams,
        RequestOutputKind,
        SamplingParams,
        StructuredOutputsParams,
    )
    from .offline.pooling_params import PoolingParams
    from .offline.prompts import PromptType, TextPrompt, TokensPrompt

__version__ = "0.1.0"
__version_tuple__ = tuple(int(part) if part.isdigit() else part for part in __version__.split("."))

__all__ = [
    "LLM",
    "AsyncEngineArgs",
    "AsyncLLM",
    "AsyncLLMEngine",
    "BeamSearchParams",
    "ClassificationOutput",
    "ClassificationRequestOutput",
    "CompletionOutput",
    "EmbeddingOutput",
    "EmbeddingRequestOutput",
    "EngineArgs",
    "GuidedDecodingParams",
    "LLMEngine",
    "LoRARequest",
    "PoolingOutput",
    "PoolingParams",
    "PoolingRequestOutput",
    "PromptType",
    "RequestOutput",
    "RequestOutputKind",
    "SamplingParams",
    "ScoringOutput",
    "ScoringRequestOutput",
    "StructuredOutputsParams",
    "TextPrompt",
    "TidewheelError",
    "TokensPrompt",
]

_MODULES = {
    "engine.errors": ("TidewheelError",),
    "offline.async_llm": ("AsyncLLM", "AsyncLLMEngine"),
    "offline.engine_args": ("AsyncEngineArgs", "EngineArgs"),
    "offline.llm": ("LLM",),
    "offline.llm_engine": ("LLMEngine",),
    "offline.lora_request": ("LoRARequest",),
    "offline.outputs": (
        "ClassificationOutput",
        "ClassificationRequestOutput",
        "CompletionOutput",
        "EmbeddingOutput",
        "EmbeddingRequestOutput",
        "PoolingOutput",
        "PoolingRequestOutput",
        "RequestOutput",
        "ScoringOutput",
        "ScoringRequestOutput",
    ),
    "offline.params": (
        "BeamSearchParams",
        "GuidedDecodingParams",
        "RequestOutputKind",
        "SamplingParams",
        "StructuredOutputsParams",
    ),
    "offline.pooling_params": ("PoolingParams",),
    "offline.prompts": ("PromptType", "TextPrompt", "TokensPrompt"),
}

# Those that `import vllm` imports, too.
_SUBMODULES = ("config", "inputs", "lora", "outputs", "pooling_params", "sampling_params", "utils")


def __getattr__(name: str) -> object:
    if name.startswith("_"):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    for module, names in _MODULES.items():
        if name in names:
            return getattr(importlib.import_module(f".{module}", __name__), name)
    if name in _SUBMODULES:
        return importlib.import_module(f".{name}", __name__)
    from .compat.refused import why_not

    why = why_not(name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}" + (f": {why}" if why else ""))


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


class SearchPath(list[str]):
    """Folders to look for a package's modules in. A module that is in none of them may be vLLM's."""

    def __iter__(self) -> Iterator[str]:
        yield from super().__iter__()
        from .compat import install

        install()


# Python that is started in the repository finds the sources first. The installed package alone has the native module.
if not any(name.startswith("_native.") and name.endswith(".so") for name in os.listdir(__path__[0])):
    import pkgutil

    __path__ = pkgutil.extend_path(__path__, __name__)

__path__ = SearchPath(__path__)
