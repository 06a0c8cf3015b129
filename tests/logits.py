"""The logits of a step. Executors do not give them: they are taken where tokens are sampled from them."""

from __future__ import annotations

import sys
from contextlib import ExitStack
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import numpy as np
from numpy.typing import NDArray

from tidewheel.engine.devices.batch import SamplingBatch, StepBatch, StepOutput
from tidewheel.engine.devices.executor import Executor
from tidewheel.engine.devices.sampling import sample_row

_SAMPLING_MODULES = ("torch_reference.executor", "graph.executor", "tpu.pending")


def run_with_logits(executor: Executor, batch: StepBatch) -> tuple[StepOutput, NDArray[np.float32]]:
    """What a step gives, and its logits [R, vocab].

    On devices that sample themselves, the rows ask for a log-probability: then they are sampled here.
    """
    if (native := getattr(executor, "native", None)) is not None:
        output = StepOutput.empty(batch.sampling)
        logits = np.empty((len(batch.logits_rows), native.vocab_size), np.float32)
        outputs = (output.token_ids, output.logprobs, output.ranks, output.top_ids, output.top_logprobs)
        native.step(batch, *outputs, logits=logits)
        return output, logits
    rows: dict[int, NDArray[np.float32]] = {}

    def record(raw: NDArray[np.float32], sampling: SamplingBatch, row: int, output: StepOutput) -> Any:
        rows[row] = raw.copy()
        return sample_row(raw, sampling, row, output)

    asking = replace(batch.sampling, num_logprobs=np.maximum(batch.sampling.num_logprobs, 0))
    with ExitStack() as patches:
        for name in _SAMPLING_MODULES:
            if (module := sys.modules.get(f"tidewheel.engine.devices.{name}")) is not None:
                patches.enter_context(patch.object(module, "sample_row", record))
        output = executor.start(replace(batch, sampling=asking)).wait()
    return output, np.array([rows[row] for row in sorted(rows)], np.float32)
