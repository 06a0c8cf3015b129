"""Encoder: a model that reads a text in one pass. An Embedder returns vectors, a CrossEncoder scores pairs of texts."""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence

import numpy as np
from msgspec import Struct
from numpy.typing import NDArray

from ..errors import InvalidRequestError, ModelError, quoted
from ..files.wording import one_line
from ..model_names import short_name
from .description import EncoderDescription
from .graph import LOGITS, POOLED_OUTPUT, TOKEN_OUTPUTS, EncoderGraph
from .pooling import Floats, cosines, normalized, pool
from .tokenization import EncoderInput, EncoderTokenizer

logger = logging.getLogger(__name__)

_QUERY_PROMPTS = ("query",)
_DOCUMENT_PROMPTS = ("document", "passage", "corpus")
# The largest effect of rounding on a vector, as a share of its largest component, also with half precision inside.
_ROUNDING = 2e-3


def padding_id(description: EncoderDescription, tokenizer: EncoderTokenizer) -> int:
    """The id of the token that inputs are padded with."""
    return next(i for i in (description.pad_token_id, tokenizer.pad_token_id, 0) if i is not None)


class ScorePlan(Struct, frozen=True):
    """What an encoder must compute to score pairs, and how to get the scores from the result.

    `sources[i]` says which text `inputs[i]` is: (0, index of a query) or (1, index of a document). For a pair it is the
    document's. `scores` takes the rows of the inputs and returns one number for each pair.
    """

    inputs: list[EncoderInput]
    sources: list[tuple[int, int]]
    scores: Callable[[Floats], NDArray[np.float64]]


class Encoder(ABC):
    """A loaded encoder. All methods may be called from any thread, but `run` only from one thread at a time.

    `name` is its name in the API, `source` the folder or hub id that it came from, which
    `is_named_by_source` tells to be what the name was made of. `takes_batches` is False if the
    graph's results depend on the other inputs of a batch, and `pads` is True if it pads these to the longest one.
    """

    def __init__(
        self, name: str, source: str, description: EncoderDescription, tokenizer: EncoderTokenizer, graph: EncoderGraph
    ) -> None:
        self.name = name
        self.source = source
        self.is_named_by_source = name == short_name(source)
        self.tokenizer = tokenizer
        self.max_length = description.max_length
        self.vocab_size = description.vocab_size or tokenizer.vocab_size
        self._pad_token_id = padding_id(description, tokenizer)
        self._graph = graph
        self.pads = graph.pads
        self._output = self._choose_output(description)
        self.width, self.takes_batches = self._probe()

    @abstractmethod
    def plan_scores(
        self, queries: Sequence[str], documents: Sequence[str], *, truncate_to: int | None = None
    ) -> ScorePlan:
        """How to score each document against the query of the same index, or all against a single one."""

    def run(self, inputs: Sequence[EncoderInput]) -> Floats:
        """The rows of a batch: pooled vectors before they are normalized, or scores. Shape [len(inputs), width]."""
        return self._rows(self._graph.run(self._output, inputs), inputs)

    def check(self, item: EncoderInput, param: str) -> None:
        """Raises InvalidRequestError for an input that the graph cannot take."""
        if item.is_too_long:
            raise InvalidRequestError(f"{param} is far too long; {self.name} takes {self.max_length} tokens", param)
        if not len(item):
            raise InvalidRequestError(f"{param} has no tokens", param)
        if len(item) > self.max_length:
            raise InvalidRequestError(f"{param} has {len(item)} tokens; {self.name} takes {self.max_length}", param)
        if not (min(item.token_ids) >= 0 and max(item.token_ids) < self.vocab_size):
            raise InvalidRequestError(f"{param}: token ids must be between 0 and {self.vocab_size - 1}", param)

    def interrupt(self) -> None:
        """End a running `run`. The encoder cannot be used afterwards."""
        self._graph.interrupt()

    @abstractmethod
    def _choose_output(self, description: EncoderDescription) -> str: ...

    @abstractmethod
    def _rows(self, values: Sequence[Floats], inputs: Sequence[EncoderInput]) -> Floats: ...

    def _probe(self) -> tuple[int, bool]:
        """The width of a row, and whether batches are safe. Runs a short input alone, and padded beside a long one."""
        ids = [i for i in range(1, 64) if i < self.vocab_size and i != self._pad_token_id]
        short, long = (EncoderInput(ids[start : start + min(n, self.max_length)]) for start, n in ((0, 3), (3, 12)))
        try:
            alone, beside = self.run([short])[0], self.run([short, long])[0]
            if not np.isfinite(alone).all():
                raise ValueError("it gives values that are not finite (infinite or NaN)")
            width = len(alone)
            safe = bool(np.abs(alone - beside).max() <= _ROUNDING * np.abs(alone).max() + 1e-5)
        except Exception as error:  # onnxruntime's exceptions have no common base class
            raise ModelError(f"{self._graph.path} does not run: {one_line(error)}") from error
        if not safe:
            logger.warning(
                "%s: the results of %s depend on the padding or the other inputs of a batch, so inputs run one by one; "
                "export it again with an attention mask and without dynamic quantization for speed",
                self.name,
                self._graph.path,
            )
        return width, safe

    def _missing(self, wanted: Iterable[str]) -> ModelError:
        return ModelError(
            f"{self._graph.path} has no output {' or '.join(wanted)}; it has {', '.join(self._graph.outputs)}"
        )


