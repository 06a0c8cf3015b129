"""A storm of faults on a real model whose cache is too small: other clients notice nothing, and nothing is lost."""

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
from cores import one_core
from server.conftest import RunningServer, ServerProcess, StartProcess, StartServer
from server.raw_http import read_health
from server.waiting import eventually, is_idle
from storm import Storm

from tidewheel.engine.core.output_processor import OutputProcessor
from tidewheel.engine.core.stream import RequestStream
from tidewheel.engine.devices.cpu.options import CpuOptions
from tidewheel.engine.loading.load import load_engine
from tidewheel.engine.options import EngineOptions
from tidewheel.engine.sequences.sequence import Sequence
from tidewheel.server import garbage
from tidewheel.server.generation.generations import Generation
from tidewheel.server.http.connections import Connection

AT_A_TIME = 48
READ_TIMEOUT_S = WRITE_TIMEOUT_S = 5
FEW = 20

# Of an engine whose KV cache holds 512 tokens, for requests of up to 150 tokens; 32 of them run at a time.
CRAMPED = {"load_format": "dummy", "max_model_len": 512, "max_num_seqs": 32, "kv_cache_space": 512 * 512 / 2**30}


@pytest.fixture(scope="module")
def cramped(start_server: StartServer, dummy_model: Path) -> RunningServer:
    """A tiny Llama whose KV cache is too small, in this process."""
    limits = {"read_timeout_s": READ_TIMEOUT_S, "write_timeout_s": WRITE_TIMEOUT_S}
    engine = load_engine(
        EngineOptions(str(dummy_model), device_options=(CpuOptions(threads_bind=one_core()),), **CRAMPED)
    )
    return start_server(engine=engine, connections=limits, served_model_names=("tiny",))


@pytest.fixture
def cramped_process(dummy_model: Path) -> Iterator[ServerProcess]:
    """The same in a process of its own, whose memory is all the server's."""
    limits = {"read_timeout": READ_TIMEOUT_S, "write_timeout": WRITE_TIMEOUT_S, "served_model_name": "tiny"}
    options = [f"--{name.replace('_', '-')}={value}" for name, value in {**CRAMPED, **limits}.items()]
    process = ServerProcess(str(dummy_model), *options)
    yield process
    process.stop()


@pytest.mark.sweep  # which takes half a minute; what is left of a few requests is looked for below
def test_a_storm_leaves_no_trace(cramped_process: ServerProcess) -> None:
    requests = 2000
    asyncio.run(check_memory(cramped_process.url, requests))


async def check_memory(url: str, requests: int) -> None:
    """Sends half of the requests, then the others, which must not need more memory."""
    storm = Storm(url, "tiny")
    await storm.learn()
    async with httpx.AsyncClient(base_url=url, timeout=60, trust_env=False) as client:
        server = soak.Server(client)
        await storm.run(requests // 2, AT_A_TIME)
        resident = await settled_memory_mib(server)
        await storm.run(requests // 2, AT_A_TIME)
        assert storm.wrong == []
        assert storm.outcomes.total() == requests
        assert len(storm.outcomes) == 7
        assert await server.figure("num_preemptions_total") > requests / 10
        assert await settled_memory_mib(server) - resident < 8  # 8 KiB a request; the allocator alone takes 1 MiB


async def settled_memory_mib(server: soak.Server) -> float:
    """The server's memory once it is well and idle, and has had time to give back what only steps need."""
    await server.check_idle()
    await asyncio.sleep(2)
    return await server.memory_mib()


@pytest.mark.parametrize("requests", [FEW, pytest.param(200, marks=pytest.mark.sweep)])
def test_nothing_outlives_its_request(
    cramped: RunningServer, requests: int, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    gc.collect()
    others = requests_kept()  # by servers of other tests
    # A collection stops all streams: what ends is freed without one.
    monkeypatch.setattr(garbage, "_collect_if_due", lambda: None)
    gc.disable()
    request.addfinalizer(gc.enable)
    storm = Storm(cramped.url, "tiny", cases=10 if requests == FEW else 40)
    asyncio.run(storm.learn())
    # How many requests of a storm meet depends on the machine. These answers never fit together.
    body = {"model": "tiny", "prompt": "a", "n": 8, "max_tokens": 140, "ignore_eos": True}
    assert cramped.post("/v1/completions", body).status_code == 200
    assert cramped.engine.stats().preemptions_total > 0
    asyncio.run(storm.run(requests, AT_A_TIME))
    assert storm.wrong == []
    eventually(lambda: is_idle(cramped), "the engine works on for clients that have gone")
    eventually(lambda: not requests_kept() - others, "what requests made outlives them")
    assert cramped.engine.stats().kv_blocks_used == 0
    assert cramped.http.get("/health").status_code == 200


def requests_kept() -> Counter[str]:
    """The objects of requests in this process, counted by type."""
    kinds = (Connection, Generation, RequestStream, Sequence, OutputProcessor)
    found = [thing for thing in gc.get_objects() if isinstance(thing, kinds)]
    return Counter(type(one).__name__ for one in found if not isinstance(one, Connection) or one.transport.is_closing())


def test_the_soak_script(dummy_server: ServerProcess, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["--url", dummy_server.url, "--api-key", "secret", "--seconds", "0.5", "--cases", "4"]
    assert soak.main([*arguments, "--concurrency", "16"]) == 0
    assert "requests" in capsys.readouterr().out
    assert soak.main([*arguments[:-4], "--api-key", "wrong"]) == 1
    assert "401" in capsys.readouterr().err


def test_the_storm_notices_a_wrong_answer(cramped: RunningServer) -> None:
    storm = Storm(cramped.url, "tiny", cases=1)
    asyncio.run(storm.learn())
    storm._alone[0][0]["text"] += "!"
    asyncio.run(storm.run(12, 4))
    assert storm.wrong


@pytest.fixture
def many_files() -> Iterator[None]:
    """This process may open as many files as it is ever allowed."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


# A process has 300 connections, more than it may open files at first, and answers take a second.
def test_idle_and_dripping_connections_do_not_disturb(start_process: StartProcess, many_files: None) -> None:
    server = start_process("--read-timeout", "1", max_files=128)
    request = b"GET /health HTTP/1.1\r\nhost: test\r\n\r\n"
    idle = [socket.create_connection(("127.0.0.1", server.port), timeout=20) for _ in range(300)]
    for connection in idle:
        connection.sendall(request)
    for connection in idle:
        read_health(connection)
    dripping = [socket.create_connection(("127.0.0.1", server.port), timeout=20) for _ in range(20)]
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
