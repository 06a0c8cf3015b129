"""Encoder: a model that reads a text in one pass. An Embedder gives vectors, a Classifier the logits of labels."""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence

import numpy as np
from msgspec import Struct
from numpy.typing import NDArray

from ..devices.executor import Executor
from ..errors import InvalidRequestError, ModelError, quoted
from ..files.wording import one_line
from ..model_names import short_name
from .classification import ClassActivation, activated
from .description import EncoderDescription
from .graph import LOGITS, POOLED_OUTPUT, TOKEN_LOGITS, TOKEN_OUTPUTS, TOKEN_VECTORS, TOKEN_WEIGHTS, EncoderGraph
from .pooling import Floats, cosines, normalized, pool
from .sparse_vectors import strongest
from .tasks import OF_TOKENS, Task
from .tokenization import EncoderInput, EncoderTokenizer, special_texts

logger = logging.getLogger(__name__)

_QUERY_PROMPTS = ("query", "retrieval.query")
_UNWEIGHTED = ("bos_token", "cls_token", "eos_token", "pad_token", "sep_token", "unk_token")
_DOCUMENT_PROMPTS = ("document", "passage", "corpus", "retrieval.passage")
# The largest effect of rounding on a vector, as a share of its largest component, also with half precision inside.
_ROUNDING = 2e-3
_MOST_QUERY_CHARACTERS = 2**24  # of a request, as often as a template is filled with them
_MOST_QUERY_TOKENS = 2**22  # the same of a cross-encoder, which has a copy of them for each document

MAX_RESULT_BYTES = 32 * 2**20
"""Of one request. 2048 vectors of 4096 numbers, or of the tokens of one text: 8192 of 1024."""


def padding_id(description: EncoderDescription, tokenizer: EncoderTokenizer) -> int:
    """The id of the token that inputs are padded with."""
    return next(i for i in (description.pad_token_id, tokenizer.pad_token_id, 0) if i is not None)


class ScorePlan(Struct, frozen=True):
    """What an encoder must compute to score pairs, and how to get the scores from the result.

    `task` is what to run the inputs for. `sources[i]` says which text `inputs[i]` is: (0, index of a query) or (1,
    index of a document). For a pair it is the document's. `scores` takes the results and returns one number for each
    pair.
    """

    task: Task
    inputs: list[EncoderInput]
    sources: list[tuple[int, int]]
    scores: Callable[[Sequence[Floats]], NDArray[np.float64]]


