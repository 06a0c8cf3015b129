"""Rows that nobody reads are not computed to the end: those that are read do not change by a bit."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import models_zoo
import numpy as np
import pytest
from harness import Harness, load, make_device
from logits import run_with_logits

from tidewheel.engine.devices.batch import SamplingBatch, StepBatch

_LENGTHS = (5, 33, 48)
_CHUNK = 20  # the first prompt decodes beside chunks of the others


@pytest.mark.parametrize("name", models_zoo.swept())
def test_a_step_that_reads_all_rows_gives_the_same_bits(name: str) -> None:
    executor = load(make_device("cpu"), models_zoo.folder(name))
    try:
        harness = Harness(executor)
        random = np.random.default_rng(2)
        prompts = [random.integers(3, models_zoo.VOCAB_SIZE, length).tolist() for length in _LENGTHS]
        for sequence in harness.generate(prompts, 4, _CHUNK) + harness.generate(prompts, 2):
            whole = harness.logits(sequence.tokens[:-1])
            np.testing.assert_array_equal(np.stack(sequence.logits), whole[sequence.prompt_len - 1 :])
    finally:
        executor.close()


@pytest.mark.parametrize("name", models_zoo.swept(("llama-bias", "gemma4"), ("llama-bias", "gemma4")))
def test_rows_are_read_in_any_order_and_as_often_as_wanted(name: str) -> None:
    executor = load(make_device("cpu"), models_zoo.folder(name))
    try:
        harness = Harness(executor)
        sequence = harness.start(list(range(3, 43)), 0)
        batch = StepBatch(
            token_ids=np.array(sequence.tokens, np.int32),
            positions=np.arange(40, dtype=np.int32),
            query_start=np.array([0, 40], np.int32),
            context_len=np.array([40], np.int32),
            block_tables=np.array([sequence.blocks], np.int32),
            window_tables=tuple(np.array([blocks], np.int32) for blocks in sequence.tables[1:]),
            logits_rows=np.arange(40, dtype=np.int32),
            sampling=SamplingBatch.greedy([*range(1, 41)]),
        )

        def logits(rows: list[int]) -> Any:
            some = replace(batch, logits_rows=np.array(rows, np.int32), sampling=SamplingBatch.greedy([40] * len(rows)))
            return run_with_logits(executor, some)[1]

        whole = logits([*range(40)])
        for rows in ([39], [39, 39, 2, 39], [17, 16, 15], [0, 1, 2, 20, 38, 39], [*range(39)]):
            np.testing.assert_array_equal(logits(rows), whole[rows])
    finally:
        executor.close()
