"""The operator's terminal: a banner, and a line about the throughput while the server is busy."""

from __future__ import annotations

import asyncio
import logging
import os
import pty
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from cores import one_core
from server.conftest import TIDEWHEEL, RunningServer, ServerProcess
from server.scripted_engine import ScriptedEngine

from tidewheel.engine.core.request import Request
from tidewheel.engine.sampling_params import SamplingParams
from tidewheel.server.telemetry.throughput import log_throughput


def shown_on_terminal(port: int, environment: Mapping[str, str], *arguments: str) -> str:
    """What `tidewheel serve` shows until its address is there."""
    terminal, inside = pty.openpty()
    command = [*TIDEWHEEL, "serve", "--port", str(port), "--threads-bind", one_core(), *arguments]
    process = subprocess.Popen(command, stdin=inside, stderr=inside, env={**os.environ, **environment})
    os.close(inside)
    shown = b""
    try:
        while b"/v1\r\n" not in shown:
            shown += os.read(terminal, 4096)
    finally:
        process.kill()
        process.wait()
        os.close(terminal)
    return shown.decode()


def test_a_terminal_shows_what_is_served_and_where(unused_port: int) -> None:
    shown = shown_on_terminal(unused_port, {"TERM": "xterm", "NO_COLOR": ""})
    for words in ("Tidewheel ", "tidewheel-demo (llava, int8-channel", "cpu, ", " kernels", "KV cache", "2048 tokens"):
        assert words in shown
    assert f"http://127.0.0.1:{unused_port}/\r\n" in shown
    assert "\x1b[2m" in shown


def test_a_terminal_shows_which_models_there_are(unused_port: int, tmp_path: Path) -> None:
    for number in range(20):
        (tmp_path / f"m{number:02}.gguf").write_bytes(b"GGUF")
    (tmp_path / "broken.gguf").touch()
    shown = shown_on_terminal(unused_port, {"NO_COLOR": "1"}, "--models-dir", str(tmp_path), "--memory", "2")
    assert "Not served, because they are broken: broken (broken.gguf is no GGUF file" in shown
    assert "models  m00, m01, " in shown
    assert "m15 and 4 more\r\n" in shown
    assert "memory  2.0 GiB for all that are loaded" in shown


def test_nothing_comes_before_the_banner_but_what_a_person_has_to_see(unused_port: int) -> None:
    """And colours can be turned off."""
    shown = shown_on_terminal(unused_port, {"TERM": "xterm", "NO_COLOR": "1"}, "--swap-space", "4")
    assert "\x1b[" not in shown
    before, _, _ = shown.partition("Tidewheel ")
    (line,) = before.strip().splitlines()
    assert "--swap-space has no effect" in line


def test_a_level_that_is_asked_for_shows_the_whole_log(unused_port: int) -> None:
    shown = shown_on_terminal(unused_port, {"NO_COLOR": "1"}, "--log-level", "info")
    assert "tidewheel.start: Loaded " in shown
    assert "tidewheel.start: Serving tidewheel-demo on http" in shown


def test_without_a_terminal_there_are_neither_colours_nor_a_banner(demo_server: ServerProcess) -> None:
    assert "Serving tidewheel-demo on http" in demo_server.log
    assert "\x1b[" not in demo_server.log
    assert "  model " not in demo_server.log
    assert "Waiting for application" not in demo_server.log


def test_files_of_the_page_and_probes_are_not_in_the_access_log(
    server: RunningServer, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level("INFO", logger="tidewheel.access"):
        for path in ("/", "/web/app.js", "/web/none.js", "/docs/docs.css", "/health"):
            server.http.get(path)
    fields: list[Any] = [record.fields for record in caplog.records]  # type: ignore[attr-defined]
    assert [field["path"] for field in fields] == ["/", "/web/none.js"]


def test_throughput_is_told_while_there_is_some(caplog: pytest.LogCaptureFixture) -> None:
    async def run() -> None:
        engine = ScriptedEngine()
        engine.start()
        logs = asyncio.create_task(log_throughput(engine, every_s=0.05))
        await asyncio.sleep(0.2)
        assert caplog.records == []  # nothing was to be done
        prompt = tuple(engine.tokenizer.encode("SAY(hello)YAS", False))
        async for _ in engine.submit(Request("one", prompt, SamplingParams(max_tokens=20))):
            pass
        await asyncio.sleep(0.2)
        logs.cancel()
        await engine.stop()

    with caplog.at_level(logging.INFO, logger="tidewheel.throughput"):
        asyncio.run(run())
    lines: list[Any] = [record.fields for record in caplog.records]  # type: ignore[attr-defined]
    assert 1 <= len(lines) <= 2  # the request may lie across the end of a turn
    assert sum(line["prompt_tokens_per_s"] for line in lines) > 0
    assert sum(line["generation_tokens_per_s"] for line in lines) > 0
    assert (lines[-1]["running"], lines[-1]["waiting"]) == (0, 0)
    assert "answers " in caplog.records[0].message
