"""load_tests/lora.py measures a model without adapters and with them."""

from __future__ import annotations

import lora
import pytest

from tidewheel.server.options.model import DEMO_MODEL


def test_a_model_is_measured_with_adapters(capsys: pytest.CaptureFixture[str]) -> None:
    measured = ["--adapters", "2", "--rank", "4", "--streams", "4", "--tokens", "24", "--rounds", "1"]
    engine = ["--kv-cache-space", "0.05", "--device", "cpu"]
    assert lora.main([str(DEMO_MODEL), *measured, "--", *engine]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == ["0", "1", "2"]
    assert all(line.endswith("of the model's") for line in lines)
