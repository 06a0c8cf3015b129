"""From configs to specs: what is read, what is defaulted, what is refused."""

from __future__ import annotations

from typing import Any

import models_zoo
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tidewheel.engine.errors import ModelError
from tidewheel.engine.models import SUPPORTED_ARCHITECTURES, describe
from tidewheel.engine.models.spec import tensor_shapes
from tidewheel.engine.models.tensor_ref import TensorRef

LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 100,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "max_position_embeddings": 512,
}
MISTRAL = {**LLAMA, "architectures": ["MistralForCausalLM"]}
QWEN2 = {**LLAMA, "architectures": ["Qwen2ForCausalLM"]}
QWEN3 = {**LLAMA, "architectures": ["Qwen3ForCausalLM"]}
OPT = {
    "architectures": ["OPTForCausalLM"],
    "vocab_size": 100,
    "hidden_size": 64,
    "ffn_dim": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 512,
}
GPT2 = {
    "architectures": ["GPT2LMHeadModel"],
    "vocab_size": 100,
    "n_embd": 64,
    "n_layer": 2,
    "n_head": 4,
    "n_positions": 512,
}


def windows(config: dict[str, Any]) -> list[int | None]:
    return [attention.sliding_window for attention in describe(config).spec.attentions()]


@pytest.mark.parametrize("config", [LLAMA, MISTRAL, QWEN2, QWEN3, OPT, GPT2])
def test_every_weight_has_a_place_in_the_checkpoint(config: dict[str, Any]) -> None:
    for tied in (True, False):
        description = describe({**config, "tie_word_embeddings": tied})
        assert list(description.tensors) == list(tensor_shapes(description.spec))
        assert description.spec.head.tied is tied


@pytest.mark.parametrize("name", models_zoo.CASES)
def test_a_missing_field_means_what_transformers_takes_it_to_mean(name: str) -> None:
    """Describe a config with every field spelled out, and one with what equals the class's default left out."""
    transformers = pytest.importorskip("transformers")
    case = models_zoo.CASES[name]
    config = transformers.AutoConfig.for_model(case.model_type, vocab_size=models_zoo.VOCAB_SIZE, **case.config)
    full = config.to_dict()
    defaults = type(config)().to_dict()
    required = {"max_position_embeddings", "n_positions", "n_embd", "n_layer", "n_head", "head_dim"}
    short = {key: value for key, value in full.items() if key in required or value != defaults[key]}
    architecture = next(a for a in SUPPORTED_ARCHITECTURES if a.lower().startswith(case.model_type))
    assert describe({**full, "architectures": [architecture]}) == describe({**short, "architectures": [architecture]})


def test_an_unsupported_architecture_is_refused_with_the_supported_ones() -> None:
    with pytest.raises(ModelError, match=r"'BloomForCausalLM'.*GPT2LMHeadModel, LlamaForCausalLM") as error:
        describe({"architectures": ["BloomForCausalLM"]})
    assert all(name in str(error.value) for name in SUPPORTED_ARCHITECTURES)
    with pytest.raises(ModelError, match="without architectures"):
        describe({})


@pytest.mark.parametrize(
    ("config", "names"),
    [
        ({**LLAMA, "quantization_config": {"quant_method": "gptq"}}, "quantization_config.*gptq"),
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


@given(
    st.sampled_from([LLAMA, MISTRAL, QWEN2, QWEN3, OPT, GPT2]),
    st.dictionaries(st.sampled_from([*QWEN2, *OPT, *GPT2, "layer_types", "sliding_window", "rope_theta"]), JSON),
    st.none() | JSON | ROPE,
)
def test_any_config_is_described_or_refused(config: dict[str, Any], changes: dict[str, Any], rope: Any) -> None:
    try:
        description = describe({**config, **changes, "rope_scaling": rope}, max_model_len=300)
    except ModelError:
        return
    assert list(description.tensors) == list(tensor_shapes(description.spec))
    assert hash(description.spec) is not None


def test_a_context_longer_than_the_model_is_refused() -> None:
    assert describe(OPT, max_model_len=512).spec.max_positions == 512
    with pytest.raises(ModelError, match="513 tokens is more than this model's 512"):
        describe(OPT, max_model_len=513)


def test_mistral_has_a_window_unless_it_is_null() -> None:
    assert windows(MISTRAL) == [4096] * 3
    assert windows({**MISTRAL, "sliding_window": 128}) == [128] * 3
    assert windows({**MISTRAL, "sliding_window": None}) == [None] * 3
    assert windows({**LLAMA, "sliding_window": 128}) == [None] * 3


def test_qwen_windows_by_depth_and_by_layer_types() -> None:
    on = {**QWEN2, "use_sliding_window": True, "sliding_window": 128}
    assert windows({**QWEN2, "sliding_window": 128}) == [None] * 3
    assert windows(on) == [None] * 3
    assert windows({**on, "max_window_layers": 2}) == [None, None, 128]
    assert windows({**on, "max_window_layers": 0}) == [128] * 3
    types = ["sliding_attention", "full_attention", "sliding_attention"]
    assert windows({**on, "layer_types": types}) == [128, None, 128]
    assert windows({**on, "sliding_window": None, "max_window_layers": 0}) == [None] * 3


def test_llama_biases() -> None:
    shapes = tensor_shapes(describe({**LLAMA, "attention_bias": True, "mlp_bias": True}).spec)
    assert {f"layers.0.{name}.bias" for name in ("q", "k", "v", "o", "gate", "up", "down")} <= shapes.keys()


def test_qwen3_heads_have_a_size_of_their_own() -> None:
    attention = next(describe(QWEN3).spec.attentions())
    assert attention.head_dim == 128
    assert attention.qk_norm is not None


def test_opt_350m_projects_its_embedding_and_normalizes_last() -> None:
    spec = describe({**OPT, "do_layer_norm_before": False, "word_embed_proj_dim": 32}).spec
    assert [(branch.norm, branch.sum_norm is None) for branch in spec.layers[0]] == [(None, False)] * 2
    assert spec.final_norm is None
    assert tensor_shapes(spec)["embed.project_out.weight"] == (32, 64)
    assert describe({**OPT, "_remove_final_layer_norm": True}).spec.final_norm is None
    assert "layers.0.up.bias" not in tensor_shapes(describe({**OPT, "enable_bias": False}).spec)


def test_gpt2_takes_query_key_and_value_out_of_one_transposed_matrix() -> None:
    tensors = describe(GPT2).tensors
    assert tensors["layers.1.k.weight"] == TensorRef("transformer.h.1.attn.c_attn.weight", True, (64, 128))
    assert tensors["layers.1.v.bias"] == TensorRef("transformer.h.1.attn.c_attn.bias", False, (128, 192))
    assert tensors["layers.1.up.weight"] == TensorRef("transformer.h.1.mlp.c_fc.weight", True)


def test_gpt2_attention_scales() -> None:
    def scales(**options: bool) -> list[float]:
        return [attention.scale for attention in describe({**GPT2, **options}).spec.attentions()]

    assert scales() == [0.25, 0.25]
    assert scales(scale_attn_weights=False) == [1.0, 1.0]
    assert scales(scale_attn_by_inverse_layer_idx=True) == [0.25, 0.125]
