"""Models with recurrent layers in GGUF files: their fields in the words of config.json, and their tensors."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ...errors import ModelError
from ...models.tensor_ref import TensorRef
from . import experts
from .fields import Fields
from .reader import GgufFile

_Config = dict[str, Any]

QWEN35_MODULES = {
    "post_attention_layernorm": "post_attention_norm",
    "linear_attn.in_proj_qkv": "attn_qkv",
    "linear_attn.in_proj_qkvz": "ssm_in",  # of files that earlier converters wrote
    "linear_attn.in_proj_z": "attn_gate",
    "linear_attn.in_proj_b": "ssm_beta",
    "linear_attn.in_proj_a": "ssm_alpha",
    "linear_attn.in_proj_ba": "ssm_ba",
    "linear_attn.conv1d": "ssm_conv1d",
    "linear_attn.norm": "ssm_norm",
    "linear_attn.out_proj": "ssm_out",
}
DELTA_NET_TENSORS = {"linear_attn.A_log": "ssm_a", "linear_attn.dt_bias": "ssm_dt.bias"}
LFM2_MODULES = {
    "operator_norm": "attn_norm",
    "ffn_norm": "ffn_norm",
    "self_attn.out_proj": "attn_output",
    "self_attn.q_layernorm": "attn_q_norm",
    "self_attn.k_layernorm": "attn_k_norm",
    "conv.in_proj": "shortconv.in_proj",
    "conv.conv": "shortconv.conv",
    "conv.out_proj": "shortconv.out_proj",
    "feed_forward.w1": "ffn_gate",
    "feed_forward.w3": "ffn_up",
    "feed_forward.w2": "ffn_down",
}
LFM2_TOP = {"model.embedding_norm.weight": "token_embd_norm.weight"}


def mamba_modules(module: str) -> dict[str, str]:
    """The names of a Mamba2 layer that its family calls `module`."""
    names = {"in_proj": "ssm_in", "conv1d": "ssm_conv1d", "norm": "ssm_norm", "out_proj": "ssm_out"}
    return {f"{module}.{name}": stored for name, stored in names.items()}


def mamba_tensors(module: str) -> dict[str, str]:
    """The whole names of its vectors."""
    return {f"{module}.A_log": "ssm_a", f"{module}.D": "ssm_d", f"{module}.dt_bias": "ssm_dt.bias"}


FALCON_H1_MODULES = {
    **mamba_modules("mamba"),
    "feed_forward.gate_proj": "ffn_gate",
    "feed_forward.up_proj": "ffn_up",
    "feed_forward.down_proj": "ffn_down",
}
FALCON_H1_TENSORS = {**mamba_tensors("mamba"), "pre_ff_layernorm.weight": "ffn_norm"}
MAMBA2_MODULES = {**mamba_modules("mixer"), "norm": "attn_norm"}
NEMOTRON_H_MODULES = {
    **MAMBA2_MODULES,
    "mixer.q_proj": "attn_q",
    "mixer.k_proj": "attn_k",
    "mixer.v_proj": "attn_v",
    "mixer.o_proj": "attn_output",
    "mixer.up_proj": "ffn_up",
    "mixer.down_proj": "ffn_down",
}


def delta_net_reference(name: str, shapes: Mapping[str, tuple[int, ...]], stored: Collection[str]) -> TensorRef | None:
    """Qwen3-Next's queries, keys, values and gates, which checkpoints hold key head by key head, and files apart.

    Files that earlier converters wrote have them as checkpoints do, in `ssm_in`.
    """
    layer, _, module = name.removesuffix(".weight").rpartition(".")
    block, parts = layer.replace("layers.", "blk."), ("delta_q", "delta_k", "delta_v")
    if module not in (*parts, "delta_z") or f"{block}.ssm_in.weight" in stored:
        return None
    if module == "delta_z":
        return TensorRef(f"{block}.attn_gate.weight")
    start = sum(shapes[f"{layer}.{part}.weight"][0] for part in parts[: parts.index(module)])
    return TensorRef(f"{block}.attn_qkv.weight", rows=(start, start + shapes[name][0]))


def mlp_reference(name: str, shapes: Mapping[str, tuple[int, ...]], stored: Collection[str]) -> TensorRef | None:
    """Granite 4's dense MLP, whose gate and up checkpoints hold in one matrix."""
    layer, _, module = name.removesuffix(".weight").rpartition(".")
    if module not in ("gate", "up", "down"):
        return None
    return TensorRef(f"{layer.replace('layers.', 'blk.')}.ffn_{module}.weight")


