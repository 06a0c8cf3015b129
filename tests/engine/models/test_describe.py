"""From configs to specs: what is read, what is defaulted, what is refused."""

from __future__ import annotations

import contextlib
import pkgutil
from importlib import import_module
from typing import Any

import models_zoo
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from model_configs import (
    BLOOM,
    COHERE2,
    CONFIGS,
    EXAONE4,
    FALCON,
    GEMMA2,
    GEMMA3,
    GPT2,
    GPTJ,
    GRANITE,
    HUNYUAN,
    LLAMA,
    MINISTRAL3,
    MISTRAL,
    MPT,
    OLMO,
    OLMO3,
    OPT,
    PHI3,
    QWEN2,
    SMOLLM3,
    STABLELM,
)

from tidewheel.engine.errors import ModelError
from tidewheel.engine.models import SUPPORTED_ARCHITECTURES, describe, families
from tidewheel.engine.models.spec import tensor_shapes
from tidewheel.engine.models.text_models import TEXT_MODELS
from tidewheel.engine.models.text_part import WRAPPERS


def test_every_architecture_of_a_family_is_listed_with_its_module() -> None:
    modules = [module.name for module in pkgutil.iter_modules(families.__path__)]
    found = {name: getattr(import_module(f"{families.__name__}.{name}"), "ARCHITECTURES", ()) for name in modules}
    assert {architecture: name for name, own in found.items() for architecture in own} == families.FAMILIES


def test_every_family_is_tested() -> None:
    assert sorted(CONFIGS) == list(SUPPORTED_ARCHITECTURES)
    transformers_names = {case.model_type.removesuffix("_text") for case in models_zoo.CASES.values()}
    elsewhere = {"internlm2", "minicpm"}  # their code lies beside their weights: see families/test_beside_weights.py
    assert transformers_names | elsewhere == {describe(config).spec.family for config in CONFIGS.values()}


@pytest.mark.parametrize("architecture", SUPPORTED_ARCHITECTURES)
def test_every_weight_has_a_place_in_the_checkpoint(architecture: str) -> None:
    config = CONFIGS[architecture]
    for tied in (True, False):
        description = describe({**config, "tie_word_embeddings": tied})
        assert list(description.tensors) == list(tensor_shapes(description.spec))
        assert description.spec.head.tied is tied


# Of each type the case that says most.
TYPES = {case.model_type: name for name, case in sorted(models_zoo.CASES.items(), key=lambda item: len(item[1].config))}


@pytest.mark.parametrize("name", models_zoo.swept(models_zoo.CASES, {*TYPES.values()}))
def test_a_missing_field_means_what_transformers_takes_it_to_mean(name: str) -> None:
    """Leave out one field after the other, and compare with a config in which transformers filled it in."""
    transformers = pytest.importorskip("transformers")
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    case = models_zoo.CASES[name]
    fields = {"vocab_size": models_zoo.VOCAB_SIZE, **case.config}

    def filled_in(config: dict[str, Any]) -> dict[str, Any]:
        complete = transformers.AutoConfig.for_model(case.model_type, **config).to_dict()
        return {**config, **complete, "architectures": [MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[case.model_type]]}

    compared, full = set(), filled_in(fields)
    full_meant = describe(full)
    for missing in full:
        # Fields that one of the two cannot do without are left out.
        with contextlib.suppress(Exception):
            complete, meant = full, full_meant
            if missing in fields:
                complete = filled_in({key: value for key, value in fields.items() if key != missing})
                meant = describe(complete)
            described = describe({key: value for key, value in complete.items() if key != missing})
            compared.add(missing)
        if missing in compared:
            assert described == meant, missing
    assert {"tie_word_embeddings", "rope_parameters"} & full.keys() <= compared


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"architectures": ["Llama9ForCausalLM"]}, r"'Llama9ForCausalLM'.*: .*LlamaForCausalLM.*docs/models.md"),
        ({"architectures": ["XyzForCausalLM"], "n_routed_experts": 64, "kv_lora_rank": 512}, r"\(MLA\) and experts"),
        ({"architectures": ["XyzForCausalLM"], "num_local_experts": 0}, r"no description of its layers\. docs/mod"),
        ({"architectures": ["XyzForCausalLM"], "num_experts": 8}, "no description of its layers; other .*: experts"),
        (
            {"architectures": ["XyzForCausalLM"], "num_experts": 8, "index_topk": 64},
            "an indexer .*, which is not implemented",
        ),
        (
            {"architectures": ["XyzForCausalLM"], "vision_config": {"depth": 2}, "num_experts": 8},
            "also takes images; only its text part .* no description of its layers; other .*: experts",
        ),
        (
            {"architectures": ["XyzForConditionalGeneration"], "text_config": {"model_type": "qwen3_next_vl"}},
            "its language model is of type 'qwen3_next_vl', which is not supported .*similar .*: .*qwen3_vl_text,",
        ),
        (
            {"architectures": ["XyzForConditionalGeneration"], "text_config": {"model_type": "qwen3"}},
            "Its language model, of type 'qwen3', is supported; what is missing is where this architecture",
        ),
        (
            {"architectures": ["XyzForConditionalGeneration"], "text_config": {"cross_attention_layers": [3]}},
            "its language model is of type None.* names cross-attention, which is not implemented",
        ),
        (
            {"architectures": ["PaliGemmaForConditionalGeneration"], "text_config": {"model_type": "gemma"}},
            "need bidirectional attention",
        ),
        ({"architectures": ["T5ForConditionalGeneration"], "is_encoder_decoder": True}, "it has an encoder that reads"),
        ({"architectures": ["BertModel"]}, "--embedding-model serves embedding and reranking models"),
        ({}, 'without architectures .* add the name of the model\'s class, such as "architectures"'),
        ({"architectures": [7]}, "without architectures"),
    ],
)
def test_an_unsupported_architecture_is_refused_with_what_is_near(config: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelError, match=message):
        describe(config)


