"""The table of docs/devices/README.md follows the code."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from model_configs import CONFIGS

from tidewheel.engine.devices import SERVING_DEVICES
from tidewheel.engine.devices.coverage import DEVICES_WITH

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "tools"))

import devices_page  # noqa: E402


def test_the_table_is_up_to_date() -> None:
    page = devices_page.PAGE.read_text("utf-8")
    assert devices_page.made(page, CONFIGS) == page, "run: python tools/devices_page.py"
    with pytest.raises(ValueError, match="one block from <!-- families"):
        devices_page.made("# Devices\n", CONFIGS)


def test_every_device_with_hardware_of_its_own_has_a_column() -> None:
    assert {*devices_page.COLUMNS} == {*SERVING_DEVICES} - {"torch"}


def test_what_a_device_lacks_is_refused_in_its_column(monkeypatch: pytest.MonkeyPatch) -> None:
    def cell(device: str, family: str) -> str:
        (row,) = [row for row in devices_page.families(CONFIGS).splitlines() if f" {family} " in row.replace(",", " ,")]
        return row.strip("| ").split(" | ")[2 + devices_page.COLUMNS.index(device)]

    assert cell("cuda", "llama") == "hardware"
    assert cell("rocm", "llama") == "tests"
    able = tuple(device for device in DEVICES_WITH["attention"] if device != "cuda")
    monkeypatch.setitem(DEVICES_WITH, "attention", able)
    assert cell("cuda", "llama") == "refused"
