"""Gemma 4's heads, windows and shared K and V."""

from __future__ import annotations

from typing import Any

import pytest
from model_configs import GEMMA4, windows

from tidewheel.engine.devices.float_cache import float_group_bytes
from tidewheel.engine.errors import ModelError
from tidewheel.engine.models import describe
from tidewheel.engine.models.spec import AttentionSpec

TYPES = ["sliding_attention", "full_attention"] * 3
CONFIG = {**GEMMA4, "num_hidden_layers": 6, "layer_types": TYPES, "sliding_window": 32, "head_dim": 16}


def attentions(**fields: Any) -> list[AttentionSpec]:
    return list(describe({**CONFIG, "global_head_dim": 32, **fields}).spec.attentions())


def test_global_layers_have_heads_of_their_own() -> None:
    assert [a.head_dim for a in attentions()] == [16, 32] * 3
    assert [a.num_kv_heads for a in attentions(num_global_key_value_heads=1)] == [4] * 6
    fields = {"num_global_key_value_heads": 1, "attention_k_eq_v": True}
    assert [(a.num_kv_heads, a.values_from_keys) for a in attentions(**fields)] == [(4, False), (1, True)] * 3
    by_layer = {str(i): {"head_dim": 32, "num_key_value_heads": 1} for i in (1, 3, 5)}
    assert attentions(per_layer_config=by_layer, attention_k_eq_v=True) == attentions(**fields)


def test_the_last_layer_sees_everything() -> None:
    assert windows({**GEMMA4, "num_hidden_layers": 8}) == [512] * 5 + [None, 512, None]


def test_layers_that_share_k_and_v_take_no_cache() -> None:
    spec = describe({**CONFIG, "global_head_dim": 32, "num_kv_shared_layers": 3}).spec
    assert [a.kv_layer for a in spec.attentions()] == [None, None, None, 1, 2, 1]
    groups = float_group_bytes("torch", spec, "float32")
    assert [(g.window, g.bytes_per_token) for g in groups] == [(None, 1024), (32, 2 * 512)]
    assert "layers.3.k.weight" not in describe({**CONFIG, "num_kv_shared_layers": 3}).tensors


@pytest.mark.parametrize(
    ("fields", "error"),
    [
        ({"num_kv_shared_layers": 5}, "leaves a layer without an earlier one of its type"),
        ({"num_kv_shared_layers": 6}, "num_kv_shared_layers must be less than the 6 layers"),
        ({"enable_moe_block": True}, "num_experts is missing"),
        (
            {"enable_moe_block": True, "num_experts": 4, "moe_intermediate_size": 8, "top_k_experts": 5},
            "top_k_experts must be at most the number of experts, 4",
        ),
        ({"vocab_size_per_layer_input": 99}, "vocab_size_per_layer_input must be at least vocab_size"),
        ({"num_kv_shared_layers": 1, "per_layer_config": {"5": {"head_dim": 8}}}, "3 and 5 share K and V"),
        ({"per_layer_config": {"5": {"window": 8}}}, "per_layer_config must be an object"),
    ],
)
def test_what_no_gemma_4_has_is_refused(fields: dict[str, Any], error: str) -> None:
    with pytest.raises(ModelError, match=error):
        attentions(**fields)
