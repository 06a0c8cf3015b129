"""Falcon's checkpoints."""

from __future__ import annotations

import pytest
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


def test_falcon_rw_has_slopes_of_bfloat16_that_are_scaled_with_the_scores() -> None:
    torch = pytest.importorskip("torch")
    spec = describe({**FALCON, "num_attention_heads": 6, "hidden_size": 96, "multi_query": False, "alibi": True}).spec
    slopes = torch.tensor([2**-2, 2**-4, 2**-6, 2**-8, 2**-1, 2**-3]).bfloat16().float() / 4
    for attention in spec.attentions():
        assert attention.rope is None
        assert attention.alibi_slopes == pytest.approx(slopes.tolist(), rel=1e-7)
    wide = describe({**FALCON, "num_attention_heads": 32, "multi_query": False, "alibi": True}).spec
    exact = torch.tensor([2 ** (-i / 4) for i in range(1, 33)]).bfloat16().float() / 2**0.5
    assert next(wide.attentions()).alibi_slopes == pytest.approx(exact.tolist(), rel=1e-7)
