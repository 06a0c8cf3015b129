"""From the metadata of a GGUF file to the words of Hugging Face's config.json, and the names of its tensors.

The keys and names: https://github.com/ggml-org/llama.cpp/blob/master/gguf-py/gguf/constants.py.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np

from ...errors import ModelError
from ...files.wording import shown
from ...models.tensor_ref import TensorRef
from . import config_fields, experts, hybrids
from .experts import expert_reference
from .fields import Fields
from .reader import GgufFile, GgufTensor

_Config = dict[str, Any]

_TOP = {
    "model.embed_tokens.weight": "token_embd.weight",
    "model.norm.weight": "output_norm.weight",
    "lm_head.weight": "output.weight",
    "lm_head.bias": "output.bias",
    "model.norm.bias": "output_norm.bias",
    "model.final_layernorm.weight": "output_norm.weight",
    "model.final_layernorm.bias": "output_norm.bias",
    "backbone.embeddings.weight": "token_embd.weight",
    "backbone.norm_f.weight": "output_norm.weight",
    "transformer.wte.weight": "token_embd.weight",
    "transformer.wpe.weight": "position_embd.weight",
    "transformer.word_embeddings.weight": "token_embd.weight",
    "transformer.word_embeddings_layernorm.weight": "token_embd_norm.weight",
    "transformer.word_embeddings_layernorm.bias": "token_embd_norm.bias",
    "transformer.ln_f.weight": "output_norm.weight",
    "transformer.ln_f.bias": "output_norm.bias",
    "transformer.norm_f.weight": "output_norm.weight",
    "gpt_neox.embed_in.weight": "token_embd.weight",
    "gpt_neox.final_layer_norm.weight": "output_norm.weight",
    "gpt_neox.final_layer_norm.bias": "output_norm.bias",
    "embed_out.weight": "output.weight",
}
_MODULES = {
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "self_attn.qkv_proj": "attn_qkv",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "mlp.gate_up_proj": "ffn_up",
    "input_layernorm": "attn_norm",
}
_PRE_NORMS = {"post_attention_layernorm": "ffn_norm"}
_POST_ATTENTION_NORM = {"post_attention_layernorm": "post_attention_norm"}
_SANDWICH_NORMS = {
    "post_attention_layernorm": "post_attention_norm",
    "pre_feedforward_layernorm": "ffn_norm",
    "post_feedforward_layernorm": "post_ffw_norm",
}
# What is added after a branch only, and the same with GLM-4's names for it.
_POST_NORMS = {
    "post_attention_layernorm": "post_attention_norm",
    "post_feedforward_layernorm": "post_ffw_norm",
}
_GLM_NORMS = {**_PRE_NORMS, "post_self_attn_layernorm": "post_attention_norm", "post_mlp_layernorm": "post_ffw_norm"}
# Modules with names of their own.
_PHI = {"self_attn.dense": "attn_output", "mlp.fc1": "ffn_up", "mlp.fc2": "ffn_down"}
_STARCODER2 = {**_PRE_NORMS, "mlp.c_fc": "ffn_up", "mlp.c_proj": "ffn_down"}
_HUNYUAN = {**_PRE_NORMS, "self_attn.query_layernorm": "attn_q_norm", "self_attn.key_layernorm": "attn_k_norm"}
_GPT2 = {
    "ln_1": "attn_norm",
    "ln_2": "ffn_norm",
    "attn.c_attn": "attn_qkv",
    "attn.c_proj": "attn_output",
    "mlp.c_fc": "ffn_up",
    "mlp.c_proj": "ffn_down",
}
_NEOX = {
    **_PRE_NORMS,
    "attention.query_key_value": "attn_qkv",
    "attention.dense": "attn_output",
    "mlp.dense_h_to_4h": "ffn_up",
    "mlp.dense_4h_to_h": "ffn_down",
}
_BLOOM = {**_NEOX, "self_attention.query_key_value": "attn_qkv", "self_attention.dense": "attn_output"}
_FALCON = {**_BLOOM, "ln_attn": "attn_norm_2", "ln_mlp": "attn_norm"}
_MPT = {
    "norm_1": "attn_norm",
    "norm_2": "ffn_norm",
    "attn.Wqkv": "attn_qkv",
    "attn.out_proj": "attn_output",
    "ffn.up_proj": "ffn_up",
    "ffn.down_proj": "ffn_down",
}
_LAYER = re.compile(
    r"(?:model\.layers|backbone\.layers|transformer\.h|transformer\.blocks|gpt_neox\.layers)\.(\d+)\.(.+)\.(weight|bias)"
)
_LAYER_NORM_EPS = ("layer_norm_eps", "layer_norm_epsilon", "norm_epsilon")  # as families call it
_LAYER_TENSOR = re.compile(r"(?:model|backbone)\.layers\.(\d+)\.(.+)")
# Tensors that belong to the config.
ROPE_FACTORS, _LONG_FACTORS, _SHORT_FACTORS = (
    "rope_freqs.weight",
    "rope_factors_long.weight",
    "rope_factors_short.weight",
)
CONFIG_TENSORS = frozenset({ROPE_FACTORS, _LONG_FACTORS, _SHORT_FACTORS})


def _nothing(file: GgufFile, fields: Fields, config: _Config) -> _Config:
    return {}


def _none(name: str, shapes: Mapping[str, tuple[int, ...]]) -> TensorRef | None:
    return None


class GgufArchitecture(NamedTuple):
    """How files of one `general.architecture` differ from Hugging Face's checkpoints of `name`.

    `rotated_pairs`: the rows of q and k lie so that the two of a rotated pair are neighbours. `norms_plus_one`: 1 was
    added to the weights of norms. `layer_norm`: norms are LayerNorms. `qkv_in_rows`: all queries, keys and values
    follow each other, whatever the checkpoint does. `outputs_first`: matrices that the checkpoint holds transposed are
    not. `fields` gives config fields of its own. `has_experts`: files may have experts; those of other architectures
    may have them `with_experts`. `top` has the tensors outside layers. `vectors` are tensors of a layer whose whole
    names differ, not only those of their modules. `own` has the places of weights that files divide otherwise, by
    Tidewheel's names. Layers of models that are not `attending` have neither attention nor MLPs.
    """

    name: str
    norms: Mapping[str, str] = _PRE_NORMS
    rotated_pairs: bool = False
    norms_plus_one: bool = False
    layer_norm: bool = False
    qkv_in_rows: bool = False
    outputs_first: bool = False
    fields: Callable[[GgufFile, Fields, _Config], _Config] = _nothing
    has_experts: bool = False
    with_experts: GgufArchitecture | None = None
    top: Mapping[str, str] = _TOP
    vectors: Mapping[str, str] = {}
    own: Callable[[str, Mapping[str, tuple[int, ...]]], TensorRef | None] = _none
    attending: bool = True

    def tensor_name(self, name: str) -> str | None:
        """The name in the file of a tensor of the checkpoint."""
        if (found := _LAYER_TENSOR.fullmatch(name)) and (tensor := self.vectors.get(found[2])):
            return f"blk.{found[1]}.{tensor}"
        if found := _LAYER.fullmatch(name):
            module = self.norms.get(found[2]) or _MODULES.get(found[2])
            return None if module is None else f"blk.{found[1]}.{module}.{found[3]}"
        return self.top.get(name)

    def reference(self, name: str, ref: TensorRef, shapes: Mapping[str, tuple[int, ...]]) -> TensorRef | None:
        """Where in the file the weight is that Tidewheel calls `name`, and that `ref` takes of the checkpoint.

        `shapes` are those of all weights. None: files do not have it.
        """
        if found := expert_reference(name) or self.own(name, shapes):
            return found
        stored = self.tensor_name(ref.name)
        if stored is None:
            return None
        ref = replace(ref, name=stored)
        if self.outputs_first:
            ref = replace(ref, transpose=False)
        layer, _, rest = name.rpartition(".")
        layer, _, module = layer.rpartition(".")
        if self.qkv_in_rows and module in ("q", "k", "v") and layer.startswith("layers."):
            sizes = [shapes[f"{layer}.{other}.{rest}"][0] for other in "qkv"]
            start = sum(sizes[: "qkv".index(module)])
            ref = replace(ref, each=None, rows=(start, start + shapes[name][0]))
        return ref

    def row_order(self, name: str, config: Mapping[str, Any]) -> tuple[int, ...] | None:
        """For a tensor of the file whose rows are moved, the row of the file that each row of the checkpoint is."""
        kind = name.split(".")[-2]
        if not self.rotated_pairs or kind not in ("attn_q", "attn_k"):
            return None
        heads = config["num_attention_heads" if kind == "attn_q" else "num_key_value_heads"]
        rows = np.arange(heads * config["head_dim"]).reshape(heads, -1, 2)
        return tuple(rows.swapaxes(1, 2).reshape(-1).tolist())


def architecture_of(file: GgufFile) -> GgufArchitecture:
    """The file's architecture. Raises ModelError, naming it, for one that is not supported."""
    name = Fields(file).text("general.architecture")
    if name not in ARCHITECTURES:
        known = ", ".join(sorted(ARCHITECTURES))
        raise ModelError(f"{file.path}: GGUF architecture {shown(name)} is not supported; supported are {known}")
    architecture = ARCHITECTURES[name]
    if architecture.has_experts or not Fields(file, f"{name}.").optional_integer("expert_count"):
        return architecture
    if architecture.with_experts is None:
        raise ModelError(f"{file.path}: models of architecture {name} with experts are not supported")
    return architecture.with_experts