@pytest.mark.parametrize(
    ("config", "names"),
    [
        ({**LLAMA, "hidden_act": "xielu"}, "hidden_act.*silu.*xielu"),
        ({**LLAMA, "hidden_size": None}, "hidden_size is missing"),
        ({**LLAMA, "hidden_size": "64"}, "hidden_size must be a positive integer"),
        ({**LLAMA, "hidden_size": 66}, "hidden_size 66"),
        ({**LLAMA, "num_hidden_layers": -1}, "num_hidden_layers"),
        ({**LLAMA, "num_hidden_layers": 10**9}, "num_hidden_layers must be at most 10000"),
        ({**LLAMA, "num_key_value_heads": 3}, "num_key_value_heads 3"),
        ({**LLAMA, "attention_bias": "yes"}, "attention_bias must be true or false"),
        ({**LLAMA, "rms_norm_eps": 0}, "rms_norm_eps"),
        ({**LLAMA, "head_dim": 15}, "even number"),
        ({**LLAMA, "per_layer_config": {"0": {}}}, "per_layer_config"),
        ({**LLAMA, "layer_types": ["sliding_attention"] * 3}, "layer_types"),
        ({**MISTRAL, "layer_types": ["sliding_attention", "full_attention"] * 2}, "layer_types"),
        ({**QWEN2, "layer_types": ["chunked_attention"] * 3}, "layer_types"),
        ({**QWEN2, "layer_types": ["sliding_attention"] * 3}, "sliding_attention"),
        ({**QWEN2, "use_sliding_window": True, "max_window_layers": -1}, "max_window_layers"),
        ({**OPT, "layer_norm_elementwise_affine": False}, "layer_norm_elementwise_affine"),
        ({**OPT, "num_attention_heads": 5}, "num_attention_heads 5"),
        ({**GPT2, "add_cross_attention": True}, "add_cross_attention"),
        ({**GPT2, "n_head": 5}, "n_head 5"),
        ({**GEMMA2, "use_bidirectional_attention": True}, "use_bidirectional_attention"),
        ({**GEMMA2, "sliding_window": None}, "no sliding window"),
        ({**GEMMA2, "attn_logit_softcapping": 0}, "attn_logit_softcapping"),
        ({**GEMMA3, "attn_logit_softcapping": 50.0}, "attn_logit_softcapping"),
        ({**GEMMA3, "rope_parameters": {"rope_type": "default"}}, "rope_parameters.*each layer type"),
        ({**GEMMA3, "rope_scaling": {"rope_type": "linear"}}, "factor is missing"),
        ({**GRANITE, "residual_multiplier": 0}, "residual_multiplier"),
        ({**PHI3, "attention_bias": True}, "attention_bias"),
        ({**OLMO, "clip_qkv": 8.0}, "clip_qkv"),
        ({**SMOLLM3, "no_rope_layers": [1, 1]}, "no_rope_layers must be a list of 3"),
        ({**SMOLLM3, "no_rope_layers": [1, 2, 0]}, "no_rope_layers"),
        ({**COHERE2, "use_qk_norm": True}, "use_qk_norm"),
        ({**COHERE2, "use_parallel_block": False}, "use_parallel_block"),
        ({**COHERE2, "sliding_window": None}, "no sliding window"),
        ({**STABLELM, "qk_layernorm": 1}, "qk_layernorm must be true or false"),
        ({**FALCON, "new_decoder_architecture": True, "parallel_attn": False}, "parallel_attn"),
        ({**FALCON, "num_ln_in_parallel_attn": 2}, "num_ln_in_parallel_attn"),
        ({**FALCON, "multi_query": False, "num_kv_heads": 2}, "num_kv_heads 2"),
        ({**OLMO3, "sliding_window": None}, "no sliding window"),
        ({**OLMO3, "rope_parameters": {"full_attention": "yarn"}}, "rope_parameters.*each layer type"),
        ({**EXAONE4, "sliding_window_pattern": "LLX"}, "sliding_window_pattern must be a positive integer"),
        (
            {**MINISTRAL3, "rope_parameters": {"llama_4_scaling_beta": 0.1}},
            "original_max_position_embeddings is missing",
        ),
        ({**MINISTRAL3, "rope_parameters": {"llama_4_scaling_beta": -1}}, "llama_4_scaling_beta must be a positive"),
        ({**BLOOM, "apply_residual_connection_post_layernorm": True}, "apply_residual_connection_post_layernorm"),
        ({**BLOOM, "n_head": 2**15, "hidden_size": 2**15}, "num_attention_heads must be at most"),
        ({**GPTJ, "rotary_dim": None}, "rotary_dim is missing"),
        ({**GPTJ, "rotary_dim": 32}, "rotary_dim 32 is more than the 16 dimensions"),
        ({**HUNYUAN, "use_cla": True}, "use_cla"),
        ({**HUNYUAN, "use_qk_norm": False}, "use_qk_norm"),
        ({**MPT, "expansion_ratio": 2}, "expansion_ratio"),
        ({**MPT, "no_bias": False}, "no_bias"),
        ({**MPT, "attn_config": {"clip_qkv": 6}}, "attn_config: clip_qkv"),
        ({**MPT, "attn_config": {"alibi": False}}, "attn_config: alibi"),
        ({**MPT, "attn_config": {"alibi_bias_max": 16}}, "attn_config: alibi_bias_max"),
        ({**MPT, "n_heads": 2**15, "d_model": 2**15}, "n_heads must be at most"),
        ({**MPT, "attn_config": []}, "attn_config must be an object"),
    ],
)
def test_what_is_not_supported_is_refused_by_name(config: dict[str, Any], names: str) -> None:
    with pytest.raises(ModelError, match=names):
        describe(config)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-5, 70) | st.floats() | st.text(max_size=3),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=4,
)
ROPE = st.fixed_dictionaries(
    {"rope_type": st.sampled_from(["linear", "dynamic", "yarn", "longrope", "llama3", "default"])},
    optional=dict.fromkeys(
        [
            *("factor", "rope_theta", "partial_rotary_factor", "original_max_position_embeddings", "beta_fast"),
            *("attention_factor", "mscale", "short_factor", "low_freq_factor", "high_freq_factor", "truncate"),
        ],
        JSON,
    ),
)

