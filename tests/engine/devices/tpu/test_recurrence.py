"""Recurrences: any division of sequences into steps and chunks gives what one token after the other gives."""

from __future__ import annotations

import numpy as np
import pytest
from numpy.typing import NDArray

jax = pytest.importorskip("jax")

HEADS, KEY, VALUE, TOKENS, SLOTS = 3, 5, 4, 32, 5
LENGTHS = (13, 1, 9, 1)  # of sequences in a step


def one_by_one(state: NDArray[np.float64], inputs: list[NDArray[np.float64]]) -> NDArray[np.float64]:
    """The outputs of a delta net's tokens, or without betas of a state space layer's; `state` becomes the last one."""
    outputs = []
    for q, k, v, log_decay, *beta in zip(*inputs, strict=True):
        state *= np.exp(log_decay)[:, None, None]
        u = v if not beta else beta[0][:, None] * (v - np.einsum("hkv,hk->hv", state, k))
        state += k[:, :, None] * u[:, None, :]
        outputs.append(np.einsum("hkv,hk->hv", state, q))
    return np.array(outputs)


@pytest.mark.parametrize("has_beta", [True, False])
def test_chunks_and_single_tokens_give_what_tokens_give_one_by_one(
    has_beta: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    from tidewheel.engine.devices.tpu import recurrence
    from tidewheel.engine.devices.tpu.inputs import StepInputs
    from tidewheel.engine.devices.tpu.recurrence import Inputs, recur

    monkeypatch.setattr(recurrence, "_SIDE_BY_SIDE", 3)  # of the four that there is room for
    random = np.random.default_rng(3)
    q, k, v = (random.standard_normal((TOKENS, HEADS, size)) for size in (KEY, KEY, VALUE))
    k /= np.linalg.norm(k, axis=-1, keepdims=True)
    # From hardly any decay to one that leaves nothing.
    log_decay = -np.exp(random.uniform(-9, 5, (TOKENS, HEADS)))
    arrays = [q, k, v, log_decay, *([random.uniform(0, 1, (TOKENS, HEADS))] if has_beta else [])]
    states = random.standard_normal((SLOTS, HEADS, KEY, VALUE))
    starts, slots = np.concatenate([[0], np.cumsum(LENGTHS)]), np.array([2, 0, 3, 1])
    positions = np.zeros(TOKENS, np.int32)
    positions[13], positions[14:23] = 40, np.arange(7, 16)  # the first sequence begins, the others go on
    positions[:13], positions[23] = np.arange(13), 5

    expected, outputs = states.copy(), []
    expected[2] = 0
    for slot, start, length in zip(slots, starts[:-1], LENGTHS, strict=True):
        outputs.append(one_by_one(expected[slot], [array[start : start + length] for array in arrays]))

    tokens = dict.fromkeys(StepInputs._fields)
    tokens |= {"positions": positions, "query_start": starts.astype(np.int32), "state_slots": slots.astype(np.int32)}
    tokens["num_seqs"] = np.array([len(LENGTHS)], np.int32)
    after, found = jax.jit(recur, static_argnames="chunk")(
        states.astype(np.float32),
        Inputs(*(array.astype(np.float32) for array in arrays)),
        StepInputs(**tokens),
        chunk=4,
    )
    np.testing.assert_allclose(found[: sum(LENGTHS)], np.concatenate(outputs), atol=2e-5)
    np.testing.assert_allclose(after[:-1], expected[:-1], atol=2e-5)
