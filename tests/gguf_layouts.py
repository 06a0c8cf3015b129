"""What llama.cpp's converter writes of models whose tensors or metadata differ most from their checkpoints."""

from __future__ import annotations

import re
from statistics import NormalDist
from typing import Any

import gguf
import numpy as np
from numpy.typing import NDArray

Tensors = dict[str, NDArray[np.float32]]

_WHOLE_NAMES = {
    "layer_scalar": "layer_output_scale.weight",
    "router.scale": "ffn_gate_inp.scale",
    "router.per_expert_scale": "ffn_down_exps.scale",
    "experts.gate_up_proj": "ffn_gate_up_exps.weight",
    "experts.down_proj": "ffn_down_exps.weight",
    "altup.correct_output_scale": "altup_correct_scale.weight",
}
STACKED = re.compile(r"model\.altup_(unembed_)?projections\.")
_LATENTS = ("deepseek_v2", "deepseek_v3", "glm4_moe_lite")


def layer_tensors(config: Any, name: str, data: NDArray[np.float32], old: bool) -> Tensors:
    """The tensors of a file that are made of one of a layer; none if it is as for most models.

    `old`: as converters wrote files before they divided the matrix of keys and values.
    """
    if config.model_type in _LATENTS and name == "self_attn.kv_b_proj.weight" and not old:
        heads = data.reshape(config.num_attention_heads, -1, data.shape[-1])
        keys, values = heads[:, : config.qk_nope_head_dim], heads[:, config.qk_nope_head_dim :]
        return {"attn_k_b.weight": keys.swapaxes(1, 2), "attn_v_b.weight": values}
    return {_WHOLE_NAMES[name]: data} if name in _WHOLE_NAMES else {}


def model_tensors(model: Any) -> Tensors:
    """Tensors that belong to no layer, and to the config."""
    config, state = model.config, model.state_dict()
    if config.model_type == "gemma3n_text":
        # What layers do not use that read another's K and V; checkpoints have it too.
        shared = range(config.num_hidden_layers - config.num_kv_shared_layers, config.num_hidden_layers)
        size = config.num_key_value_heads * config.head_dim
        unused: Tensors = {}
        for layer in shared:
            for name in ("attn_k.weight", "attn_v.weight"):
                unused[f"blk.{layer}.{name}"] = np.zeros((size, config.hidden_size), np.float32)
            unused[f"blk.{layer}.attn_k_norm.weight"] = np.zeros(config.head_dim, np.float32)
        return unused | {
            stored: np.stack([data.numpy() for name, data in state.items() if f".{module}." in name])
            for module, stored in (
                ("altup_projections", "altup_proj.weight"),
                ("altup_unembed_projections", "altup_unembd_proj.weight"),
            )
        }
    if config.model_type != "gemma4_text":
        return {}
    half = _of_layer(config, "full_attention").head_dim // 2
    turning = int(half * config.rope_parameters["full_attention"]["partial_rotary_factor"])
    return {"rope_freqs.weight": np.array([1.0] * turning + [1e30] * (half - turning), np.float32)}


def adjust(writer: Any, config: Any, old: bool) -> None:
    """Writes the metadata that other models do not have, or have otherwise."""
    kind = config.model_type
    if kind in _LATENTS:
        _latents(writer, config, old)
    elif kind == "minicpm3":
        _drop(writer, "attention.key_length", "attention.value_length", "rope.dimension_count")
        _ranks(writer, config)
        writer.add_key_length(config.qk_nope_head_dim + config.qk_rope_head_dim)
    elif kind == "gemma3n_text":
        _gemma3n(writer, config)
    elif kind == "gemma4_text":
        _gemma4(writer, config)
    elif kind == "llama4_text":
        _drop(writer, "feed_forward_length")
        writer.add_feed_forward_length(config.intermediate_size_mlp)
        writer.add_expert_feed_forward_length(config.intermediate_size)
        writer.add_interleave_moe_layer_step(config.interleave_moe_layer_step)
    elif kind == "hunyuan_v1_moe":
        writer.add_expert_used_count(config.moe_topk)
        writer.add_expert_feed_forward_length(config.intermediate_size)
        writer.add_expert_shared_feed_forward_length(config.intermediate_size)
        writer.add_expert_shared_count(1)
    elif kind == "olmo":
        writer.add_layer_norm_eps(1e-5)
    elif kind == "olmo3":
        writer.add_sliding_window(config.sliding_window)
        writer.add_sliding_window_pattern([kind == "sliding_attention" for kind in config.layer_types])
        writer.add_rope_freq_base_swa(config.rope_parameters["sliding_attention"]["rope_theta"])


