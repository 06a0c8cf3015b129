"""Specs as plans: the format of every matrix, and what is refused."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import pytest
from engine.devices.made_models import MLP, NORM, PLAIN, decoder, decoder_of

from tidewheel.engine.errors import DeviceError
from tidewheel.engine.models.spec import BranchSpec
from tidewheel.engine.models.spec.shapes import Shapes
from tidewheel.engine.weights.quantization import Quantization, TensorFormat

_native = pytest.importorskip("tidewheel._native")
from tidewheel.engine.devices.cpu.lowering import Formats, formats_of, lower  # noqa: E402

SPEC = decoder(PLAIN)
INT4 = Quantization("int4", 64, zero_points=True)


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


def test_matrices_may_differ_unless_they_are_packed_into_one() -> None:
    formats = formats_of(SPEC, "float32", None)
    executor({**formats, "layers.0.o.weight": TensorFormat("int4", 32), "layers.0.down.weight": TensorFormat("int8")})
    for first, second in (("q", "v"), ("gate", "up")):
        message = rf"layers\.0\.{first}\.weight and layers\.0\.{second}\.weight .* must have one format"
        with pytest.raises(ValueError, match=message):
            executor({**formats, f"layers.0.{second}.weight": TensorFormat("int8")})


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

    spec = decoder_of((BranchSpec(MLP, NORM), BranchSpec(Recurrence(), NORM)))
    with pytest.raises(DeviceError, match="the cpu device has no recurrence"):
        lower(spec, formats_of(spec, "float32", None), spec.max_positions)
