"""Parts of a decoder that many families share, built from config fields with the same names."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import replace

from ...errors import ModelError
from ..config import ConfigReader
from ..rope import Rope, rope_from_config
from ..spec import (
    Activation,
    AttentionSpec,
    DecoderSpec,
    EmbeddingSpec,
    HeadSpec,
    LayerSpec,
    MlpSpec,
    NormSpec,
    PerLayerEmbeddingSpec,
    ResidualBlockSpec,
    StreamsSpec,
)

MAX_HEAD_DIM = 2**14  # bounds rope's table, which is made before any tensor's shape is checked
_MAX_ALIBI_HEADS = 2**14  # bounds the slopes, which are made before any tensor's shape is checked
_LAYER_TYPES = ("full_attention", "sliding_attention")


def attention(config: ConfigReader, *, qkv_bias: bool = False, out_bias: bool = False) -> AttentionSpec:
    """Attention without positions. By default each query head has a KV head, and the head dim is hidden size / heads.

    Raises ModelError for numbers that do not divide each other.
    """
    num_heads = config.integer("num_attention_heads")
    num_kv_heads = config.integer("num_key_value_heads", num_heads)
    head_dim = config.optional_integer("head_dim")
    if head_dim is None:
        hidden = config.integer("hidden_size")
        if hidden % num_heads:
            raise ModelError(
                f"config.json: hidden_size {hidden} is not a multiple of num_attention_heads {num_heads}, "
                "and head_dim is not given"
            )
        head_dim = hidden // num_heads
    if num_heads % num_kv_heads:
        raise ModelError(f"config.json: num_key_value_heads {num_kv_heads} must divide num_attention_heads {num_heads}")
    if head_dim > MAX_HEAD_DIM:
        raise ModelError(f"config.json: a head has {head_dim} dimensions, more than the {MAX_HEAD_DIM} it may have")
    return AttentionSpec(num_heads, num_kv_heads, head_dim, head_dim**-0.5, qkv_bias=qkv_bias, out_bias=out_bias)


def gated_mlp(config: ConfigReader, activation: Activation | None = None, *, bias: bool = False) -> MlpSpec:
    """A gated MLP of `intermediate_size`. Without an `activation` it is the config's `hidden_act`, else SiLU."""
    activation = activation or config.activation("hidden_act", "silu")
    return MlpSpec(config.integer("intermediate_size"), activation, gated=True, bias=bias)


def uniform_layers(config: ConfigReader, layer_type: str = "full_attention") -> int:
    """How many layers there are, all of one type. Raises ModelError if `layer_types` says otherwise."""
    num_layers, layer_types = config.num_layers("num_hidden_layers"), config.raw("layer_types")
    if layer_types is not None and layer_types != [layer_type] * num_layers:
        raise ModelError(f"config.json: layer_types other than {layer_type!r} are not supported for this architecture")
    return num_layers


def layer_windows(
    config: ConfigReader, window: int | None, is_sliding: Callable[[int], bool]
) -> tuple[int | None, ...]:
    """Each layer's window: `window` in sliding layers. `layer_types` name these, or else `is_sliding` of the index.

    Raises ModelError for a sliding layer without a window.
    """
    num_layers, layer_types = config.num_layers("num_hidden_layers"), config.raw("layer_types")
    if layer_types is None:
        sliding = [is_sliding(i) for i in range(num_layers)]
    elif (
        not isinstance(layer_types, list)
        or len(layer_types) != num_layers
        or any(t not in _LAYER_TYPES for t in layer_types)
    ):
        raise config.error("layer_types", f"a list of {num_layers} entries, each one of {', '.join(_LAYER_TYPES)}")
    else:
        sliding = [t == "sliding_attention" for t in layer_types]
    if window is None and any(sliding):
        raise ModelError("config.json: a layer is of type sliding_attention, but no sliding window is in use")
    return tuple(window if s else None for s in sliding)


def with_windows(mixer: AttentionSpec, windows: Iterable[int | None]) -> tuple[AttentionSpec, ...]:
    """The same attention in layers of these windows."""
    return tuple(replace(mixer, sliding_window=window) for window in windows)


def rope_of_layer_type(
    config: ConfigReader, layer_type: str, theta_name: str, theta: float, head_dim: int, max_model_len: int | None
) -> Rope:
    """The rope of one layer type: of its entry in `rope_parameters`, or `rope_scaling` (full layers) and a theta."""
    by_type = config.with_defaults(rope_parameters={}).raw("rope_parameters")
    if not isinstance(by_type, dict) or not all(isinstance(entry, dict) for entry in by_type.values()):
        raise config.error("rope_parameters", "an object with an object for each layer type")
    scaling = config.raw("rope_scaling") if layer_type == "full_attention" else None
    if scaling and by_type.get(layer_type):
        raise ModelError("config.json: rope_scaling beside rope_parameters is not supported for this architecture")
    fields = {"rope_scaling": scaling, "rope_parameters": by_type.get(layer_type)}
    theta = config.number(theta_name, theta)
    return rope_from_config(config.with_fields(**fields, rope_theta=theta), head_dim, max_model_len)


def alibi_slopes(config: ConfigReader, name: str) -> tuple[float, ...]:
    """ALiBi's slopes, `2 ** (-8 i / n)` for head i of n (https://arxiv.org/abs/2108.12409). `name` is the field of n.

    If the number of heads is not a power of two, n is the next power of two. Every second of its slopes comes first.
    """
    num_heads = config.integer(name)
    if num_heads > _MAX_ALIBI_HEADS:
        raise config.error(name, f"at most {_MAX_ALIBI_HEADS}")
    power = 2 ** math.ceil(math.log2(num_heads))
    slopes = [2.0 ** (-8 * i / power) for i in range(1, power + 1)]
    if power != num_heads:
        slopes = slopes[1::2] + slopes[::2]
    return tuple(slopes[:num_heads])


def pre_norm_layers(attentions: Iterable[AttentionSpec], mlp: MlpSpec, norm: NormSpec) -> tuple[LayerSpec, ...]:
    """Layers of attention and MLP, each after a norm."""
    return tuple((ResidualBlockSpec(mixer, norm), ResidualBlockSpec(mlp, norm)) for mixer in attentions)


def decoder(
    config: ConfigReader,
    family: str,
    layers: tuple[LayerSpec, ...],
    final_norm: NormSpec,
    max_positions: int,
    *,
    tied: bool = False,
    embedding_scale: float = 1.0,
    softcap: float | None = None,
    divisor: float = 1.0,
    head_bias: bool = False,
    per_layer: PerLayerEmbeddingSpec | None = None,
    streams: StreamsSpec | None = None,
) -> DecoderSpec:
    """A decoder around `layers`. `tied` is the default of `tie_word_embeddings`.

    `softcap`, `divisor` and `head_bias` are the head's.
    """
    hidden = config.integer("hidden_size")
    return DecoderSpec(
        family=family,
        vocab_size=config.integer("vocab_size"),
        hidden_size=hidden,
        max_positions=max_positions,
        embedding=EmbeddingSpec(hidden, scale=embedding_scale, per_layer=per_layer),
        layers=layers,
        final_norm=final_norm,
        head=HeadSpec(config.flag("tie_word_embeddings", tied), softcap, divisor, head_bias),
        streams=streams,
    )
