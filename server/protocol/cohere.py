"""Cohere's `/v1/embed` and `/v2/embed`."""

from __future__ import annotations

from typing import Literal

import msgspec

from ..errors import bad_request
from .decode import Body, Unsupported
from .embeddings import EmbeddingRequest
from .scoring import limited

CohereType = Literal["float", "base64", "int8", "uint8", "binary", "ubinary"]


class CohereEmbedRequest(Body, kw_only=True):
    """Texts to embed. They are cut to `max_tokens`, or else to what the model takes, unless `truncate` is NONE.

    `input_type` chooses one of the model's prompts, if it has one for it.
    """

    model: str | None = None
    texts: list[str]
    input_type: Literal["search_query", "search_document", "classification", "clustering"] | None = None
    embedding_types: list[CohereType] | None = None
    output_dimension: int | None = None
    max_tokens: int | None = None
    truncate: Literal["END", "NONE"] | None = None

    images: Unsupported = None
    inputs: Unsupported = None
    priority: Unsupported = None

    def wanted(self) -> EmbeddingRequest:
        """The same as /v1/embeddings takes it, without the prompt. Raises ApiError (400) without texts."""
        if self.truncate == "NONE" and self.max_tokens is not None:
            raise bad_request("max_tokens cuts texts, and truncate is NONE: send one of them", "max_tokens")
        most = -1 if self.max_tokens is None else self.max_tokens
        return EmbeddingRequest(
            model=self.model,
            input=[*limited(self.texts, "texts")],
            dimensions=self.output_dimension,
            truncate_prompt_tokens=None if self.truncate == "NONE" else most,
        )


class CohereEmbeddings(msgspec.Struct):
    """The vectors in each type that was asked for. In `binary` and `ubinary` a bit says that a number is above 0.

    In `int8` a vector's numbers are multiplied so that the one farthest from 0 is 127 or -127; `uint8` is 128 more.
    """

    floats: list[list[float]] | msgspec.UnsetType = msgspec.field(default=msgspec.UNSET, name="float")
    base64: list[str] | msgspec.UnsetType = msgspec.UNSET
    int8: list[list[int]] | msgspec.UnsetType = msgspec.UNSET
    uint8: list[list[int]] | msgspec.UnsetType = msgspec.UNSET
    binary: list[list[int]] | msgspec.UnsetType = msgspec.UNSET
    ubinary: list[list[int]] | msgspec.UnsetType = msgspec.UNSET


class CohereVersion(msgspec.Struct):
    """Of Cohere's API."""

    version: str


class CohereUnits(msgspec.Struct):
    """Tokens of all texts."""

    input_tokens: int


class CohereMeta(msgspec.Struct):
    """What the answer took."""

    api_version: CohereVersion
    billed_units: CohereUnits


class CohereEmbedAnswer(msgspec.Struct, kw_only=True):
    """An answer, in the order of the texts: vectors by types, or numbers where `/v1/embed` was asked for none."""

    id: str
    response_type: Literal["embeddings_floats", "embeddings_by_type"]
    embeddings: CohereEmbeddings | list[list[float]]
    texts: list[str]
    meta: CohereMeta
