"""Gemma 3's ropes."""

from __future__ import annotations

from typing import Any

import pytest
from model_configs import GEMMA3

from tidewheel.engine.models import describe


def test_gemma3_has_a_rope_for_each_layer_type() -> None:
    def frequencies(**fields: Any) -> list[float]:
        spec = describe({**GEMMA3, "num_hidden_layers": 2, "sliding_window_pattern": 2, **fields}).spec
        return [attention.rope.inv_freq[1] for attention in spec.attentions() if attention.rope]

    sliding, full = 1e4 ** (-1 / 128), 1e6 ** (-1 / 128)
    assert frequencies() == pytest.approx([sliding, full])
    assert frequencies(rope_scaling={"rope_type": "linear", "factor": 8.0}) == pytest.approx([sliding, full / 8])
    assert frequencies(rope_theta=1e5, rope_local_base_freq=1e3) == pytest.approx(
        [1e3 ** (-1 / 128), 1e5 ** (-1 / 128)]
    )
    by_type = {"full_attention": {"rope_type": "linear", "factor": 4.0, "rope_theta": 1e5}}
    assert frequencies(rope_parameters=by_type) == pytest.approx([sliding, 1e5 ** (-1 / 128) / 4])


def test_gemma3s_linear_scaling_does_not_lengthen_its_context() -> None:
    config = {**GEMMA3, "rope_scaling": {"rope_type": "linear", "factor": 8.0}}
    assert describe(config).spec.max_positions == 512
