"""Specs as plans: the format of every matrix, and what is refused."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

import numpy as np
import pytest
from engine.devices.made_models import MLP, NORM, PLAIN, RandomWeights, decoder, decoder_of

from tidewheel.engine.devices.cache_split import BLOCK_TOKENS
from tidewheel.engine.errors import DeviceError
from tidewheel.engine.models.spec import ProjectionSpec, ResidualBlockSpec, TowerSpec
from tidewheel.engine.models.spec.shapes import Shapes
from tidewheel.engine.weights.quantization import InputOrder, Quantization, TensorFormat

_native = pytest.importorskip("tidewheel._native")
from tidewheel.engine.devices.cpu.formats import Formats, formats_of, tower_formats, why_not_kept  # noqa: E402
from tidewheel.engine.devices.cpu.lowering import lower, lower_tower  # noqa: E402

SPEC = decoder(PLAIN)
INT4 = Quantization("int4-fast", 64, zero_points=True)


def executor(formats: Formats) -> object:
    plan = lower(SPEC, formats, SPEC.max_positions)
    return _native.Executor(plan, "auto", "float32", [4], 1, 16, [[_native.topology()["cores"][0]]])


@pytest.mark.parametrize(
    ("quantization", "projections", "down", "head"),
    [
        (None, TensorFormat("bfloat16"), TensorFormat("bfloat16"), TensorFormat("bfloat16")),
        (Quantization("int8"), TensorFormat("int8"), TensorFormat("int8"), TensorFormat("int8")),
        (Quantization("int8-channel"), TensorFormat("int8-channel"), TensorFormat("int8"), TensorFormat("int8")),
        (INT4, TensorFormat("int4", 64, True), TensorFormat("int4", 64, True), TensorFormat("int8")),
    ],
    ids=str,
)
def test_every_matrix_has_a_format_and_no_vector(
    quantization: Quantization | None, projections: TensorFormat, down: TensorFormat, head: TensorFormat
) -> None:
    assert formats_of(SPEC, "bfloat16", quantization) == {
        "embed.weight": head,
        **{f"layers.0.{name}.weight": projections for name in ("q", "k", "v", "o", "gate", "up")},
        "layers.0.down.weight": down,
        "head.weight": head,
    }


def test_of_a_tower_only_the_matrices_of_layers_are_quantized() -> None:
    layer = (ResidualBlockSpec(replace(PLAIN, two_way=True), NORM), ResidualBlockSpec(MLP, NORM))
    spec = TowerSpec(64, (layer,), (("patches", ProjectionSpec(48, 64, norm=NORM)),), (("positions", (9, 64)),))
    stored = TensorFormat("grid", 32, bits=4)

    class Stored(RandomWeights):
        def stored_format(self, name: str) -> TensorFormat:
            return stored

    matrices = [f"layers.0.{name}.weight" for name in ("q", "k", "v", "o", "gate", "up", "down")]
    floats = {"patches.weight": TensorFormat("bfloat16")}
    for quantization, format in ((Quantization("int8"), TensorFormat("int8")), (None, stored)):
        formats = tower_formats(spec, "bfloat16", quantization, Stored(SPEC))
        assert formats == {**dict.fromkeys(matrices, format), **floats}
        assert set(lower_tower(spec, formats).formats) == {*matrices, "patches.weight"}
    assert set(tower_formats(spec, "float16", None).values()) == {TensorFormat("float16")}


def test_what_the_kernels_lack_is_dequantized_with_a_reason() -> None:
    class Stored(RandomWeights):
        def stored_format(self, name: str) -> TensorFormat:
            order = InputOrder(np.arange(63, -1, -1)) if name in ("embed.weight", "layers.0.q.weight") else None
            return TensorFormat("grid", 16 if name.endswith("up.weight") else 64, bits=4, input_order=order)

    formats = formats_of(SPEC, "bfloat16", None, Stored(SPEC))
    assert {name for name, format in formats.items() if not format.is_stored} == {"embed.weight", "layers.0.up.weight"}
    assert lower(SPEC, formats, SPEC.max_positions).input_orders == {"layers.0.q.weight": [*range(63, -1, -1)]}
    reasons = [
        why_not_kept(name, (64, 64), Stored(SPEC).stored_format(name))
        for name in ("embed.weight", "layers.0.up.weight")
    ]
    assert reasons == [
        "the inputs of an embedding cannot have an order of their own",
        "groups are of 32, 64, 128 or a multiple of 256 inputs, or whole rows, not of 16",
    ]


@pytest.mark.parametrize(
    ("format", "said"), [(TensorFormat("int3"), "int3"), (TensorFormat("int4", 48), "32, 64 or 128")]
)
def test_unknown_formats_are_refused(format: TensorFormat, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        executor({**formats_of(SPEC, "float32", None), "layers.0.o.weight": format})


def test_a_mixer_that_the_device_lacks_is_refused_by_name() -> None:
    @dataclass(frozen=True)
    class Recurrence:
        kind: ClassVar[str] = "recurrence"
        activations: int = 0

        def shapes(self, hidden_size: int) -> Shapes:
            return {}

    spec = decoder_of((ResidualBlockSpec(MLP, NORM), ResidualBlockSpec(Recurrence(), NORM)))
    with pytest.raises(DeviceError, match="the cpu device has no recurrence"):
        lower(spec, formats_of(spec, "float32", None), spec.max_positions)


def test_memory_is_planned_in_the_kernels_blocks() -> None:
    assert _native.block_tokens() == BLOCK_TOKENS
