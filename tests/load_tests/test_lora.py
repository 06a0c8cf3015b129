"""load_tests/lora.py measures a model without adapters and with them."""

from __future__ import annotations

import re

import lora
import pytest

from tidewheel.server.options.model import DEMO_MODEL


# The model is loaded for each format and number of adapters. With few tokens, a stream may end on a busy machine before
# the other has begun, and nothing is measured.
@pytest.mark.sweep
def test_a_model_is_measured_with_adapters(capsys: pytest.CaptureFixture[str]) -> None:
    measured = ["--adapters", "2", "--rank", "4", "--streams", "2", "--tokens", "200", "--rounds", "1", "--turns", "1"]
    assert lora.main([str(DEMO_MODEL), *measured, "--tidewheel-formats", "float32,int8"]) == 0
    heading, *rows = capsys.readouterr().out.splitlines()
    assert re.findall(r"(\d) adapters, rank 4", heading) == ["0", "1", "2"]
    assert [row.split()[:2] for row in rows] == [["tidewheel", "float32"], ["tidewheel", "int8"]]
    for row in rows:
        _, _, base, rest = row.split(maxsplit=3)
        rates = [(float(rate), float(share)) for rate, share in re.findall(r"([\d.]+) \(([\d.]+), ", rest)]
        assert [share for _, share in rates] == pytest.approx([rate / float(base) for rate, _ in rates], abs=0.01)
        assert len(rates) == 2
