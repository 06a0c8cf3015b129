"""The fields that families with experts read from their configs, and the values that they refuse."""

from __future__ import annotations

from typing import Any

import pytest
from model_configs import (
    ERNIE4_5_MOE,
    GLM4_MOE,
    GPT_OSS,
    HUNYUAN_MOE,
    LLAMA4,
    MIXTRAL,
    OLMOE,
    PHIMOE,
    QWEN2_MOE,
    QWEN3_MOE,
)

from tidewheel.engine.errors import ModelError
from tidewheel.engine.models import describe
from tidewheel.engine.models.spec import ExpertsSpec, mixers


def with_experts(config: dict[str, Any], **fields: Any) -> list[bool]:
    layers = describe({**config, **fields}).spec.layers
    return [any(isinstance(mixer, ExpertsSpec) for mixer in mixers(layer)) for layer in layers]


def test_some_layers_have_no_experts() -> None:
    assert with_experts(QWEN3_MOE) == [True] * 3
    assert with_experts(QWEN3_MOE, decoder_sparse_step=2, num_hidden_layers=4) == [False, True, False, True]
    assert with_experts(QWEN2_MOE, mlp_only_layers=[0]) == [False, True, True]
    assert with_experts(GLM4_MOE, first_k_dense_replace=2) == [False, False, True]
    assert with_experts(ERNIE4_5_MOE, num_hidden_layers=4, moe_layer_end_index=2) == [False, True, True, False]


def test_every_other_layer_of_gpt_oss_slides() -> None:
    attentions = describe({**GPT_OSS, "sliding_window": 8}).spec.attentions()
    assert [attention.sliding_window for attention in attentions] == [8, None, 8]


def test_llama4_is_served_within_a_chunk_of_its_attention() -> None:
    assert describe({**LLAMA4, "attention_chunk_size": 64}).spec.max_positions == 64
    with pytest.raises(ModelError, match="a context of 65 tokens is more than this model's 64"):
        describe({**LLAMA4, "attention_chunk_size": 64}, 65)


def test_released_files_of_llama_4_say_some_things_in_a_way_of_their_own() -> None:
    factors = {"factor": 16.0, "high_freq_factor": 1.0, "low_freq_factor": 1.0}
    scaling = {"rope_scaling": {**factors, "original_max_position_embeddings": 8192, "rope_type": "llama3"}}
    released = {**LLAMA4, **scaling, "no_rope_layers": [], "attn_temperature_tuning": 4, "num_hidden_layers": 4}
    *rotated, last = describe(released).spec.attentions()
    assert all(attention.rope is not None for attention in rotated)
    assert last.rope is None
    assert last.query_temperature is not None
    untuned = describe({**released, "attn_temperature_tuning": 0}).spec.attentions()
    assert all(attention.query_temperature is None for attention in untuned)
    with pytest.raises(ModelError, match="attn_temperature_tuning must be true or false"):
        describe({**released, "attn_temperature_tuning": "4"})


@pytest.mark.parametrize(
    ("config", "fields", "words"),
    [
        (MIXTRAL, {"num_experts_per_tok": 5}, "num_experts_per_tok must be at most the number of experts, 4, got 5"),
        (MIXTRAL, {"num_local_experts": 1 << 20}, "num_local_experts must be so few that all layers have at most"),
        (PHIMOE, {"num_experts_per_tok": 3}, "num_experts_per_tok = 3 is not supported"),
        (PHIMOE, {"num_local_experts": 1}, "num_experts_per_tok must be at most the number of experts, 1, got 2"),
        (QWEN3_MOE, {"mlp_only_layers": "all"}, "mlp_only_layers must be a list of layers' numbers"),
        (OLMOE, {"clip_qkv": 8.0}, "clip_qkv = 8.0 is not supported"),
        (GPT_OSS, {"swiglu_alpha": 2.0}, "swiglu_alpha = 2.0 is not supported"),
        (GLM4_MOE, {"n_group": 3}, "n_group 3 must divide the number of experts, 4"),
        (GLM4_MOE, {"n_group": 2, "topk_group": 3}, "topk_group 3 be at most n_group"),
        (GLM4_MOE, {"n_group": 4}, "a group of n_group 4 has only one of 4 experts"),
        (GLM4_MOE, {"first_k_dense_replace": -1}, "first_k_dense_replace must be an integer of at least 0"),
        (HUNYUAN_MOE, {"use_cla": True}, "use_cla = True is not supported"),
        (HUNYUAN_MOE, {"moe_topk": [2, 2, 1]}, "moe_topk must be a positive integer"),
        (LLAMA4, {"moe_layers": 2}, "moe_layers must be a list of layers' numbers"),
        (ERNIE4_5_MOE, {"use_bias": True}, "use_bias = True is not supported"),
        (ERNIE4_5_MOE, {"moe_layer_start_index": [1, 2]}, "moe_layer_start_index must be an integer"),
    ],
)
def test_what_makes_no_mixture_is_refused(config: dict[str, Any], fields: dict[str, Any], words: str) -> None:
    with pytest.raises(ModelError, match=words):
        describe({**config, **fields})
