"""load_tests/lora.py measures a model without adapters and with them."""

from __future__ import annotations

import re

import lora
import pytest

from tidewheel.server.options.model import DEMO_MODEL


# The model is loaded for each format and number of adapters.
def test_a_model_is_measured_with_adapters(capsys: pytest.CaptureFixture[str]) -> None:
    measured = ["--adapters", "2", "--rank", "4", "--streams", "2", "--tokens", "12", "--rounds", "1"]
    assert lora.main([str(DEMO_MODEL), *measured, "--tidewheel-formats", "float32,int8"]) == 0
    heading, *rows = capsys.readouterr().out.splitlines()
    assert re.findall(r"(\d) adapters, rank 4", heading) == ["0", "1", "2"]
    assert [row.split()[:2] for row in rows] == [["tidewheel", "float32"], ["tidewheel", "int8"]]
    for row in rows:
        rates = [(float(rate), float(share)) for rate, share in re.findall(r"([\d.]+) \(([\d.]+)\)", row)]
        assert [share for _, share in rates] == pytest.approx([rate / rates[0][0] for rate, _ in rates], abs=0.01)
