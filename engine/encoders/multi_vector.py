"""MultiVectorEncoder: a model that gives a vector for each token of a text (ColBERT, arXiv 2004.12832)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from operator import mul

import numpy as np

from ..errors import InvalidRequestError, ModelError, quoted
from ..files.wording import shown
from .description import EncoderDescription
from .embedder import Embedder
from .encoder import ScorePlan
from .graph import TOKEN_VECTORS, EncoderGraph
from .late_interaction import late_interaction_scores
from .pooling import Floats, normalized
from .tasks import Task
from .tokenization import EncoderInput, EncoderTokenizer, special_texts

_MOST_PRODUCTS = 2**26  # of two tokens' vectors, in a request: some seconds on a core


class MultiVectorEncoder(Embedder):
    """An embedder that marks queries and documents, fills queries up with masks and skips tokens of documents.

    Its prompts are `query` and `document`, which say what a text is; by default it is a document.
    """

    def __init__(
        self, name: str, source: str, description: EncoderDescription, tokenizer: EncoderTokenizer, graph: EncoderGraph
    ) -> None:
        interaction = description.late_interaction
        assert interaction is not None
        self._interaction = interaction
        self._markers = {
            role: None if not prefix else _required(tokenizer, prefix, f"{source}: the mark of a {role}")
            for role, prefix in (("query", interaction.query_prefix), ("document", interaction.document_prefix))
        }
        if interaction.expands and interaction.query_length > description.max_length:
            raise ModelError(
                f"{source}: queries of {interaction.query_length} tokens are longer than the {description.max_length} "
                "that the model takes"
            )
        self._mask: int | None = None
        if interaction.expands:
            named = special_texts(description.tokenizer_folder)
            mask = named.get("mask_token") or named.get("eos_token")
            self._mask = _required(tokenizer, mask, f"{source}: the mask that queries are filled up with")
        # As in sentence-transformers, words that the tokenizer lacks skip nothing: they would all be unknown tokens.
        self._skipped = {tokenizer.token_id(word) for word in interaction.skiplist} - {None}
        super().__init__(name, source, description, tokenizer, graph)

    def encode(
        self,
        text: str,
        *,
        prompt_name: str | None = None,
        add_special_tokens: bool = True,
        truncate_to: int | None = None,
    ) -> EncoderInput:
        """The input for a `query` or, by default, a `document`. Raises InvalidRequestError for another prompt."""
        role = self.default_prompt_name if prompt_name is None else prompt_name
        if role not in self._markers:
            raise InvalidRequestError(
                f"{self.name} has no prompt {quoted(str(role))}; it has {', '.join(self._markers)}", "prompt_name"
            )
        marker = self._markers[role]
        item = self.tokenizer.encode(
            text,
            add_special_tokens=add_special_tokens,
            truncate_to=truncate_to,
            at_most=self.max_length,
            room=0 if marker is None else 1,
        )
        if item.is_too_long:
            return item
        ids, types = [*item.token_ids], None if item.type_ids is None else [*item.type_ids]
        if marker is not None:
            ids.insert(1, marker)
            if types is not None:
                types.insert(1, 0)
        if role == "query":
            return self._filled_up(ids, types)
        kept = [place for place, token in enumerate(ids) if token not in self._skipped]
        return EncoderInput(ids, types, kept=kept)

    def plan_scores(
        self,
        queries: Sequence[str],
        documents: Sequence[str],
        *,
        truncate_to: int | None = None,
        use_activation: bool | None = None,
    ) -> ScorePlan:
        """See Encoder. A score is the sum over the query's tokens of the largest cosine with one of the document's."""

        def cut(rows: Sequence[Floats]) -> list[Floats]:
            return [normalized(vectors[:, : self._dimensions]) for vectors in rows]

        plan = self._plan(
            "token_embed",
            queries,
            documents,
            truncate_to,
            lambda q, d: late_interaction_scores(cut(q), cut(d)),
        )
        lengths = [len(item) for item in plan.inputs]
        of_queries, of_documents = lengths[: len(queries)], lengths[len(queries) :]
        paired = of_queries * len(of_documents) if len(of_queries) == 1 else of_queries
        if sum(map(mul, paired, of_documents)) > _MOST_PRODUCTS:
            raise InvalidRequestError(
                f"the queries and documents have too many tokens to compare each with each, more than {_MOST_PRODUCTS} "
                "pairs of them: send fewer or shorter documents in a request",
                "documents",
            )
        return plan

    def _filled_up(self, ids: list[int], types: list[int] | None) -> EncoderInput:
        count = self._interaction.query_length - len(ids)
        if self._mask is None or count <= 0:
            return EncoderInput(ids, types)
        return EncoderInput(
            ids + [self._mask] * count,
            None if types is None else types + [0] * count,
            num_seen=None if self._interaction.attends else len(ids),
        )

    def _choose_outputs(self, description: EncoderDescription) -> Mapping[Task, str]:
        return {"token_embed": TOKEN_VECTORS}

    def _results(self, task: Task, values: Sequence[Floats], inputs: Sequence[EncoderInput]) -> list[Floats]:
        return [
            vectors if item.kept is None else vectors[np.asarray(item.kept, np.int64)]
            for vectors, item in zip(values, inputs, strict=True)
        ]


def _required(tokenizer: EncoderTokenizer, token: str | None, what: str) -> int:
    found = tokenizer.token_id(token)
    if found is None:
        raise ModelError(f"{what} must be a token of tokenizer.json, and {shown(token)} is none")
    return found
