"""adapter_config.json, as peft writes it (https://github.com/huggingface/peft): what of it matters for an answer."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..errors import ModelError
from ..files.folder import read_json
from ..files.wording import shown
from ..models.config import MAX_INTEGER
from .patterns import NamePatterns, compile_patterns, value_for

CONFIG = "adapter_config.json"
# No thread goes on while it is decoded. Peft writes some kilobytes, or as many as the names of all modules have.
_MAX_BYTES, _MAX_PARTS = 1 << 20, 1 << 12

# What an adapter may not ask for: it would compute something else than its A and B say.
_REFUSED = {
    "use_dora": "DoRA adapters are not supported; train with use_dora=False, or merge the adapter into its model",
    "use_qalora": "QA-LoRA adapters are not supported; merge the adapter into its model",
    "use_bdlora": "block-diagonal adapters are not supported; merge the adapter into its model",
    "trainable_token_indices": "trained tokens are not supported; merge the adapter into its model",
    "layer_replication": "replicated layers are not supported; merge the adapter into its model",
    "alora_invocation_tokens": "activated LoRA is not supported; merge the adapter into its model",
    "arrow_config": "Arrow routing is not supported; serve the adapters one by one",
    "kasa_config": "KaSA adapters are not supported; merge the adapter into its model",
    "monteclora_config": "MonteCLoRA adapters are not supported; merge the adapter into its model",
}
_BIASES = ("none", "lora_only", "all")
# Initializations that change the model's own weights too, which the adapter's file does not have.
_CHANGE_THE_MODEL = ("pissa", "olora", "corda", "loftq", "lora_ga")


@dataclass(frozen=True)
class PeftConfig:
    """The sizes of an adapter's updates, and the modules that it has instead of the model's.

    `version` is peft's; configs have it since 0.18.
    """

    trains_biases: bool
    alpha: float
    rank_stabilized: bool
    alpha_pattern: dict[str, float]
    patterns: NamePatterns
    modules_to_save: tuple[str, ...]
    target_parameters: frozenset[str] = frozenset()
    version: tuple[int, ...] | None = None
    context_length: int | None = None  # in tokens, of adapters that were trained for longer contexts

    def targets(self, parameter: str) -> bool:
        """Whether peft took a parameter of that whole name for a target."""
        parts = parameter.split(".")
        return any(".".join(parts[start:]) in self.target_parameters for start in range(len(parts)))

    def scale(self, module: str, rank: int) -> float:
        """The factor of a module's update: alpha / rank, or alpha / sqrt(rank), arXiv 2312.03732."""
        alpha = value_for(module, self.patterns, self.alpha_pattern, self.alpha)
        return alpha / (math.sqrt(rank) if self.rank_stabilized else rank)


def read_peft_config(folder: Path) -> PeftConfig:
    """The config of the adapter in `folder`. Raises ModelError for one that is broken, or asks for too much.

    The adapter's tensors tell its modules and their ranks. All forms of `target_modules` and `rank_pattern`
    only describe them. Only `target_parameters` tells which parameter of a module it has.
    """
    path = folder / CONFIG
    config = read_json(path, _MAX_BYTES, _MAX_PARTS)
    kind = config.get("peft_type")
    if kind != "LORA":
        raise ModelError(f"{path}: peft_type must be LORA, not {shown(kind)}; merge the adapter into its model")
    for field, reason in _REFUSED.items():
        if config.get(field):
            raise ModelError(f"{path}: {field} is set, and {reason}")
    bias = config.get("bias") or "none"
    if bias not in _BIASES:
        raise ModelError(f"{path}: bias must be one of {', '.join(_BIASES)}, not {shown(bias)}")
    start = config.get("init_lora_weights")
    if isinstance(start, str) and start.lower().startswith(_CHANGE_THE_MODEL):
        raise ModelError(
            f"{path}: init_lora_weights {shown(start)} changed the model's own weights before the training; save the "
            "adapter with peft's path_initial_model_for_weight_conversion"
        )
    pattern = config.get("alpha_pattern") or {}
    if not isinstance(pattern, dict):
        raise ModelError(f"{path}: alpha_pattern must be an object")
    alphas = {key: _number(path, f"alpha_pattern[{shown(key)}]", value) for key, value in pattern.items()}
    version = re.match(r"(\d{1,4})\.(\d{1,4})(?:\.(\d{1,4}))?", str(config.get("peft_version") or ""))
    return PeftConfig(
        trains_biases=bias != "none",
        alpha=_number(path, "lora_alpha", config.get("lora_alpha")),
        rank_stabilized=config.get("use_rslora") is True,
        alpha_pattern=alphas,
        patterns=compile_patterns(alphas, f"{path}: alpha_pattern"),
        modules_to_save=tuple(_names(path, config, "modules_to_save")),
        target_parameters=frozenset(_names(path, config, "target_parameters")),
        version=tuple(int(part or 0) for part in version.groups()) if version else None,
        context_length=_length(path, config.get("context_length")),
    )


def _length(path: Path, value: Any) -> int | None:
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int) or not 0 < value <= MAX_INTEGER:
        raise ModelError(f"{path}: context_length must be a number of tokens, got {shown(value)}")
    return value


def _names(path: Path, config: Mapping[str, Any], field: str) -> list[str]:
    names = config.get(field) or []
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise ModelError(f"{path}: {field} must be a list of names")
    return names


def _number(path: Path, field: str, value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value) or abs(value) > 1e9:
        raise ModelError(f"{path}: {field} must be a number, got {shown(value)}")
    return float(value)
