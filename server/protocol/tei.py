"""The endpoints of Text Embeddings Inference (TEI)."""

from __future__ import annotations

from typing import Literal

import msgspec

from ..errors import bad_request
from .decode import Body
from .embeddings import TextsRequest
from .scoring import limited


class TeiOptions(Body, kw_only=True):
    """What every request may say of its texts. They are refused if they are too long, unless `truncate` is true."""

    truncate: bool | None = None
    truncation_direction: Literal["Right", "right"] | None = None

    def cut(self) -> int | None:
        """To how many tokens texts are cut, as `truncate_prompt_tokens`."""
        return -1 if self.truncate else None


class TeiTexts(TeiOptions, kw_only=True):
    """Texts or token ids. `prompt_name` is one of the model's own prompts, put before each text."""

    inputs: str | list[str | int | list[int]]
    model: str | None = None
    prompt_name: str | None = None

    def texts(self) -> TextsRequest:
        """The same as /v1/embeddings takes it."""
        return TextsRequest(
            model=self.model, input=self.inputs, prompt_name=self.prompt_name, truncate_prompt_tokens=self.cut()
        )


class TeiEmbedRequest(TeiTexts, kw_only=True):
    """Texts to embed. Vectors have length 1 unless `normalize` is false."""

    normalize: bool | None = None
    dimensions: int | None = None


class TeiPredictRequest(TeiOptions, kw_only=True):
    """A text to classify, two texts that are read together, or a list of such lists of one or two texts."""

    inputs: str | list[str | list[str]]
    model: str | None = None
    raw_scores: bool | None = None

    def sequences(self) -> tuple[list[list[str]], bool]:
        """The texts, one or two each, and whether it is a list. Raises ApiError (400) for a mixture or none."""
        if isinstance(self.inputs, str):
            return [[self.inputs]], False
        if all(isinstance(item, str) for item in self.inputs):
            found, is_list = [[str(item) for item in self.inputs]], False
        else:
            found, is_list = [[*item] for item in limited(self.inputs, "inputs") if isinstance(item, list)], True
            if len(found) < len(self.inputs):
                raise bad_request("inputs mixes texts and lists of texts: send lists of one or two texts", "inputs")
        for i, texts in enumerate(found):
            if not 1 <= len(texts) <= 2:
                place = f"inputs[{i}]" if is_list else "inputs"
                raise bad_request(
                    f"{place} has {len(texts)} texts, and one or two are read together: to classify several, send a "
                    "list of lists of one text",
                    place,
                )
        return found, is_list


class TeiPrediction(msgspec.Struct):
    """How probable a label is."""

    score: float
    label: str


class TeiRerankRequest(TeiOptions, kw_only=True):
    """A query and the texts to put in its order. `raw_scores` are logits."""

    query: str
    texts: list[str]
    model: str | None = None
    raw_scores: bool | None = None
    return_text: bool | None = None

    def limited(self) -> list[str]:
        """The texts. Raises ApiError (400) if there are none or too many."""
        return [*limited(self.texts, "texts")]


class TeiRank(msgspec.Struct, kw_only=True):
    """A text's score; `index` is its place in the request."""

    index: int
    text: str | msgspec.UnsetType = msgspec.UNSET
    score: float


class TeiSparseValue(msgspec.Struct):
    """A token id, and its weight."""

    index: int
    value: float


class TeiSentences(msgspec.Struct, forbid_unknown_fields=True):
    """A text, and those to compare it with."""

    source_sentence: str
    sentences: list[str]


class TeiSimilarityOptions(TeiOptions, kw_only=True):
    """How the texts are read."""

    prompt_name: str | None = None


class TeiSimilarityRequest(Body, kw_only=True):
    """Texts whose cosines are wanted."""

    inputs: TeiSentences
    parameters: TeiSimilarityOptions | None = None
    model: str | None = None


class TeiInfoQuery(msgspec.Struct, kw_only=True):
    """Which model."""

    model: str | None = None


class TeiPooling(msgspec.Struct):
    """How one vector is made of those of the tokens."""

    pooling: str


class TeiLabels(msgspec.Struct):
    """A classifier's labels, and their numbers."""

    id2label: dict[str, str]
    label2id: dict[str, int]


class TeiModelType(msgspec.Struct, kw_only=True):
    """What a model is: one of these."""

    embedding: TeiPooling | msgspec.UnsetType = msgspec.UNSET
    classifier: TeiLabels | msgspec.UnsetType = msgspec.UNSET
    reranker: TeiLabels | msgspec.UnsetType = msgspec.UNSET


class TeiInfo(msgspec.Struct, kw_only=True):
    """A model and its limits.

    `max_input_length` and `max_batch_tokens` are in tokens. `max_concurrent_requests` is how many texts may wait; null
    is no limit.
    """

    model_id: str
    served_model_name: str
    model_dtype: str
    model_type: TeiModelType
    max_concurrent_requests: int | None
    max_input_length: int
    max_batch_tokens: int
    max_client_batch_size: int
    auto_truncate: bool
    tokenization_workers: int
    version: str


class TeiRootRequest(TeiOptions, kw_only=True):
    """The body of /embed, /predict, /similarity or /rerank."""

    inputs: str | list[str | int | list[str | int]] | TeiSentences | None = None
    parameters: TeiSimilarityOptions | None = None
    query: str | None = None
    texts: list[str] | None = None
    model: str | None = None
    prompt_name: str | None = None
    normalize: bool | None = None
    dimensions: int | None = None
    raw_scores: bool | None = None
    return_text: bool | None = None
