"""`/v1/embeddings`, and what it shares with the other endpoints of encoders."""

from __future__ import annotations

from typing import Literal, cast

import msgspec

from ..errors import bad_request
from .decode import Body, Unsupported

MAX_INPUTS = 2048  # OpenAI's


class InputUsage(msgspec.Struct):
    """Tokens of all inputs of a request that generates none."""

    prompt_tokens: int
    total_tokens: int


class EncoderRequest(Body, kw_only=True):
    """What every request to an encoder may say. `use_activation` false asks for vectors that are not normalized, and
    for logits in place of probabilities.
    """

    model: str | None = None
    truncate_prompt_tokens: int | None = None
    use_activation: bool | None = None
    user: str | None = None

    additional_data: Unsupported = None
    mm_processor_kwargs: Unsupported = None
    padding: Unsupported = None
    priority: Unsupported = None
    request_id: Unsupported = None
    truncation_side: Unsupported = None

    def without_effect(self) -> dict[str, str]:
        return {} if self.user is None else {"user": "no answer depends on it"}


class TextsRequest(EncoderRequest, kw_only=True):
    """Texts or token ids. `prompt_name` is one of the model's own prompts, put before each text."""

    input: str | list[str | int | list[int]]
    add_special_tokens: bool | None = None
    prompt_name: str | None = None

    cache_salt: Unsupported = None
    chat_template: Unsupported = None
    messages: Unsupported = None

    def inputs(self) -> list[str] | list[list[int]]:
        """The inputs one by one, all as text or all as token ids. Raises ApiError (400) for a mixture or none."""
        if isinstance(self.input, str):
            return [self.input]
        if not self.input:
            raise bad_request("input is empty", "input")
        kind = type(self.input[0])
        for i, item in enumerate(self.input):
            if type(item) is not kind:
                raise bad_request(f"input mixes text and token ids: input[{i}] differs from input[0]", "input")
        if kind is int:
            return [cast("list[int]", self.input)]
        if len(self.input) > MAX_INPUTS:
            raise bad_request(f"input must have at most {MAX_INPUTS} entries, got {len(self.input)}", "input")
        return cast("list[str] | list[list[int]]", self.input)


class VectorsRequest(TextsRequest, kw_only=True):
    """How vectors are made. `normalize` is another name of `use_activation`."""

    encoding_format: Literal["float", "base64"] | None = None
    dimensions: int | None = None
    normalize: bool | None = None

    embed_dtype: Unsupported = None
    endianness: Unsupported = None

    def activation(self) -> bool | None:
        """Whether vectors are normalized; None is as the model says. Raises ApiError (400) for a contradiction."""
        if None not in (self.normalize, self.use_activation) and self.normalize != self.use_activation:
            raise bad_request("normalize and use_activation contradict each other: send one", "normalize")
        return self.use_activation if self.normalize is None else self.normalize


class EmbeddingRequest(VectorsRequest, kw_only=True):
    """Texts or token ids to embed."""

    input_type: Unsupported = None
    late_chunking: Unsupported = None
    output_dtype: Unsupported = None
    task: Unsupported = None


class Embedding(msgspec.Struct, kw_only=True):
    """One vector: numbers, or base64 of little-endian float32."""

    object: Literal["embedding"] = "embedding"
    index: int
    embedding: list[float] | str


class EmbeddingList(msgspec.Struct, kw_only=True):
    """An answer, in the order of the inputs."""

    id: str
    object: Literal["list"] = "list"
    created: int
    model: str
    data: list[Embedding]
    usage: InputUsage