class Embedder(Encoder):
    """A model that turns a text into a vector."""

    def __init__(
        self, name: str, source: str, description: EncoderDescription, tokenizer: EncoderTokenizer, graph: EncoderGraph
    ) -> None:
        self.prompts = description.prompts
        self.default_prompt_name = description.default_prompt_name
        self._pooling = description.pooling
        self._pools_prompt = description.pools_prompt
        self._normalizes = description.normalize
        super().__init__(name, source, description, tokenizer, graph)

    def encode(
        self,
        text: str,
        *,
        prompt_name: str | None = None,
        add_special_tokens: bool = True,
        truncate_to: int | None = None,
    ) -> EncoderInput:
        """The input for a text after one of the model's prompts, by default after its default prompt.

        Raises InvalidRequestError if the model has no such prompt.
        """
        prompt = ""
        name = self.default_prompt_name if prompt_name is None else prompt_name
        if name is not None:
            if name not in self.prompts:
                known = ", ".join(self.prompts) or "none"
                raise InvalidRequestError(f"{self.name} has no prompt {quoted(name)}; it has {known}", "prompt_name")
            prompt = self.prompts[name]
        item = self.tokenizer.encode(
            prompt + text, add_special_tokens=add_special_tokens, truncate_to=truncate_to, at_most=self.max_length
        )
        if item.is_too_long:
            return item
        if prompt and not self._pools_prompt:
            item = EncoderInput(item.token_ids, item.type_ids, self.tokenizer.prompt_length(prompt))
        return item

    def check_vectors(self, *, dimensions: int | None, normalize: bool | None) -> None:
        """Raises InvalidRequestError for too many dimensions, or if normalizing cannot be turned off."""
        if dimensions is not None and not 1 <= dimensions <= self.width:
            raise InvalidRequestError(
                f"dimensions must be between 1 and {self.width}, the number that {self.name} has, got {dimensions}",
                "dimensions",
            )
        if normalize is False and self._normalizes and self._output == POOLED_OUTPUT:
            raise InvalidRequestError(
                f"normalize must not be false, because the graph of {self.name} normalizes its vectors", "normalize"
            )

    def vectors(self, rows: Floats, *, dimensions: int | None = None, normalize: bool | None = None) -> Floats:
        """The embeddings of rows from `run`, shape [N, dimensions]. If `normalize` is not given, the model decides.

        `dimensions` keeps only the first components (Matryoshka, arXiv 2205.13147).
        """
        vectors = rows[:, :dimensions]
        return normalized(vectors) if normalize or (normalize is None and self._normalizes) else vectors

    def plan_scores(
        self, queries: Sequence[str], documents: Sequence[str], *, truncate_to: int | None = None
    ) -> ScorePlan:
        """See Encoder. A score is the cosine of two vectors. Each text follows its prompt, if the model has one."""
        query_prompt, document_prompt = self._prompt_among(_QUERY_PROMPTS), self._prompt_among(_DOCUMENT_PROMPTS)
        inputs = [self.encode(text, prompt_name=query_prompt, truncate_to=truncate_to) for text in queries]
        inputs += [self.encode(text, prompt_name=document_prompt, truncate_to=truncate_to) for text in documents]
        n = len(queries)
        sources = [*((0, i) for i in range(n)), *((1, i) for i in range(len(documents)))]
        return ScorePlan(inputs, sources, lambda rows: cosines(rows[:n], rows[n:]))

    def _prompt_among(self, names: Sequence[str]) -> str | None:
        return next((name for name in names if name in self.prompts), None)

    def _choose_output(self, description: EncoderDescription) -> str:
        outputs = self._graph.outputs
        if not description.foreign_modules:
            tokens = next((name for name in TOKEN_OUTPUTS if name in outputs), None)
            if tokens is not None:
                return tokens
        if POOLED_OUTPUT not in outputs:
            if description.foreign_modules:
                raise ModelError(
                    f"{self.source} has modules that are not supported outside of the graph "
                    f"({', '.join(description.foreign_modules)}), and {self._graph.path} has no output {POOLED_OUTPUT}"
                )
            raise self._missing((*TOKEN_OUTPUTS, POOLED_OUTPUT))
        if not self._pools_prompt and any(self.prompts.values()):
            raise ModelError(
                f"{self.source} leaves its prompts out of pooling, but {POOLED_OUTPUT} of its graph does not"
            )
        return POOLED_OUTPUT

    def _rows(self, values: Sequence[Floats], inputs: Sequence[EncoderInput]) -> Floats:
        if self._output == POOLED_OUTPUT:
            return np.stack(values)
        pooled = [pool(tokens, item.prompt_length, self._pooling) for tokens, item in zip(values, inputs, strict=True)]
        return self._graph.after_pooling(np.stack(pooled))


