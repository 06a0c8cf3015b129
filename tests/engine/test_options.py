"""The engine's options, made by a program: held to the ranges that a command line is held to."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import pytest

from tidewheel.engine.declaring.option import OptionError, Options
from tidewheel.engine.encoders.options import EncoderOptions
from tidewheel.engine.options import EngineOptions


@pytest.mark.parametrize(
    ("owner", "values", "said"),
    [
        (EngineOptions, {"model": "m", "device": "abacus"}, "device: must be one of auto, cpu"),
        (
            EngineOptions,
            {"model": "m", "quantization": "int3"},
            "quantization: must be one of int8, int8-channel, int4",
        ),
        (EngineOptions, {"model": "m", "max_num_seqs": 0}, "max_num_seqs: must be at least 1, got 0"),
        (EngineOptions, {"model": "m", "max_step_ms": 0.0}, "max_step_ms: must be above 0, got 0.0"),
        (EngineOptions, {"model": "m", "kv_cache_space": float("nan")}, "kv_cache_space: must be at least 0, got nan"),
        (EncoderOptions, {"models": ["a", "a"]}, "two embedding models have the same name"),
    ],
)
def test_what_cannot_be_used_is_said_by_field(owner: type[Options], values: Mapping[str, Any], said: str) -> None:
    with pytest.raises(OptionError, match=re.escape(said)):
        owner(**values)


def test_the_model_is_all_that_must_be_given() -> None:
    assert EngineOptions("m") == EngineOptions(model="m", kv_cache_space=None, max_model_len=None)
    with pytest.raises(TypeError, match="model"):
        EngineOptions()
