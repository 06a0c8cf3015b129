"""SmolLM3's layers without positions."""

from __future__ import annotations

from typing import Any

from model_configs import SMOLLM3

from tidewheel.engine.models import describe
from tidewheel.engine.models.spec import AttentionSpec


def test_every_fourth_layer_knows_no_positions() -> None:
    assert [layer.rope is not None for layer in attentions(num_hidden_layers=5)] == [True, True, True, False, True]
    assert [layer.rope is not None for layer in attentions(no_rope_layer_interval=2)] == [True, False, True]
    assert [layer.rope is not None for layer in attentions(no_rope_layers=[0, 1, 1])] == [False, True, True]


def test_layers_without_positions_slide_where_windows_are_used() -> None:
    layers = attentions(use_sliding_window=True, sliding_window=8, no_rope_layers=[0, 1, 1])
    assert [layer.sliding_window for layer in layers] == [8, None, None]


def test_heads_share_keys_unless_the_config_says_null() -> None:
    assert [layer.num_kv_heads for layer in attentions(num_attention_heads=8)] == [4] * 3
    assert [layer.num_kv_heads for layer in attentions(num_attention_heads=8, num_key_value_heads=None)] == [8] * 3


def attentions(**fields: Any) -> list[AttentionSpec]:
    return list(describe({**SMOLLM3, **fields}).spec.attentions())