class CrossEncoder(Encoder):
    """A model that reads two texts together and scores how well the second answers the first."""

    def __init__(
        self, name: str, source: str, description: EncoderDescription, tokenizer: EncoderTokenizer, graph: EncoderGraph
    ) -> None:
        self._sigmoid = description.sigmoid
        super().__init__(name, source, description, tokenizer, graph)
        if self.width != 1:
            raise ModelError(f"{graph.path} gives {self.width} logits; only cross-encoders with one are served")

    def plan_scores(
        self, queries: Sequence[str], documents: Sequence[str], *, truncate_to: int | None = None
    ) -> ScorePlan:
        """See Encoder. A score is the logit, or its sigmoid if the model says so."""
        tokenizer, limit = self.tokenizer, self.max_length
        firsts = [tokenizer.part(query, truncate_to, limit) for query in queries]
        if len(queries) == 1:
            firsts *= len(documents)
        inputs = [
            tokenizer.join([first, tokenizer.part(document, truncate_to, limit)], truncate_to=truncate_to)
            for first, document in zip(firsts, documents, strict=True)
        ]
        return ScorePlan(inputs, [(1, i) for i in range(len(inputs))], lambda rows: rows[:, 0].astype(float))

    def _choose_output(self, description: EncoderDescription) -> str:
        if LOGITS not in self._graph.outputs:
            raise self._missing([LOGITS])
        return LOGITS

    def _rows(self, values: Sequence[Floats], inputs: Sequence[EncoderInput]) -> Floats:
        logits = np.stack(values)
        if not self._sigmoid:
            return logits
        with np.errstate(over="ignore"):
            scores: Floats = (1 / (1 + np.exp(-logits.astype(np.float64)))).astype(np.float32)
        return scores
