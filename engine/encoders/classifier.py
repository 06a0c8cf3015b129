"""Classifier: an encoder that gives the logits of labels, or reads two texts together."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from ..errors import InvalidRequestError, ModelError
from .classification import activated
from .description import EncoderDescription
from .encoder import Encoder, ScorePlan
from .graph import LOGITS, TOKEN_LOGITS, EncoderGraph
from .pair_reader import PairReader
from .pooling import Floats
from .tasks import Task
from .tokenization import MOST_QUERY_TOKENS, EncoderInput, EncoderTokenizer, check_query_size


class Classifier(Encoder):
    """A model that gives a text, or two texts that it reads together, the logits of its labels.

    With one label it is a cross-encoder: the logit of a pair says how well the second text answers the first.
    """

    def __init__(
        self, name: str, source: str, description: EncoderDescription, tokenizer: EncoderTokenizer, graph: EncoderGraph
    ) -> None:
        self.labels = description.labels
        self.activation = description.activation
        template = description.pair_template
        self._pairs = None if template is None else PairReader(template, tokenizer)
        super().__init__(name, source, description, tokenizer, graph)
        if self.width != len(self.labels):
            raise ModelError(f"{graph.path} gives {self.width} logits, and config.json names {len(self.labels)} labels")

    def encode_pair(self, first: str, second: str, *, truncate_to: int | None = None) -> EncoderInput:
        """See Encoder."""
        if self._pairs is None:
            return super().encode_pair(first, second, truncate_to=truncate_to)
        return self._pairs.encode([first], [second], truncate_to=truncate_to, at_most=self.max_length)[0]

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
        if self._pairs is not None:
            inputs = self._pairs.encode(queries, documents, truncate_to=truncate_to, at_most=limit)
        else:
            times = len(documents) if len(queries) == 1 else 1
            firsts = [tokenizer.part(query, truncate_to, limit) for query in queries]
            check_query_size(times * sum(len(part.encoding) for part in firsts if part is not None), MOST_QUERY_TOKENS)
            inputs = [
                tokenizer.join([first, tokenizer.part(document, truncate_to, limit)], truncate_to=truncate_to)
                for first, document in zip(firsts * times, documents, strict=True)
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
        of_tokens = self.task == "classify" and TOKEN_LOGITS in self._graph.outputs
        return {self.task: wanted, **({"token_classify": TOKEN_LOGITS} if of_tokens else {})}

    def _results(self, task: Task, values: Sequence[Floats], inputs: Sequence[EncoderInput]) -> list[Floats]:
        return [*values]
