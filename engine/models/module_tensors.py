"""Where a checkpoint has the weights of modules: towers' and encoders'."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import product

from .spec import NormSpec
from .tensor_ref import TensorRef

Tensors = dict[str, TensorRef]


def module_tensors(shapes: Iterable[str], modules: Mapping[str, str | TensorRef], layers: str = "") -> Tensors:
    """Where the weights called `shapes` lie, by the modules' names.

    Those of a layer have names within it; `layers` and the number of the layer come before these. Without a module a
    whole name counts.
    """
    tensors = {}
    for name in shapes:
        before, rest = "", name
        if name.startswith("layers."):
            _, number, rest = name.split(".", 2)
            before = f"{layers}{number}."
        ref = modules.get(rest)
        suffix = ""
        if ref is None:
            module, _, kind = rest.rpartition(".")
            ref, suffix = modules[module], f".{kind}"
        ref = ref if isinstance(ref, TensorRef) else TensorRef(ref)
        tensors[name] = _named(ref, before, suffix)
    return tensors


def in_places(tensors: Mapping[str, TensorRef], *prefixes: Sequence[str]) -> dict[str, tuple[TensorRef, ...]]:
    """The same tensors with each combination of the prefixes before their names."""
    befores = ["".join(parts) for parts in product(*prefixes)]
    return {name: tuple(_named(ref, before) for before in befores) for name, ref in tensors.items()}


def fused_qkv(name: str, size: int) -> dict[str, TensorRef]:
    """q, k and v out of one module that has them one after the other, each of `size` rows."""
    return {module: TensorRef(name, rows=(i * size, (i + 1) * size)) for i, module in enumerate(("q", "k", "v"))}


def norm_tables(name: str, norm: NormSpec, size: int) -> tuple[tuple[str, tuple[int, ...]], ...]:
    """The tables of a norm between layers."""
    return tuple((f"{name}.{kind}", shape) for kind, shape in norm.shapes(size).items())


def _named(ref: TensorRef, before: str, after: str = "") -> TensorRef:
    factors = f"{before}{ref.scaled_by}" if ref.scaled_by else ""
    stack = tuple(_named(part, before, after) for part in ref.stack)
    return replace(ref, name=f"{before}{ref.name}{after}", scaled_by=factors, stack=stack)
