"""Qwen3-Next (https://qwen.ai/blog?id=qwen3-next): three delta nets to one attention with an output gate."""

from __future__ import annotations

from ..config import ConfigReader
from ..description import ModelDescription
from ..spec import BranchSpec, DeltaNetSpec, ExpertsSpec, MixerSpec, MlpSpec, NormSpec, RouterSpec
from ..tensor_ref import TensorRef
from .expert_parts import EXPERT_NORMS, QWEN_EXPERTS, expert_count, experts_per_token, shared_expert, sparse_layers
from .hybrids import DELTA_NET_MODULES, conv_taps, gated_queries, qwen_attention, qwen_delta_net, qwen_layers
from .listing import Listing
from .names import llama_names
from .parts import decoder, gated_mlp

ARCHITECTURES = {"Qwen3NextForCausalLM": Listing("Qwen3-Next, without its MTP layer")}

_MODULES = {
    **EXPERT_NORMS,
    **QWEN_EXPERTS,
    **shared_expert("mlp.shared_expert"),
    "shared_gate": "mlp.shared_expert_gate",
    **DELTA_NET_MODULES,
}


def describe(architecture: str, config: ConfigReader, max_model_len: int | None) -> ModelDescription:
    """Qwen3-Next. MTP layers are left out."""
    config = config.with_defaults(num_key_value_heads=2)
    norm = NormSpec("rms", config.number("rms_norm_eps", 1e-6), unit_offset=True)
    heads, rope = qwen_attention(config, norm, max_model_len)
    net = qwen_delta_net(config)
    mixers: dict[str, MixerSpec] = {"full_attention": heads, "linear_attention": net}
    layers = tuple(
        (BranchSpec(mixers[kind], norm), BranchSpec(mlp, norm))
        for kind, mlp in zip(qwen_layers(config), _mlps(config), strict=True)
    )
    names = llama_names(_MODULES)
    refs = {**gated_queries(heads), **_of_key_heads(net), "delta_conv": conv_taps("linear_attn.conv1d")}
    return names.describe(decoder(config, "qwen3_next", layers, norm, rope.max_positions), refs)


def _mlps(config: ConfigReader) -> list[MixerSpec]:
    """Experts or an MLP of each layer."""
    num_layers = config.num_layers("num_hidden_layers")
    if config.raw("num_experts") == 0:
        return [gated_mlp(config)] * num_layers
    config = config.with_defaults(num_experts=512, num_experts_per_tok=10)
    num_experts = expert_count(config, "num_experts")
    experts = ExpertsSpec(
        num_experts,
        experts_per_token(config, num_experts),
        config.integer("moe_intermediate_size", 512),
        router=RouterSpec(normalize=config.flag("norm_topk_prob", True)),
        shared=MlpSpec(config.integer("shared_expert_intermediate_size", 512), "silu", gated=True),
        shared_gate=True,
    )
    has_experts = sparse_layers(config)
    return [experts if has_experts(layer) else gated_mlp(config) for layer in range(num_layers)]


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
