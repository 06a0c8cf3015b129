"""Tiny random models of families whose code lies beside their weights: models of transformers with other names."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import models_zoo
import numpy as np
from numpy.typing import NDArray
from safetensors.numpy import save_file

_INTERNLM2 = {
    "embed_tokens": "tok_embeddings",
    "lm_head": "output",
    "self_attn.o_proj": "attention.wo",
    "mlp.gate_proj": "feed_forward.w1",
    "mlp.up_proj": "feed_forward.w3",
    "mlp.down_proj": "feed_forward.w2",
    "input_layernorm": "attention_norm",
    "post_attention_layernorm": "ffn_norm",
}
_MINICPM = models_zoo.Case(
    "granite",
    {
        **models_zoo._LLAMA,
        "rms_norm_eps": 1e-4,
        "attention_multiplier": 0.25,
        "embedding_multiplier": 6.0,
        "residual_multiplier": 1.4 / 2**0.5,
        "logits_scaling": 4.0,
        "tie_word_embeddings": True,
    },
)
_Tensors = dict[str, NDArray[np.float32]]


def _internlm2(model: Any) -> tuple[dict[str, Any], _Tensors]:
    """Llama with one matrix for q, k and v."""
    config, state = model.config, {name: tensor.numpy() for name, tensor in model.state_dict().items()}
    for layer in range(config.num_hidden_layers):
        prefix = f"model.layers.{layer}.self_attn"
        parts = [state.pop(f"{prefix}.{part}_proj.weight") for part in "qkv"]
        by_kv_head = [part.reshape(config.num_key_value_heads, -1, config.hidden_size) for part in parts]
        fused = np.concatenate(by_kv_head, axis=1).reshape(-1, config.hidden_size)
        state[f"model.layers.{layer}.attention.wqkv.weight"] = fused
    for theirs, name in _INTERNLM2.items():
        state = {stored.replace(theirs, name): data for stored, data in state.items()}
    return {**config.to_dict(), "architectures": ["InternLM2ForCausalLM"], "bias": False}, state


def _minicpm(model: Any) -> tuple[dict[str, Any], _Tensors]:
    """Granite with other multipliers."""
    state = {name: tensor.numpy() for name, tensor in model.state_dict().items() if name != "lm_head.weight"}
    multipliers = {"scale_emb": 6, "scale_depth": 1.4, "dim_model_base": 16}
    return {**model.config.to_dict(), **multipliers, "architectures": ["MiniCPMForCausalLM"]}, state


_MODELS: dict[str, tuple[models_zoo.Case, Callable[[Any], tuple[dict[str, Any], _Tensors]]]] = {
    "internlm2": (models_zoo.CASES["llama"], _internlm2),
    "minicpm": (_MINICPM, _minicpm),
}
NAMES = tuple(_MODELS)


@functools.cache
def model(name: str) -> Any:
    """The transformers model that computes the same."""
    return models_zoo.build(_MODELS[name][0])


@functools.cache
def folder(name: str) -> Path:
    """A model folder: config.json and model.safetensors, as its authors call things."""
    path = models_zoo.new_folder(name)
    config, state = _MODELS[name][1](model(name))
    save_file({name: np.ascontiguousarray(data) for name, data in state.items()}, path / "model.safetensors")
    (path / "config.json").write_text(json.dumps(config), "utf-8")
    return path
