"""What is measured, and whether it fits the model and the machine."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, replace

from tidewheel.engine.declaring.values import positive_count
from tidewheel.engine.devices.cache_split import max_states
from tidewheel.engine.errors import ModelError

BATCH_SIZES = (1, 8, 32)
SHORT_CONTEXT = 128
LONG_BATCH_SIZES = (1, 8)  # with more the cache takes more memory than most models' weights
LONG_CONTEXTS = (2000, 8000)  # with room for what is decoded in a model's context of 2,048 or 8,192

_GIB = 2**30
_ROUND_TOKENS = 128  # a sequence's last block is rarely full, whatever the device's block size
_SPARE_TOKENS = 16  # the engine lets a sequence in only if there is a block for it to grow into


@dataclass(frozen=True, slots=True)
class Prefill:
    """`prompts` prompts of `tokens` tokens each, computed together."""

    prompts: int
    tokens: int

    def __str__(self) -> str:
        return f"{self.prompts}x{self.tokens}"


@dataclass(frozen=True, slots=True)
class Decode:
    """`batch_size` sequences decoded together, each with `context` tokens before."""

    batch_size: int
    context: int

    def __str__(self) -> str:
        return f"batch {self.batch_size}, context {self.context}"


def decodes_of(batch_sizes: Iterable[int], contexts: Iterable[int]) -> tuple[Decode, ...]:
    """Each batch size at each context."""
    sizes = tuple(batch_sizes)
    return tuple(Decode(batch_size, context) for context in contexts for batch_size in sizes)


@dataclass(frozen=True, slots=True)
class Workload:
    """What is measured; each decode takes `decode_tokens` steps.

    `long_decodes` have long contexts, and were not asked for. If they fit, they are measured on the device only.
    """

    prefills: tuple[Prefill, ...] = (Prefill(4, 512),)
    decodes: tuple[Decode, ...] = decodes_of(BATCH_SIZES, (SHORT_CONTEXT,))
    long_decodes: tuple[Decode, ...] = decodes_of(LONG_BATCH_SIZES, LONG_CONTEXTS)
    decode_tokens: int = 32
    repeats: int = 3
    ceilings_s: float = 0.8
    profile: bool = False

    @property
    def all_decodes(self) -> tuple[Decode, ...]:
        """The decodes that were asked for, then the long ones."""
        return self.decodes + self.long_decodes

    @property
    def longest(self) -> int:
        """The longest sequence, in tokens."""
        decoded = [decode.context + self.decode_tokens for decode in self.all_decodes]
        return max([prefill.tokens for prefill in self.prefills] + decoded)

    @property
    def max_sequences(self) -> int:
        """The most sequences at a time."""
        return max([p.prompts for p in self.prefills] + [decode.batch_size for decode in self.all_decodes])

    @property
    def kv_tokens(self) -> int:
        """How many tokens the KV cache must hold at a time."""
        prefilled = [prefill.prompts * _rounded(prefill.tokens) for prefill in self.prefills]
        decoded = [d.batch_size * _rounded(d.context + self.decode_tokens) for d in self.all_decodes]
        return max(prefilled + decoded)


QUICK = Workload(
    prefills=(Prefill(2, 64),),
    decodes=decodes_of((1, 4), (64,)),
    long_decodes=(),
    decode_tokens=8,
    repeats=1,
    ceilings_s=0.2,
)

# Of kernels: as many rows as a prompt, a few streams and many have, and attention to little and to much.
KERNELS = Workload(
    prefills=(Prefill(1, 512), Prefill(1, 2048)),
    decodes=(*decodes_of(BATCH_SIZES, (SHORT_CONTEXT,)), *decodes_of(LONG_BATCH_SIZES, (2048,))),
    long_decodes=(),
    decode_tokens=16,
    repeats=1,
    ceilings_s=0.4,
)


@dataclass(frozen=True, slots=True)
class Room:
    """What a workload must fit into.

    `longest_context` is in tokens, and `state_bytes` is the recurrent state of a sequence. `kv_cache_limit_bytes` is
    what `--kv-cache-space` allows, None if it was not given. `available_bytes` is the memory for weights and cache
    together, None if it is not known.
    """

    longest_context: int
    kv_bytes_per_token: int
    state_bytes: int
    weight_bytes: int
    kv_cache_limit_bytes: int | None
    available_bytes: int | None

    def kv_bytes(self, workload: Workload) -> int:
        """The bytes of KV cache that a workload takes, recurrent state included.

        Raises ModelError if it is too long or too large.
        """
        if workload.longest > self.longest_context:
            raise ModelError(
                f"a sequence of {workload.longest} tokens does not fit in the context of {self.longest_context}: lower "
                "--contexts, --decode-tokens or --prefill, or raise --max-model-len if it was lowered"
            )
        # Twice the states, because they get at most half of the cache.
        states = 2 * self.state_bytes * max_states(workload.max_sequences)
        kv_bytes = workload.kv_tokens * self.kv_bytes_per_token + states
        with_states = f" and the states of {workload.max_sequences} sequences" if states else ""
        needed = f"{workload.kv_tokens} tokens{with_states} take {kv_bytes / _GIB:.2f} GiB of KV cache"
        if self.kv_cache_limit_bytes is not None and kv_bytes > self.kv_cache_limit_bytes:
            raise ModelError(
                f"{needed}, more than the {self.kv_cache_limit_bytes / _GIB:.2f} GiB of --kv-cache-space: "
                "raise it, or lower --batch-sizes, --contexts or --prefill"
            )
        if self.available_bytes is not None and kv_bytes + self.weight_bytes > self.available_bytes:
            raise ModelError(
                f"{needed} and the weights {self.weight_bytes / _GIB:.2f} GiB, but only "
                f"{self.available_bytes / _GIB:.2f} GiB of memory is available: lower --batch-sizes, --contexts or "
                "--prefill, or take a smaller model"
            )
        return kv_bytes

    def fit(self, workload: Workload) -> Workload:
        """The workload without the long decodes that do not fit, or would take more than half of the memory."""
        available = None if self.available_bytes is None else self.available_bytes // 2
        roomy = replace(self, available_bytes=available)
        fitting = [d for d in workload.long_decodes if roomy._holds(replace(workload, decodes=(), long_decodes=(d,)))]
        return replace(workload, long_decodes=tuple(fitting))

    def _holds(self, workload: Workload) -> bool:
        try:
            self.kv_bytes(workload)
        except ModelError:
            return False
        return True


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
