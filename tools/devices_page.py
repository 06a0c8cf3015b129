"""Writes the tables of docs/devices/README.md that say which families and formats have run on which device, and how.

What a device refuses comes from the code. What has run where is noted here.

Usage, where Tidewheel is installed: python tools/devices_page.py
"""

from __future__ import annotations

import runpy
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from tidewheel.engine.devices import get_device
from tidewheel.engine.devices.base import Device
from tidewheel.engine.devices.coverage import DEVICES_WITH, FORMS_WITH, needs
from tidewheel.engine.errors import DeviceError
from tidewheel.engine.models import SUPPORTED_ARCHITECTURES, describe

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "devices" / "README.md"
CONFIGS = ROOT / "tests" / "model_configs.py"  # the smallest config of every architecture
COLUMNS = ("cpu", "cuda", "rocm", "xpu", "hpu", "neuron", "tpu")


def _caches_8_bits(device: Device) -> bool:
    spec = describe(runpy.run_path(str(CONFIGS))["LLAMA"]).spec
    try:
        device.kv_bytes_per_token(spec, "fp8_e4m3")
    except DeviceError:
        return False
    return True


_DENSE = frozenset({"attention", "mlp", "parallel"})
_ON_HARDWARE: Mapping[str, frozenset[str] | None] = {"cpu": None, "cuda": _DENSE}
"""By device, the kinds of layers that ran on its hardware; None: all that it has."""
_RECURRENT = frozenset({"delta_net", "mamba2", "short_conv"})
_OF_GEMMA = frozenset(
    {
        "alt_up",
        "laurel",
        "per_layer",
        "attention to another layer's K and V",
        "attention with normalized values",
        "scaled sums",
        "MLPs with sparse gates",
    }
)
_COMPILED: Mapping[str, frozenset[str] | None] = {
    "tpu": _DENSE | {"experts", "latent_attention"} | _RECURRENT | _OF_GEMMA
}
"""The same of those that the vendor's own compiler compiled for the hardware."""
_FORMATS: Mapping[str, tuple[Callable[[Device], bool], tuple[str, ...], tuple[str, ...]]] = {
    "weights in bfloat16, float16 or float32": (lambda device: True, ("cpu", "cuda"), ("tpu",)),
    "quantized files": (lambda device: True, ("cpu",), ("cuda", "rocm", "tpu")),
    "`--quantization`": (lambda device: bool(device.capabilities.quantizes), ("cpu",), ("cuda", "rocm", "tpu")),
    "KV cache in 8 bits": (_caches_8_bits, ("cpu",), ()),
    "LoRA adapters": (lambda device: device.capabilities.lora, ("cpu",), ("tpu",)),
    "images": (lambda device: device.capabilities.media, ("cpu",), ()),
}
"""Whether a device has a format, and the devices where it ran on the hardware, and where its kernels were compiled."""
_NAMES = {"latent_attention": "latent attention (MLA)", "delta_net": "delta nets", "short_conv": "short convolutions"}
"""The kinds that the code calls otherwise than people do."""


def main() -> None:
    """Write the page."""
    page = PAGE.read_text("utf-8")
    PAGE.write_text(made(page, runpy.run_path(str(CONFIGS))["CONFIGS"]), "utf-8")


def made(page: str, configs: Mapping[str, Mapping[str, Any]]) -> str:
    """The page with its tables filled in. `configs` has one config of every architecture, which shows its layers.

    Raises ValueError if the page lacks the place of a table.
    """
    for name, table in (("families", families(configs)), ("formats", formats())):
        begin, end = f"<!-- {name}: made by tools/devices_page.py -->\n", f"<!-- end of {name} -->"
        if page.count(begin) != 1 or page.count(end) != 1:
            raise ValueError(f"the page must have one block from {begin.strip()} to {end}")
        before, _, rest = page.partition(begin)
        page = f"{before}{begin}{table}{end}{rest.partition(end)[2]}"
    return page


def families(configs: Mapping[str, Mapping[str, Any]]) -> str:
    """A row for each set of layers beside plain attention and MLPs, with the families that have it."""
    with_kinds: defaultdict[frozenset[str], set[str]] = defaultdict(set)
    able = DEVICES_WITH | FORMS_WITH
    for architecture in SUPPORTED_ARCHITECTURES:
        spec = describe(configs[architecture]).spec
        with_kinds[frozenset({*needs(spec)} - _DENSE)].add(spec.family)
    rows = [("layers", "families", *(f"`{device}`" for device in COLUMNS))]
    for kinds in sorted(with_kinds, key=lambda kinds: (len(kinds), sorted(kinds))):
        layers = ", ".join(_NAMES.get(kind, kind.replace("_", " ")) for kind in sorted(kinds)) or "attention, MLPs"
        wanted = kinds | _DENSE
        cells = (
            _evidence(device, wanted) if all(device in able[kind] for kind in wanted) else "refused"
            for device in COLUMNS
        )
        rows.append((layers, ", ".join(sorted(with_kinds[kinds])), *cells))
    return _table(rows)


def formats() -> str:
    """A row for each format, and for other things that not all devices have."""
    rows = [("", *(f"`{device}`" for device in COLUMNS))]
    devices = {name: get_device(name) for name in COLUMNS}
    for what, (has, on_hardware, compiled) in _FORMATS.items():
        said = {**dict.fromkeys(compiled, "compiled"), **dict.fromkeys(on_hardware, "hardware")}
        cells = (said.get(name, "tests") if has(device) else "no" for name, device in devices.items())
        rows.append((what, *cells))
    return _table(rows)


def _table(rows: Sequence[Sequence[str]]) -> str:
    head, *others = rows
    return "".join(f"| {' | '.join(row)} |\n" for row in (head, ["---"] * len(head), *others))


def _evidence(device: str, kinds: frozenset[str]) -> str:
    """How well it is known that a model with these kinds of layers runs on a device."""
    for said, where in (("hardware", _ON_HARDWARE), ("compiled", _COMPILED)):
        if device in where and ((ran := where[device]) is None or kinds <= ran):
            return said
    return "tests"


if __name__ == "__main__":
    main()
