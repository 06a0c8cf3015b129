"""EAGLE3 checkpoints: a layer for drafts that was trained for another model, as its config describes it.

They come as LlamaForCausalLMEagle3 of https://github.com/SafeAILab/EAGLE and of those who train with it, and as
speculators (https://github.com/vllm-project/speculators), whose config has the layer's in `transformer_layer_config`.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

from ..errors import ModelError
from ..files.wording import shown
from . import describe
from .config import ConfigReader
from .spec import AttentionSpec, DecoderSpec, Eagle3Spec
from .spec.shapes import under

_ARCHITECTURES = (
    *("LlamaForCausalLMEagle3", "Eagle3LlamaForCausalLM", "Eagle3Speculator", "Eagle3DraftModel"),
    "LlamaForCausalLM",  # of the authors' first checkpoints, which have a draft_vocab_size
)
_FEWEST_LAYERS = 4  # of a model, where the config does not say which are watched
_LAYER = "model.layers.0."


@dataclass(frozen=True, slots=True)
class Eagle3Place:
    """Where a weight lies: in the columns `[begin, end)`, or all, of the tensor `name`."""

    name: str
    columns: tuple[int, int] | None = None


@dataclass(frozen=True, slots=True)
class Eagle3Description:
    """The layer, without its token ids, and where its weights are: from the names of `tensor_shapes`."""

    spec: Eagle3Spec
    places: Mapping[str, Eagle3Place]


def describe_eagle3(config: Mapping[str, Any], target: DecoderSpec, names: Collection[str]) -> Eagle3Description:
    """The layer that a config describes, for the model `target`. `names` are the names of the checkpoint's tensors.

    Raises ModelError for a layer that is not supported, or was made for another model.
    """
    reader = ConfigReader(config)
    _require_eagle3(reader)
    whole = _layer_config(config)
    layer = ConfigReader(whole)
    _require_fitting(layer, target)
    if layer.integer("num_hidden_layers", 1) != 1:
        raise layer.error("num_hidden_layers", "1: layers behind the first are not supported")
    alone = {**whole, "architectures": ["LlamaForCausalLM"], "model_type": "llama", "num_hidden_layers": 1}
    described = describe(alone)
    attention, mlp = described.spec.layers[0]
    norm = mlp.norm
    assert isinstance(attention.mixer, AttentionSpec)
    assert norm is not None
    size = described.spec.hidden_size
    watched = _watched(reader, len(target.layers))
    spec = Eagle3Spec(
        hidden_size=size,
        vocab_size=reader.integer("draft_vocab_size", target.vocab_size),
        layers=watched,
        embedding_norm=norm,
        hidden_norm=norm,
        attention=attention.mixer,
        mlp=mlp,
        final_norm=norm,
        adds_normed=reader.flag("norm_before_residual", False),
        own_embedding="embed_tokens.weight" in names,
    )
    if not spec.own_embedding and size != target.hidden_size:
        sizes = f"its hidden size is {size} and the model's {target.hidden_size}"
        raise ModelError(f"{sizes}: it needs embed_tokens.weight")
    at = "midlayer." if any(name.startswith("midlayer.") for name in names) else "layers.0."
    top = {
        "eagle3.embed.weight": Eagle3Place("embed_tokens.weight"),
        "eagle3.embedding_norm.weight": Eagle3Place(f"{at}input_layernorm.weight"),
        "eagle3.hidden_norm.weight": Eagle3Place(f"{at}hidden_norm.weight"),
        "eagle3.final_norm.weight": Eagle3Place("norm.weight"),
        "eagle3.head.weight": Eagle3Place("lm_head.weight"),
    }
    for i in range(len(watched)):
        columns = i * target.hidden_size, (i + 1) * target.hidden_size
        top[f"eagle3.fuse.{i}.weight"] = Eagle3Place("fc.weight", columns)
    places = {}
    for name in under("eagle3", spec.shapes(target.hidden_size, target.vocab_size)):
        if name in top:
            places[name] = top[name]
            continue
        ref = described.tensors[f"layers.0.{name.removeprefix('eagle3.layer.')}"]
        places[name] = Eagle3Place(at + ref.name.removeprefix(_LAYER))
    return Eagle3Description(spec, places)


def _require_eagle3(config: ConfigReader) -> None:
    architectures = config.raw("architectures")
    name = architectures[0] if isinstance(architectures, list) and architectures else None
    is_plain = name == "LlamaForCausalLM" and config.raw("draft_vocab_size") is None
    if name not in _ARCHITECTURES or is_plain:
        raise ModelError(
            f"{shown(name)} is not an EAGLE3 checkpoint of a kind that is supported: take one of "
            f"{', '.join(_ARCHITECTURES[:-1])}"
        )
    config.refuse("norm_before_fc", False)
    config.refuse("parallel_drafting", False)
    eagle = config.raw("eagle_config")
    if isinstance(eagle, Mapping):
        ConfigReader(eagle, "config.json: eagle_config").refuse("use_aux_hidden_state", True)


def _layer_config(config: Mapping[str, Any]) -> dict[str, Any]:
    """The config of the layer itself, in the words of a Llama."""
    layer = config.get("transformer_layer_config")
    if layer is None:
        return dict(config)
    if not isinstance(layer, Mapping):
        raise ConfigReader(config).error("transformer_layer_config", "the config of a layer")
    return {**layer, **({"target_hidden_size": size} if (size := config.get("target_hidden_size")) else {})}


def _require_fitting(layer: ConfigReader, target: DecoderSpec) -> None:
    kind = layer.raw("model_type")
    if kind not in (None, "llama"):
        raise ModelError(f"its layer is of the type {shown(kind)}; supported are those of llama")
    made_for = layer.integer("target_hidden_size", layer.integer("hidden_size"))
    vocab = layer.integer("vocab_size")
    if (made_for, vocab) != (target.hidden_size, target.vocab_size):
        raise ModelError(
            f"it was made for a model of hidden size {made_for} with {vocab} tokens, and this one has "
            f"{target.hidden_size} and {target.vocab_size}"
        )


def _watched(config: ConfigReader, num_layers: int) -> tuple[int, ...]:
    """Before which layers of the model its rows are taken: low, middle and high ones unless the config names them."""
    field, offset, eagle = "eagle_aux_hidden_state_layer_ids", 0, config.raw("eagle_config")
    ids = config.raw(field)
    if not ids and isinstance(eagle, Mapping):
        ids, offset = eagle.get(field), 1  # there, rows are taken behind the named layers
    if not ids:
        if num_layers < _FEWEST_LAYERS:
            raise ModelError(f"config.json must name {field} for a model of {num_layers} layers")
        return (2, num_layers // 2, num_layers - 3)
    if not isinstance(ids, list) or not all(type(i) is int and 0 <= i + offset <= num_layers for i in ids):
        raise ModelError(f"config.json: {field} must be numbers of the model's {num_layers} layers, got {shown(ids)}")
    return tuple(i + offset for i in ids)
