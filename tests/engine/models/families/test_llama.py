"""Llama's biases."""

from __future__ import annotations

from model_configs import LLAMA

from tidewheel.engine.models import describe
from tidewheel.engine.models.spec import tensor_shapes


def test_llama_biases() -> None:
    shapes = tensor_shapes(describe({**LLAMA, "attention_bias": True, "mlp_bias": True}).spec)
    assert {f"layers.0.{name}.bias" for name in ("q", "k", "v", "o", "gate", "up", "down")} <= shapes.keys()
