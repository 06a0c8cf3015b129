"""Qwen3-Next (https://qwen.ai/blog?id=qwen3-next): three delta nets to one attention with an output gate."""

from __future__ import annotations

from dataclasses import replace

from ..config import ConfigReader
from ..description import ModelDescription
from ..spec import DeltaNetSpec, MixerSpec, NormSpec, ResidualBlockSpec
from ..tensor_ref import TensorRef
from .expert_parts import EXPERT_NORMS
from .hybrids import (
    DELTA_NET_MODULES,
    SHARED_EXPERT_MODULES,
    conv_taps,
    gated_queries,
    qwen_attention,
    qwen_delta_net,
    qwen_layers,
    qwen_mlps,
)
from .listing import Listing
from .mtp_parts import qwen_mtp
from .names import llama_names
from .parts import decoder

ARCHITECTURES = {"Qwen3NextForCausalLM": Listing("Qwen3-Next")}

_MODULES = {**EXPERT_NORMS, **SHARED_EXPERT_MODULES, **DELTA_NET_MODULES}


def describe(architecture: str, config: ConfigReader, max_model_len: int | None) -> ModelDescription:
    """Qwen3-Next, with the MTP layer that its checkpoints have."""
    config = config.with_defaults(num_key_value_heads=2)
    norm = NormSpec("rms", config.number("rms_norm_eps", 1e-6), unit_offset=True)
    heads, rope = qwen_attention(config, norm, max_model_len)
    net = qwen_delta_net(config)
    mixers: dict[str, MixerSpec] = {"full_attention": heads, "linear_attention": net}
    mlps = qwen_mlps(config)
    layers = tuple(
        (ResidualBlockSpec(mixers[kind], norm), ResidualBlockSpec(mlp, norm))
        for kind, mlp in zip(qwen_layers(config), mlps, strict=True)
    )
    names = llama_names(_MODULES)
    refs = {**gated_queries(heads), **_of_key_heads(net), "delta_conv": conv_taps("linear_attn.conv1d")}
    spec = decoder(config, "qwen3_next", layers, norm, rope.max_positions)
    description = names.describe(spec, refs)
    if config.raw("mtp_num_hidden_layers") == 0:
        return description
    mtp = qwen_mtp(
        names, norm, (ResidualBlockSpec(heads, norm), ResidualBlockSpec(mlps[-1], norm)), spec.hidden_size, refs
    )
    return replace(description, mtp=mtp)


def _of_key_heads(net: DeltaNetSpec) -> dict[str, TensorRef]:
    """The delta net's inputs out of two matrices that hold, for each key head, what belongs to it."""
    values = net.num_value_heads // net.num_key_heads
    refs = {}
    for module, sizes in (
        ("qkvz", {"q": net.key_dim, "k": net.key_dim, "v": values * net.value_dim, "z": values * net.value_dim}),
        ("ba", {"b": values, "a": values}),
    ):
        total, start = sum(sizes.values()), 0
        for name, size in sizes.items():
            refs[f"delta_{name}"] = TensorRef(f"linear_attn.in_proj_{module}", each=(total, start, start + size))
            start += size
    return refs
