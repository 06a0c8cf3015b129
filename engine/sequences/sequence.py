"""Sequence: one choice of one request while the engine computes it."""

from __future__ import annotations

import enum
import time

import numpy as np
from numpy.typing import NDArray

from ..adapters.lora import Lora
from ..cache.identity import Digest, Identity
from ..cache.snapshots import SnapshotPlan
from ..constraints.constraint import SequenceConstraint
from ..media.prompt_media import PromptMedia
from ..sampling_params import SamplingParams
from .beam_search import BeamSearch
from .sampling_rows import SamplingRow

# Odd, so that all choices of a request get different seeds (2^64 divided by the golden ratio).
_SEED_STRIDE = 0x9E3779B97F4A7C15

_FIRST_GROWTH = 256

UNKNOWN = -1  # how many tokens of a sequence a draft model has computed, before it was looked at


class SequenceState(enum.Enum):
    """Where a sequence is. Preempted sequences are waiting again."""

    WAITING = enum.auto()
    PREFILLING = enum.auto()
    DECODING = enum.auto()
    FINISHED = enum.auto()


class Sequence:
    """Tokens and KV blocks of one choice. Built by `submit`, then owned by the engine thread.

    `key` names the sequence in messages. The first `num_computed` of its `num_tokens` tokens are in the KV cache;
    a sequence that is not computed up to its last token is in prefill, whether those tokens came from the prompt or
    were sampled before a preemption. A draft model has computed the first `num_drafted`. The log-probabilities of the
    tokens that follow the first `num_scored` have been reported, or are not wanted. `sampling` says how its tokens are
    sampled, and `search` is the search that the sequence computes a beam of.
    """

    __slots__ = (
        "_digests",
        "adapter",
        "announced",
        "arrival",
        "awaited",
        "block_tables",
        "client",
        "constraint",
        "decode_set",
        "eos_ids",
        "first_blocks",
        "identity",
        "in_flight",
        "index",
        "key",
        "last_token",
        "max_length",
        "media",
        "min_length",
        "num_blocks",
        "num_cached_tokens",
        "num_charged",
        "num_computed",
        "num_drafted",
        "num_prompt_logprobs",
        "num_registered",
        "num_scored",
        "num_tokens",
        "num_window_blocks",
        "order",
        "priority",
        "prompt_len",
        "queued_at",
        "sampling",
        "scheduled_at",
        "search",
        "snapshots",
        "state",
        "state_slot",
        "stop_ids",
        "tokens",
        "virtual_finish",
    )

    def __init__(
        self,
        key: int,
        prompt: NDArray[np.int32],
        sampling: SamplingParams,
        *,
        index: int = 0,
        seed: int,
        arrival: int = 0,
        priority: int = 0,
        client: str = "",
        cache_salt: str | None = None,
        lora: Lora | None = None,
        media: PromptMedia | None = None,
        eos_ids: frozenset[int] = frozenset(),
        max_length: int,
        constraint: SequenceConstraint | None = None,
        search: BeamSearch | None = None,
    ) -> None:
        """`max_length` is the context's limit in tokens, prompt and output together; `seed` is the request's."""
        self.key = key
        self.index = index
        self.priority = priority
        self.client = client
        self.order = (priority, arrival, index)
        self.identity = Identity(
            salt=cache_salt,
            adapter=None if lora is None else lora.digest,
            media=() if media is None else media.identity,
        )
        self.media = media
        self.adapter = -1 if lora is None else lora.number  # of the executor's
        self.constraint = constraint
        self.state = SequenceState.WAITING
        self.in_flight = False  # in a step that was started, whose end decides how it goes on
        self.decode_set = 0  # in which it decoded last, where there are several
        self.queued_at = time.perf_counter()
        self.scheduled_at = 0.0  # for the first time

        self.prompt_len = self.num_tokens = len(prompt)
        room = max_length - self.prompt_len
        max_tokens = room if sampling.max_tokens is None else min(sampling.max_tokens, room)
        self.max_length = self.prompt_len + max_tokens
        self.min_length = self.prompt_len + min(sampling.min_tokens, max_tokens)
        self.tokens = np.empty(min(self.max_length, self.prompt_len + _FIRST_GROWTH), dtype=np.int32)
        self.tokens[: self.prompt_len] = prompt
        self.last_token = int(prompt[-1])
        self.num_computed = 0
        self.num_drafted = UNKNOWN
        self.num_cached_tokens: int | None = None  # unknown until the sequence runs for the first time
        self.num_charged = -1  # tokens of the prompt that count as its client's; before it runs, an estimate or unknown
        self.virtual_finish = 0.0  # see FairShares; unknown until it runs

        # By cache group; the cache's manager makes them and keeps them.
        self.block_tables: NDArray[np.int32] = np.empty((0, 0), dtype=np.int32)  # [groups, most blocks]
        self.num_blocks = 0  # of the tables, that are in use
        self.num_window_blocks = 0  # of those, that groups with a window have so far: a prompt gets them chunk by chunk
        self.first_blocks: list[int] = []  # of each group, the first that is still held
        self.state_slot = -1  # of recurrent state, while it holds one
        self.snapshots = SnapshotPlan()
        self.num_registered = 0  # full blocks that the prefix cache knows about
        self._digests: list[Digest] = []
        self.announced: list[Digest] = []  # by this sequence, last one first
        self.awaited: Digest | None = None  # announced by another sequence and worth waiting for

        self.eos_ids: frozenset[int] = frozenset() if sampling.ignore_eos else eos_ids
        self.stop_ids = self.eos_ids | frozenset(sampling.stop_token_ids)
        self.num_prompt_logprobs = -1 if sampling.prompt_logprobs is None or index else sampling.prompt_logprobs
        self.num_scored = 0 if self.num_prompt_logprobs >= 0 else self.prompt_len - 1
        self.search = search
        # A constraint has its own way to forbid an end that comes too soon, and so has a search.
        ends_freely = constraint is None and search is None
        self.sampling = SamplingRow(
            sampling,
            seed=(seed + index * _SEED_STRIDE) % 2**64,
            prompt_len=self.prompt_len,
            min_length=self.min_length if ends_freely else 0,
            stop_ids=self.stop_ids,
            search=search,
        )

    @property
    def request(self) -> int:
        """The same number for all choices of a request."""
        return self.order[1]

    @property
    def num_reusable(self) -> int:
        """How many tokens need not be computed if the cache has them: at least one must, or there would be no logits.

        The logits after tokens of the prompt that are still to be scored are wanted too.
        """
        return self.num_tokens - 1 if self.num_scored == self.prompt_len - 1 else self.num_scored

    def append(self, token: int) -> None:
        """Add a sampled token."""
        if self.num_tokens == len(self.tokens):
            grown = np.empty(min(self.max_length, 2 * len(self.tokens)), dtype=np.int32)
            grown[: self.num_tokens] = self.tokens
            self.tokens = grown
        self.tokens[self.num_tokens] = token
        self.num_tokens += 1
        self.last_token = token

    def rewind(self) -> None:
        """Forget all tokens but the prompt's. The caller has released the blocks."""
        self.num_tokens, self.last_token = self.prompt_len, int(self.tokens[self.prompt_len - 1])
        self._digests = []

    def become(self, other: Sequence) -> None:
        """Take over the tokens of `other` and its block tables. The caller has seen to the blocks' reference counts."""
        if len(self.tokens) < other.num_tokens:
            self.tokens = np.empty(len(other.tokens), dtype=np.int32)
        self.tokens[: other.num_tokens] = other.tokens[: other.num_tokens]
        self.num_tokens, self.last_token = other.num_tokens, other.last_token
        self.num_computed, self.num_cached_tokens = other.num_computed, other.num_cached_tokens
        self.num_drafted = other.num_drafted
        self.block_tables, self.first_blocks = other.block_tables.copy(), other.first_blocks.copy()
        self.num_blocks, self.num_window_blocks = other.num_blocks, other.num_window_blocks
        self.num_registered = other.num_registered
        self._digests = other._digests.copy()
        self.snapshots = other.snapshots.forked()

    def digests(self, count: int, block_size: int) -> list[Digest]:
        """The digests of the first `count` blocks. The sequence must have tokens to fill them all."""
        known = self._digests
        while len(known) < count:
            parent = known[-1] if known else self.identity.root
            start = len(known) * block_size
            known.append(self.identity.block_digest(parent, start, self.tokens[start : start + block_size]))
        return known[:count]
