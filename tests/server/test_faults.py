"""A storm of faults on a real model whose cache is too small: whoever behaves notices nothing, and nothing is lost."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import resource
import socket
import threading
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
import soak
from server.conftest import RunningServer, ServerProcess, StartProcess, StartServer
from server.raw_http import read_health
from server.waiting import eventually, is_idle
from storm import Storm

from tidewheel.engine.load import load_engine
from tidewheel.engine.machine.memory import release_free_memory
from tidewheel.engine.options import EngineOptions
from tidewheel.engine.scheduling.sequence import Sequence
from tidewheel.engine.stream import RequestStream
from tidewheel.engine.transcript import Transcript
from tidewheel.server.generation.generations import Generation

REQUESTS, AT_A_TIME = 2000, 48


@pytest.fixture(scope="module")
def cramped(start_server: StartServer, dummy_model: Path) -> RunningServer:
    """A tiny Llama whose KV cache holds 512 tokens, for requests of up to 150 of which 32 run at a time."""
    options = EngineOptions(
        str(dummy_model), load_format="dummy", max_model_len=512, max_num_seqs=32, kv_cache_space=512 * 512 / 2**30
    )
    limits = {"read_timeout_s": 5, "write_timeout_s": 5}
    return start_server(engine=load_engine(options), connections=limits, served_model_names=("tiny",))


def test_a_storm_leaves_no_trace(cramped: RunningServer) -> None:
    others = requests_kept()  # by servers of other tests
    storm = Storm(cramped.url, "tiny")
    asyncio.run(storm.learn())
    asyncio.run(storm.run(REQUESTS // 2, AT_A_TIME))
    resident = settled_memory(cramped, others)
    asyncio.run(storm.run(REQUESTS // 2, AT_A_TIME))
    assert storm.wrong == []
    assert storm.outcomes.total() == REQUESTS
    assert len(storm.outcomes) == 7
    stats = cramped.engine.stats()
    assert stats.preemptions_total > REQUESTS / 10
    assert settled_memory(cramped, others) - resident < 16 * 2**20
    assert cramped.engine.stats().kv_blocks_used == 0
    cramped.engine._scheduler.check()
    assert cramped.http.get("/health").status_code == 200


def settled_memory(server: RunningServer, others: Counter[str]) -> int:
    """The resident bytes of this process once the server is idle, and everything that its requests made is gone."""
    eventually(lambda: is_idle(server), "the engine works on for clients that have gone")
    eventually(lambda: not requests_kept() - others, "what requests made outlives them")
    release_free_memory()  # what the allocator keeps, of other tests of this process too, is not lost
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * resource.getpagesize()


def requests_kept() -> Counter[str]:
    """What there is of requests in this process, by its type."""
    gc.collect()
    kinds = (Generation, RequestStream, Sequence, Transcript)
    return Counter(type(thing).__name__ for thing in gc.get_objects() if isinstance(thing, kinds))


def test_the_soak_script(dummy_server: ServerProcess, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["--url", dummy_server.url, "--api-key", "secret", "--seconds", "2", "--cases", "10"]
    assert soak.main([*arguments, "--concurrency", "16"]) == 0
    assert "requests" in capsys.readouterr().out
    assert soak.main([*arguments[:-4], "--api-key", "wrong"]) == 1
    assert "401" in capsys.readouterr().err


def test_the_storm_notices_a_wrong_answer(cramped: RunningServer) -> None:
    storm = Storm(cramped.url, "tiny", cases=1)
    asyncio.run(storm.learn())
    storm._alone[0][0]["text"] += "!"
    asyncio.run(storm.run(30, 4))
    assert storm.wrong


@pytest.fixture
def many_files() -> Iterator[None]:
    """This process may open as many files as it is ever allowed."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_idle_and_dripping_connections_do_not_disturb(start_process: StartProcess, many_files: None) -> None:
    server = start_process("--read-timeout", "3", max_files=1024)
    request = b"GET /health HTTP/1.1\r\nhost: test\r\n\r\n"
    idle = [socket.create_connection(("127.0.0.1", server.port), timeout=20) for _ in range(2000)]
    for connection in idle:
        connection.sendall(request)
    for connection in idle:
        read_health(connection)
    dripping = [socket.create_connection(("127.0.0.1", server.port), timeout=20) for _ in range(50)]
    for connection in dripping:
        connection.sendall(b"GET /health HTTP/1.1\r\nx-endless: ")
    stopped = threading.Event()

    def drip() -> None:
        while not stopped.wait(0.05):
            for connection in dripping:
                with contextlib.suppress(OSError):  # it has been dropped, as it should be
                    connection.sendall(b"a")

    slowloris = threading.Thread(target=drip)
    slowloris.start()
    streams = [server.start_stream(f"SAY(stream {i} {'goes on ' * 12})YAS") for i in range(8)]
    for i, (thread, lines) in enumerate(streams):
        thread.join(60)
        text = "".join(line.partition('"text":"')[2].partition('"')[0] for line in lines)
        assert text == f"stream {i} {'goes on ' * 12}"
        assert "data: [DONE]" in lines
    for connection in dripping:
        with connection:
            try:
                while connection.recv(4096):
                    pass
            except ConnectionResetError:
                pass
    stopped.set()
    slowloris.join()
    for connection in idle:
        connection.sendall(request)
    for connection in idle:
        with connection:
            read_health(connection)
    assert httpx.get(f"{server.client.base_url}/health", trust_env=False).status_code == 200
