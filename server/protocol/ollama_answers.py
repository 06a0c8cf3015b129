"""Ollama's API: the answers. Each may be a line of a stream. Durations are nanoseconds."""

from __future__ import annotations

from typing import Any, Literal

import msgspec
from msgspec import UNSET, UnsetType

from .chat import TokenLogprobEntry


class OllamaCalledFunction(msgspec.Struct):
    """A function's name and its arguments; `index` counts an answer's calls."""

    index: int
    name: str
    arguments: dict[str, Any]


class OllamaToolCall(msgspec.Struct):
    """A call that the model makes."""

    id: str
    function: OllamaCalledFunction


class OllamaAnswerMessage(msgspec.Struct, kw_only=True):
    """The model's turn, or a part of it."""

    role: Literal["assistant"] = "assistant"
    content: str
    thinking: str | UnsetType = UNSET
    tool_calls: list[OllamaToolCall] | UnsetType = UNSET


class _Answer(msgspec.Struct, kw_only=True):
    model: str
    created_at: str
    done: bool = False
    done_reason: Literal["stop", "length", "load", "unload"] | UnsetType = UNSET
    total_duration: int | UnsetType = UNSET
    load_duration: int | UnsetType = UNSET
    prompt_eval_count: int | UnsetType = UNSET
    prompt_eval_duration: int | UnsetType = UNSET
    eval_count: int | UnsetType = UNSET
    eval_duration: int | UnsetType = UNSET
    logprobs: list[TokenLogprobEntry] | UnsetType = UNSET


class OllamaChatAnswer(_Answer, kw_only=True):
    """An answer of `/api/chat`."""

    message: OllamaAnswerMessage


class OllamaGenerateAnswer(_Answer, kw_only=True):
    """An answer of `/api/generate`."""

    response: str
    thinking: str | UnsetType = UNSET


class OllamaEmbedAnswer(msgspec.Struct):
    """An answer of `/api/embed`, in the order of the inputs."""

    model: str
    embeddings: list[list[float]]
    total_duration: int
    load_duration: int
    prompt_eval_count: int


class OllamaEmbeddingsAnswer(msgspec.Struct):
    """An answer of `/api/embeddings`."""

    embedding: list[float]


class OllamaDetails(msgspec.Struct):
    """What a model is. What is not known is empty."""

    parent_model: str
    format: str
    family: str
    families: list[str]
    parameter_size: str
    quantization_level: str


class OllamaModel(msgspec.Struct, kw_only=True):
    """One served name. `size` is that of the weights in memory, in bytes; `digest` is made of the name."""

    name: str
    model: str
    modified_at: str
    size: int
    digest: str
    details: OllamaDetails


class OllamaModels(msgspec.Struct):
    """All served names."""

    models: list[OllamaModel]


class OllamaRunningModel(msgspec.Struct, kw_only=True):
    """One served name, which is never unloaded."""

    name: str
    model: str
    size: int
    digest: str
    details: OllamaDetails
    expires_at: str
    size_vram: int
    context_length: int


class OllamaRunningModels(msgspec.Struct):
    """All served names."""

    models: list[OllamaRunningModel]


class OllamaModelInfo(msgspec.Struct):
    """One model. `template` is written for Jinja, and `parameters` has the model's own, one a line."""

    modelfile: str
    parameters: str
    template: str
    details: OllamaDetails
    model_info: dict[str, str | int]
    capabilities: list[Literal["completion", "tools", "thinking", "insert", "vision", "embedding"]]
    modified_at: str


class OllamaProgress(msgspec.Struct, kw_only=True):
    """A line of `/api/pull`. `completed` of `total` bytes are here; neither ever shrinks."""

    status: str
    digest: str | UnsetType = UNSET
    total: int | UnsetType = UNSET
    completed: int | UnsetType = UNSET


class OllamaVersion(msgspec.Struct):
    """The version of Ollama whose API this is."""

    version: str


class OllamaError(msgspec.Struct):
    """An error of Ollama's API."""

    error: str
