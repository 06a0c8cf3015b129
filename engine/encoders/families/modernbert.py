"""ModernBERT (https://arxiv.org/abs/2412.13663): norms before the blocks, rope, windows in two of three layers."""

from __future__ import annotations

from dataclasses import replace

from ...models.config import ConfigReader
from ...models.families.parts import layer_windows, rope_of_layer_type
from ...models.module_tensors import fused_qkv
from ...models.spec import MlpSpec, NormSpec, ResidualBlockSpec
from ...models.tensor_ref import TensorRef
from ..model import EmbeddingSpec, EncoderModel
from .parts import Layout, Modules, encoder, head, head_modules, two_way

_MODULES = {
    "words": "embeddings.tok_embeddings.weight",
    "embedding_norm": "embeddings.norm",
    "o": "attn.Wo",
    "attention_norm": "attn_norm",
    "down": "mlp.Wo",
    "mlp_norm": "mlp_norm",
    "final_norm": "final_norm",
    "head.dense": "head.dense",
    "head.norm": "head.norm",
}
_CLASSIFIER = {"head.out": "classifier"}
_WORDS = {"head.out": "decoder"}


def model(architecture: str, config: ConfigReader) -> EncoderModel:
    """ModernBERT. The first layer's attention takes the rows as they are, which are normalized already."""
    norm = NormSpec("layer", config.number("norm_eps", 1e-5), bias=config.flag("norm_bias", False))
    attention = two_way(config, bias=config.flag("attention_bias", False))
    size, bias = config.integer("intermediate_size", 1152), config.flag("mlp_bias", False)
    mlp = MlpSpec(size, config.activation("hidden_activation", "gelu"), gated=True, bias=bias)
    every = config.integer("global_attn_every_n_layers", 3)
    # Half a window before a token, half a window behind it, and itself.
    window = config.integer("local_attention", 128) // 2 + 1
    config = config.with_defaults(max_position_embeddings=8192)
    full = rope_of_layer_type(config, "full_attention", "global_rope_theta", 160_000.0, attention.head_dim, None)
    near = rope_of_layer_type(config, "sliding_attention", "local_rope_theta", 10_000.0, attention.head_dim, None)
    layers = tuple(
        (
            ResidualBlockSpec(
                replace(attention, sliding_window=window, rope=(near if window else full).spec), norm if index else None
            ),
            ResidualBlockSpec(mlp, norm),
        )
        for index, window in enumerate(layer_windows(config, window, lambda index: index % every != 0))
    )
    inner = {
        f"{name}.{kind}": TensorRef(f"mlp.Wi.{kind}", rows=rows)
        for kind in ("weight", "bias")
        for name, rows in (("gate", (0, size)), ("up", (size, 2 * size)))
    }
    pooling = config.raw("classifier_pooling")
    if pooling not in (None, "cls", "mean"):
        raise config.error("classifier_pooling", "cls or mean")
    modules: Modules = {**_MODULES, **fused_qkv("attn.Wqkv", attention.q_size), **inner}
    activation = config.activation("classifier_activation", "gelu")
    own = head(
        architecture,
        config,
        activation,
        "mean" if pooling == "mean" else "cls",
        norm,
        words=(activation, norm),
        same=True,
    )
    if own is not None and own.of == "words":
        own = replace(own, out_bias=config.flag("decoder_bias", True))
    return encoder(
        config.integer("hidden_size", 768),
        layers,
        EmbeddingSpec(config.integer("vocab_size"), norm=norm),
        [
            Layout(
                {**modules, **head_modules(architecture, _CLASSIFIER, _CLASSIFIER, _WORDS)}, "layers.", ("", "model.")
            )
        ],
        head=own,
        head_bias=config.flag("classifier_bias", False),
        final_norm=norm,
        max_length=min(full.max_positions, near.max_positions),
    )
