"""Llama (https://arxiv.org/abs/2302.13971, https://arxiv.org/abs/2407.21783) and Mistral, which differ in the window.

SmolLM is a Llama. Qwen2 and Qwen3 have the same skeleton and are described through `describe_llama_like`.
"""

from __future__ import annotations

from ..errors import ModelError
from .config import ConfigReader
from .description import ModelDescription
from .rope import rope_from_config
from .spec import (
    AttentionSpec,
    BranchSpec,
    DecoderSpec,
    EmbeddingSpec,
    HeadSpec,
    MlpSpec,
    NormSpec,
    tensor_shapes,
)
from .tensor_ref import TensorRef

ARCHITECTURES = ("LlamaForCausalLM", "MistralForCausalLM")

_MISTRAL_DEFAULT_WINDOW = 4096
_MAX_HEAD_DIM = 2**14  # rope's table has half as many entries, which are made before a tensor could contradict

# Tidewheel's module to the checkpoint's, below "model.layers.N."
_MODULES = {
    "attention_norm": "input_layernorm",
    "q": "self_attn.q_proj",
    "k": "self_attn.k_proj",
    "v": "self_attn.v_proj",
    "o": "self_attn.o_proj",
    "q_norm": "self_attn.q_norm",
    "k_norm": "self_attn.k_norm",
    "mlp_norm": "post_attention_layernorm",
    "gate": "mlp.gate_proj",
    "up": "mlp.up_proj",
    "down": "mlp.down_proj",
}


def describe(architecture: str, config: ConfigReader, max_model_len: int | None) -> ModelDescription:
    """Llama or Mistral. A Mistral config without `sliding_window` has one of 4096; null is none."""
    num_layers = config.num_layers("num_hidden_layers")
    if architecture == "LlamaForCausalLM":
        attention_bias, mlp_bias = config.flag("attention_bias", False), config.flag("mlp_bias", False)
        window = None
    else:
        attention_bias = mlp_bias = False
        window = config.optional_integer("sliding_window") if "sliding_window" in config else _MISTRAL_DEFAULT_WINDOW
    layer_type = "full_attention" if window is None else "sliding_attention"
    layer_types = config.raw("layer_types")
    if layer_types is not None and layer_types != [layer_type] * num_layers:
        raise ModelError(f"config.json: layer_types other than {layer_type!r} are not supported for {architecture}")
    return describe_llama_like(
        config,
        family="llama" if architecture == "LlamaForCausalLM" else "mistral",
        head_dim=config.optional_integer("head_dim"),
        qkv_bias=attention_bias,
        out_bias=attention_bias,
        mlp_bias=mlp_bias,
        qk_norm=False,
        windows=(window,) * num_layers,
        max_model_len=max_model_len,
    )


def describe_llama_like(
    config: ConfigReader,
    *,
    family: str,
    head_dim: int | None,
    qkv_bias: bool,
    out_bias: bool,
    mlp_bias: bool,
    qk_norm: bool,
    windows: tuple[int | None, ...],
    max_model_len: int | None,
) -> ModelDescription:
    """A pre-norm decoder with RMSNorm, rope and a gated MLP. `windows` has the sliding window of each layer.

    `head_dim` None is the hidden size divided by the heads.
    """
    hidden, num_heads = config.integer("hidden_size"), config.integer("num_attention_heads")
    num_kv_heads = config.integer("num_key_value_heads", num_heads)
    if head_dim is None:
        if hidden % num_heads:
            raise ModelError(
                f"config.json: hidden_size {hidden} is not a multiple of num_attention_heads {num_heads}, "
                "and head_dim is not given"
            )
        head_dim = hidden // num_heads
    if num_heads % num_kv_heads:
        raise ModelError(f"config.json: num_key_value_heads {num_kv_heads} must divide num_attention_heads {num_heads}")
    if head_dim > _MAX_HEAD_DIM:
        raise ModelError(f"config.json: a head has {head_dim} dimensions, more than the {_MAX_HEAD_DIM} it may have")
    rope = rope_from_config(config, head_dim, max_model_len)
    norm = NormSpec("rms", config.number("rms_norm_eps", 1e-6))
    activation = config.activation("hidden_act", "silu")
    mlp = MlpSpec(config.integer("intermediate_size"), activation, gated=True, bias=mlp_bias)
    layers = tuple(
        (
            BranchSpec(
                AttentionSpec(
                    num_heads=num_heads,
                    num_kv_heads=num_kv_heads,
                    head_dim=head_dim,
                    scale=head_dim**-0.5,
                    qkv_bias=qkv_bias,
                    out_bias=out_bias,
                    qk_norm=norm if qk_norm else None,
                    rope=rope.spec,
                    sliding_window=window,
                ),
                norm,
            ),
            BranchSpec(mlp, norm),
        )
        for window in windows
    )
    spec = DecoderSpec(
        family=family,
        vocab_size=config.integer("vocab_size"),
        hidden_size=hidden,
        max_positions=rope.max_positions,
        embedding=EmbeddingSpec(size=hidden),
        layers=layers,
        final_norm=norm,
        head=HeadSpec(tied=config.flag("tie_word_embeddings", False)),
    )
    return ModelDescription(spec, {name: _reference(name) for name in tensor_shapes(spec)}, base_prefix="model.")


def _reference(name: str) -> TensorRef:
    if name == "head.weight":
        return TensorRef("lm_head.weight")
    if name == "embed.weight":
        return TensorRef("model.embed_tokens.weight")
    if name == "final_norm.weight":
        return TensorRef("model.norm.weight")
    _, layer, module, kind = name.split(".")
    return TensorRef(f"model.layers.{layer}.{_MODULES[module]}.{kind}")
