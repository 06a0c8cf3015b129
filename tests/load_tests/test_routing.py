"""A mix of conversations is played against a server, and its recording without one."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import routing
import routing_simulation
from conversations import make_mix
from load_tests.stub import StubServer
from server.conftest import ServerProcess, StartServer


@pytest.fixture(scope="module")
def server() -> Iterator[ServerProcess]:
    """A server of the embedded model, whose cache has room for a few conversations."""
    process = ServerProcess("--num-gpu-blocks-override", "160")
    yield process
    process.stop()


def figures(table: str) -> list[str]:
    """The last line's, without what is left of the first percentage."""
    cells = table.splitlines()[-1].split()
    return cells[next(i for i, cell in enumerate(cells) if cell.endswith("%")) :]


@pytest.mark.sweep
def test_the_simulation_finds_what_a_server_finds(
    server: ServerProcess, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    url, recording = f"http://127.0.0.1:{server.port}", tmp_path / "mix.jsonl"
    mix = ["--conversations", "24", "--concurrency", "1"]
    assert routing.main(["--url", url, "--record", str(recording), *mix]) == 0
    cached, max_requests, max_tokens, errors, _ = figures(capsys.readouterr().out)
    assert (max_requests, max_tokens, errors) == ("1.00", "1.00", "0")
    routing_simulation.main(["--replicas", "1", "--blocks", "160", "--concurrency", "1", "--recorded", str(recording)])
    simulated = float(figures(capsys.readouterr().out)[0].rstrip("%"))
    assert 40 < simulated < 75
    assert float(cached.rstrip("%")) == pytest.approx(simulated, abs=1.5)


def test_a_mix_is_made_by_its_seed() -> None:
    one, same, other = make_mix(50, 0), make_mix(50, 0), make_mix(50, 1)
    assert one == same != other
    assert {conversation.named_by for conversation in one.conversations} == {"x-session-id", "prompt_cache_key", None}
    assert len({conversation.system for conversation in one.conversations}) > 3
    for conversation in one.conversations:
        assert one.order.count(conversation.number) == len(conversation.questions) > 1


def test_servers_without_metrics_are_named(stub: StubServer, capsys: pytest.CaptureFixture[str]) -> None:
    assert routing.main(["--url", stub.url]) == 1
    assert f"name the servers behind {stub.url} with --server" in capsys.readouterr().err


def test_requests_that_fail_are_counted(
    start_server: StartServer, stub: StubServer, capsys: pytest.CaptureFixture[str]
) -> None:
    with_metrics = start_server().url
    assert routing.main(["--url", f"{stub.url}/nowhere", "--server", with_metrics, "--conversations", "3"]) == 1
    said = capsys.readouterr()
    assert "3 times: ValueError: 404" in said.err
    assert figures(said.out)[3] == "3"