def of_layers(fields: Fields, key: str, num_layers: int, default: int | None = None) -> tuple[int, list[bool] | None]:
    """One number for all layers, or for those that have it; and which layers these are, if the file says it.

    Raises ModelError for layers whose numbers differ.
    """
    if not isinstance(fields.raw(key), np.ndarray):
        return fields.integer(key, default), None
    counts = fields.numbers(key, num_layers) or []
    found = {int(count) for count in counts if count}
    if len(found) != 1 or min(found) < 0:
        raise fields.error(key, "one number for all layers that have it, and 0 for others")
    return found.pop(), [bool(count) for count in counts]


def qwen35(file: GgufFile, fields: Fields, config: _Config) -> _Config:
    """Qwen3.5's. Files hold value heads by their number within a key head, then by key head."""
    return _delta_net(fields) | _drafts(fields, config) | {"linear_value_heads_tiled": True}


def qwen35_moe(file: GgufFile, fields: Fields, config: _Config) -> _Config:
    """The same with experts."""
    return experts.qwen3_moe(file, fields, config) | qwen35(file, fields, config) | _shared_expert(fields)


def qwen3_next(file: GgufFile, fields: Fields, config: _Config) -> _Config:
    """Qwen3-Next's."""
    own = experts.qwen3_moe(file, fields, config) | _shared_expert(fields)
    return _delta_net(fields) | _drafts(fields, config) | own


def _drafts(fields: Fields, config: _Config) -> _Config:
    """How many layers there are, and how many for drafts: a Qwen's config has its own word for these."""
    found = experts.drafts(fields, config)
    return found | {"mtp_num_hidden_layers": found["num_nextn_predict_layers"]}


def _delta_net(fields: Fields) -> _Config:
    value_heads, inner = fields.integer("ssm.time_step_rank"), fields.integer("ssm.inner_size")
    if inner % value_heads:
        raise fields.error("ssm.inner_size", f"a multiple of {value_heads} heads")
    return {
        "full_attention_interval": fields.integer("full_attention_interval", 4),
        "linear_num_key_heads": fields.integer("ssm.group_count"),
        "linear_num_value_heads": value_heads,
        "linear_key_head_dim": fields.integer("ssm.state_size"),
        "linear_value_head_dim": inner // value_heads,
        "linear_conv_kernel_dim": fields.integer("ssm.conv_kernel"),
    }


def _shared_expert(fields: Fields) -> _Config:
    return {"shared_expert_intermediate_size": fields.integer("expert_shared_feed_forward_length")}


def lfm2(file: GgufFile, fields: Fields, config: _Config) -> _Config:
    """LFM2's: layers without KV heads are convolutions."""
    num_layers = config["num_hidden_layers"]
    attending = of_layers(fields, "attention.head_count_kv", num_layers, config["num_attention_heads"])[1]
    return {
        "norm_eps": config["rms_norm_eps"],
        "conv_L_cache": fields.integer("shortconv.l_cache"),
        "block_auto_adjust_ff_dim": False,
        "layer_types": ["full_attention" if attends else "conv" for attends in attending or [True] * num_layers],
    }


def lfm2_moe(file: GgufFile, fields: Fields, config: _Config) -> _Config:
    """LFM2's with experts."""
    scale = fields.optional_number("expert_weights_scale")
    return (
        lfm2(file, fields, config)
        | experts.qwen3_moe(file, fields, config)
        | {
            "num_dense_layers": fields.optional_integer("leading_dense_block_count") or 0,
            "routed_scaling_factor": 1.0 if scale is None else scale,
        }
    )


def granite_hybrid(file: GgufFile, fields: Fields, config: _Config) -> _Config:
    """Granite 4's: attention knows positions only where the file says that rope was trained."""
    size, shared = _mamba_size(fields), fields.optional_integer("expert_shared_feed_forward_length")
    if size % config["hidden_size"]:
        raise fields.error("ssm.inner_size", f"a multiple of the model's {config['hidden_size']} values")
    has_experts = bool(fields.optional_integer("expert_count"))
    return {
        **_bamba(file, fields, size),
        **(experts.mixtral(file, fields, config) if has_experts else {"num_local_experts": 0}),
        "mamba_expand": size // config["hidden_size"],
        "shared_intermediate_size": shared or config["intermediate_size"],
        "position_embedding_type": "rope" if fields.flag("rope.scaling.finetuned", False) else "nope",
        "layer_types": [
            "mamba" if f"blk.{i}.ssm_in.weight" in file.tensors else "attention"
            for i in range(config["num_hidden_layers"])
        ],
    }


