"""Biases that adapters have instead of the model's: peft's `bias` of `lora_only` and `all`.

Peft saves the trained bias itself. What is added to the model's own product is the difference from the model's bias.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from ..errors import ModelError
from ..files.wording import shown
from ..models.tensor_ref import TensorRef
from ..weights.lora import EMBED, LowRankUpdate
from ..weights.stored import StoredTensor
from ..weights.taking import rows_of
from ..weights.tensor import WeightSource, to_float32
from .modules import Target
from .updates import AdapterTensor

_BIAS = ".bias"


@dataclass(frozen=True, slots=True)
class BiasDifference:
    """An adapter's bias minus the model's, for some outputs: `values [outputs]`, in float32."""

    target: Target
    values: NDArray[np.float32]


class OwnBiases:
    """Finds the differences between the biases of an adapter's file and the model's.

    `tensors` says where the model's weights are in checkpoints, `modules` which of them can be changed, and `base` has
    the model's own weights.
    """

    def __init__(
        self,
        path: Path,
        tensors: Mapping[str, TensorRef],
        modules: Mapping[str, tuple[Target, ...]],
        base: WeightSource | None,
    ) -> None:
        self._path = path
        self._modules = modules
        self._base = base
        self._places: dict[str, list[tuple[str, TensorRef]]] = {}
        self._tensors = tensors
        for name, ref in tensors.items():
            for part in ref.parts():  # a vector that is transposed is the same
                self._places.setdefault(part.name, []).append((name, replace(part, transpose=False)))

    def has(self, module: str) -> bool:
        """Whether the model has a bias of that name, or a layer that could have one."""
        return module + _BIAS in self._places or self._may_have(module)

    def in_base(self, module: str) -> bool:
        """Whether the model has a bias of that name."""
        return module + _BIAS in self._places

    def differences(self, module: str, stored: StoredTensor) -> list[BiasDifference]:
        """The differences of one of the file's tensors; none where it equals the model's own.

        Raises ModelError for one that does not fit, and for a bias of a norm or a convolution that was trained.
        """
        name = module + _BIAS
        own = AdapterTensor(self._path, name, stored.shape, lambda: to_float32(stored.floats(name))).floats()
        if not self.in_base(module):
            return self._whole(module, own)
        if self._base is None:
            raise ValueError("biases need the model's own weights")
        found: list[BiasDifference] = []
        for place, ref in self._places[name]:
            target = self._target(module, place, ref)
            of_base = to_float32(self._base[place])
            if target is not None:
                of_base = of_base[target.first_output : target.first_output + target.outputs]
            elif self._tensors[place].stack:
                raise self._not_a_linear_layers(name)
            shape = ref.shape(own.shape)
            if own.ndim != 1 or ref.index is not None or shape != of_base.shape:
                raise self._does_not_fit(module, own)
            with np.errstate(over="ignore"):
                values = np.ascontiguousarray(rows_of(own, ref) - of_base)
            if not values.any():
                continue
            if target is None:
                raise self._not_a_linear_layers(name)
            if not np.isfinite(values).all():
                raise ModelError(f"{self._path}: {shown(name)} differs too much from the model's own")
            found.append(BiasDifference(target, values))
        return found

    def _whole(self, module: str, own: NDArray[np.float32]) -> list[BiasDifference]:
        """The differences for a layer that has no bias in the model."""
        targets = self._modules[module]
        if own.ndim != 1 or not all(target.fits(own.shape) for target in targets):
            raise self._does_not_fit(module, own)
        return [BiasDifference(target, target.rows(own)) for target in targets] if own.any() else []

    def _target(self, module: str, place: str, ref: TensorRef) -> Target | None:
        """The part of a linear layer whose bias that is; None: it is of something else."""
        targets = self._modules.get(module, ())
        alike = (t for t in targets if place == t.name + _BIAS and ref == replace(t.ref, name=ref.name))
        return next(alike, None)

    def _not_a_linear_layers(self, name: str) -> ModelError:
        return ModelError(
            f"{self._path}: {shown(name)} differs from the model's own. Biases of linear layers can be an adapter's, "
            "but not those of norms and convolutions. Train with bias='lora_only', or merge the adapter into its model"
        )

    def _may_have(self, module: str) -> bool:
        targets = self._modules.get(module, ())
        return bool(targets) and all(target.name != EMBED and target.ref.index is None for target in targets)

    def _does_not_fit(self, module: str, own: NDArray[np.float32]) -> ModelError:
        return ModelError(f"{self._path}: {shown(module + _BIAS)} has shape {own.shape}, which does not fit the model")


def with_differences(updates: Iterable[LowRankUpdate], differences: Iterable[BiasDifference]) -> list[LowRankUpdate]:
    """The updates and what is added to biases, one update for the outputs that both have."""
    found = {(update.name, update.first_output): update for update in updates}
    for difference in differences:
        target, values = difference.target, difference.values
        place = (target.name, target.first_output)
        if place not in found:
            a, b = np.zeros((0, target.inputs), np.float32), np.zeros((target.outputs, 0), np.float32)
            found[place] = LowRankUpdate(target.name, a, b, 1.0, None, target.first_output)
        found[place] = replace(found[place], shift=values)
    return list(found.values())
