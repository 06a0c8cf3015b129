"""EncoderGraph: what computes an encoder. An OnnxGraph runs in onnxruntime, a NativeGraph with our own kernels."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Generator, Mapping, Sequence
from pathlib import Path

from ..devices.executor import Executor
from .pooling import Floats
from .tokenization import EncoderInput

TOKEN_OUTPUTS = ("token_embeddings", "last_hidden_state")
POOLED_OUTPUT = "sentence_embedding"
LOGITS = "logits"
TOKEN_LOGITS = "token_logits"
TOKEN_VECTORS = "token_vectors"
TOKEN_WEIGHTS = "token_weights"
SPARSE = "sparse"


class EncoderGraph(ABC):
    """From the token ids of texts to vectors. Used by one thread at a time, but `interrupt` may be called on any.

    `path` is the file or folder that it comes from. `outputs` are those that it can be asked for. TOKEN_OUTPUTS are a
    vector for each token, TOKEN_VECTORS what else the model makes of it, TOKEN_LOGITS the logits of labels for each
    token, and TOKEN_WEIGHTS a number from 0 on. SPARSE are the weights above 0 of words. All others are one vector for
    each text. `pads`: the texts of a batch are padded to the longest one. `adapters` are the names of
    those that an input may have, by their numbers.
    """

    path: Path
    outputs: tuple[str, ...]
    pads: bool
    adapters: tuple[str, ...] = ()
    info: Mapping[str, str] = {}

    @abstractmethod
    def run(
        self, output: str, inputs: Sequence[EncoderInput], read: Sequence[Sequence[int]] | None = None
    ) -> Sequence[Floats]:
        """One of the outputs for each input: `[tokens, width]` for an output of tokens, `[words, 2]` for SPARSE, with
        words in ascending order and their weights, else `[width]`.

        `read` are the places of the tokens that are looked at in each input, in ascending order: in one of
        TOKEN_OUTPUTS, the rows of others may be anything. None: all.
        """

    def pieces(
        self, output: str, inputs: Sequence[EncoderInput], read: Sequence[Sequence[int]] | None = None
    ) -> Generator[None, None, Sequence[Floats]]:
        """`run`, but it yields after each piece of work, if there are several.

        In between, `run` and other `pieces` may be called unless the graph `is_within_layer`.
        """
        yield from ()
        return self.run(output, inputs, read)

    def set_piece(self, seconds: float) -> None:
        """How long a piece takes from now on, about."""
        return

    @property
    def is_within_layer(self) -> bool:
        """See TowerExecutor."""
        return False

    def share_threads(self, beside: Executor) -> bool:
        """Compute on the threads of a chat model, which is idle meanwhile; whether that can be."""
        return False

    def use_threads(self, threads: object) -> bool:
        """Compute with these threads from now on: see Executor."""
        return False

    def after_pooling(self, vectors: Floats) -> Floats:
        """What the model's modules behind the pooling make of pooled vectors `[N, width]`."""
        return vectors

    def release_scratch(self) -> None:
        """See TowerExecutor."""
        return

    @abstractmethod
    def interrupt(self) -> None:
        """Make a run in another thread fail, and all later runs."""

    @property
    def is_writing(self) -> bool:
        """See Executor."""
        return False

    def close(self) -> None:  # noqa: B027 - what is freed with the object has nothing to do
        """Free the weights. Nothing runs any more. Calling it twice is allowed."""
