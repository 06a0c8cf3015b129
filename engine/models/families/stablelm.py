"""StableLM (https://arxiv.org/abs/2402.17834): Llama with LayerNorm and a quarter of each head rotated."""

from __future__ import annotations

from dataclasses import replace

from ..config import ConfigReader
from ..description import ModelDescription
from ..rope import rope_from_config
from ..spec import LayerSpec, NormSpec, ParallelSpec, ResidualBlockSpec
from ..tensor_ref import TensorRef
from .listing import Listing
from .names import PRE_NORMS, llama_names
from .parts import attention, decoder, gated_mlp, uniform_layers

ARCHITECTURES = {"StableLmForCausalLM": Listing("StableLM")}


def describe(architecture: str, config: ConfigReader, max_model_len: int | None) -> ModelDescription:
    """StableLM. In parallel residuals attention and MLP share a norm. Each head may have norms of its own."""
    config = config.with_fields(head_dim=None).with_defaults(num_key_value_heads=32, partial_rotary_factor=0.25)
    heads = attention(config, qkv_bias=config.flag("use_qkv_bias", False))
    rope = rope_from_config(config, heads.head_dim, max_model_len)
    norm = NormSpec("layer", config.number("layer_norm_eps", 1e-5), bias=True)
    mixer, mlp, norms = replace(heads, rope=rope.spec), gated_mlp(config), {}
    if config.flag("qk_layernorm", False):
        mixer = replace(mixer, qk_norm=replace(norm, bias=False), qk_norm_over="each")
        norms = {"q_norm": _by_head("q", heads.num_heads), "k_norm": _by_head("k", heads.num_kv_heads)}
    layer: LayerSpec = (ResidualBlockSpec(mixer, norm), ResidualBlockSpec(mlp, norm))
    if config.flag("use_parallel_residual", False):
        layer = (ResidualBlockSpec(ParallelSpec((ResidualBlockSpec(mixer), ResidualBlockSpec(mlp))), norm),)
    spec = decoder(config, "stablelm", (layer,) * uniform_layers(config), norm, rope.max_positions)
    return llama_names({**PRE_NORMS, "parallel_norm": "input_layernorm"}).describe(spec, norms)


def _by_head(name: str, num_heads: int) -> TensorRef:
    """The weights of a norm for each head, one after the other."""
    heads = [TensorRef(f"self_attn.{name}_layernorm.norms.{head}") for head in range(num_heads)]
    return replace(heads[0], stack=tuple(heads[1:]))
