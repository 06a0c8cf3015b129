"""Writes the table of docs/devices/README.md that says which families have run on which device, and how.

What a device refuses comes from the code. What has run where is noted here.

Usage, where Tidewheel is installed: python tools/devices_page.py
"""

from __future__ import annotations

import runpy
from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tidewheel.engine.devices.coverage import DEVICES_WITH, FORMS_WITH, needs
from tidewheel.engine.models import SUPPORTED_ARCHITECTURES, describe

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "devices" / "README.md"
CONFIGS = ROOT / "tests" / "model_configs.py"  # the smallest config of every architecture
BEGIN, END = "<!-- families: made by tools/devices_page.py -->\n", "<!-- end of families -->"
COLUMNS = ("cpu", "cuda", "rocm", "xpu", "hpu", "neuron", "tpu")

_DENSE = frozenset({"attention", "mlp", "parallel"})
_ON_HARDWARE: Mapping[str, frozenset[str] | None] = {"cpu": None, "cuda": _DENSE}
"""By device, the kinds of layers that ran on its hardware; None: all that it has."""
_COMPILED: Mapping[str, frozenset[str] | None] = {}
"""The same of those that the vendor's own compiler compiled for the hardware."""
_NAMES = {"latent_attention": "latent attention (MLA)", "delta_net": "delta nets", "short_conv": "short convolutions"}
"""The kinds that the code calls otherwise than people do."""


def main() -> None:
    """Write the page."""
    page = PAGE.read_text("utf-8")
    PAGE.write_text(made(page, runpy.run_path(str(CONFIGS))["CONFIGS"]), "utf-8")


def made(page: str, configs: Mapping[str, Mapping[str, Any]]) -> str:
    """The page with its table filled in. `configs` has one config of every architecture, which shows its layers."""
    before, begin, rest = page.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not (begin and end):
        raise ValueError(f"the page must have a block from {BEGIN.strip()} to {END}")
    return f"{before}{BEGIN}{table(configs)}{END}{after}"


def table(configs: Mapping[str, Mapping[str, Any]]) -> str:
    """A row for each set of layers beside plain attention and MLPs, with the families that have it."""
    families: defaultdict[frozenset[str], set[str]] = defaultdict(set)
    able = DEVICES_WITH | FORMS_WITH
    for architecture in SUPPORTED_ARCHITECTURES:
        spec = describe(configs[architecture]).spec
        families[frozenset({*needs(spec)} - _DENSE)].add(spec.family)
    rows = [("layers", "families", *(f"`{device}`" for device in COLUMNS)), ("---",) * (2 + len(COLUMNS))]
    for kinds in sorted(families, key=lambda kinds: (len(kinds), sorted(kinds))):
        layers = ", ".join(_NAMES.get(kind, kind.replace("_", " ")) for kind in sorted(kinds)) or "attention, MLPs"
        wanted = kinds | _DENSE
        cells = (
            _evidence(device, wanted) if all(device in able[kind] for kind in wanted) else "refused"
            for device in COLUMNS
        )
        rows.append((layers, ", ".join(sorted(families[kinds])), *cells))
    return "".join(f"| {' | '.join(row)} |\n" for row in rows)


def _evidence(device: str, kinds: frozenset[str]) -> str:
    """How well it is known that a model with these kinds of layers runs on a device."""
    for said, where in (("hardware", _ON_HARDWARE), ("compiled", _COMPILED)):
        if device in where and ((ran := where[device]) is None or kinds <= ran):
            return said
    return "tests"


if __name__ == "__main__":
    main()
