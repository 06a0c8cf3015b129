"""Experts as transformers has them from version 5 on: a module whose parameters hold the matrices of all experts.

Peft adapts these with `target_parameters`. It wraps the module once for each parameter, in the order in which the
module defines them. A wrapper's tensors have the module's name, and `.base_layer` for each wrapper around it:
https://github.com/huggingface/peft/blob/main/src/peft/tuners/lora/layer.py, ParamWrapper.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from ..errors import ModelError
from ..models.spec import DecoderSpec, ExpertsSpec, mixers
from ..models.tensor_ref import TensorRef
from .modules import Target
from .updates import AdapterTensor, outputs_of

# Before this version, peft took the first dimension of every parameter for the inputs.
_KNOWS_OUTPUTS = (0, 19, 1)
_GATE_UP, _UP, _DOWN = "gate_up_proj", "up_proj", "down_proj"


@dataclass(frozen=True, slots=True)
class ExpertStack:
    """The experts of one layer. `modules` are what checkpoints call their parameters, or would, in transformers' order.

    `transposed`: the parameters are `[experts, inputs, outputs]`; else `[experts, outputs, inputs]`.
    """

    layer: int
    experts: ExpertsSpec
    hidden_size: int
    modules: Mapping[str, str]
    transposed: bool

    @property
    def parameters(self) -> list[str]:
        """All parameters in their order. Biases cannot be adapted, but peft may have wrapped them."""
        biases = ("_bias",) if self.experts.bias else ()
        return [f"{name}{kind}" for name in self.modules for kind in ("", *biases)]

    def targets(self, parameter: str) -> tuple[Target, ...]:
        """The targets of a parameter's rows in the model, where checkpoints have a matrix for each expert."""
        module, size = self.modules[parameter], self.experts.intermediate_size
        down = parameter == _DOWN
        inputs, outputs = (size, self.hidden_size) if down else (self.hidden_size, size)
        names = {_DOWN: ("down",), _UP: ("up",), _GATE_UP: ("gate", "up")}[parameter]
        return tuple(
            Target(
                f"layers.{self.layer}.experts.{expert}.{name}",
                inputs,
                outputs,
                0,
                TensorRef(module, rows=(i * outputs, (i + 1) * outputs), index=expert),
            )
            for expert in range(self.experts.num_experts)
            for i, name in enumerate(names)
        )


def expert_stacks(spec: DecoderSpec, tensors: Mapping[str, TensorRef]) -> dict[str, ExpertStack]:
    """The experts of all layers, by what checkpoints call the module that has them."""
    found = {}
    for layer, residuals in enumerate(spec.layers):
        experts = next((mixer for mixer in mixers(residuals) if isinstance(mixer, ExpertsSpec)), None)
        if experts is None:
            continue
        first = f"layers.{layer}.experts.0"
        up, down = tensors[f"{first}.up.weight"], tensors[f"{first}.down.weight"]
        before, stands, _ = down.name.rpartition(".experts.0." if down.index is None else ".experts.")
        # Granite's checkpoints have a module for each parameter.
        module = (before if stands else down.name.removesuffix(".output_linear.weight")) + ".experts"
        name = _GATE_UP if experts.gated else _UP
        if down.index is None:
            modules = {name: f"{module}.{name}", _DOWN: f"{module}.{_DOWN}"}
        else:
            modules = {name: up.name.removesuffix(".weight"), _DOWN: down.name.removesuffix(".weight")}
        found[module] = ExpertStack(layer, experts, spec.hidden_size, modules, down.transpose)
    return found


def orientations(a: AdapterTensor, b: AdapterTensor, targets: tuple[Target, ...]) -> set[bool]:
    """The ways to read peft's matrices of a parameter. False: A has its inputs; True: A has its outputs."""
    experts, inputs, outputs = _sizes(targets)
    if len(a.shape) != 2 or len(b.shape) != 2 or a.shape[0] != b.shape[1] or not a.shape[0] or a.shape[0] % experts:
        return set()
    found = (a.shape[1], b.shape[0])
    return {swapped for swapped, sizes in ((False, (inputs, outputs)), (True, (outputs, inputs))) if found == sizes}


def swapped_by_version(version: tuple[int, ...] | None, transposed: bool) -> bool | None:
    """Whether peft of that version has swapped inputs and outputs; None: that depends on more than its version."""
    if version is None:
        return None
    if version < _KNOWS_OUTPUTS:
        return not transposed
    return None if transposed else False


def unstacked(
    a: AdapterTensor, b: AdapterTensor, targets: tuple[Target, ...], swapped: bool | None
) -> tuple[AdapterTensor, AdapterTensor]:
    """A `[experts, rank, inputs]` and B `[experts, outputs, rank]` of what peft has saved for a parameter.

    Peft's A has a row for each expert and rank, `[experts * rank, inputs]`; its B has a column for each rank and
    expert, `[outputs, rank * experts]`. `swapped` says which are inputs and outputs where both are equally many.
    Raises ModelError for shapes that do not fit, and where it has to be said and is not.
    """
    experts, inputs, outputs = _sizes(targets)
    found = orientations(a, b, targets)
    if not found:
        raise ModelError(
            f"{a.path}: {a.name} {a.shape} and {b.name} {b.shape} do not fit the model: it needs A ({experts} x rank, "
            f"{inputs}) and B ({outputs}, rank x {experts})"
        )
    if len(found) == 1:
        swapped = found.pop()
    if swapped is None:
        raise ModelError(
            f"{a.path}: {a.name} {a.shape} has as many inputs as outputs, so A and B cannot be told apart; save the "
            "adapter with peft 0.19.1 or later, or merge it into its model"
        )
    rank = a.shape[0] // experts

    def of_a(*order: int) -> NDArray[np.float32]:
        return np.ascontiguousarray(a.read().reshape(experts, rank, -1).transpose(order))

    def of_b(*order: int) -> NDArray[np.float32]:
        return np.ascontiguousarray(b.read().reshape(-1, rank, experts).transpose(order))

    shape_a, shape_b = (experts, rank, inputs), (experts, outputs, rank)
    if swapped:
        return (
            replace(b, shape=shape_a, read=lambda: of_b(2, 1, 0)),
            replace(a, shape=shape_b, read=lambda: of_a(0, 2, 1)),
        )
    return (
        replace(a, shape=shape_a, read=lambda: of_a(0, 1, 2)),
        replace(b, shape=shape_b, read=lambda: of_b(2, 0, 1)),
    )


def _sizes(targets: tuple[Target, ...]) -> tuple[int, int, int]:
    """How many experts, inputs and outputs a parameter has."""
    last = targets[-1].ref.index
    assert last is not None
    return last + 1, targets[0].inputs, outputs_of(targets)