def falcon_h1(file: GgufFile, fields: Fields, config: _Config) -> _Config:
    """Falcon-H1's. Its multipliers are in the weights, and the gate comes before the norm."""
    size = _mamba_size(fields)
    return {
        **_bamba(file, fields, size),
        "mamba_d_ssm": size,
        "mamba_rms_norm": "blk.0.ssm_norm.weight" in file.tensors,
        "mamba_norm_before_gate": False,
    }


def nemotron_h(file: GgufFile, fields: Fields, config: _Config) -> _Config:
    """Nemotron-H's. What a layer has says of what kind it is."""
    size, heads = _mamba_size(fields), fields.integer("ssm.time_step_rank")
    kinds = {"ssm_in": "mamba", "attn_q": "attention", "ffn_gate_inp": "moe", "ffn_up": "mlp"}
    types = []
    for layer in range(config["num_hidden_layers"]):
        found = [kind for name, kind in kinds.items() if f"blk.{layer}.{name}.weight" in file.tensors]
        if not found:
            raise ModelError(f"{file.path} has no tensor of layer {layer} that says what kind of layer it is")
        types.append(found[0])
    return {
        "layers_block_type": types,
        "layer_norm_epsilon": config["rms_norm_eps"],
        "mamba_num_heads": heads,
        "mamba_head_dim": size // heads,
        "ssm_state_size": fields.integer("ssm.state_size"),
        **_plain_mamba(file, fields),
        "mlp_bias": _has(file, "ffn_up.bias"),
    }


def nemotron_h_moe(file: GgufFile, fields: Fields, config: _Config) -> _Config:
    """The same with experts."""
    experts.require_sigmoids(fields)
    grouped = experts.grouped(fields, config, normalizes=True)
    return {
        **nemotron_h(file, fields, config | grouped),
        **grouped,
        "moe_shared_expert_intermediate_size": fields.integer("expert_shared_feed_forward_length"),
        "moe_latent_size": fields.optional_integer("moe_latent_size"),
    }


def mamba2(file: GgufFile, fields: Fields, config: _Config) -> _Config:
    """Mamba2's."""
    size, heads = _mamba_size(fields), fields.integer("ssm.time_step_rank")
    if size % config["hidden_size"]:
        raise fields.error("ssm.inner_size", f"a multiple of the model's {config['hidden_size']} values")
    return {
        "layer_norm_epsilon": config["rms_norm_eps"],
        "num_heads": heads,
        "head_dim": size // heads,
        "expand": size // config["hidden_size"],
        "state_size": fields.integer("ssm.state_size"),
        **_plain_mamba(file, fields),
    }


def _mamba_size(fields: Fields) -> int:
    """The width of all heads of a Mamba2 layer. Raises ModelError for one that the heads do not divide."""
    size, heads = fields.integer("ssm.inner_size"), fields.integer("ssm.time_step_rank")
    if size % heads:
        raise fields.error("ssm.inner_size", f"a multiple of {heads} heads")
    return size


def _bamba(file: GgufFile, fields: Fields, size: int) -> _Config:
    """A Mamba2 layer in Bamba's words."""
    heads = fields.integer("ssm.time_step_rank")
    return {
        "mamba_n_heads": heads,
        "mamba_d_head": size // heads,
        "mamba_n_groups": fields.integer("ssm.group_count"),
        "mamba_d_state": fields.integer("ssm.state_size"),
        "mamba_d_conv": fields.integer("ssm.conv_kernel"),
        "mamba_conv_bias": _has(file, "ssm_conv1d.bias"),
        "mamba_proj_bias": _has(file, "ssm_in.bias"),
        "projectors_bias": _has(file, "ssm_in.bias"),
    }


def _plain_mamba(file: GgufFile, fields: Fields) -> _Config:
    """What configs of Mamba2 and of Nemotron-H call by the same names."""
    return {
        "n_groups": fields.integer("ssm.group_count"),
        "conv_kernel": fields.integer("ssm.conv_kernel"),
        "use_conv_bias": _has(file, "ssm_conv1d.bias"),
        "use_bias": _has(file, "ssm_in.bias"),
    }


def _has(file: GgufFile, tensor: str) -> bool:
    """Whether any layer has the tensor."""
    return any(name.startswith("blk.") and name.endswith(f".{tensor}") for name in file.tensors)


def log_of_decays(decays: NDArray[Any], origin: str) -> NDArray[np.float32]:
    """What a checkpoint calls A_log: files hold `-exp(A_log)`. Raises ModelError for numbers that are not below 0."""
    rates = -decays.astype(np.float32)
    if not ((rates > 0) & np.isfinite(rates)).all():
        raise ModelError(f"{origin} must hold numbers below 0")
    logs: NDArray[np.float32] = np.log(rates)
    return logs
