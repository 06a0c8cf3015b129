"""nginx and HAProxy, as the examples configure them, before two servers."""

from __future__ import annotations

import http.client
import re
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import httpx
import pytest
from deploy.proxies import Proxy
from server.conftest import ServerProcess, events
from server.processes import ScriptedProcess
from server.waiting import eventually

KINDS = ("nginx", "haproxy")
BLOCK = 16  # tokens

StartProxy = Callable[..., Proxy]


@pytest.fixture(scope="module")
def replicas() -> Iterator[list[ServerProcess]]:
    """Two servers of the embedded model."""
    servers = [ServerProcess("--kv-cache-space", "0.2"), ServerProcess("--kv-cache-space", "0.2")]
    yield servers
    for server in servers:
        server.stop()


@pytest.fixture(scope="module")
def slow_replicas() -> Iterator[list[ScriptedProcess]]:
    """Two servers that take 10 ms a token."""
    servers = [ScriptedProcess(), ScriptedProcess()]
    yield servers
    for server in servers:
        server.stop()


@pytest.fixture(scope="module", params=KINDS)
def start_proxy(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[StartProxy]:
    proxies: list[Proxy] = []

    def start(servers: list[Any]) -> Proxy:
        folder = tmp_path_factory.mktemp(request.param)
        proxies.append(Proxy(request.param, [server.port for server in servers], folder))
        return proxies[-1]

    yield start
    for proxy in proxies:
        proxy.stop()


@pytest.fixture(scope="module")
def proxy(start_proxy: StartProxy, replicas: list[ServerProcess]) -> Proxy:
    return start_proxy(replicas)


@pytest.fixture(scope="module")
def slow_proxy(start_proxy: StartProxy, slow_replicas: list[ScriptedProcess]) -> Proxy:
    return start_proxy(slow_replicas)


def running(server: ScriptedProcess) -> int:
    return int(metric(str(server.client.base_url), "num_requests_running"))


def metric(url: str, name: str, labels: str = "") -> float:
    text = httpx.get(f"{url}/metrics", trust_env=False).text
    match = re.search(rf"^tidewheel:{name}{{[^}}]*{labels}[^}}]*}} (\S+)$", text, re.MULTILINE)
    assert match is not None, name
    return float(match[1])


@contextmanager
def endless_stream(proxy: Proxy, **headers: str) -> Iterator[Iterator[str]]:
    body = {"prompt": "LOOP(", "max_tokens": 8000, "stream": True}
    url = f"{proxy.url}/v1/completions"
    with (
        httpx.Client(trust_env=False, timeout=30) as client,
        client.stream("POST", url, json=body, headers=headers) as response,
    ):
        assert response.status_code == 200
        yield response.iter_lines()


def test_tokens_come_through_while_the_server_still_writes_and_a_client_that_leaves_is_noticed(
    slow_proxy: Proxy, slow_replicas: list[ScriptedProcess]
) -> None:
    with endless_stream(slow_proxy) as lines:
        for _ in range(8):
            assert "error" not in next(lines)
            assert sum(running(server) for server in slow_replicas) == 1
    eventually(lambda: not any(running(server) for server in slow_replicas), "the server goes on for nobody")


def chat(url: str, messages: list[Any], headers: dict[str, str] | None = None, **fields: Any) -> httpx.Response:
    body = {"model": "tidewheel-demo", "messages": messages, "temperature": 0, **fields}
    answer = httpx.post(f"{url}/v1/chat/completions", json=body, headers=headers, trust_env=False, timeout=60)
    assert answer.status_code == 200, answer.text
    return answer


# Two servers and the proxy start with the first test.
@pytest.mark.parametrize("stream", [False, True])
def test_the_answers_are_the_servers_own(proxy: Proxy, replicas: list[ServerProcess], stream: bool) -> None:
    def ask(url: str) -> str:
        answer = chat(url, [{"role": "user", "content": "Who are you?"}], stream=stream)
        if not stream:
            return str(answer.json()["choices"][0]["message"]["content"])
        chunks = events(answer)
        assert len(chunks) > 1  # a busy machine sends several tokens in one
        return "".join(choice["delta"].get("content") or "" for chunk in chunks for choice in chunk["choices"])

    assert ask(proxy.url) == ask(replicas[0].url) != ""


@pytest.mark.parametrize("named_by", ["header", "prompt_cache_key", "system and user", "user", "parts"])
def test_a_conversation_stays_where_its_prefix_is_cached(
    proxy: Proxy, replicas: list[ServerProcess], named_by: str
) -> None:
    before = [metric(server.url, "prompt_tokens_total") for server in replicas]

    def asked() -> list[bool]:
        after = [metric(server.url, "prompt_tokens_total") for server in replicas]
        return [now > then for now, then in zip(after, before, strict=True)]

    for number in range(24):  # a hash may give one server two thirds of them
        if number >= 4 and all(asked()):
            break
        name = f"{named_by} {proxy.port} {number}"
        options: dict[str, Any] = {}
        messages: list[Any] = []
        if named_by == "header":
            options["headers"] = {"X-Session-Id": name}
        elif named_by == "prompt_cache_key":
            options["prompt_cache_key"] = name
        elif named_by == "system and user":
            messages.append({"role": "system", "content": 'Answer in "one" word.\n' * 3})
        question = f"The {name}th question of a conversation that is long enough to fill a block: who are you?"
        content: Any = [{"type": "text", "text": question}] if named_by == "parts" else question
        messages.append({"role": "user", "content": content})
        known = 0
        for _ in range(3):
            answer = chat(proxy.url, messages, max_tokens=8, **options).json()
            assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] >= known
            known = (answer["usage"]["prompt_tokens"] // BLOCK - 1) * BLOCK
            messages.append({"role": "assistant", "content": answer["choices"][0]["message"]["content"]})
            messages.append({"role": "user", "content": "And then?"})
    assert all(asked()), "all went to one server"


def test_conversations_that_begin_with_a_long_document_stay_too(
    slow_proxy: Proxy, slow_replicas: list[ScriptedProcess]
) -> None:
    for number in range(6):
        messages = [{"role": "user", "content": f"{number} " + "long " * 20_000}]
        for turn in range(2):
            requested = {"X-Request-Id": f"document-{slow_proxy.port}-{number}-{turn}."}
            body = {"messages": messages}
            answer = httpx.post(
                f"{slow_proxy.url}/v1/chat/completions", json=body, headers=requested, trust_env=False, timeout=30
            )
            assert "context" in answer.json()["error"]["message"]  # the servers' is too short for it
            messages += [{"role": "assistant", "content": "Hm."}, {"role": "user", "content": "And?"}]

    def turns(server: ScriptedProcess) -> list[str]:
        return re.findall(rf"document-{slow_proxy.port}-(\d)-\d\.", server.log)

    eventually(lambda: sum(len(turns(server)) for server in slow_replicas) == 12, "some requests have left no trace")
    assert not set(turns(slow_replicas[0])) & set(turns(slow_replicas[1]))


def test_requests_of_no_conversation_are_spread(proxy: Proxy, replicas: list[ServerProcess]) -> None:
    before = [metric(server.url, "prompt_tokens_total") for server in replicas]
    for _ in range(20):
        answer = httpx.post(
            f"{proxy.url}/v1/completions", json={"prompt": "tide", "max_tokens": 1}, trust_env=False, timeout=30
        )
        assert answer.status_code == 200
    after = [metric(server.url, "prompt_tokens_total") for server in replicas]
    assert all(now > then for now, then in zip(after, before, strict=True))


# A server of its own starts, for it has to die: 0.5 s.
def test_a_server_that_dies_is_stood_in_for(start_proxy: StartProxy, slow_replicas: list[ScriptedProcess]) -> None:
    server, other = ScriptedProcess(), slow_replicas[0]
    try:
        proxy = start_proxy([server, other])
        body = {"prompt": "SAY(tide)YAS", "max_tokens": 10}

        def ask(session: str) -> tuple[int, str]:
            options: dict[str, Any] = {"headers": {"X-Session-Id": session}, "trust_env": False, "timeout": 30}
            answer = httpx.post(f"{proxy.url}/v1/completions", json=body, **options)
            return answer.status_code, answer.json()["choices"][0]["text"]

        def answered(one: ScriptedProcess) -> float:
            return metric(str(one.client.base_url), "request_success_total", 'finished_reason="stop"')

        for number in range(100):  # until one goes to it, by chance
            assert ask(f"{number}") == (200, "tide")
            if answered(server):
                break
        before = answered(other)
        server.stop()
        assert [ask(f"{number}") for _ in range(5)] == [(200, "tide")] * 5
        assert answered(other) == before + 5
    finally:
        server.stop()


def test_one_busy_conversation_does_not_fill_a_server(slow_proxy: Proxy, slow_replicas: list[ScriptedProcess]) -> None:
    if slow_proxy.kind == "nginx":
        pytest.skip("nginx has no bounded loads, as its file says")
    with ExitStack() as streams:
        readers = [streams.enter_context(endless_stream(slow_proxy, **{"X-Session-Id": "busy"})) for _ in range(10)]
        for lines in readers:
            next(lines)
        shares = sorted(running(server) for server in slow_replicas)
    assert sum(shares) == 10
    assert shares[1] <= 1.6 * 5  # times the average
    eventually(lambda: not any(running(server) for server in slow_replicas), "the server goes on for nobody")


@pytest.mark.parametrize("path", ["/metrics", "/%6detrics", "//metrics", "/load", "/server_info", "/metrics/"])
def test_what_is_for_operators_stays_inside(proxy: Proxy, path: str) -> None:
    connection = http.client.HTTPConnection("127.0.0.1", proxy.port, timeout=30)
    connection.request("GET", path)  # as it is written: httpx would tidy it up
    answer = connection.getresponse()
    text = answer.read().decode()
    assert answer.status in (404, 307)
    assert "tidewheel:" not in text
    connection.request("POST", "/reset_prefix_cache")
    assert connection.getresponse().status == 404
    connection.close()


def test_request_ids_go_in_and_out(proxy: Proxy, replicas: list[ServerProcess]) -> None:
    body = {"prompt": "tide", "max_tokens": 1}
    with httpx.Client(base_url=proxy.url, trust_env=False, timeout=30) as client:
        answer = client.post("/v1/completions", json=body, headers={"X-Request-Id": "mine-1"})
        assert answer.headers["x-request-id"] == "mine-1"
        made = client.post("/v1/completions", json=body).headers["x-request-id"]
    eventually(lambda: any(made in server.log for server in replicas), "the server does not know the proxy's id")
    assert any("mine-1" in server.log for server in replicas)


def test_bodies_that_outgrow_the_proxys_buffer_are_served_too(proxy: Proxy) -> None:
    body = {"user": "x" * 3_000_000, "prompt": "tide", "max_tokens": 1}
    answer = httpx.post(f"{proxy.url}/v1/completions", json=body, trust_env=False, timeout=60)
    assert answer.status_code == 200
    assert answer.json()["usage"]["completion_tokens"] == 1


def test_health_is_there_for_whoever_balances_the_proxies(proxy: Proxy) -> None:
    assert httpx.get(f"{proxy.url}/health", trust_env=False).status_code == 200
