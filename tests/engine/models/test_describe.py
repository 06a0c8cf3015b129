"""From configs to specs: what is read, what is defaulted, what is refused."""

from __future__ import annotations

import contextlib
from typing import Any

import models_zoo
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tidewheel.engine.errors import ModelError
from tidewheel.engine.models import SUPPORTED_ARCHITECTURES, describe
from tidewheel.engine.models.spec import HeadSpec, tensor_shapes
from tidewheel.engine.models.tensor_ref import TensorRef

LLAMA: dict[str, Any] = {
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
OPT: dict[str, Any] = {
    "architectures": ["OPTForCausalLM"],
    "vocab_size": 100,
    "hidden_size": 64,
    "ffn_dim": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 512,
}
GPT2: dict[str, Any] = {
    "architectures": ["GPT2LMHeadModel"],
    "vocab_size": 100,
    "n_embd": 64,
    "n_layer": 2,
    "n_head": 4,
    "n_positions": 512,
}
MPT: dict[str, Any] = {
    "architectures": ["MptForCausalLM"],
    "vocab_size": 100,
    "d_model": 64,
    "n_layers": 2,
    "n_heads": 4,
    "max_seq_len": 512,
}
GEMMA2 = {**LLAMA, "architectures": ["Gemma2ForCausalLM"]}
GEMMA3 = {**LLAMA, "architectures": ["Gemma3ForCausalLM"]}
GRANITE = {**LLAMA, "architectures": ["GraniteForCausalLM"]}
PHI3 = {**LLAMA, "architectures": ["Phi3ForCausalLM"]}
OLMO = {**LLAMA, "architectures": ["OlmoForCausalLM"]}
OLMO2 = {**LLAMA, "architectures": ["Olmo2ForCausalLM"]}
SMOLLM3 = {**LLAMA, "architectures": ["SmolLM3ForCausalLM"]}
COHERE = {**LLAMA, "architectures": ["CohereForCausalLM"]}
COHERE2 = {**LLAMA, "architectures": ["Cohere2ForCausalLM"]}
NEOX = {**LLAMA, "architectures": ["GPTNeoXForCausalLM"]}
STABLELM = {**LLAMA, "architectures": ["StableLmForCausalLM"], "num_key_value_heads": 4}
FALCON = {**LLAMA, "architectures": ["FalconForCausalLM"]}
CONFIGS: dict[str, dict[str, Any]] = {
    config["architectures"][0]: config
    for config in (
        *(LLAMA, MISTRAL, QWEN2, QWEN3, OPT, GPT2, MPT, GEMMA2, GEMMA3, GRANITE, PHI3, OLMO, OLMO2),
        *(SMOLLM3, COHERE, COHERE2, NEOX, STABLELM, FALCON),
    )
}


def windows(config: dict[str, Any]) -> list[int | None]:
    return [attention.sliding_window for attention in describe(config).spec.attentions()]


def test_every_family_is_tested() -> None:
    assert sorted(CONFIGS) == list(SUPPORTED_ARCHITECTURES)
    transformers_names = {case.model_type.removesuffix("_text") for case in models_zoo.CASES.values()}
    assert transformers_names == {describe(config).spec.family for config in CONFIGS.values()}


@pytest.mark.parametrize("architecture", SUPPORTED_ARCHITECTURES)
def test_every_weight_has_a_place_in_the_checkpoint(architecture: str) -> None:
    config = CONFIGS[architecture]
    for tied in (True, False):
        description = describe({**config, "tie_word_embeddings": tied})
        assert list(description.tensors) == list(tensor_shapes(description.spec))
        assert description.spec.head.tied is tied


@pytest.mark.parametrize("name", models_zoo.CASES)
def test_a_missing_field_means_what_transformers_takes_it_to_mean(name: str) -> None:
    """Leave out one field after the other, and compare with a config in which transformers filled it in."""
    transformers = pytest.importorskip("transformers")
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    case = models_zoo.CASES[name]
    fields = {"vocab_size": models_zoo.VOCAB_SIZE, **case.config}

    def filled_in(config: dict[str, Any]) -> dict[str, Any]:
        complete = transformers.AutoConfig.for_model(case.model_type, **config).to_dict()
        return {**config, **complete, "architectures": [MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[case.model_type]]}

    compared = set()
    for missing in filled_in(fields):
        # Fields that one of the two cannot do without are left out.
        with contextlib.suppress(Exception):
            complete = filled_in({key: value for key, value in fields.items() if key != missing})
            meant = describe(complete)
            described = describe({key: value for key, value in complete.items() if key != missing})
            compared.add(missing)
        if missing in compared:
            assert described == meant, missing
    assert {"tie_word_embeddings", "rope_parameters"} & filled_in(fields).keys() <= compared


def test_an_unsupported_architecture_is_refused_with_the_supported_ones() -> None:
    with pytest.raises(ModelError, match=r"'BloomForCausalLM'.*FalconForCausalLM, GPT2LMHeadModel") as error:
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
        ({**COHERE, "use_qk_norm": True}, "use_qk_norm"),
        ({**COHERE2, "use_parallel_block": False}, "use_parallel_block"),
        ({**COHERE2, "sliding_window": None}, "no sliding window"),
        ({**STABLELM, "qk_layernorm": True}, "qk_layernorm"),
        ({**FALCON, "alibi": True}, "alibi"),
        ({**FALCON, "new_decoder_architecture": True, "parallel_attn": False}, "parallel_attn"),
        ({**FALCON, "num_ln_in_parallel_attn": 2}, "num_ln_in_parallel_attn"),
        ({**FALCON, "multi_query": False, "num_kv_heads": 2}, "num_kv_heads 2"),
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
    assert tensors["layers.1.v.bias"] == TensorRef("transformer.h.1.attn.c_attn.bias", True, (128, 192))
    assert tensors["layers.1.up.weight"] == TensorRef("transformer.h.1.mlp.c_fc.weight", True)


def test_gpt2_attention_scales() -> None:
    def scales(**options: bool) -> list[float]:
        return [attention.scale for attention in describe({**GPT2, **options}).spec.attentions()]

    assert scales() == [0.25, 0.25]
    assert scales(scale_attn_weights=False) == [1.0, 1.0]
    assert scales(scale_attn_by_inverse_layer_idx=True) == [0.25, 0.125]


def test_gemma_scales_its_embedding_and_caps_scores_and_logits() -> None:
    spec = describe(GEMMA2).spec
    assert spec.embedding.scale == 8.0
    assert spec.head == HeadSpec(tied=True, softcap=30.0)
    assert [attention.softcap for attention in spec.attentions()] == [50.0] * 3
    assert [attention.scale for attention in spec.attentions()] == [1 / 16] * 3
    uncapped = describe({**GEMMA2, "attn_logit_softcapping": None, "final_logit_softcapping": None}).spec
    assert uncapped.head.softcap is None
    assert [attention.softcap for attention in uncapped.attentions()] == [None] * 3


def test_gemma_windows() -> None:
    assert windows(GEMMA2) == [4096, None, 4096]
    assert windows({**GEMMA3, "num_hidden_layers": 7}) == [4096] * 5 + [None, 4096]
    assert windows({**GEMMA3, "sliding_window_pattern": 2, "sliding_window": 64}) == [64, None, 64]


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


def test_phi3_splits_its_fused_matrices() -> None:
    tensors = describe({**PHI3, "num_key_value_heads": 2}).tensors
    assert tensors["layers.1.v.weight"] == TensorRef("model.layers.1.self_attn.qkv_proj.weight", rows=(96, 128))
    assert tensors["layers.1.up.weight"] == TensorRef("model.layers.1.mlp.gate_up_proj.weight", rows=(96, 192))


def test_early_names_of_longrope() -> None:
    factors = {"short_factor": [1.5] * 8, "long_factor": [2.0] * 8}
    specs = [
        describe({**PHI3, "original_max_position_embeddings": 128, "rope_scaling": {"type": name, **factors}}).spec
        for name in ("longrope", "su", "yarn")
    ]
    assert specs[0] == specs[1] == specs[2]
    assert specs[0].max_positions == 128


def test_smollm3_and_cohere2_have_layers_without_positions() -> None:
    def rotated(config: dict[str, Any]) -> list[bool]:
        return [attention.rope is not None for attention in describe(config).spec.attentions()]

    assert rotated({**SMOLLM3, "num_hidden_layers": 5}) == [True, True, True, False, True]
    assert rotated({**SMOLLM3, "no_rope_layers": [0, 1, 1]}) == [False, True, True]
    assert rotated({**COHERE2, "num_hidden_layers": 5}) == [True, True, True, False, True]
    assert windows({**SMOLLM3, "use_sliding_window": True, "sliding_window": 8, "no_rope_layers": [0, 1, 1]}) == [
        8,
        None,
        None,
    ]
    assert rotated(COHERE) == [True] * 3


def test_olmos_norms_have_no_weights() -> None:
    shapes = tensor_shapes(describe(OLMO).spec)
    assert not any("norm" in name for name in shapes)


def test_command_r_multiplies_its_logits() -> None:
    assert describe(COHERE).spec.head == HeadSpec(tied=True, divisor=16.0)
    assert describe({**COHERE, "logit_scale": 0.5}).spec.head.divisor == 2.0


def test_neox_takes_query_key_and_value_out_of_each_head() -> None:
    tensors = describe(NEOX).tensors
    name = "gpt_neox.layers.1.attention.query_key_value"
    assert tensors["layers.1.k.weight"] == TensorRef(f"{name}.weight", each=(48, 16, 32))
    assert tensors["layers.1.v.bias"] == TensorRef(f"{name}.bias", each=(48, 32, 48))
    assert describe({**NEOX, "tie_word_embeddings": False}).tensors["head.weight"].name == "embed_out.weight"


def test_falcons_fused_matrices() -> None:
    name = "transformer.h.0.self_attention.query_key_value.weight"
    assert describe(FALCON).tensors["layers.0.v.weight"] == TensorRef(name, rows=(80, 96))
    grouped = describe({**FALCON, "new_decoder_architecture": True, "num_kv_heads": 2}).tensors
    assert grouped["layers.0.q.weight"] == TensorRef(name, each=(64, 0, 32))
    assert grouped["layers.0.v.weight"] == TensorRef(name, each=(64, 48, 64))
    assert grouped["layers.0.mlp_norm.bias"].name == "transformer.h.0.ln_mlp.bias"


def test_mpts_slopes_halve_from_head_to_head() -> None:
    def slopes(num_heads: int) -> tuple[float, ...] | None:
        return next(describe({**MPT, "n_heads": num_heads, "d_model": 48}).spec.attentions()).alibi_slopes

    assert slopes(8) == tuple(2.0**-i for i in range(1, 9))
    # Of the 8 slopes for the next power of two the second, fourth, sixth and eighth come first.
    assert slopes(6) == tuple(2.0**-i for i in (2, 4, 6, 8, 1, 3))
