"""How configs name the modules that are not quantized: other readers must find these, and no others."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable

_FUSED = {
    "qkv_proj": ("q_proj", "k_proj", "v_proj"),
    "gate_up_proj": ("gate_proj", "up_proj"),
    "w13": ("w1", "w3"),
    "in_proj_qkvz": ("in_proj_qkv", "in_proj_z"),
    "in_proj_ba": ("in_proj_b", "in_proj_a"),
    "fused_qkv_a_proj": ("q_a_proj", "kv_a_proj_with_mqa"),
}
"""What vLLM calls a matrix that it joins of several. All or none of these must be quantized."""


def joined_with(module: str) -> list[str]:
    """The modules that other servers join with this one, itself among them."""
    parent, _, name = module.rpartition(".")
    names = next((parts for parts in _FUSED.values() if name in parts), (name,))
    return [f"{parent}.{part}" if parent else part for part in names]


def fused_names(modules: Iterable[str]) -> set[str]:
    """The modules, and vLLM's names of those that are joined of them."""
    names = set(modules)
    for fused, parts in _FUSED.items():
        names |= {module.removesuffix(parts[0]) + fused for module in names if module.rpartition(".")[2] == parts[0]}
    return names


def patterns(kept: Collection[str], quantized: Collection[str]) -> list[str]:
    """Regular expressions for the names of the modules `kept` and of what is in them.

    One is for the modules of that name in all layers. If one of these is quantized, it is for all experts of a layer,
    and at last for one module.
    """
    found, left = set[str](), {*kept}
    for exact in range(1 + max((_numbers(module) for module in left), default=0)):
        taken = {_pattern(module, exact) for module in quantized}
        found |= {pattern for module in left if (pattern := _pattern(module, exact)) not in taken}
        left = {module for module in left if _pattern(module, exact) in taken}
    return [rf"{name}(\.|$)" for name in sorted(found)]


def _numbers(module: str) -> int:
    return sum(part.isdigit() for part in module.split("."))


def _pattern(module: str, exact: int) -> str:
    """The module's name with any number in place of its own, but for the first `exact` ones."""
    parts, numbers = [], 0
    for part in module.split("."):
        numbers += part.isdigit()
        parts.append(r"\d+" if part.isdigit() and numbers > exact else re.escape(part))
    return r"\.".join(parts)
