"""Padding goes into a block that the executor keeps for it: no sequence's tokens change."""

from __future__ import annotations

import models_zoo
import numpy as np
import pytest
from harness import device_ids, load, make_device
from optional_packages import require_packages

from tidewheel.engine.devices.batch import SamplingBatch, StepBatch
from tidewheel.engine.devices.executor import Executor

require_packages("torch")

PROMPT = models_zoo.prompts()[-1][:40]


def answers(executor: Executor, num_padding: int) -> list[int]:
    """Greedy tokens of a prompt in steps that have sequences of padding before and behind it."""
    limits, tokens = executor.limits, list(PROMPT)
    width = -(-len(PROMPT) // limits.block_size) + 1
    table = np.arange(
        limits.num_blocks - width, limits.num_blocks, dtype=np.int32
    )  # up to the block before the padding
    padding = np.full(width, limits.padding_block, np.int32)
    cached = 0
    for _ in range(8):
        count = len(tokens) - cached
        before, behind = num_padding // 2, num_padding - num_padding // 2
        lengths = [1] * before + [count] + [1] * behind
        starts = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)
        positions = [[0]] * before + [list(range(cached, len(tokens)))] + [[0]] * behind
        ids = [[7]] * before + [tokens[cached:]] + [[7]] * behind
        batch = StepBatch(
            token_ids=np.concatenate(ids).astype(np.int32),
            positions=np.concatenate(positions).astype(np.int32),
            query_start=starts,
            context_len=np.array([1] * before + [len(tokens)] + [1] * behind, np.int32),
            block_tables=np.stack([padding] * before + [table] + [padding] * behind),
            logits_rows=np.array([starts[before + 1] - 1], np.int32),
            sampling=SamplingBatch.greedy([len(tokens)]),
        )
        cached = len(tokens)
        tokens.append(int(executor.start(batch).wait().token_ids[0]))
    return tokens[len(PROMPT) :]


@pytest.mark.parametrize("device_id", device_ids())
def test_padding_changes_nothing(device_id: str) -> None:
    executor = load(make_device(device_id), models_zoo.folder("llama"))
    expected = answers(executor, 0)
    assert answers(executor, 5) == expected == answers(executor, 0)
    executor.close()
