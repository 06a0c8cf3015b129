"""Qwen3-Next (https://qwen.ai/blog?id=qwen3-next): three delta nets to one attention with an output gate."""

from __future__ import annotations

from ..config import ConfigReader
from ..description import ModelDescription
from ..spec import BranchSpec, DeltaNetSpec, MixerSpec, NormSpec
from ..tensor_ref import TensorRef
from .hybrids import DELTA_NET_MODULES, conv_taps, gated_queries, qwen_attention, qwen_delta_net, qwen_layers
from .listing import Listing
from .names import PRE_NORMS, llama_names
from .parts import decoder, gated_mlp

ARCHITECTURES = {"Qwen3NextForCausalLM": Listing("Qwen3-Next, without its MTP layer", refused="experts")}


def describe(architecture: str, config: ConfigReader, max_model_len: int | None) -> ModelDescription:
    """Qwen3-Next without experts. MTP layers are left out."""
    norm = NormSpec("rms", config.number("rms_norm_eps", 1e-6), unit_offset=True)
    heads, rope = qwen_attention(config, norm, max_model_len)
    net, mlp = qwen_delta_net(config), BranchSpec(gated_mlp(config), norm)
    mixers: dict[str, MixerSpec] = {"full_attention": heads, "linear_attention": net}
    layers = tuple((BranchSpec(mixers[kind], norm), mlp) for kind in qwen_layers(config))
    names = llama_names({**PRE_NORMS, **DELTA_NET_MODULES})
    refs = {**gated_queries(heads), **_of_key_heads(net), "delta_conv": conv_taps("linear_attn.conv1d")}
    return names.describe(decoder(config, "qwen3_next", layers, norm, rope.max_positions), refs)


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