FIELDS = sorted(
    {name for config in CONFIGS.values() for name in config}
    | {
        "layer_types",
        "sliding_window",
        "rope_theta",
        "sliding_window_pattern",
        "head_dim",
        "num_kv_heads",
        "attn_config",
    }
    | {
        "no_rope_layers",
        "no_rope_layer_interval",
        "new_decoder_architecture",
        "rotary_pct",
        "logit_scale",
        "rope_parameters",
    }
)


@settings(max_examples=40, deadline=None)
@given(
    st.sampled_from([*CONFIGS.values()]),
    st.dictionaries(st.sampled_from(FIELDS), JSON),
    st.none() | JSON | ROPE,
)
def test_any_config_is_described_or_refused(config: dict[str, Any], changes: dict[str, Any], rope: Any) -> None:
    try:
        description = describe({**config, **changes, "rope_scaling": rope}, max_model_len=300)
    except ModelError:
        return
    assert list(description.tensors) == list(tensor_shapes(description.spec))
    assert hash(description.spec) is not None


@settings(max_examples=40, deadline=None)
@given(
    st.sampled_from(WRAPPERS),
    st.sampled_from([*TEXT_MODELS]) | JSON,
    st.dictionaries(st.sampled_from([*FIELDS, "cross_attention_layers", "use_bias", "model_type"]), JSON),
    st.none() | JSON | ROPE | st.fixed_dictionaries({"mrope_section": JSON, "type": st.just("mrope") | JSON}),
)
def test_any_text_part_is_described_or_refused(
    architecture: str, kind: Any, changes: dict[str, Any], rope: Any
) -> None:
    text = {**LLAMA, "architectures": None, "model_type": kind, **changes, "rope_scaling": rope}
    with contextlib.suppress(ModelError):
        description = describe({"architectures": [architecture], "text_config": text}, max_model_len=300)
        assert list(description.tensors) == list(tensor_shapes(description.spec))
        assert description.text_part


def test_a_context_longer_than_the_model_is_refused() -> None:
    assert describe(OPT, max_model_len=512).spec.max_positions == 512
    with pytest.raises(ModelError, match="513 tokens is more than this model's 512: lower --max-model-len, or"):
        describe(OPT, max_model_len=513)
