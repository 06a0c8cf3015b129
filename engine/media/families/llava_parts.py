"""What models built as LLaVA is have in common: the layers whose features are taken, the projector, the names."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from ...errors import ModelError
from ...models.config import ConfigReader
from ...models.module_tensors import in_places, module_tensors
from ...models.spec import ProjectionSpec, TowerSpec, tower_shapes
from ...models.tensor_ref import TensorRef

Names = Mapping[str, str | TensorRef]

PROJECTOR: Names = {"merge": "linear_1", "connector": "linear_2"}
_MAX_TAKEN = 16


def feature_layers(config: ConfigReader, depth: int, default: int) -> tuple[int, ...]:
    """After how many layers the features are taken, by `vision_feature_layer`: one or several numbers."""
    value = config.raw("vision_feature_layer")
    value = default if value is None else value
    several = value if isinstance(value, list | tuple) else [value]
    if not 0 < len(several) <= _MAX_TAKEN or not all(
        type(index) is int and -depth - 1 <= index <= depth for index in several
    ):
        raise config.error("vision_feature_layer", f"a number from {-depth - 1} to {depth}, or several")
    taken = tuple(index if index >= 0 else depth + 1 + index for index in several)
    if not max(taken):
        raise ModelError("config.json: vision_feature_layer takes what no layer has computed")
    return taken


def projector(
    config: ConfigReader, inputs: int, outputs: int, *, bias: bool = True
) -> tuple[tuple[str, ProjectionSpec], ...]:
    """LLaVA's two linear layers between tower and language model."""
    bias = config.flag("multimodal_projector_bias", bias)
    act = config.activation("projector_hidden_act", "gelu")
    return (
        ("merge", ProjectionSpec(inputs, outputs, bias=bias, activation=act)),
        ("connector", ProjectionSpec(outputs, outputs, bias=bias)),
    )


def tensors_of(
    spec: TowerSpec,
    names: Names,
    layers: str,
    inner: tuple[str, ...],
    of_projector: Names = PROJECTOR,
    beside: Names = MappingProxyType({}),
) -> dict[str, tuple[TensorRef, ...]]:
    """Where the weights lie in a wrapper of LLaVA's kind: the tower, the projector, and what is beside them."""
    shapes = tower_shapes(spec)
    mine = [name for name in shapes if name.startswith(tuple(f"{module}." for module in of_projector))]
    others = [name for name in shapes if name not in mine and name not in beside]
    return {
        **in_places(module_tensors(others, names, layers), ("model.", ""), ("vision_tower.",), inner),
        **in_places(module_tensors(mine, of_projector), ("model.", ""), ("multi_modal_projector.",)),
        **in_places(module_tensors(beside, beside), ("model.", "")),
    }
