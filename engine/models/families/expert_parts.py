"""Shared by families with experts: how many there are, which layers have them, and their names in checkpoints."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

from ...errors import ModelError
from ..config import ConfigReader
from ..spec import ExpertsSpec, LayerSpec, MixerSpec, MlpSpec, NormSpec, ResidualBlockSpec
from ..tensor_ref import TensorRef
from .names import CheckpointNames

# Each expert's matrices get a description of their own, in all layers together not more than these.
_MAX_EXPERTS = 100_000


def expert_count(config: ConfigReader, *names: str) -> int:
    """How many experts a layer has, by the first of these fields that is there. Raises ModelError for too many."""
    name = next((name for name in names if config.raw(name) is not None), names[0])
    count = config.integer(name)
    if count * config.num_layers("num_hidden_layers") > _MAX_EXPERTS:
        raise config.error(name, f"so few that all layers have at most {_MAX_EXPERTS} experts")
    return count


def experts_per_token(config: ConfigReader, num_experts: int, name: str = "num_experts_per_tok") -> int:
    """How many experts compute a token. Raises ModelError for more than there are."""
    count = config.integer(name)
    if count > num_experts:
        raise config.error(name, f"at most the number of experts, {num_experts}")
    return count


def sparse_layers(config: ConfigReader) -> Callable[[int], bool]:
    """Which layers have experts: all but `mlp_only_layers`, of those every `decoder_sparse_step`-th."""
    dense, step = config.raw("mlp_only_layers"), config.integer("decoder_sparse_step", 1)
    if dense is not None and (not isinstance(dense, list) or any(type(layer) is not int for layer in dense)):
        raise config.error("mlp_only_layers", "a list of layers' numbers")
    return lambda layer: layer not in (dense or ()) and (layer + 1) % step == 0


def expert_layers(
    attentions: Iterable[MixerSpec],
    experts: ExpertsSpec,
    norm: NormSpec,
    mlp: MlpSpec | None = None,
    has_experts: Callable[[int], bool] = lambda layer: True,
    scale: float = 1.0,
) -> tuple[LayerSpec, ...]:
    """Layers of attention and experts, each after a norm; layers without experts have the `mlp`."""
    layers = []
    for index, attention in enumerate(attentions):
        mixer = experts if mlp is None or has_experts(index) else mlp
        layers.append((ResidualBlockSpec(attention, norm, scale=scale), ResidualBlockSpec(mixer, norm, scale=scale)))
    return tuple(layers)


EXPERT_NORMS = {
    "attention_norm": "input_layernorm",
    "experts_norm": "post_attention_layernorm",
    "mlp_norm": "post_attention_layernorm",
}


def single_experts(block: str, gate: str, up: str, down: str) -> Mapping[str, str]:
    """The names of experts that are modules of their own, below a layer's `block`."""
    return {f"experts.*.{name}": f"{block}.experts.*.{theirs}" for name, theirs in
            (("gate", gate), ("up", up), ("down", down))}  # fmt: skip


QWEN_EXPERTS = {"router": "mlp.gate", **single_experts("mlp", "gate_proj", "up_proj", "down_proj")}
"""The names that most families have, without a shared expert's."""


def shared_expert(module: str) -> Mapping[str, str]:
    """The names of a shared expert that is called `module`."""
    return {f"shared.{name}": f"{module}.{name}_proj" for name in ("gate", "up", "down")}


def expert_groups(config: ConfigReader, num_experts: int) -> tuple[int, int]:
    """How many groups of experts there are, and how many of them are kept. Raises ModelError."""
    num_groups, kept_groups = config.integer("n_group", 1), config.integer("topk_group", 1)
    if num_experts % num_groups or kept_groups > num_groups:
        raise ModelError(
            f"config.json: n_group {num_groups} must divide the number of experts, {num_experts}, and topk_group "
            f"{kept_groups} be at most n_group"
        )
    if 1 < num_groups == num_experts:
        raise ModelError(f"config.json: a group of n_group {num_groups} has only one of {num_experts} experts, not two")
    return num_groups, kept_groups


def stacked(
    name: str,
    rows: tuple[int, int] | None = None,
    transpose: bool = False,
    each: tuple[int, int, int] | None = None,
) -> TensorRef:
    """A part of each expert's matrix in the tensor `name`, which holds all experts' matrices."""
    return TensorRef(name, transpose, rows, each, index=0)


_EXPERT = re.compile(r"(?:layers\.(\d+)|mtp\.layer)\.experts\.(\d+)\.(gate|up|down)\.weight")


@dataclass(frozen=True)
class ExpertsTogether:
    """Where an expert's matrix may be in checkpoints with one tensor for all experts of a layer.

    Gate and up, of `size` rows each, are in one matrix. With `may_transpose` matrices may also be transposed.
    """

    base: str
    size: int
    may_transpose: bool = False

    def __call__(self, name: str) -> tuple[TensorRef, ...]:
        if not (found := _EXPERT.fullmatch(name)):
            return ()
        layer, expert, matrix = found.groups()
        rows = {"gate": (0, self.size), "up": (self.size, 2 * self.size)}.get(matrix)
        block = "mtp.layers.0" if layer is None else f"{self.base}layers.{layer}"
        module = f"{block}.mlp.experts.{'gate_up' if rows else 'down'}_proj"
        turns = (True, False) if self.may_transpose else (False,)
        return tuple(TensorRef(module, transpose, rows, index=int(expert)) for transpose in turns)


@dataclass(frozen=True)
class ExpertsApart:
    """Where an expert's matrix is in checkpoints that have a module for each expert, as tools write them that quantize.

    `names` has their names, `experts.*.gate`.
    """

    names: CheckpointNames

    def __call__(self, name: str) -> tuple[TensorRef, ...]:
        if not (found := _EXPERT.fullmatch(name)):
            return ()
        layer, expert, matrix = found.groups()
        return (self.names.of_layer(int(layer), f"experts.{expert}.{matrix}.weight"),)
