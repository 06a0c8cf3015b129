"""Classifier: an encoder that gives the logits of labels, or reads two texts together."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from ..errors import InvalidRequestError, ModelError
from .classification import activated
from .description import EncoderDescription
from .encoder import Encoder, ScorePlan
from .graph import LOGITS, TOKEN_LOGITS, EncoderGraph
from .pooling import Floats
from .tasks import Task
from .tokenization import EncoderInput, EncoderTokenizer

_MOST_QUERY_CHARACTERS = 2**24  # of a request, as often as a template is filled with them
_MOST_QUERY_TOKENS = 2**22  # the same of a cross-encoder, which has a copy of them for each document


class Classifier(Encoder):
    """A model that gives a text, or two texts that it reads together, the logits of its labels.

    With one label it is a cross-encoder: the logit of a pair says how well the second text answers the first.
    """

    def __init__(
        self, name: str, source: str, description: EncoderDescription, tokenizer: EncoderTokenizer, graph: EncoderGraph
    ) -> None:
        self.labels = description.labels
        self.activation = description.activation
        self._template = description.pair_template
        super().__init__(name, source, description, tokenizer, graph)
        if self.width != len(self.labels):
            raise ModelError(f"{graph.path} gives {self.width} logits, and config.json names {len(self.labels)} labels")

    def encode_pair(self, first: str, second: str, *, truncate_to: int | None = None) -> EncoderInput:
        """See Encoder."""
        if self._template is None:
            return super().encode_pair(first, second, truncate_to=truncate_to)
        return self._template.encode(self.tokenizer, first, second, truncate_to=truncate_to, at_most=self.max_length)

    def finished(
        self,
        task: Task,
        results: Sequence[Floats],
        *,
        dimensions: int | None = None,
        use_activation: bool | None = None,
    ) -> list[Floats]:
        """See Encoder."""
        return [self.probabilities(result, use_activation) for result in results]

    def probabilities(self, logits: Floats | Sequence[Floats], use_activation: bool | None = None) -> Floats:
        """What results of `run` say of the labels: probabilities, unless the model or the call says no.

        `logits` are `[labels]` of one text, or `[N, labels]` of its tokens or of several texts.
        """
        rows: Floats = np.asarray(logits)
        return rows if use_activation is False or self.activation is None else activated(rows, self.activation)

    def plan_scores(
        self,
        queries: Sequence[str],
        documents: Sequence[str],
        *,
        truncate_to: int | None = None,
        use_activation: bool | None = None,
    ) -> ScorePlan:
        """See Encoder. A score is the logit, or its sigmoid if the model says so. Also for a query that is too long to
        be read once with each document.
        """
        if not self.is_cross_encoder:
            raise InvalidRequestError(
                f"{self.name} tells {len(self.labels)} labels apart and gives pairs of texts no score: classify texts "
                "with it",
                "model",
            )
        tokenizer, limit = self.tokenizer, self.max_length
        times = len(documents) if len(queries) == 1 else 1
        if self._template is not None:
            _check_queries(times * sum(map(len, queries)), _MOST_QUERY_CHARACTERS)
            pairs = zip([*queries] * times, documents, strict=True)
            inputs = [self.encode_pair(query, document, truncate_to=truncate_to) for query, document in pairs]
        else:
            firsts = [tokenizer.part(query, truncate_to, limit) for query in queries]
            _check_queries(times * sum(len(part.encoding) for part in firsts if part is not None), _MOST_QUERY_TOKENS)
            firsts *= times
            inputs = [
                tokenizer.join([first, tokenizer.part(document, truncate_to, limit)], truncate_to=truncate_to)
                for first, document in zip(firsts, documents, strict=True)
            ]
        return ScorePlan(
            "classify",
            inputs,
            [(1, i) for i in range(len(inputs))],
            lambda logits: self.probabilities(logits, use_activation)[:, 0].astype(np.float64),
        )

    def _choose_outputs(self, description: EncoderDescription) -> Mapping[Task, str]:
        wanted = TOKEN_LOGITS if self.task == "token_classify" else LOGITS
        if wanted not in self._graph.outputs:
            raise self._missing([wanted])
        return {self.task: wanted}

    def _results(self, task: Task, values: Sequence[Floats], inputs: Sequence[EncoderInput]) -> list[Floats]:
        return [*values]


def _check_queries(size: int, most: int) -> None:
    if size > most:
        raise InvalidRequestError("the query is too long for so many documents: send fewer in a request", "query")