def config_of(file: GgufFile) -> _Config:
    """What the model's config.json would say. Raises ModelError, naming the file and the key."""
    architecture = architecture_of(file)
    fields = Fields(file, Fields(file).text("general.architecture") + ".")
    embedding = file.tensors.get("token_embd.weight")
    if embedding is None:
        raise ModelError(f"{file.path} has no tensor token_embd.weight: it holds no language model, or a part of one")
    config: _Config = {
        "architectures": [architecture.name],
        "vocab_size": embedding.shape[0],
        "hidden_size": fields.integer("embedding_length"),
        "num_hidden_layers": fields.integer("block_count"),
        "max_position_embeddings": fields.integer("context_length"),
        **_norm(fields, architecture),
        "tie_word_embeddings": "output.weight" not in file.tensors,
    }
    if architecture.attending:
        config |= _attention(file, fields, config)
    return config | architecture.fields(file, fields, config)


def _attention(file: GgufFile, fields: Fields, config: _Config) -> _Config:
    """The sizes of attention and MLPs. The numbers may be arrays with one for each layer."""
    layers, heads = config["num_hidden_layers"], fields.integer("attention.head_count")
    head_dim = fields.integer("attention.key_length", max(config["hidden_size"] // heads, 1))
    if fields.integer("attention.value_length", head_dim) != head_dim:
        raise fields.error("attention.value_length", f"that of the keys, {head_dim}")
    if heads * head_dim >= 1 << 24:
        raise fields.error("attention.head_count", "a number of heads that fits the model")
    return {
        "intermediate_size": hybrids.of_layers(fields, "feed_forward_length", layers)[0],
        "num_attention_heads": heads,
        "num_key_value_heads": hybrids.of_layers(fields, "attention.head_count_kv", layers, heads)[0],
        "head_dim": head_dim,
        **_rope(file, fields, head_dim),
    }


def _norm(fields: Fields, architecture: GgufArchitecture) -> _Config:
    if not architecture.layer_norm:
        return {"rms_norm_eps": fields.number("attention.layer_norm_rms_epsilon")}
    return dict.fromkeys(_LAYER_NORM_EPS, fields.number("attention.layer_norm_epsilon"))


def _rope(file: GgufFile, fields: Fields, head_dim: int) -> _Config:
    """The fields of rope: the base, how much of a head is rotated, and how it is scaled."""
    theta, dim = fields.optional_number("rope.freq_base"), fields.integer("rope.dimension_count", head_dim)
    config: _Config = {"rope_theta": 10000.0 if theta is None else theta}
    if dim != head_dim:
        config["partial_rotary_factor"] = dim / head_dim
    kind = fields.optional_text("rope.scaling.type") or "none"
    factor = fields.optional_number("rope.scaling.factor")
    if factor is None:
        factor = fields.optional_number("rope.scale_linear")
        kind = "linear" if factor is not None and kind == "none" else kind
    if ROPE_FACTORS in file.tensors or _LONG_FACTORS in file.tensors:
        if kind in ("linear", "yarn"):
            raise fields.error("rope.scaling.type", "none or longrope in a file that has factors of its own")
        return config | _factors(file, fields)
    if kind in ("none", "linear") and factor is not None and factor != 1:
        config["rope_scaling"] = {"rope_type": "linear", "factor": factor} if kind == "linear" else None
    elif kind == "yarn":
        config["rope_scaling"] = _yarn(fields)
    elif kind not in ("none", "linear"):
        raise fields.error("rope.scaling.type", "none, linear or yarn, or the file must have the factors of longrope")
    return config


def _yarn(fields: Fields) -> _Config:
    factor = fields.number("rope.scaling.factor")
    scaling: _Config = {
        "rope_type": "yarn",
        "factor": factor,
        "original_max_position_embeddings": fields.integer("rope.scaling.original_context_length"),
    }
    if (scale := fields.optional_number("rope.scaling.attn_factor")) is not None:
        scaling["attention_factor"] = scale * (1 + 0.1 * math.log(max(factor, 1)))
    for name in ("beta_fast", "beta_slow"):
        if (beta := fields.optional_number(f"rope.scaling.yarn_{name}")) is not None:
            scaling[name] = beta
    return scaling


def _factors(file: GgufFile, fields: Fields) -> _Config:
    """Factors that the file gives one by one: Llama 3.1's, which hold at any length, or those of LongRoPE."""
    if ROPE_FACTORS in file.tensors:
        factors = _float32(file.tensors[ROPE_FACTORS])
        scaling = {"rope_type": "longrope", "short_factor": factors, "long_factor": factors, "attention_factor": 1.0}
        return {"rope_scaling": scaling, "original_max_position_embeddings": fields.integer("context_length")}
    if _SHORT_FACTORS not in file.tensors:
        raise ModelError(f"{file.path} has {_LONG_FACTORS} but not {_SHORT_FACTORS}")
    scaling = {
        "rope_type": "longrope",
        "short_factor": _float32(file.tensors[_SHORT_FACTORS]),
        "long_factor": _float32(file.tensors[_LONG_FACTORS]),
    }
    if (scale := fields.optional_number("rope.scaling.attn_factor")) is not None:
        scaling["attention_factor"] = scale
    original = fields.integer("rope.scaling.original_context_length")
    return {"rope_scaling": scaling, "original_max_position_embeddings": original}


def _float32(tensor: GgufTensor) -> list[float]:
    if tensor.kind.name != "F32" or len(tensor.shape) != 1 or tensor.shape[0] > 1 << 16:
        raise ModelError(f"{tensor.origin} must be a vector of F32")
    factors: list[float] = np.frombuffer(tensor.data.tobytes(), "<f4").tolist()
    return factors


def _llama(file: GgufFile, fields: Fields, config: _Config) -> _Config:
    return {
        "attention_bias": "blk.0.attn_output.bias" in file.tensors,
        "mlp_bias": "blk.0.ffn_up.bias" in file.tensors,
    }


def _granite(file: GgufFile, fields: Fields, config: _Config) -> _Config:
    multipliers = {
        "attention_multiplier": "attention.scale",
        "embedding_multiplier": "embedding_scale",
        "residual_multiplier": "residual_scale",
        "logits_scaling": "logit_scale",
    }
    given = {name: fields.optional_number(key) for name, key in multipliers.items()}
    # Without a scale of its own, attention has the usual one, unlike in a config.json.
    given["attention_multiplier"] = given["attention_multiplier"] or config["head_dim"] ** -0.5
    return _llama(file, fields, config) | {name: value for name, value in given.items() if value is not None}


def _granite_hybrid(file: GgufFile, fields: Fields, config: _Config) -> _Config:
    return _granite(file, fields, config) | hybrids.granite_hybrid(file, fields, config)


def _phi3(file: GgufFile, fields: Fields, config: _Config) -> _Config:
    window = fields.optional_integer("attention.sliding_window") or None
    return {"sliding_window": window if window and window < config["max_position_embeddings"] else None}


def _gemma(layers_27b: int) -> Callable[[GgufFile, Fields, _Config], _Config]:
    """Gemma 2 and 3. The 27B model, which has so many layers, scales its queries by hidden size instead of head dim."""

    def fields_of(file: GgufFile, fields: Fields, config: _Config) -> _Config:
        is_27b = config["num_hidden_layers"] == layers_27b
        scalar = config["hidden_size"] / config["num_attention_heads"] if is_27b else config["head_dim"]
        given = {"query_pre_attn_scalar": scalar, "sliding_window": fields.integer("attention.sliding_window")}
        for name, key in (("attn_logit_softcapping",) * 2, ("final_logit_softcapping",) * 2):
            if (cap := fields.optional_number(key)) is not None:
                given[name] = cap
        return given

    return fields_of


def _gemma3(file: GgufFile, fields: Fields, config: _Config) -> _Config:
    local = fields.optional_number("rope.freq_base_swa")
    pattern = fields.optional_integer("attention.sliding_window_pattern", 1)
    given = {"rope_local_base_freq": local, "sliding_window_pattern": pattern}
    # Its layers without a window have this base where the file is silent.
    theta = {"rope_theta": 1e6} if fields.raw("rope.freq_base") is None else {}
    return (
        _gemma(62)(file, fields, config) | theta | {name: value for name, value in given.items() if value is not None}
    )


def _granite_moe(file: GgufFile, fields: Fields, config: _Config) -> _Config:
    return _granite(file, fields, config) | experts.mixtral(file, fields, config)


def _with_experts(
    name: str,
    fields: Callable[[GgufFile, Fields, _Config], _Config],
    norms: Mapping[str, str] = _PRE_NORMS,
    rotated_pairs: bool = False,
) -> GgufArchitecture:
    return GgufArchitecture(name, norms, rotated_pairs, fields=fields, has_experts=True)


ARCHITECTURES: dict[str, GgufArchitecture] = {
    "llama": GgufArchitecture(
        "LlamaForCausalLM",
        rotated_pairs=True,
        fields=_llama,
        with_experts=GgufArchitecture("MixtralForCausalLM", rotated_pairs=True, fields=experts.mixtral),
    ),
    "qwen2": GgufArchitecture("Qwen2ForCausalLM"),
    "qwen3": GgufArchitecture("Qwen3ForCausalLM"),
    "gemma2": GgufArchitecture("Gemma2ForCausalLM", _SANDWICH_NORMS, norms_plus_one=True, fields=_gemma(46)),
    "gemma3": GgufArchitecture("Gemma3ForCausalLM", _SANDWICH_NORMS, norms_plus_one=True, fields=_gemma3),
    "phi3": GgufArchitecture("Phi3ForCausalLM", fields=_phi3),
    "granite": GgufArchitecture("GraniteForCausalLM", rotated_pairs=True, fields=_granite),
    "qwen35": GgufArchitecture(
        "Qwen3_5ForCausalLM",
        hybrids.QWEN35_MODULES,
        norms_plus_one=True,
        fields=hybrids.qwen35,
        vectors=hybrids.DELTA_NET_TENSORS,
    ),
    "qwen35moe": GgufArchitecture(
        "Qwen3_5MoeForCausalLM",
        hybrids.QWEN35_MODULES,
        norms_plus_one=True,
        fields=hybrids.qwen35_moe,
        has_experts=True,
        vectors=hybrids.DELTA_NET_TENSORS,
    ),
    "qwen3next": GgufArchitecture(
        "Qwen3NextForCausalLM",
        hybrids.QWEN35_MODULES,
        norms_plus_one=True,
        fields=hybrids.qwen3_next,
        has_experts=True,
        vectors=hybrids.DELTA_NET_TENSORS,
        own=hybrids.delta_net_reference,
    ),
    "granitehybrid": GgufArchitecture(
        "GraniteMoeHybridForCausalLM",
        _PRE_NORMS | hybrids.mamba_modules("mamba"),
        rotated_pairs=True,
        fields=_granite_hybrid,
        has_experts=True,
        vectors=hybrids.mamba_tensors("mamba"),
        own=hybrids.mlp_reference,
    ),
    "falcon-h1": GgufArchitecture(
        "FalconH1ForCausalLM",
        hybrids.FALCON_H1_MODULES,
        fields=hybrids.falcon_h1,
        vectors=hybrids.FALCON_H1_TENSORS,
    ),
    "nemotron_h": GgufArchitecture(
        "NemotronHForCausalLM",
        hybrids.NEMOTRON_H_MODULES,
        fields=hybrids.nemotron_h,
        vectors=hybrids.mamba_tensors("mixer"),
    ),
    "nemotron_h_moe": GgufArchitecture(
        "NemotronHForCausalLM",
        hybrids.NEMOTRON_H_MODULES,
        fields=hybrids.nemotron_h_moe,
        has_experts=True,
        vectors=hybrids.mamba_tensors("mixer"),
    ),
    "mamba2": GgufArchitecture(
        "Mamba2ForCausalLM",
        hybrids.MAMBA2_MODULES,
        fields=hybrids.mamba2,
        vectors=hybrids.mamba_tensors("mixer"),
        attending=False,
    ),
    "lfm2moe": GgufArchitecture(
        "Lfm2MoeForCausalLM",
        hybrids.LFM2_MODULES,
        fields=hybrids.lfm2_moe,
        has_experts=True,
        top=_TOP | hybrids.LFM2_TOP,
    ),
    "lfm2": GgufArchitecture("Lfm2ForCausalLM", hybrids.LFM2_MODULES, fields=hybrids.lfm2, top=_TOP | hybrids.LFM2_TOP),
    "smollm3": GgufArchitecture("SmolLM3ForCausalLM", rotated_pairs=True, fields=_llama),
    "qwen2moe": _with_experts("Qwen2MoeForCausalLM", experts.qwen2_moe),
    "qwen3moe": _with_experts("Qwen3MoeForCausalLM", experts.qwen3_moe),
    "olmoe": _with_experts("OlmoeForCausalLM", experts.olmoe),
    "granitemoe": _with_experts("GraniteMoeForCausalLM", _granite_moe, rotated_pairs=True),
    "gpt-oss": _with_experts("GptOssForCausalLM", experts.gpt_oss, _POST_ATTENTION_NORM),
    "glm4moe": _with_experts("Glm4MoeForCausalLM", experts.glm4_moe, _POST_ATTENTION_NORM),
    "ernie4_5-moe": _with_experts("Ernie4_5_MoeForCausalLM", experts.ernie4_5_moe),
    "qwen2vl": GgufArchitecture("Qwen2ForCausalLM"),
    "qwen3vl": GgufArchitecture("Qwen3ForCausalLM"),
    "olmo2": GgufArchitecture("Olmo2ForCausalLM", _POST_NORMS, fields=config_fields.olmo2),
    "exaone4": GgufArchitecture("Exaone4ForCausalLM", _POST_NORMS, fields=config_fields.exaone4),
    "glm4": GgufArchitecture("Glm4ForCausalLM", _GLM_NORMS, fields=config_fields.glm4),
    "ernie4_5": GgufArchitecture("Ernie4_5ForCausalLM", fields=config_fields.ernie),
    "hunyuan-dense": GgufArchitecture("HunYuanDenseV1ForCausalLM", _HUNYUAN, fields=config_fields.hunyuan),
    "mistral3": GgufArchitecture("Ministral3ForCausalLM", rotated_pairs=True, fields=config_fields.ministral3),
    "command-r": GgufArchitecture("CohereForCausalLM", layer_norm=True, fields=config_fields.command_r),
    "cohere2": GgufArchitecture("Cohere2ForCausalLM", layer_norm=True, fields=config_fields.cohere2),
    "stablelm": GgufArchitecture("StableLmForCausalLM", layer_norm=True, fields=config_fields.stablelm),
    "starcoder2": GgufArchitecture(
        "Starcoder2ForCausalLM", _STARCODER2, layer_norm=True, fields=config_fields.starcoder2
    ),
    "phi2": GgufArchitecture("PhiForCausalLM", _PHI, layer_norm=True, fields=config_fields.phi2),
    "gpt2": GgufArchitecture("GPT2LMHeadModel", _GPT2, layer_norm=True, outputs_first=True, fields=config_fields.gpt2),
    "starcoder": GgufArchitecture("GPTBigCodeForCausalLM", _GPT2, layer_norm=True, fields=config_fields.gpt2),
    "gptneox": GgufArchitecture(
        "GPTNeoXForCausalLM", _NEOX, layer_norm=True, qkv_in_rows=True, fields=config_fields.gptneox
    ),
    "falcon": GgufArchitecture(
        "FalconForCausalLM", _FALCON, layer_norm=True, qkv_in_rows=True, fields=config_fields.falcon
    ),
    "bloom": GgufArchitecture(
        "BloomForCausalLM", _BLOOM, layer_norm=True, qkv_in_rows=True, fields=config_fields.bloom
    ),
    "mpt": GgufArchitecture("MptForCausalLM", _MPT, layer_norm=True, fields=config_fields.mpt),
}
