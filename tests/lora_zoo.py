"""Random LoRA adapters for the zoo's models, made with peft in a temporary folder, and what peft computes with them."""

from __future__ import annotations

import atexit
import copy
import functools
import shutil
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import models_zoo
import numpy as np
from numpy.typing import NDArray

RANK = 6

_root = Path(tempfile.mkdtemp(prefix="tidewheel-lora-"))
atexit.register(shutil.rmtree, _root, ignore_errors=True)


@functools.cache
def _peft_model(name: str, seed: int, fields: tuple[tuple[str, Any], ...]) -> Any:
    return adapted(copy.deepcopy(models_zoo.model(name)), seed, fields)


def adapted(model: Any, seed: int = 0, fields: tuple[tuple[str, Any], ...] = ()) -> Any:
    """The model with a random adapter."""
    import torch
    from peft import LoraConfig, get_peft_model

    config: dict[str, Any] = {"r": RANK, "lora_alpha": 2 * RANK, "target_modules": "all-linear", **dict(fields)}
    config = {key: dict(value) if key.endswith("pattern") else value for key, value in config.items()}
    config = {key: list(value) if isinstance(value, tuple) else value for key, value in config.items()}
    model = get_peft_model(model, LoraConfig(task_type="CAUSAL_LM", **config))
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for key, weight in model.named_parameters():
            if "lora_" in key:
                weight.copy_(torch.randn(weight.shape, generator=generator) / max(weight.shape) ** 0.5)
            elif "modules_to_save" in key:
                weight.add_(torch.randn(weight.shape, generator=generator) * weight.std() / 2)
            elif weight.requires_grad and model.get_submodule(key.rpartition(".")[0]).weight.ndim == 2:
                weight.add_(torch.randn(weight.shape, generator=generator))  # the bias of a linear layer
    return model.eval()


def _items(fields: dict[str, Any]) -> tuple[tuple[str, Any], ...]:
    return tuple((key, tuple(value.items()) if isinstance(value, dict) else value) for key, value in fields.items())


def folder(name: str, seed: int = 0, **fields: Any) -> Path:
    """A folder with an adapter of the zoo's model `name`. `fields` are of peft's LoraConfig, lists as tuples."""
    return _folder(name, seed, _items(fields))


@functools.cache
def _folder(name: str, seed: int, fields: tuple[tuple[str, Any], ...]) -> Path:
    path = _root / f"{name}-{len(list(_root.iterdir()))}"
    _peft_model(name, seed, fields).save_pretrained(path)
    return path


def greedy(name: str, prompt: Sequence[int], count: int, seed: int = 0, **fields: Any) -> list[int]:
    """The `count` tokens after a prompt that peft finds most likely."""
    tokens = list(prompt)
    for _ in range(count):
        tokens.append(int(logits(name, tokens, seed, **fields)[-1].argmax()))
    return tokens[len(prompt) :]


def logits(
    name: str, tokens: Sequence[int], seed: int = 0, *, merged: bool = False, **fields: Any
) -> NDArray[np.float32]:
    """Peft's logits after each of the tokens, with the adapter beside the model or merged. Shape [T, vocab]."""
    import torch

    model = _peft_model(name, seed, _items(fields))
    if merged:
        model = copy.deepcopy(model).merge_and_unload()
    with torch.no_grad():
        found: NDArray[np.float32] = model(torch.tensor([list(tokens)])).logits[0].float().numpy()
    return found
