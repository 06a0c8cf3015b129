"""Adapters of routed experts, on devices that keep all experts of a layer in stacks."""

from __future__ import annotations

import re

NO_ROOM_FOR_EXPERTS = (
    "this adapter changes {name}, and this server has no room for adapters of experts, which is large: name the "
    "adapter, or another one that changes experts, in --lora-modules when the server starts, or take --device cpu"
)

_OF_EXPERT = re.compile(r"(layers\.\d+\.experts)\.(\d+)\.(\w+)")


def of_expert(name: str) -> tuple[str, int] | None:
    """The stack `layers.0.experts.up`, and the expert in it, of `layers.0.experts.7.up`; None: it is of no expert."""
    found = _OF_EXPERT.fullmatch(name)
    return None if found is None else (f"{found[1]}.{found[3]}", int(found[2]))


def expert_name(stack: str, expert: int) -> str:
    """The inverse of `of_expert`."""
    layer, _, kind = stack.rpartition(".")
    return f"{layer}.{expert}.{kind}"
