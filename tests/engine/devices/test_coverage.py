"""What is listed of devices without importing them is right, and what they lack is refused with a way out."""

from __future__ import annotations

from dataclasses import dataclass
from importlib import import_module
from typing import ClassVar

import pytest
from engine.devices.made_models import decoder
from model_configs import CONFIGS, GEMMA4

from tidewheel.engine.devices import DEVICE_NAMES
from tidewheel.engine.devices.coverage import DEVICES_WITH, EVERYWHERE, FORMS_WITH, GRAPH, missing_kinds, require_mixers
from tidewheel.engine.errors import DeviceError
from tidewheel.engine.models import describe
from tidewheel.engine.models.spec import mixers


@dataclass(frozen=True)
class Oracle:
    kind: ClassVar[str] = "oracle"
    activations: int = 0

    def shapes(self, hidden_size: int) -> dict[str, tuple[int, ...]]:
        return {}


def test_all_devices_are_known() -> None:
    assert {*EVERYWHERE} == {*DEVICE_NAMES} - {"auto"}


@pytest.mark.parametrize(
    ("package", "needs", "devices"),
    [
        ("torch_reference", "torch", ["torch"]),
        ("graph", "torch", GRAPH),
        ("tpu", "jax", ["tpu"]),
    ],
)
def test_a_kind_is_known_where_it_is_registered(package: str, needs: str, devices: list[str]) -> None:
    pytest.importorskip(needs)
    registered = {*import_module(f"tidewheel.engine.devices.{package}.mixers").KINDS}
    for device in devices:
        assert {kind for kind, able in DEVICES_WITH.items() if device in able} == registered


def test_the_cpu_lowers_what_it_is_known_to_have() -> None:
    pytest.importorskip("tidewheel._native")
    from tidewheel.engine.devices.cpu.lowering import lower

    for config in CONFIGS.values():
        spec = describe(config).spec
        kinds = {mixer.kind for layer in spec.layers for mixer in mixers(layer)}
        if missing := missing_kinds("cpu", spec):
            with pytest.raises(DeviceError, match=f"the cpu device has no {missing[0]}"):
                lower(spec, {}, 16)
        else:
            assert kinds <= DEVICES_WITH.keys()
            lower(spec, {}, 16)


def test_forms_that_a_device_lacks_are_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    for device in EVERYWHERE:
        require_mixers(device, describe(GEMMA4).spec)
    for form in ("attention with normalized values", "scaled sums"):
        monkeypatch.setitem(FORMS_WITH, form, ("cpu",))
    with pytest.raises(DeviceError, match=r"no attention with normalized values .*scaled sums, which gemma4 .* cpu$"):
        require_mixers("cuda", describe(GEMMA4).spec)


def test_the_refusal_names_the_devices_that_can(monkeypatch: pytest.MonkeyPatch) -> None:
    spec = decoder(Oracle())  # type: ignore[arg-type]
    with pytest.raises(DeviceError, match=r"the tpu device has no oracle, .*: no device has all of them"):
        require_mixers("tpu", spec)
    monkeypatch.setitem(DEVICES_WITH, "oracle", ("cpu", "torch"))
    with pytest.raises(DeviceError, match=r"the tpu device has no oracle, .*: choose --device cpu or torch"):
        require_mixers("tpu", spec)
    require_mixers("cpu", spec)
