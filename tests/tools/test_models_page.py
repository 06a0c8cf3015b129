"""The tables of docs/models.md follow the code's registries."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from model_configs import CONFIGS

from tidewheel.engine.devices import coverage
from tidewheel.engine.models import SUPPORTED_ARCHITECTURES

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "tools"))

import models_page  # noqa: E402


def test_the_tables_are_up_to_date() -> None:
    page = (ROOT / "docs" / "models.md").read_text("utf-8")
    assert models_page.made(page, CONFIGS) == page, "run: python tools/models_page.py"


def test_every_architecture_is_listed_by_its_models() -> None:
    table = models_page.families(CONFIGS)
    for architecture in SUPPORTED_ARCHITECTURES:
        (row,) = [line for line in table.splitlines() if f"`{architecture}`" in line]
        assert row.split(" | ")[0].strip("| ")


def test_what_a_device_lacks_is_in_its_row(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(coverage.DEVICES_WITH, "mlp", ("cpu", "torch", "graph-cpu"))
    rows = models_page.families(CONFIGS).splitlines()
    assert all("| cpu, torch |" in row for row in rows if "`LlamaForCausalLM`" in row)


def test_a_page_without_a_block_is_refused() -> None:
    with pytest.raises(ValueError, match="one block from <!-- families"):
        models_page.made("# Models\n", CONFIGS)
