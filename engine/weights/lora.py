"""LoraAdapter: an adapter as plain data, under the names of the model's own matrices."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from .tensor import DenseTensor

EMBED, HEAD = "embed", "head"
"""The names of the embedding, and of the head, which may be tied to it."""

ADAPTABLE = re.compile(
    r"layers\.(\d+)\.(?:q|k|v|q_gate|o|(?:experts\.\d+\.|shared\.)?(?:gate|up|down)|router|shared_gate"
    r"|latent_(?:q|q_down|q_up|kv_down|o)|(?:delta|mamba|conv)_(?:q|k|v|z|a|b|c|B|C|x|dt|out))\.weight"
)
"""The names of the other matrices that adapters can change: products that every device computes in one piece."""


@dataclass(frozen=True, slots=True, eq=False)
class LowRankUpdate:
    """Adds `scale * (b a x + bias) + shift` to some outputs of a matrix, https://arxiv.org/abs/2106.09685.

    `name` is the matrix' module in Tidewheel's words (`layers.0.q`). The update is for its outputs from `first_output`
    on. The update of EMBED is added to tokens' rows, before any scale: its x is 1 for the token, so its inputs are the
    vocabulary. `a` is `[rank, inputs]`, `b` `[outputs, rank]`, `bias` and `shift` `[outputs]` or None; all are
    contiguous float32. `shift` is the adapter's bias minus the model's; with it, the rank may be 0.
    Updates of parts of one matrix in a checkpoint have the same object `a`.
    """

    name: str
    a: NDArray[np.float32]
    b: NDArray[np.float32]
    scale: float
    bias: NDArray[np.float32] | None = None
    first_output: int = 0
    shift: NDArray[np.float32] | None = None

    @property
    def rank(self) -> int:
        """The values between the two matrices."""
        return len(self.a)


@dataclass(frozen=True, slots=True, eq=False)
class LoraAdapter:
    """All that an adapter changes. Adapters with the same `digest` compute the same.

    `matrices` are those that it has instead of the model's: EMBED for looking tokens up and HEAD for logits, whether or
    not they are tied in the model. Both are `[vocab, embedding size]`, perhaps views of a mapped file. The angles of
    the model's rope are divided by `rope_factor`.
    """

    updates: tuple[LowRankUpdate, ...]
    matrices: Mapping[str, DenseTensor] = field(default_factory=dict)
    rope_factor: float = 1.0
    digest: str = field(init=False)

    def __post_init__(self) -> None:
        content = hashlib.sha256()
        for update in self.updates:
            shapes = (update.name, update.first_output, update.scale, update.a.shape, update.b.shape)
            content.update(repr((*shapes, update.bias is not None, update.shift is not None)).encode())
            for array in (update.a, update.b, update.bias, update.shift):
                if array is not None:
                    content.update(array.data)
        for name, matrix in sorted(self.matrices.items()):
            content.update(repr((name, matrix.dtype, matrix.data.shape)).encode())
            content.update(np.ascontiguousarray(matrix.data).data)
        content.update(repr(self.rope_factor).encode())
        object.__setattr__(self, "digest", content.hexdigest())

    @property
    def rank(self) -> int:
        """The highest rank of an update; 0 if there is none."""
        return max((update.rank for update in self.updates), default=0)
