"""Qwen2 and Qwen2.5 (https://arxiv.org/abs/2407.10671): Llama with biases on the query, key and value projections."""

from __future__ import annotations

from ..errors import ModelError
from .config import ConfigReader
from .description import ModelDescription
from .llama import describe_llama_like

ARCHITECTURES = ("Qwen2ForCausalLM",)


def describe(architecture: str, config: ConfigReader, max_model_len: int | None) -> ModelDescription:
    """Qwen2."""
    return describe_llama_like(
        config,
        family="qwen2",
        head_dim=config.optional_integer("head_dim"),
        qkv_bias=True,
        out_bias=False,
        mlp_bias=False,
        qk_norm=False,
        windows=sliding_windows(config),
        max_model_len=max_model_len,
    )


def sliding_windows(config: ConfigReader) -> tuple[int | None, ...]:
    """Each layer's window: by `layer_types`, else the layers from `max_window_layers` on where windows are used."""
    num_layers = config.num_layers("num_hidden_layers")
    window = None
    # A null window where the field is present means none even though windows are asked for.
    if config.flag("use_sliding_window", False) and ("sliding_window" not in config or config.raw("sliding_window")):
        window = config.integer("sliding_window", 4096)
    layer_types = config.raw("layer_types")
    if layer_types is None:
        first = config.raw("max_window_layers")
        first = 28 if first is None else first
        if isinstance(first, bool) or not isinstance(first, int) or first < 0:
            raise config.error("max_window_layers", "an integer of at least 0")
        return tuple(window if i >= first else None for i in range(num_layers))
    known = ("full_attention", "sliding_attention")
    if not isinstance(layer_types, list) or len(layer_types) != num_layers or any(t not in known for t in layer_types):
        raise config.error("layer_types", f"a list of {num_layers} entries, each one of {', '.join(known)}")
    if window is None and "sliding_attention" in layer_types:
        raise ModelError("config.json: layer_types has sliding_attention, but no sliding window is in use")
    return tuple(window if t == "sliding_attention" else None for t in layer_types)
