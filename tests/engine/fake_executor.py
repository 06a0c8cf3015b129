"""An executor whose tokens give every mistake of the engine away.

Its "KV cache" stores the token and the position of every slot. The next token is a hash of what the block table
reaches, of the seed, and of every other sampling parameter; so a wrong table, a missing or doubled computation, a
stale buffer or a foreign prefix changes the tokens.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import replace
from functools import partial

import numpy as np

from tidewheel.engine.devices.batch import StepBatch, StepOutput
from tidewheel.engine.devices.executor import Executor, OnWait
from tidewheel.engine.devices.limits import CacheGroup, ExecutorLimits
from tidewheel.engine.devices.sampling import NO_TOKEN


class FakeExecutor(Executor):
    """Vocabulary of `vocab_size` tokens. `before_step` is called with each batch."""

    def __init__(self, limits: ExecutorLimits, vocab_size: int = 256) -> None:
        self.limits = limits
        self.vocab_size = vocab_size
        self.closed = 0
        self.times_yielded = self.times_reclaimed = 0  # each counted by the one thread that does it
        self.yields_from = 8  # tokens of a step
        self.num_steps = 0
        self.num_copies = 0
        self.num_followed = 0  # steps that were started before the last one was waited for
        self._sampled = np.empty(0, np.int32)
        self.largest_batch = 0
        slots = [(group.num_blocks + 1) * limits.block_size for group in limits.groups]
        self._tokens = [np.full(count, -1, dtype=np.int32) for count in slots]
        # Of a recurrent layer, by slot: a running sum over the tokens before a position, where a next step may begin.
        self._states: list[dict[int, int]] = [{} for _ in range(limits.num_states + 1)]
        self._positions = [np.full(count, -1, dtype=np.int32) for count in slots]

    def step(self, batch: StepBatch) -> StepOutput:
        self._check(batch)
        self.num_steps += 1
        self.largest_batch = max(self.largest_batch, len(batch.token_ids))
        for group in range(len(self.limits.groups)):
            for s, (start, end) in enumerate(zip(batch.query_start[:-1], batch.query_start[1:], strict=True)):
                positions = batch.positions[start:end]
                slots = self._slots(batch, group, s, positions)
                self._tokens[group][slots], self._positions[group][slots] = batch.token_ids[start:end], positions
        for s, length in enumerate(batch.context_len):
            tokens = {}
            for group in range(len(self.limits.groups)):
                positions = np.arange(self._first_seen(group, batch.positions[batch.query_start[s]]), length)
                slots = self._slots(batch, group, s, positions)
                assert (self._positions[group][slots] == positions).all(), "a slot was not computed, or is another's"
                for position, token in zip(positions.tolist(), self._tokens[group][slots].tolist(), strict=True):
                    assert tokens.setdefault(position, token) == token, "two groups have different tokens"
        states = self._recur(batch) if self.limits.num_states else [b""] * len(batch.token_ids)
        if batch.sampling.masks is not None:
            batch.sampling.masks.wait()
        output = StepOutput.empty(batch.sampling)
        for row, token in enumerate(batch.logits_rows):
            sequence = int(np.searchsorted(batch.query_start, token, side="right")) - 1
            seen = self._seen(batch, sequence, int(batch.positions[token])) + states[token]
            self._sample_row(batch, row, seen, output)
        return output

    def _recur(self, batch: StepBatch) -> list[bytes]:
        """Let each token change the state of its sequence; the states after the tokens."""
        assert batch.state_slots is not None
        assert batch.state_slots.dtype == np.int32
        assert ((batch.state_slots >= 0) & (batch.state_slots < self.limits.num_states)).all()
        assert len(set(batch.state_slots.tolist())) == len(batch.context_len), "two sequences have one state"
        count = len(batch.context_len)
        num_draft_tokens = np.zeros(count, np.int32) if batch.num_draft_tokens is None else batch.num_draft_tokens
        assert num_draft_tokens.dtype == np.int32
        assert num_draft_tokens.shape == (count,)
        assert (num_draft_tokens < np.diff(batch.query_start)).all()
        assert ((num_draft_tokens >= 0) & (num_draft_tokens <= self.limits.max_draft_tokens)).all()
        states = []
        for slot, start, end, draft_tokens in zip(
            batch.state_slots, batch.query_start[:-1], batch.query_start[1:], num_draft_tokens, strict=True
        ):
            first = int(batch.positions[start])
            assert first == 0 or first in self._states[slot], "a state that nobody has computed"
            state, kept = 0 if first == 0 else self._states[slot][first], {}
            for token, position in zip(batch.token_ids[start:end], batch.positions[start:end].tolist(), strict=True):
                state = (state * 31 + int(token) + 1) % 2**61
                states.append(state.to_bytes(8, "little"))
                if position >= batch.positions[end - 1] - draft_tokens:
                    kept[position + 1] = state
            self._states[slot] = kept
        return states

    def copy_states(self, pairs: np.ndarray) -> None:
        for source, target in pairs.tolist():
            self._states[target] = dict(self._states[source])

    def _seen(self, batch: StepBatch, sequence: int, position: int) -> bytes:
        """All that the token at a position sees, group by group."""
        seen = []
        for group, tokens in enumerate(self._tokens):
            positions = np.arange(self._first_seen(group, position), position + 1)
            seen.append(tokens[self._slots(batch, group, sequence, positions)].tobytes())
        return b"".join(seen)

    def _first_seen(self, group: int, position: int) -> int:
        window = self.limits.groups[group].window
        return 0 if window is None else max(0, position - window + 1)

    def _slots(self, batch: StepBatch, group: int, sequence: int, positions: np.ndarray) -> np.ndarray:
        table, size = (batch.block_tables, *batch.window_tables)[group][sequence], self.limits.block_size
        return np.asarray(table[positions // size] * size + positions % size)

    def _sample_row(self, batch: StepBatch, row: int, context: bytes, output: StepOutput) -> None:
        target = -1 if batch.sampling.target is None else int(batch.sampling.target[row])
        output.token_ids[row] = token = target if target >= 0 else self._sample(batch, row, context)
        if target >= 0:
            assert output.ranks is not None
            output.ranks[row] = hashlib.blake2b(context).digest()[0] + 1
        if output.logprobs is not None and output.top_ids is not None and output.top_logprobs is not None:
            top = token + np.arange(output.top_ids.shape[1], dtype=np.int32)
            output.logprobs[row], output.top_ids[row] = -(token + 1) / 7, top
            output.top_logprobs[row] = -(top + 1).astype(np.float32) / 7

    def copy_blocks(self, pairs: np.ndarray, group: int = 0) -> None:
        self.num_copies += len(pairs)
        for cached in (self._tokens[group], self._positions[group]):
            blocks = cached.reshape(-1, self.limits.block_size)
            blocks[pairs[:, 1]] = blocks[pairs[:, 0]]

    @property
    def block_bytes(self) -> int:
        return 2 * self.limits.block_size * 4

    def read_blocks(self, blocks: np.ndarray) -> np.ndarray:
        parts = [cached.reshape(-1, self.limits.block_size)[blocks] for cached in (self._tokens[0], self._positions[0])]
        return np.concatenate(parts, axis=1).view(np.uint8)

    def write_blocks(self, blocks: np.ndarray, data: np.ndarray) -> None:
        tokens, positions = np.split(data.view(np.int32), 2, axis=1)
        self._tokens[0].reshape(-1, self.limits.block_size)[blocks] = tokens
        self._positions[0].reshape(-1, self.limits.block_size)[blocks] = positions

    def warm_up(self, progress: Callable[[int, int], None]) -> None:
        progress(1, 1)

    def start(self, batch: StepBatch) -> OnWait:
        """With async scheduling it computes now, and does not look at the batch later."""
        if not self.limits.async_scheduling:
            assert not batch.is_async
            return OnWait(partial(self.step, batch))
        if batch.is_async:
            self.num_followed += 1
            batch = replace(batch, token_ids=np.maximum(self._sampled, 0))  # what cannot be told has ended
        output = self.step(batch)
        self._sampled = output.token_ids.copy()
        return OnWait(lambda: output)

    def yield_core(self, num_tokens: int) -> Callable[[], None] | None:
        if num_tokens < self.yields_from:
            return None
        self.times_yielded += 1

        def passed_on() -> None:
            self.times_reclaimed += 1

        return passed_on

    def close(self) -> None:
        self.closed += 1

    def _sample(self, batch: StepBatch, row: int, context: bytes) -> int:
        sampling = batch.sampling
        history = sampling.history_ids[sampling.history_start[row] : sampling.history_start[row + 1]]
        bias = slice(sampling.bias_start[row], sampling.bias_start[row + 1])
        state = [
            context,
            history.tobytes(),
            sampling.bias_ids[bias].tobytes(),
            sampling.bias_values[bias].tobytes(),
        ]
        if len(history) and self.limits.groups == (CacheGroup(self.limits.num_blocks),) and not self.limits.num_states:
            assert history.tobytes() == context
        masks = sampling.masks
        mask = None if masks is None or masks.index[row] < 0 else masks.bits[masks.index[row]]
        if mask is not None:
            state.append(mask.tobytes())
        state += [getattr(sampling, name)[row].tobytes() for name in _ROW_ARRAYS]
        digest = hashlib.blake2b(b"|".join(state), digest_size=8).digest()
        allowed = np.ones(self.vocab_size, np.bool_)
        allowed[sampling.bias_ids[bias][np.isneginf(sampling.bias_values[bias])]] = False
        if mask is not None:
            allowed &= np.unpackbits(mask.view(np.uint8), bitorder="little")[: self.vocab_size] == 1
        if not allowed.any():
            return NO_TOKEN
        token = int.from_bytes(digest, "little") % self.vocab_size
        while not allowed[token]:
            token = (token + 1) % self.vocab_size
        return token

    def _check(self, batch: StepBatch) -> None:
        limits, lengths = self.limits, np.diff(batch.query_start)
        num_tokens, num_rows = len(batch.token_ids), len(batch.logits_rows)
        assert 0 < num_tokens <= limits.max_num_batched_tokens
        assert len(lengths) <= limits.max_num_seqs
        assert (lengths > 0).all()
        assert batch.query_start[0] == 0
        assert batch.query_start[-1] == num_tokens
        assert len(batch.positions) == num_tokens
        assert len(batch.context_len) == len(lengths)
        assert len(batch.window_tables) == len(limits.window_groups)
        assert (batch.positions[batch.query_start[1:] - 1] + 1 == batch.context_len).all()
        firsts = batch.positions[batch.query_start[:-1]]
        for group, tables in zip(limits.groups, (batch.block_tables, *batch.window_tables), strict=True):
            assert tables.shape == batch.block_tables.shape == (len(lengths), tables.shape[1])
            assert tables.dtype == np.int32
            assert tables.flags.c_contiguous
            assert ((tables >= 0) & (tables <= group.padding_block)).all()
            seen = 0 * firsts if group.window is None else np.maximum(firsts - group.window + 1, 0)
            column = np.arange(tables.shape[1])
            used = column < -(-batch.context_len[:, None] // limits.block_size)
            used &= column >= seen[:, None] // limits.block_size
            assert (tables[used] != group.padding_block).all(), "padding in the place of a block"
            written = tables[np.repeat(np.arange(len(lengths)), lengths), batch.positions // limits.block_size]
            slots = written * limits.block_size + batch.positions % limits.block_size
            assert len(set(slots.tolist())) == num_tokens, "two tokens are written to one slot"
        assert ((batch.logits_rows >= 0) & (batch.logits_rows < num_tokens)).all()
        samples = batch.sampling.target if batch.sampling.target is not None else np.full(num_rows, -1, dtype=np.int32)
        assert samples.dtype == np.int32
        sampled = set(batch.logits_rows[samples < 0].tolist())
        for start, end in zip(batch.query_start[:-1].tolist(), batch.query_start[1:].tolist(), strict=True):
            # After its last token, or, if that is drafted, after each of them.
            assert sampled & set(range(start, end)) in (set(), {end - 1}, set(range(start, end)))
        assert num_rows - np.count_nonzero(samples >= 0) <= limits.max_num_seqs + num_tokens
        for array, dtype in _DTYPES.items():
            value = getattr(batch, array)
            assert value.dtype == dtype, array
            assert value.flags.c_contiguous, array
        for name, dtype in _ROW_ARRAYS.items():
            value = getattr(batch.sampling, name)
            assert value.shape == (num_rows,), name
            assert value.dtype == dtype, name
            assert value.flags.c_contiguous, name
        if batch.sampling.masks is not None:
            assert batch.sampling.masks.index.shape == (num_rows,)
        assert batch.sampling.history_start.shape == batch.sampling.bias_start.shape == (num_rows + 1,)
        assert batch.sampling.history_start[-1] == len(batch.sampling.history_ids)
        assert batch.sampling.bias_start[-1] == len(batch.sampling.bias_ids) == len(batch.sampling.bias_values)


_DTYPES = dict.fromkeys(
    ("token_ids", "positions", "query_start", "context_len", "block_tables", "logits_rows"), np.int32
)
_ROW_ARRAYS = {
    "temperature": np.float32,
    "top_k": np.int32,
    "top_p": np.float32,
    "min_p": np.float32,
    "seed": np.uint64,
    "position": np.int32,
    "repetition_penalty": np.float32,
    "presence_penalty": np.float32,
    "frequency_penalty": np.float32,
    "num_logprobs": np.int32,
    "prompt_len": np.int32,
}
