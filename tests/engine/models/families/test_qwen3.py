"""Qwen3's heads."""

from __future__ import annotations

from model_configs import QWEN3

from tidewheel.engine.models import describe


def test_qwen3_heads_have_a_size_of_their_own() -> None:
    attention = next(describe(QWEN3).spec.attentions())
    assert attention.head_dim == 128
    assert attention.qk_norm is not None
