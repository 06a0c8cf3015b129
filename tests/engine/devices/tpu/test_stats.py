"""What the TPU device says of its padding."""

from __future__ import annotations

from dataclasses import replace

import pytest
from engine.devices.made_models import PLAIN, ROPE, decoder
from harness import Harness

from tidewheel.engine.devices.bucket_stats import BucketStats

pytest.importorskip("jax")


# Three programs are compiled.
def test_steps_are_counted_by_size_and_what_is_compiled_late_too(caplog: pytest.LogCaptureFixture) -> None:
    from engine.devices.tpu.making import Compilations, load

    executor = load(decoder(replace(PLAIN, rope=ROPE)), max_num_batched_tokens=32)
    assert executor.stats() == BucketStats((), 0, 0)
    with Compilations() as compilations:
        Harness(executor).generate([[1, 2, 3] * 6], 3)
    stats = executor.stats()
    assert [(use.phase, use.bucket.num_tokens, use.num_launches, use.num_tokens) for use in stats.uses] == [
        ("step", 16, 2, 2),
        ("step", 32, 1, 18),
    ]
    assert (stats.num_outside, stats.num_compilations) == (0, 3)  # two steps and a head
    assert compilations.count == executor.late_compilations == 3
    assert "Compiling a step of 16 tokens while serving" in caplog.text
