"""Encoder: a model that reads a text in one pass. Its kinds have files of their own, as the Embedder."""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence

import numpy as np
from msgspec import Struct
from numpy.typing import NDArray

from ..devices.executor import Executor
from ..errors import InvalidRequestError, ModelError
from ..files.wording import one_line
from ..model_names import short_name
from .classification import ClassActivation
from .description import EncoderDescription
from .graph import TOKEN_WEIGHTS, EncoderGraph
from .pooling import Floats
from .tasks import OF_TOKENS, Task
from .tokenization import EncoderInput, EncoderTokenizer

logger = logging.getLogger(__name__)

# The largest effect of rounding on a vector, as a share of its largest component, also with half precision inside.
_ROUNDING = 2e-3

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
    `activation` makes probabilities of its logits. `pooling` are the modes of an embedding model.
    """

    pooling: tuple[str, ...] = ()
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
        return self._results(task, self._graph.run(self._outputs[task], inputs, self._read(task, inputs)), inputs)

    def pieces(self, task: Task, inputs: Sequence[EncoderInput]) -> Generator[None, None, list[Floats]]:
        """`run` in pieces: see EncoderGraph."""
        values = yield from self._graph.pieces(self._outputs[task], inputs, self._read(task, inputs))
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

    def use_threads(self, threads: object) -> bool:
        """Compute with these threads from now on, which others use in turns; whether that can be."""
        return self._graph.use_threads(threads)

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

    def release_scratch(self) -> None:
        """Give all memory but that of the weights back to the system, until the next call. Nothing runs."""
        self._graph.release_scratch()

    @property
    def is_writing(self) -> bool:
        """See Executor."""
        return self._graph.is_writing

    def interrupt(self) -> None:
        """End a running `run`. The encoder cannot be used afterwards."""
        self._graph.interrupt()

    def close(self) -> None:
        """Free the weights. Nothing runs any more. Calling it twice is allowed."""
        self._graph.close()

    @abstractmethod
    def _choose_outputs(self, description: EncoderDescription) -> Mapping[Task, str]:
        """The graph's output that each of the encoder's tasks needs."""

    def _read(self, task: Task, inputs: Sequence[EncoderInput]) -> Sequence[Sequence[int]] | None:
        """The places of the tokens whose rows `_results` looks at: see EncoderGraph."""
        return None

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
