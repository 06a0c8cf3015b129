"""StaticQueryEncoder: a sparse encoder of documents, for queries whose words have weights in a table."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from pathlib import Path

import numpy as np

from ..errors import ModelError
from ..weights.checkpoint import open_checkpoint
from ..weights.stored import StoredTensor
from ..weights.tensor import to_float32
from .description import EncoderDescription
from .graph import EncoderGraph
from .pooling import Floats
from .sparse_encoder import SparseEncoder
from .sparse_vectors import strongest
from .tasks import Task
from .tokenization import EncoderInput, EncoderTokenizer

_QUERY = "query"


class StaticQueryEncoder(SparseEncoder):
    """Its prompts `query` and `document` say what a text is. Only documents are computed, by the graph."""

    def __init__(
        self, name: str, source: str, description: EncoderDescription, tokenizer: EncoderTokenizer, graph: EncoderGraph
    ) -> None:
        folder = description.static_queries
        assert folder is not None
        self._of_queries = EncoderTokenizer.load(folder)
        self._table = _weights_in(folder)
        super().__init__(name, source, description, tokenizer, graph)

    def encode(
        self,
        text: str,
        *,
        prompt_name: str | None = None,
        add_special_tokens: bool = True,
        truncate_to: int | None = None,
    ) -> EncoderInput:
        """See Embedder. Queries have no special tokens."""
        name = self._prompt_name(prompt_name)
        if name != _QUERY:
            return super().encode(
                text, prompt_name=name, add_special_tokens=add_special_tokens, truncate_to=truncate_to
            )
        item = self._of_queries.encode(
            self.prompts[_QUERY] + text, add_special_tokens=False, truncate_to=truncate_to, at_most=self.max_length
        )
        return EncoderInput(item.token_ids, is_too_long=item.is_too_long, is_static=True)

    def tokens(self, token_ids: Sequence[int], *, prompt_name: str | None = None) -> EncoderInput:
        """See Encoder."""
        return EncoderInput(token_ids, is_static=self._prompt_name(prompt_name) == _QUERY)

    def run(self, task: Task, inputs: Sequence[EncoderInput]) -> list[Floats]:
        """See Encoder."""
        computed = iter(super().run(task, documents) if (documents := _documents(inputs)) else [])
        return [self._looked_up(item) if item.is_static else next(computed) for item in inputs]

    def pieces(self, task: Task, inputs: Sequence[EncoderInput]) -> Generator[None, None, list[Floats]]:
        """See Encoder."""
        documents, computed = _documents(inputs), list[Floats]()
        if documents:
            computed = yield from super().pieces(task, documents)
        rest = iter(computed)
        return [self._looked_up(item) if item.is_static else next(rest) for item in inputs]

    def result_numbers(self, task: Task, item: EncoderInput) -> int:
        """See Encoder."""
        return 2 * len(item) if item.is_static else super().result_numbers(task, item)

    def _looked_up(self, item: EncoderInput) -> Floats:
        ids = np.asarray(item.token_ids, np.int64)
        ids = ids[ids < len(self._table)]  # tables may leave out the last tokens, which have no weight then
        return strongest(ids.tolist(), self._table[ids], [])


def _documents(inputs: Sequence[EncoderInput]) -> list[EncoderInput]:
    return [item for item in inputs if not item.is_static]


def _weights_in(folder: Path) -> Floats:
    """The weight of each token, `[vocabulary]`."""
    stored = open_checkpoint(folder).get("weight")
    if isinstance(stored, StoredTensor) and len(stored.shape) == 1:
        table = np.array(to_float32(stored.floats("weight")))
        if np.isfinite(table).all() and (table >= 0).all():
            return table
    raise ModelError(f"{folder} must have a vector of weights from 0 on, weight, one for each token")