class Encoder(ABC):
    """A loaded encoder. All methods may be called from any thread, but `run` only from one thread at a time.

    `name` is its name in the API, `source` the folder or hub id that it came from, which `is_named_by_source` tells to
    be what the name was made of. `info` is what people are told of it. `takes_batches` is False if the graph's results
    depend on the other inputs of a batch, and `pads` is True if it pads these to the longest one. `task` is its main
    one of its `tasks`, and `widths` are the sizes of their rows. `labels` are a classifier's, and
    `activation` makes probabilities of its logits.
    """

    labels: tuple[str, ...] = ()
    activation: ClassActivation | None = None

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
        self.task = description.task
        self._outputs = self._choose_outputs(description)
        self.tasks = frozenset(self._outputs)
        self.widths, self.takes_batches = self._probe()
        self.info: Mapping[str, str] = {**graph.info, "architecture": description.architecture}

    @property
    def width(self) -> int:
        """How many numbers a row of its main task has."""
        return self.widths[self.task]

    @property
    def is_cross_encoder(self) -> bool:
        """Whether it reads two texts together to score how well the second answers the first."""
        return "classify" in self.tasks and len(self.labels) == 1

    @abstractmethod
    def plan_scores(
        self,
        queries: Sequence[str],
        documents: Sequence[str],
        *,
        truncate_to: int | None = None,
        use_activation: bool | None = None,
    ) -> ScorePlan:
        """How to score each document against the query of the same index, or all against a single one.

        `use_activation` False leaves a cross-encoder's scores logits. Raises InvalidRequestError if it has no scores.
        """

    def encode(
        self,
        text: str,
        *,
        prompt_name: str | None = None,
        add_special_tokens: bool = True,
        truncate_to: int | None = None,
    ) -> EncoderInput:
        """The input for a text. Raises InvalidRequestError if the model has no prompt of that name."""
        if prompt_name is not None:
            raise InvalidRequestError(f"{self.name} has no prompts", "prompt_name")
        return self.tokenizer.encode(
            text, add_special_tokens=add_special_tokens, truncate_to=truncate_to, at_most=self.max_length
        )

    def encode_pair(self, first: str, second: str, *, truncate_to: int | None = None) -> EncoderInput:
        """The input for two texts that a classifier reads together."""
        return self.tokenizer.encode(first, second, truncate_to=truncate_to, at_most=self.max_length)

    def tokens(self, token_ids: Sequence[int], *, prompt_name: str | None = None) -> EncoderInput:
        """The input of tokens, with the adapter of a prompt. Raises InvalidRequestError if there is no such prompt."""
        return EncoderInput(token_ids)

    def check_task(
        self, task: Task, *, dimensions: int | None = None, use_activation: bool | None = None, param: str = "task"
    ) -> None:
        """Raises InvalidRequestError if the model does not do a task with these options of `finished`."""
        if task not in self.tasks:
            raise InvalidRequestError(f"{self.name} does not do {task}; it does {', '.join(sorted(self.tasks))}", param)
        if dimensions is not None:
            raise InvalidRequestError(f"dimensions are of vectors, and {task} of {self.name} gives none", "dimensions")

    def finished(
        self,
        task: Task,
        results: Sequence[Floats],
        *,
        dimensions: int | None = None,
        use_activation: bool | None = None,
    ) -> list[Floats]:
        """What a request for a task is answered with: vectors that are cut and normalized, probabilities of labels.

        `use_activation` False leaves vectors unnormalized and gives logits; None is as the model says.
        """
        return [*results]

    def run(self, task: Task, inputs: Sequence[EncoderInput]) -> list[Floats]:
        """The result of each input of a batch, as Task says. `task` must be one of the encoder's."""
        return self._results(task, self._graph.run(self._outputs[task], inputs), inputs)

    def pieces(self, task: Task, inputs: Sequence[EncoderInput]) -> Generator[None, None, list[Floats]]:
        """`run` in pieces: see EncoderGraph."""
        values = yield from self._graph.pieces(self._outputs[task], inputs)
        return self._results(task, values, inputs)

    def set_piece(self, seconds: float) -> None:
        """How long a piece takes from now on, about."""
        self._graph.set_piece(seconds)

    @property
    def is_within_layer(self) -> bool:
        """Whether nothing else can be run until the next piece has: see TowerExecutor."""
        return self._graph.is_within_layer

    def share_threads(self, beside: Executor) -> bool:
        """Compute on the threads of a chat model from now on, while it is idle; whether that can be."""
        return self._graph.share_threads(beside)

    def check_size(self, task: Task, inputs: Sequence[EncoderInput]) -> None:
        """Raises InvalidRequestError if the results of a request's inputs would take too much memory."""
        size = sum(self.result_numbers(task, item) for item in inputs) * np.dtype(np.float32).itemsize
        if size > MAX_RESULT_BYTES:
            raise InvalidRequestError(
                f"the numbers of the texts would take {size // 2**20} MiB while they are computed, and those of a "
                f"request may take at most {MAX_RESULT_BYTES // 2**20} MiB: send fewer or shorter texts in a request"
            )

    def result_numbers(self, task: Task, item: EncoderInput) -> int:
        """How many numbers the result of an input has at most."""
        if task == "sparse":
            return 2 * (len(item) if self._outputs[task] == TOKEN_WEIGHTS else self.vocab_size)
        return self.widths[task] * (len(item) if task in OF_TOKENS else 1)

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

    def close(self) -> None:
        """Free the weights. Nothing runs any more. Calling it twice is allowed."""
        self._graph.close()

    @abstractmethod
    def _choose_outputs(self, description: EncoderDescription) -> Mapping[Task, str]:
        """The graph's output that each of the encoder's tasks needs."""

    @abstractmethod
    def _results(self, task: Task, values: Sequence[Floats], inputs: Sequence[EncoderInput]) -> list[Floats]:
        """The results of a task from the values of its output."""

    def _probe(self) -> tuple[dict[Task, int], bool]:
        """The widths, and whether batches are safe. Runs a short input alone, and padded beside a long one."""
        ids = [i for i in range(1, 64) if i < self.vocab_size and i != self._pad_token_id]
        short, long = (EncoderInput(ids[start : start + min(n, self.max_length)]) for start, n in ((0, 3), (3, 12)))
        try:
            results = {task: self.run(task, [short])[0] for task in self.tasks}
            if not all(np.isfinite(result).all() for result in results.values()):
                raise ValueError("it gives values that are not finite (infinite or NaN)")
            alone, beside = results[self.task], self.run(self.task, [short, long])[0]
            safe = bool(np.abs(alone - beside).max(initial=0) <= _ROUNDING * np.abs(alone).max(initial=0) + 1e-5)
        except Exception as error:  # onnxruntime's exceptions have no common base class
            raise ModelError(f"{self._graph.path} does not run: {one_line(error)}") from error
        if not safe:
            logger.warning(
                "%s: the results of %s depend on the padding or the other inputs of a batch, so inputs run one by one; "
                "export it again with an attention mask and without dynamic quantization for speed",
                self.name,
                self._graph.path,
            )
        return {task: result.shape[-1] for task, result in results.items()}, safe

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
        self._dimensions = description.dimensions
        self._matryoshka = description.matryoshka
        self._unweighted: list[int] = []  # tokens without a weight in sparse vectors, as BGE-M3's own code has it
        if TOKEN_WEIGHTS in graph.outputs:
            named = special_texts(description.tokenizer_folder)
            ids = [tokenizer.token_id(named.get(role)) for role in _UNWEIGHTED]
            self._unweighted = [i for i in ids if i is not None]
        super().__init__(name, source, description, tokenizer, graph)
        self.info = {**self.info, "width": str(self._dimensions or self.width)}
        if description.is_pooled_as_asked and self._outputs.get("embed") == POOLED_OUTPUT:
            raise ModelError(
                f"{graph.path} pools the tokens itself: leave pooling_type and use_activation out of --pooler-config"
            )
        try:
            self.check_task(self.task, dimensions=self._dimensions, use_activation=description.normalize)
        except InvalidRequestError as error:
            raise ModelError(f"--pooler-config: {error}") from error

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
        name = self._prompt_name(prompt_name)
        prompt = "" if name is None else self.prompts[name]
        item = self.tokenizer.encode(
            prompt + text, add_special_tokens=add_special_tokens, truncate_to=truncate_to, at_most=self.max_length
        )
        if item.is_too_long:
            return item
        skipped = self.tokenizer.prompt_length(prompt) if prompt and not self._pools_prompt else 0
        return EncoderInput(item.token_ids, item.type_ids, skipped, adapter=self._adapter(name))

    def tokens(self, token_ids: Sequence[int], *, prompt_name: str | None = None) -> EncoderInput:
        """See Encoder. A prompt changes no tokens, but it may have an adapter."""
        return EncoderInput(token_ids, adapter=self._adapter(self._prompt_name(prompt_name)))

    def check_task(
        self, task: Task, *, dimensions: int | None = None, use_activation: bool | None = None, param: str = "task"
    ) -> None:
        """See Encoder. Also for too many dimensions, or if normalizing cannot be turned off."""
        super().check_task(task, dimensions=dimensions if task == "sparse" else None, param=param)
        width = self.widths[task]
        if dimensions is not None and not 1 <= dimensions <= width:
            raise InvalidRequestError(
                f"dimensions must be between 1 and {width}, the number that {self.name} has, got {dimensions}",
                "dimensions",
            )
        if dimensions not in (None, width):
            self._check_cut(dimensions)
        if use_activation is False and self._normalizes and self._outputs[task] == POOLED_OUTPUT:
            raise InvalidRequestError(
                f"normalize must not be false, because the graph of {self.name} normalizes its vectors", "normalize"
            )

    def _check_cut(self, dimensions: int) -> None:
        """Raises InvalidRequestError for a number that the model's config rules out, as vLLM does."""
        if self._matryoshka is False:
            raise InvalidRequestError(
                f"dimensions must be left out: the config of {self.name} says that its vectors cannot be cut",
                "dimensions",
            )
        if isinstance(self._matryoshka, tuple) and dimensions not in self._matryoshka:
            sizes = ", ".join(map(str, self._matryoshka))
            raise InvalidRequestError(
                f"dimensions must be one of {sizes}, which {self.name} was trained for, got {dimensions}", "dimensions"
            )

    def finished(
        self,
        task: Task,
        results: Sequence[Floats],
        *,
        dimensions: int | None = None,
        use_activation: bool | None = None,
    ) -> list[Floats]:
        """See Encoder."""
        if task == "sparse":
            return [*results]
        if task == "token_embed":
            return [self.vectors(rows, dimensions=dimensions, normalize=use_activation) for rows in results]
        return [*self.vectors(results, dimensions=dimensions, normalize=use_activation)]

    def vectors(
        self, rows: Floats | Sequence[Floats], *, dimensions: int | None = None, normalize: bool | None = None
    ) -> Floats:
        """The embeddings of N results of `embed`, or of the N tokens of one result of `token_embed`: [N, dimensions].

        If `normalize` is not given, the model decides. `dimensions` keeps only the first components (Matryoshka, arXiv
        2205.13147).
        """
        vectors: Floats = np.asarray(rows)[:, : dimensions or self._dimensions]
        return normalized(vectors) if normalize or (normalize is None and self._normalizes) else vectors

    def plan_scores(
        self,
        queries: Sequence[str],
        documents: Sequence[str],
        *,
        truncate_to: int | None = None,
        use_activation: bool | None = None,
    ) -> ScorePlan:
        """See Encoder. A score is the cosine of two vectors. Each text follows its prompt, if the model has one."""
        size = self._dimensions
        return self._plan(
            "embed", queries, documents, truncate_to, lambda q, d: cosines(np.stack(q)[:, :size], np.stack(d)[:, :size])
        )

    def _plan(
        self,
        task: Task,
        queries: Sequence[str],
        documents: Sequence[str],
        truncate_to: int | None,
        scores: Callable[[Sequence[Floats], Sequence[Floats]], NDArray[np.float64]],
    ) -> ScorePlan:
        """A plan with `scores` of results of queries, or of one for all, and of documents, each behind its prompt."""
        query_prompt, document_prompt = self._prompt_among(_QUERY_PROMPTS), self._prompt_among(_DOCUMENT_PROMPTS)
        inputs = [self.encode(text, prompt_name=query_prompt, truncate_to=truncate_to) for text in queries]
        inputs += [self.encode(text, prompt_name=document_prompt, truncate_to=truncate_to) for text in documents]
        n = len(queries)
        sources = [*((0, i) for i in range(n)), *((1, i) for i in range(len(documents)))]
        return ScorePlan(task, inputs, sources, lambda results: scores(results[:n], results[n:]))

    def _prompt_name(self, given: str | None) -> str | None:
        name = self.default_prompt_name if given is None else given
        if name is not None and name not in self.prompts:
            known = ", ".join(self.prompts) or "none"
            raise InvalidRequestError(f"{self.name} has no prompt {quoted(name)}; it has {known}", "prompt_name")
        return name

    def _adapter(self, prompt_name: str | None) -> int:
        adapters = self._graph.adapters
        return adapters.index(prompt_name) if prompt_name in adapters else -1

    def _prompt_among(self, names: Sequence[str]) -> str | None:
        return next((name for name in names if name in self.prompts), None)

    def _choose_outputs(self, description: EncoderDescription) -> Mapping[Task, str]:
        outputs = self._graph.outputs
        tokens = next((name for name in TOKEN_OUTPUTS if name in outputs), None)
        if tokens is not None and not description.foreign_modules:
            own = TOKEN_VECTORS if TOKEN_VECTORS in outputs else tokens
            chosen: dict[Task, str] = {"embed": tokens, "token_embed": own}
            return chosen | {"sparse": TOKEN_WEIGHTS} if TOKEN_WEIGHTS in outputs else chosen
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
        found: dict[Task, str] = {"embed": POOLED_OUTPUT}
        return found if tokens is None else {**found, "token_embed": tokens}

    def _results(self, task: Task, values: Sequence[Floats], inputs: Sequence[EncoderInput]) -> list[Floats]:
        if task == "sparse":
            return [
                strongest(item.token_ids, weights[:, 0], self._unweighted)
                for weights, item in zip(values, inputs, strict=True)
            ]
        if self._outputs[task] == TOKEN_VECTORS:  # of BGE-M3, without the first token
            return [vectors[1:] for vectors in values]
        if task == "token_embed" or self._outputs[task] == POOLED_OUTPUT:
            return [*values]
        pooled = [pool(tokens, item.prompt_length, self._pooling) for tokens, item in zip(values, inputs, strict=True)]
        return [*self._graph.after_pooling(np.stack(pooled))]


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
