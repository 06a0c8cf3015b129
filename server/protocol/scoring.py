"""`/v1/score` and `/v1/rerank`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, TypeVar

import msgspec

from ..errors import bad_request
from .decode import Unsupported
from .embeddings import MAX_INPUTS, EncoderRequest, InputUsage

T = TypeVar("T")


class _PairsRequest(EncoderRequest, kw_only=True):
    activation: Unsupported = None
    softmax: Unsupported = None


class ScoreRequest(_PairsRequest, kw_only=True):
    """Texts to compare: one with one, one with many, or two lists of the same length in pairs."""

    text_1: str | list[str]
    text_2: str | list[str]

    data_1: Unsupported = None
    data_2: Unsupported = None
    documents: Unsupported = None
    queries: Unsupported = None

    def texts(self) -> tuple[list[str], list[str]]:
        """Both sides; the first may be a single text for all of the second. Raises ApiError (400) for other numbers."""
        first, second = _listed(self.text_1, "text_1"), _listed(self.text_2, "text_2")
        if len(first) not in (1, len(second)):
            raise bad_request(
                f"text_1 must have one text or as many as text_2, which has {len(second)}; got {len(first)}", "text_1"
            )
        return first, second


class Document(msgspec.Struct, forbid_unknown_fields=True):
    """A document's text. The other fields are here to be refused by name."""

    text: str
    image: Unsupported = None
    content: Unsupported = None


class RerankRequest(_PairsRequest, kw_only=True):
    """A query and the documents to put in order. `top_n` 0 is all of them."""

    query: str
    documents: list[str | Document]
    top_n: int | None = None
    return_documents: bool | None = None

    max_chunks_per_doc: Unsupported = None
    max_tokens_per_doc: Unsupported = None
    rank_fields: Unsupported = None

    def texts(self) -> list[str]:
        """The documents' texts. Raises ApiError (400) if there are none or too many."""
        return [item if isinstance(item, str) else item.text for item in _limited(self.documents, "documents")]

    def limit(self) -> int:
        """How many results are wanted. Raises ApiError (400) for a number below 0."""
        if self.top_n is not None and self.top_n < 0:
            raise bad_request(f"top_n must be at least 0, got {self.top_n}", "top_n")
        return self.top_n or len(self.documents)


class Score(msgspec.Struct, kw_only=True):
    """The score of one pair."""

    index: int
    object: Literal["score"] = "score"
    score: float


class ScoreList(msgspec.Struct, kw_only=True):
    """An answer, in the order of the pairs."""

    id: str
    object: Literal["list"] = "list"
    created: int
    model: str
    data: list[Score]
    usage: InputUsage


class RankedDocument(msgspec.Struct):
    """A document of the request."""

    text: str


class RerankResult(msgspec.Struct, kw_only=True):
    """A document's score; `index` is its place in the request."""

    index: int
    document: RankedDocument | msgspec.UnsetType = msgspec.UNSET
    relevance_score: float


class RerankList(msgspec.Struct, kw_only=True):
    """An answer, the most relevant document first."""

    id: str
    model: str
    usage: InputUsage
    results: list[RerankResult]


def _listed(texts: str | list[str], param: str) -> list[str]:
    return [texts] if isinstance(texts, str) else [*_limited(texts, param)]


def _limited(items: Sequence[T], param: str) -> Sequence[T]:
    if not items:
        raise bad_request(f"{param} is empty", param)
    if len(items) > MAX_INPUTS:
        raise bad_request(f"{param} must have at most {MAX_INPUTS} entries, got {len(items)}", param)
    return items
