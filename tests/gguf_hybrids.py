"""What llama.cpp's converter writes of models with recurrent layers."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import gguf
import numpy as np
from numpy.typing import NDArray

ARCHITECTURES = {
    "lfm2": gguf.MODEL_ARCH.LFM2,
    "lfm2_moe": gguf.MODEL_ARCH.LFM2MOE,
    "qwen3_5_text": gguf.MODEL_ARCH.QWEN35,
    "qwen3_5_moe_text": gguf.MODEL_ARCH.QWEN35MOE,
    "qwen3_next": gguf.MODEL_ARCH.QWEN3NEXT,
    "granitemoehybrid": gguf.MODEL_ARCH.GRANITE_HYBRID,
    "bamba": gguf.MODEL_ARCH.GRANITE_HYBRID,
    "falcon_h1": gguf.MODEL_ARCH.FALCON_H1,
    "nemotron_h": gguf.MODEL_ARCH.NEMOTRON_H_MOE,  # without experts NEMOTRON_H
    "mamba2": gguf.MODEL_ARCH.MAMBA2,
}
DELTA_NETS = ("qwen3_5_text", "qwen3_5_moe_text", "qwen3_next")
MAMBAS = ("granitemoehybrid", "bamba", "falcon_h1", "nemotron_h", "mamba2")

_Array = NDArray[np.float32]


def architecture(config: Any) -> Any:
    """The architecture of a GGUF file for a model with recurrent layers; None for other models."""
    if config.model_type == "nemotron_h" and "moe" not in config.layers_block_type:
        return gguf.MODEL_ARCH.NEMOTRON_H
    return ARCHITECTURES.get(config.model_type)


def converted(name: str, data: _Array, config: Any, old: bool = False) -> Iterator[tuple[str, _Array]]:
    """The tensors that are made of one, by the names that the package knows or as the file has them."""
    if name.endswith((".conv1d.weight", ".conv.conv.weight")):
        data = data.squeeze(1)
    if config.model_type in DELTA_NETS:
        yield from _delta_net(name, data, config, old)
    elif config.model_type in MAMBAS:
        yield from _mamba(name.replace("model.layers", "backbone.layers") if ".mixer." in name else name, data, config)
    else:
        yield name, data


def _delta_net(name: str, data: _Array, config: Any, old: bool) -> Iterator[tuple[str, _Array]]:
    """Decays instead of their logarithms; Qwen3.5's value heads by their number within a key head."""
    if name.endswith(".A_log"):
        data = -np.exp(data)
    name = name.replace(".dt_bias", ".dt_proj.bias")
    keys, heads = config.linear_num_key_heads, config.linear_num_value_heads
    if config.model_type == "qwen3_next":
        if name.endswith("in_proj_qkvz.weight") and old:
            yield f"blk.{name.split('.')[2]}.ssm_in.weight", data
        elif name.endswith("in_proj_qkvz.weight"):
            sizes = [config.linear_key_head_dim] * 2 + [heads // keys * config.linear_value_head_dim] * 2
            parts = np.split(data.reshape(keys, sum(sizes), -1), np.cumsum(sizes)[:-1], axis=1)
            *qkv, z = (part.reshape(-1, data.shape[1]) for part in parts)
            yield name.replace("qkvz", "qkv"), np.concatenate(qkv)
            yield name.replace("qkvz", "z"), z
        else:
            yield name, data
        return
    order = np.arange(heads).reshape(keys, -1).T.reshape(-1)
    rest = 2 * keys * config.linear_key_head_dim if name.endswith(("in_proj_qkv.weight", "conv1d.weight")) else 0

    def tiled(values: _Array) -> _Array:
        moved: _Array = values.reshape(heads, -1, *values.shape[1:])[order].reshape(values.shape)
        return moved

    if name.endswith("linear_attn.out_proj.weight"):
        data = tiled(data.T).T
    elif ".linear_attn." in name and not name.endswith("linear_attn.norm.weight"):
        data = np.concatenate([data[:rest], tiled(data[rest:])])
    yield name, data


def _mamba(name: str, data: _Array, config: Any) -> Iterator[tuple[str, _Array]]:
    """Decays and skips as columns, the norm's groups as rows; Falcon-H1's multipliers in the weights."""
    groups = getattr(config, "mamba_n_groups", None) or config.n_groups
    if config.model_type == "falcon_h1":
        data = data * _multiplier(name, len(data), config)
    if name.endswith(".A_log"):
        data = -np.exp(data[:, None])
    elif name.endswith((".mixer.D", ".mamba.D")):
        data = data[:, None]
    elif name.endswith((".mixer.norm.weight", ".mamba.norm.weight")):
        data = data.reshape(groups, -1)
    elif name.endswith("shared_mlp.input_linear.weight"):
        for kind, part in zip(("gate", "up"), np.split(data, 2), strict=True):
            yield f"blk.{name.split('.')[2]}.ffn_{kind}{'_shexp' if config.num_local_experts else ''}.weight", part
        return
    elif name.endswith("shared_mlp.output_linear.weight") and not config.num_local_experts:
        name = f"blk.{name.split('.')[2]}.ffn_down.weight"
    name = name.replace(".dt_bias", ".dt_proj.bias")
    tops = {"model.embeddings": "backbone.embeddings", "model.norm_f": "backbone.norm_f"}
    for theirs, original in tops.items():
        name = name.replace(theirs, original)
    is_layer_norm = config.model_type == "nemotron_h" and name.endswith(".norm.weight") and ".mixer." not in name
    yield name.replace("model.layers", "backbone.layers") if is_layer_norm else name, data


def _multiplier(name: str, rows: int, config: Any) -> Any:
    inputs = config.attention_in_multiplier
    scales = {
        "down_proj": config.mlp_multipliers[1],
        "gate_proj": config.mlp_multipliers[0],
        "k_proj": config.key_multiplier * inputs,
        "q_proj": inputs,
        "v_proj": inputs,
        "o_proj": config.attention_out_multiplier,
        "out_proj": config.ssm_out_multiplier,
        "lm_head": config.lm_head_multiplier,
        "embed_tokens": config.embedding_multiplier,
    }
    if name.endswith(".in_proj.weight"):
        size, group = config.mamba_d_ssm, config.mamba_n_groups * config.mamba_d_state
        sizes = (size, size, group, group, rows - 2 * size - 2 * group)
        return config.ssm_in_multiplier * np.repeat(np.float32(config.ssm_multipliers), sizes)[:, None]
    return next((scale for part, scale in scales.items() if part in name.split(".")), 1.0)


def attending(config: Any) -> list[bool] | None:
    """Which layers have KV heads; None for models whose files do not say."""
    if config.model_type == "bamba":
        return [layer in config.attn_layer_indices for layer in range(config.num_hidden_layers)]
    if config.model_type not in ("lfm2", "lfm2_moe", "granitemoehybrid", "nemotron_h"):
        return None
    return [kind == "full_attention" for kind in config.layer_types]


def write_config(writer: Any, config: Any) -> None:
    """The keys of recurrent layers."""
    if config.model_type in ("lfm2", "lfm2_moe"):
        writer.add_shortconv_l_cache(config.conv_L_cache)
    elif config.model_type in DELTA_NETS:
        writer.add_ssm_conv_kernel(config.linear_conv_kernel_dim)
        writer.add_ssm_group_count(config.linear_num_key_heads)
        writer.add_ssm_time_step_rank(config.linear_num_value_heads)
        writer.add_ssm_state_size(config.linear_key_head_dim)
        writer.add_ssm_inner_size(config.linear_value_head_dim * config.linear_num_value_heads)
        writer.add_full_attention_interval(2)
    elif config.model_type in MAMBAS:
        names = {
            "conv_kernel": ("mamba_d_conv", "conv_kernel"),
            "group_count": ("mamba_n_groups", "n_groups"),
            "state_size": ("mamba_d_state", "ssm_state_size", "state_size"),
            "time_step_rank": ("mamba_n_heads", "mamba_num_heads", "num_heads"),
        }
        said = {
            key: next(found for field in fields if (found := getattr(config, field, None)) is not None)
            for key, fields in names.items()
        }
        for key, value in said.items():
            getattr(writer, f"add_ssm_{key}")(value)
        dims = ("mamba_d_head", "mamba_head_dim", "head_dim")
        head_dim = next(dim for field in dims if (dim := getattr(config, field, None)) is not None)
        writer.add_ssm_inner_size(said["time_step_rank"] * head_dim)
    if config.model_type == "nemotron_h":
        sizes = {"mlp": config.intermediate_size, "moe": config.moe_intermediate_size}
        writer.add_feed_forward_length([sizes.get(kind, 0) for kind in config.layers_block_type])
    if config.model_type == "granitemoehybrid":
        writer.add_expert_shared_feed_forward_length(config.shared_intermediate_size)
        writer.add_rope_scaling_finetuned(False)
    if config.model_type == "bamba":
        writer.add_rope_scaling_finetuned(True)
    if config.model_type in ("qwen3_5_moe_text", "qwen3_next"):
        writer.add_expert_shared_feed_forward_length(config.shared_expert_intermediate_size)
    if config.model_type == "lfm2_moe":
        writer.add_leading_dense_block_count(config.num_dense_layers)
        writer.add_expert_gating_func(gguf.ExpertGatingFuncType.SIGMOID)
    if config.model_type == "nemotron_h" and "moe" in config.layers_block_type:
        writer.add_expert_shared_feed_forward_length(config.moe_shared_expert_intermediate_size)
        writer.add_expert_shared_count(1)
        writer.add_expert_weights_norm(config.norm_topk_prob)
        writer.add_expert_weights_scale(config.routed_scaling_factor)
        writer.add_expert_group_count(config.n_group)
