"""Adapter folders that are written by hand, for a Llama of any size."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from safetensors.numpy import save_file

CONFIG = {"peft_type": "LORA", "r": 4, "lora_alpha": 8, "target_modules": ["q_proj", "v_proj"], "bias": "none"}


def tensors(seed: int = 0, *, hidden: int = 64, kv: int = 32, layers: int = 2, rank: int = 4) -> dict[str, Any]:
    """A and B of the queries and values of all layers."""
    random = np.random.default_rng(seed)
    found = {}
    for layer in range(layers):
        for module, outputs in (("q_proj", hidden), ("v_proj", kv)):
            name = f"base_model.model.model.layers.{layer}.self_attn.{module}"
            found[f"{name}.lora_A.weight"] = random.standard_normal((rank, hidden)).astype(np.float32)
            found[f"{name}.lora_B.weight"] = random.standard_normal((outputs, rank)).astype(np.float32)
    return found


def contents(folder: Path) -> dict[str, bytes]:
    """The files of a folder, for a hub."""
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def embedding(seed: int, *, hidden: int = 64, vocab: int = 320, rank: int = 4) -> dict[str, Any]:
    """A and B of the embedding."""
    name = "base_model.model.model.embed_tokens.lora_embedding"
    return {f"{name}_A": _random(seed, rank, vocab), f"{name}_B": _random(seed + 1, hidden, rank)}


def biases(seed: int, *modules: str, hidden: int = 64, kv: int = 32, layers: int = 2) -> dict[str, Any]:
    """Biases of some modules of all layers, by default of the values'."""
    found = {}
    for layer in range(layers):
        for module in modules or ("self_attn.v_proj",):
            outputs = kv if module.endswith(("k_proj", "v_proj")) else hidden
            found[f"base_model.model.model.layers.{layer}.{module}.bias"] = _random(seed + layer, outputs)
    return found


def head(seed: int, *, hidden: int = 64, vocab: int = 320, rank: int = 3) -> dict[str, Any]:
    """A and B of the head."""
    name = "base_model.model.lm_head.lora"
    return {f"{name}_A.weight": _random(seed, rank, hidden), f"{name}_B.weight": _random(seed + 1, vocab, rank)}


def embedding_of_its_own(seed: int) -> dict[str, Any]:
    """A whole embedding."""
    return {"base_model.model.model.embed_tokens.weight": _random(seed, 320, 64)}


def head_of_its_own(seed: int) -> dict[str, Any]:
    """A whole head."""
    return {"base_model.model.lm_head.weight": _random(seed, 320, 64)}


def _random(seed: int, *shape: int) -> NDArray[np.float32]:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def write(folder: Path, content: Mapping[str, NDArray[Any]] | None = None, **config: Any) -> Path:
    """An adapter in `folder`; fields of its config that are None are left out."""
    folder.mkdir(parents=True, exist_ok=True)
    fields = {key: value for key, value in {**CONFIG, **config}.items() if value is not None}
    (folder / "adapter_config.json").write_text(json.dumps(fields))
    save_file(dict(tensors() if content is None else content), folder / "adapter_model.safetensors")
    return folder
