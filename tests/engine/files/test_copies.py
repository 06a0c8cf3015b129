"""Copies of files in memory, with files that have no name, and on systems that have no such files in memory."""

from __future__ import annotations

import mmap
import os
import sys
import tempfile
from pathlib import Path

import pytest

from tidewheel.engine.files.copies import FileCopy
from tidewheel.engine.files.unnamed import unnamed_file


@pytest.fixture(params=["as here", "as on macOS"])
def folder(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where temporary files go."""
    if request.param == "as on macOS":
        monkeypatch.setattr(sys, "platform", "darwin")
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return tmp_path


def test_a_copy_stays_as_it_was(folder: Path) -> None:
    path = folder / "adapter"
    path.write_bytes(b"before")
    copy = FileCopy(path)
    path.write_bytes(b"after")
    assert copy.content[:] == b"before"
    assert [*folder.iterdir()] == [path]


def test_who_has_the_file_shares_its_memory(folder: Path) -> None:
    file = unnamed_file()
    try:
        os.ftruncate(file, mmap.PAGESIZE)
        with mmap.mmap(file, mmap.PAGESIZE) as ours, mmap.mmap(file, mmap.PAGESIZE) as theirs:
            ours[:5] = b"a row"
            assert theirs[:5] == b"a row"
        assert not [*folder.iterdir()]
    finally:
        os.close(file)
