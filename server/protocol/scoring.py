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
    cache_salt: Unsupported = None
    softmax: Unsupported = None


class ScoreRequest(_PairsRequest, kw_only=True):
    """Texts to compare: one with one, one with many, or two lists of the same length in pairs.

    The two sides have the names of one pair: `queries` and `documents`, or as in other versions of vLLM.
    """

    queries: str | list[str] | None = None
    documents: str | list[str] | None = None
    items: str | list[str] | None = None
    data_1: str | list[str] | None = None
    data_2: str | list[str] | None = None
    text_1: str | list[str] | None = None
    text_2: str | list[str] | None = None

    def texts(self) -> tuple[list[str], list[str], tuple[list[str], list[str]]]:
        """Both sides; the first may be a single text for all of the second. And the texts' places in the body.

        Raises ApiError (400) for other numbers, or other sides.
        """
        given = [name for name in _SIDES if getattr(self, name) is not None]
        if len(given) < 2:
            pair = next((pair for pair in _PAIRS if given and given[0] in pair), ("queries", "documents"))
            missing = next(name for name in pair if name not in given)
            raise bad_request(f"{missing} is required", missing, "missing_required_parameter")
        if tuple(given) not in _PAIRS:
            raise bad_request(
                f"send two of {', '.join(' and '.join(pair) for pair in _PAIRS)}; got {', '.join(given)}", given[-1]
            )
        sides = [getattr(self, name) for name in given]
        first, second = (_listed(side, name) for side, name in zip(sides, given, strict=True))
        if len(first) not in (1, len(second)):
            raise bad_request(
                f"{given[0]} must have one text or as many as {given[1]}, which has {len(second)}; got {len(first)}",
                given[0],
            )
        names = [_places(side, name) for side, name in zip(sides, given, strict=True)]
        return first, second, (names[0], names[1])


_PAIRS = (("text_1", "text_2"), ("data_1", "data_2"), ("queries", "documents"), ("queries", "items"))
_SIDES = ("text_1", "text_2", "data_1", "data_2", "queries", "documents", "items")


class Document(msgspec.Struct, forbid_unknown_fields=True):
    """A document's text. The other fields are here to be refused by name."""

    text: str
    image: Unsupported = None
    content: Unsupported = None


class RerankRequest(_PairsRequest, kw_only=True):
    """A query and the documents to put in order, as vLLM, Jina and Cohere take them. `top_n` 0 is all of them.

    Documents are cut to `max_tokens_per_doc` tokens, and with it also what the model cannot take.
    """

    query: str
    documents: list[str | Document]
    top_n: int | None = None
    return_documents: bool | None = None
    max_tokens_per_doc: int | None = None

    max_chunks_per_doc: Unsupported = None
    rank_fields: Unsupported = None
    relevant_spans: Unsupported = None

    def texts(self) -> list[str]:
        """The documents' texts. Raises ApiError (400) if there are none or too many."""
        return [item if isinstance(item, str) else item.text for item in limited(self.documents, "documents")]

    def limit(self) -> int:
        """How many results are wanted. Raises ApiError (400) for a number below 0."""
        if self.top_n is not None and self.top_n < 0:
            raise bad_request(f"top_n must be at least 0, got {self.top_n}", "top_n")
        return self.top_n or len(self.documents)

    def cut(self) -> tuple[int | None, int | None]:
        """To how many tokens documents are cut, and inputs. Raises ApiError (400) for a number below 1."""
        most = self.max_tokens_per_doc
        if most is None:
            return None, self.truncate_prompt_tokens
        if most < 1:
            raise bad_request(f"max_tokens_per_doc must be at least 1, got {most}", "max_tokens_per_doc")
        return most, -1 if self.truncate_prompt_tokens is None else self.truncate_prompt_tokens


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
    return [texts] if isinstance(texts, str) else [*limited(texts, param)]


def _places(texts: str | list[str], param: str) -> list[str]:
    return [param] if isinstance(texts, str) else [f"{param}[{i}]" for i in range(len(texts))]


def limited(items: Sequence[T], param: str, most: int = MAX_INPUTS) -> Sequence[T]:
    """The items. Raises ApiError (400) if there are none, or too many."""
    if not items:
        raise bad_request(f"{param} is empty", param)
    if len(items) > most:
        raise bad_request(f"{param} must have at most {most} entries, got {len(items)}", param)
    return items
