"""The options that size a KV cache by the memory of an accelerator."""

from __future__ import annotations

from typing import Any

import pytest

from tidewheel.engine.declaring.option import OptionError, options_of
from tidewheel.engine.devices.memory_options import MemoryOptions


def test_flags_are_those_that_vllm_users_know() -> None:
    assert [option.flag for option in options_of(MemoryOptions)] == ["--gpu-memory-utilization"]


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"gpu_memory_utilization": 0.0}, "gpu_memory_utilization: must be above 0 and at most 1, got 0.0"),
        ({"gpu_memory_utilization": float("nan")}, "gpu_memory_utilization: must be above 0 and at most 1"),
    ],
)
def test_values_out_of_range_are_refused(values: dict[str, Any], said: str) -> None:
    with pytest.raises(OptionError) as error:
        MemoryOptions(**values)
    assert said in str(error.value)
