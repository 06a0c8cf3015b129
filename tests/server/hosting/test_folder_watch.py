"""Models that come into the folder, or leave it, while the server runs."""

from __future__ import annotations

import asyncio
import logging
from pathlib import Path

import pytest
from waiting import wait_until

from tidewheel.server.hosting.catalog import Catalog
from tidewheel.server.hosting.folder_watch import watch_folder
from tidewheel.server.options.serve import parse_options


async def until_named(catalog: Catalog, *names: str) -> None:
    await asyncio.to_thread(wait_until, lambda: [entry.name for entry in catalog.entries] == [*names], 10, 0.005)


def test_the_folder_is_followed(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    folder = tmp_path / "models"
    (folder / "owner").mkdir(parents=True)
    catalog = Catalog(parse_options(["--models-dir", str(folder)], {}))

    async def follow() -> None:
        watching = asyncio.create_task(watch_folder(str(folder), catalog.rescan, 0.005))
        await asyncio.sleep(0.02)
        (folder / "a.gguf").write_bytes(b"GGUF")
        await until_named(catalog, "a")
        (folder / "owner" / "name").mkdir()
        await asyncio.sleep(0.02)
        (folder / "owner" / "name" / "b.gguf").write_bytes(b"GGUF")
        await until_named(catalog, "a", "owner/name")
        folder.rename(tmp_path / "away")
        await asyncio.sleep(0.05)
        await until_named(catalog, "a", "owner/name")  # and the server goes on
        (tmp_path / "away" / "a.gguf").unlink()
        (tmp_path / "away").rename(folder)
        await until_named(catalog, "owner/name")
        watching.cancel()

    with caplog.at_level(logging.INFO):
        asyncio.run(follow())
    assert "Found the model a" in caplog.messages
    assert f"The model a is no longer in {folder}, or has changed" in caplog.messages
    assert any("The models stay as they are: " in message for message in caplog.messages)