def _of_layer(config: Any, kind: str) -> Any:
    """The config of the first layer of that type."""
    return config.per_layer_config[config.layer_types.index(kind)]


def _drop(writer: Any, *keys: str) -> None:
    for key in keys:
        writer.kv_data[0].pop(f"{writer.arch}.{key}", None)


def _ranks(writer: Any, config: Any) -> None:
    writer.add_kv_lora_rank(config.kv_lora_rank)
    if config.q_lora_rank is not None:
        writer.add_q_lora_rank(config.q_lora_rank)
    writer.add_rope_dimension_count(config.qk_rope_head_dim)


def _latents(writer: Any, config: Any, old: bool) -> None:
    sizes = ("attention.key_length", "attention.value_length", "rope.dimension_count")
    _drop(writer, *sizes, "attention.head_count_kv")
    _ranks(writer, config)
    key_dim, rope_dim = config.qk_nope_head_dim + config.qk_rope_head_dim, config.qk_rope_head_dim
    if old:
        writer.add_head_count_kv(config.num_attention_heads)
        writer.add_key_length(key_dim)
        writer.add_value_length(config.v_head_dim)
    else:
        writer.add_head_count_kv(1)
        writer.add_key_length(config.kv_lora_rank + rope_dim)
        writer.add_value_length(config.kv_lora_rank)
        writer.add_key_length_mla(key_dim)
        writer.add_value_length_mla(config.v_head_dim)
    dense = getattr(config, "first_k_dense_replace", None)
    writer.add_leading_dense_block_count(config.mlp_layer_types.count("dense") if dense is None else dense)
    writer.add_expert_shared_count(config.n_shared_experts)
    writer.add_expert_weights_scale(config.routed_scaling_factor)
    writer.add_expert_group_count(config.n_group or 1)
    writer.add_expert_group_used_count(config.topk_group or 1)
    if config.model_type != "deepseek_v2":
        writer.add_expert_weights_norm(config.norm_topk_prob)
        writer.add_expert_gating_func(gguf.ExpertGatingFuncType.SIGMOID)
    if sharpness := config.rope_parameters.get("mscale_all_dim"):
        writer.add_rope_scaling_yarn_log_mul(0.1 * sharpness)


def _gemma3n(writer: Any, config: Any) -> None:
    writer.add_sliding_window(config.sliding_window)
    writer.add_sliding_window_pattern([kind == "sliding_attention" for kind in config.layer_types])
    writer.add_rope_freq_base_swa(config.rope_parameters["sliding_attention"]["rope_theta"])
    writer.add_altup_active_idx(config.altup_active_idx)
    writer.add_altup_num_inputs(config.altup_num_inputs)
    writer.add_embedding_length_per_layer_input(config.hidden_size_per_layer_input)
    writer.add_shared_kv_layers(config.num_kv_shared_layers)
    shares = config.activation_sparsity_pattern
    writer.add_activation_sparsity_scale([NormalDist().inv_cdf(share) if share else -np.inf for share in shares])


def _gemma4(writer: Any, config: Any) -> None:
    _drop(
        writer,
        *("attention.key_length", "attention.value_length", "attention.head_count_kv", "feed_forward_length"),
        *("rope.dimension_count", "rope.scaling.type", "rope.scaling.factor"),
    )
    sliding = [kind == "sliding_attention" for kind in config.layer_types]
    writer.add_sliding_window(config.sliding_window)
    writer.add_sliding_window_pattern(sliding)
    for slides, add in ((True, "{}_swa"), (False, "{}")):
        dim = _of_layer(config, "sliding_attention" if slides else "full_attention").head_dim
        for name in ("add_key_length", "add_value_length", "add_rope_dimension_count"):
            getattr(writer, add.format(name))(dim)
    writer.add_rope_freq_base_swa(config.rope_parameters["sliding_attention"]["rope_theta"])
    heads = [config.per_layer_config[i].num_key_value_heads for i in range(config.num_hidden_layers)]
    writer.add_head_count_kv(heads if len(set(heads)) > 1 else heads[0])
    shared, width = config.num_kv_shared_layers, config.intermediate_size
    writer.add_shared_kv_layers(shared)
    own = config.num_hidden_layers - shared
    widths = [width if i < own else 2 * width for i in range(config.num_hidden_layers)]
    writer.add_feed_forward_length(widths if config.use_double_wide_mlp else width)
    writer.add_embedding_length_per_layer_input(config.hidden_size_per_layer_input)
    if config.enable_moe_block:
        writer.add_expert_used_count(config.top_k_experts)
