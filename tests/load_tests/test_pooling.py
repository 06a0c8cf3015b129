"""Comparing embedding models: what the script does with a server."""

from __future__ import annotations

import sys
from pathlib import Path

import pooling
import pytest


def test_a_server_that_does_not_start(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    command = tmp_path / "tidewheel"
    command.write_text("#!/bin/sh\necho there is no model >&2\nexit 1\n")
    command.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    with pytest.raises(SystemExit, match="the server does not start"), pooling.serving(tmp_path, "float32", 1):
        pass
    assert "there is no model" in capfd.readouterr().err
