"""What is measured, and whether it fits the model and the machine."""

from __future__ import annotations

import re
from dataclasses import dataclass

from tidewheel.engine.errors import ModelError
from tidewheel.server.options import positive_count

_GIB = 2**30
_ROUND_TOKENS = 128  # a sequence's last block is rarely full, whatever the device's block size
_SPARE_TOKENS = 16  # the engine lets a sequence in only if there is a block for it to grow into


@dataclass(frozen=True, slots=True)
class Prefill:
    """So many prompts of so many tokens each, computed together."""

    prompts: int
    tokens: int

    def __str__(self) -> str:
        return f"{self.prompts}x{self.tokens}"


@dataclass(frozen=True, slots=True)
class Workload:
    """`decode_tokens` are decoded after each of `contexts` (tokens), by each of `batch_sizes` (sequences)."""

    prefills: tuple[Prefill, ...] = (Prefill(4, 512),)
    batch_sizes: tuple[int, ...] = (1, 8, 32)
    contexts: tuple[int, ...] = (128,)
    decode_tokens: int = 32
    repeats: int = 3
    ceilings_s: float = 0.8

    @property
    def longest(self) -> int:
        """The longest sequence, in tokens."""
        return max([prefill.tokens for prefill in self.prefills] + [c + self.decode_tokens for c in self.contexts])

    @property
    def most_sequences(self) -> int:
        """The most sequences at a time."""
        return max([prefill.prompts for prefill in self.prefills] + list(self.batch_sizes))

    @property
    def kv_tokens(self) -> int:
        """How many tokens the KV cache must hold at a time."""
        prefilled = [prefill.prompts * _rounded(prefill.tokens) for prefill in self.prefills]
        return max([*prefilled, max(self.batch_sizes) * _rounded(max(self.contexts) + self.decode_tokens)])


QUICK = Workload(
    prefills=(Prefill(2, 64),), batch_sizes=(1, 4), contexts=(64,), decode_tokens=8, repeats=1, ceilings_s=0.2
)


def check_fits(
    workload: Workload,
    *,
    longest_context: int,
    kv_bytes_per_token: int,
    weight_bytes: int,
    kv_cache_limit_bytes: int | None,
    available_bytes: int | None,
) -> int:
    """The bytes of KV cache that the workload takes. Raises ModelError if it is too long or too large.

    `longest_context` is in tokens. `kv_cache_limit_bytes` is what `--kv-cache-space` allows, None if it was not
    given; `available_bytes` is the memory that weights and cache must share, None if it is not known.
    """
    if workload.longest > longest_context:
        raise ModelError(
            f"a sequence of {workload.longest} tokens does not fit in the context of {longest_context}: lower "
            "--contexts, --decode-tokens or --prefill, or raise --max-model-len if it was lowered"
        )
    kv_bytes = workload.kv_tokens * kv_bytes_per_token
    needed = f"{workload.kv_tokens} tokens take {kv_bytes / _GIB:.2f} GiB of KV cache"
    if kv_cache_limit_bytes is not None and kv_bytes > kv_cache_limit_bytes:
        raise ModelError(
            f"{needed}, more than the {kv_cache_limit_bytes / _GIB:.2f} GiB of --kv-cache-space: "
            "raise it, or lower --batch-sizes, --contexts or --prefill"
        )
    if available_bytes is not None and kv_bytes + weight_bytes > available_bytes:
        raise ModelError(
            f"{needed} and the weights {weight_bytes / _GIB:.2f} GiB, but only {available_bytes / _GIB:.2f} GiB "
            "of memory is available: lower --batch-sizes, --contexts or --prefill, or take a smaller model"
        )
    return kv_bytes


def parse_prefills(text: str) -> tuple[Prefill, ...]:
    """`4x512,1x4k` as prompts and their tokens. Raises ValueError."""
    prefills = []
    for item in text.split(","):
        prompts, by, tokens = item.partition("x")
        if not by:
            raise ValueError(f"{item!r} is not PROMPTSxTOKENS, such as 4x512")
        prefills.append(Prefill(positive_count(prompts), positive_count(tokens)))
    return tuple(prefills)


def parse_counts(text: str) -> tuple[int, ...]:
    """`1,8,32` as numbers, in ascending order and each once. Raises ValueError."""
    return tuple(sorted({positive_count(item) for item in re.split(r"\s*,\s*", text)}))


def _rounded(num_tokens: int) -> int:
    return -(-(num_tokens + _SPARE_TOKENS) // _ROUND_TOKENS) * _ROUND_TOKENS
