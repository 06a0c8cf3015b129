"""Falcon's checkpoints."""

from __future__ import annotations

from model_configs import FALCON

from tidewheel.engine.models import describe
from tidewheel.engine.models.tensor_ref import TensorRef


def test_falcons_fused_matrices() -> None:
    name = "transformer.h.0.self_attention.query_key_value.weight"
    assert describe(FALCON).tensors["layers.0.v.weight"] == TensorRef(name, rows=(80, 96))
    grouped = describe({**FALCON, "new_decoder_architecture": True, "num_kv_heads": 2}).tensors
    assert grouped["layers.0.q.weight"] == TensorRef(name, each=(64, 0, 32))
    assert grouped["layers.0.v.weight"] == TensorRef(name, each=(64, 48, 64))
    assert grouped["layers.0.mlp_norm.bias"].name == "transformer.h.0.ln_mlp.bias"
