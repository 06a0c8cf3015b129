"""Templates that come with requests: rendered as the model's own are, in a process that is all they may break."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest
from samples import swept
from server.chat.tools.test_tool_templates import LLAMA, MISTRAL, QWEN
from server.conftest import RunningServer, StartProcess, StartServer
from server.scripted_engine import impatient
from server.waiting import eventually

from tidewheel.server.chat import request_templates
from tidewheel.server.http.limits import AdmissionLimits

CHAT = "/v1/chat/completions"
ASK = {"role": "user", "content": "SAY(hello)YAS"}
OWN = "{{ bos_token }}{{ messages[0].content }}"
ENDLESS = "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}"


@pytest.fixture(scope="module")
def trusting(start_server: StartServer) -> RunningServer:
    return start_server(trust_request_chat_template=True)


def ask(server: RunningServer, template: str | None, **fields: Any) -> Any:
    body = {"messages": [ASK], **fields} | ({} if template is None else {"chat_template": template})
    return server.http.post(CHAT, json=body, timeout=60)


def said(server: RunningServer, template: str | None) -> str:
    response = ask(server, template)
    assert response.status_code == 200, response.text
    content: str = response.json()["choices"][0]["message"]["content"]
    return content


def workers(parent: int) -> list[int]:
    """The processes of a server that render templates."""
    found = []
    for path in Path("/proc").glob("[0-9]*"):
        try:
            is_child = path.joinpath("stat").read_text().rpartition(")")[2].split()[1] == str(parent)
            if is_child and b"template_worker" in path.joinpath("cmdline").read_bytes():
                found.append(int(path.name))
        except OSError:  # it has ended meanwhile
            continue
    return found


def end_templates(asked: Sequence[Future[Any]]) -> None:
    """Ends the processes that render, again and again, until all that was asked for is answered."""

    def are_answered() -> bool:
        for worker in workers(os.getpid()):
            with contextlib.suppress(ProcessLookupError):
                os.kill(worker, signal.SIGKILL)
        return all(future.done() for future in asked)

    eventually(are_answered, "an answer waits for more than its template")


# Six processes end, and each next one takes a third of a second to start.
@pytest.mark.parametrize(
    ("template", "reason"),
    [
        (ENDLESS, "rendering it takes"),
        swept("{{ 10 ** (10 ** 9) }}", "rendering it takes"),
        ("{{ 'a' * 10 ** 9 }}", "512 MiB"),
        swept(
            "{% set ns = namespace(x='a') %}{% for i in range(99) %}{% set ns.x = ns.x + ns.x %}{% endfor %}", "512 MiB"
        ),
        ("{% for i in range(99999) %}{{ 'a' * 999 }}{% endfor %}", "16777216 characters"),
        ("{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}", "nested too deeply"),
        ("{{ " + "(" * 5000 + ")" * 5000 + " }}", "nested too deeply"),
        ("{{ range(10**12) | list }}", "Range too big"),
        ("{{ strftime_now('%Y' * 1000000) }}", "at most 1000 characters"),
        ("{{ '\\ud800' }}", "surrogates"),
        ("{{ raise_exception('no' * 10**6) }}", "nono"),
        ("{{ cycler.__init__.__globals__ }}", "unsafe"),
        ("{% if %}", "does not compile"),
        ("{{ messages[7].content.x }}", "no element 7"),
    ],
)
def test_a_bad_template_is_its_own_requests_fault(
    trusting: RunningServer, monkeypatch: pytest.MonkeyPatch, template: str, reason: str
) -> None:
    if reason == "rendering it takes":  # others may need the time on a slow machine
        monkeypatch.setattr(request_templates, "_MAX_S", 0.4)
    response = ask(trusting, template)
    assert response.status_code == 400, response.text
    error = response.json()["error"]
    assert reason in error["message"]
    assert len(error["message"]) < 3000
    assert error["param"] in ("chat_template", "messages")
    monkeypatch.undo()
    assert said(trusting, OWN) == "hello"


@pytest.mark.parametrize("keys", [swept(()), ("one", "two")])
def test_each_client_has_a_place(start_server: StartServer, keys: tuple[str, ...]) -> None:
    """Clients have different addresses, or different keys. Behind all six the other would be out of time."""
    server = start_server(trust_request_chat_template=True, api_keys=keys)
    body = {"messages": [ASK], "max_tokens": 1}

    def client(number: int) -> httpx.Client:
        if keys:
            headers = {"authorization": f"Bearer {keys[number]}"}
            return httpx.Client(base_url=server.url, timeout=60, trust_env=False, headers=headers)
        transport = httpx.HTTPTransport(local_address=f"127.0.0.{number + 1}")
        return httpx.Client(base_url=server.url, timeout=60, transport=transport)

    with client(0) as spinning, client(1) as other, ThreadPoolExecutor(6) as pool:
        endless = [pool.submit(spinning.post, CHAT, json={**body, "chat_template": ENDLESS}) for _ in range(6)]
        eventually(lambda: workers(os.getpid()), "nothing renders")
        for _ in range(3):
            assert other.post(CHAT, json={**body, "chat_template": OWN}).status_code == 200
        assert not all(future.done() for future in endless)
        end_templates(endless)
        assert spinning.post(CHAT, json={**body, "chat_template": OWN}).status_code == 200


@pytest.mark.sweep
def test_one_that_waits_for_its_clients_others_is_told_to_come_again(
    trusting: RunningServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(request_templates, "_MAX_S", 0.4)
    with ThreadPoolExecutor(3) as pool:
        answers = list(pool.map(lambda _: ask(trusting, ENDLESS), range(3)))
    assert {answer.status_code for answer in answers} == {400, 503}
    for answer in answers:
        if answer.status_code == 503:
            assert answer.json()["error"]["code"] == "template_queue_timeout"
            assert "retry-after" in answer.headers
    monkeypatch.undo()
    assert said(trusting, OWN) == "hello"


@pytest.mark.sweep
def test_the_server_ends_while_templates_do_not(start_process: StartProcess) -> None:
    arguments = ("--trust-request-chat-template", "--shutdown-timeout", "0")
    server = start_process(*arguments, environment=impatient(0.1))
    body = {"messages": [ASK], "chat_template": ENDLESS}
    with ThreadPoolExecutor(3) as pool:
        for _ in range(3):
            pool.submit(httpx.post, f"{server.client.base_url}{CHAT}", json=body, trust_env=False, timeout=60)
        eventually(lambda: workers(server.process.pid), "nothing renders")
        (worker,) = workers(server.process.pid)
        server.process.send_signal(signal.SIGTERM)
        assert server.wait() == 0
    eventually(lambda: "\nState:\tZ" in status(worker) or not status(worker), "it outlives the server")


def test_others_do_not_notice(trusting: RunningServer) -> None:
    assert said(trusting, OWN) == "hello"
    for worker in workers(os.getpid()):
        os.kill(worker, signal.SIGSTOP)  # its next task does not end
    with ThreadPoolExecutor(1) as pool:
        bad = pool.submit(ask, trusting, ENDLESS)
        for _ in range(5):
            assert said(trusting, None) == "hello"
            assert trusting.http.get("/health").status_code == 200
        assert not bad.done()
        end_templates([bad])
    assert bad.result().status_code in (400, 503)
    assert said(trusting, OWN) == "hello"


@pytest.mark.parametrize("template", [QWEN, LLAMA, MISTRAL])
def test_the_text_is_that_of_the_models_own(start_server: StartServer, template: str) -> None:
    server = start_server(engine={"template": template}, trust_request_chat_template=True)
    call = {"id": "abcdefghi", "type": "function", "function": {"name": "f", "arguments": '{"a":  1, "b": "\\u00fc"}'}}
    body = {
        "messages": [ASK, {"role": "assistant", "tool_calls": [call]},
                     {"role": "tool", "tool_call_id": "abcdefghi", "content": "3"}],
        "tools": [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}],
        "chat_template_kwargs": {"large": 10**30, "tone": ["ü", None, 1.5]},
    }  # fmt: skip
    wanted = server.post("/tokenize", body).json()
    assert wanted["tokens"]
    assert server.post("/tokenize", {**body, "chat_template": template}).json() == wanted


def test_many_at_once_get_their_own(trusting: RunningServer) -> None:
    with ThreadPoolExecutor(16) as pool:
        texts = list(pool.map(lambda i: said(trusting, f"{{{{ messages[0].content }}}}SAY(number {i})YAS"), range(64)))
    assert texts == [f"number {i}" for i in range(64)]
    running = set(workers(os.getpid()))
    assert said(trusting, OWN) == "hello"
    assert set(workers(os.getpid())) == running  # none is started for each of them


def test_the_process_has_nothing_of_the_servers(start_process: StartProcess) -> None:
    server = start_process("--trust-request-chat-template", environment={"TIDEWHEEL_API_KEY": "secret"})
    server.client.headers["authorization"] = "Bearer secret"
    assert workers(server.process.pid) == []
    body = {"messages": [ASK], "chat_template": OWN}
    assert server.client.post(CHAT, json=body).status_code == 200
    (worker,) = workers(server.process.pid)
    environment = Path(f"/proc/{worker}/environ").read_bytes()
    assert b"secret" not in environment
    assert b"TIDEWHEEL" not in environment
    files = [os.readlink(path) for path in Path(f"/proc/{worker}/fd").iterdir()]
    assert len([name for name in files if name.startswith("socket:")]) == 1
    assert len(files) == 4  # and the standard ones
    limits = Path(f"/proc/{worker}/limits").read_text()
    for name in ("Max address space", "Max cpu time", "Max file size"):
        (line,) = [line for line in limits.splitlines() if line.startswith(name)]
        assert not line.removeprefix(name).strip().startswith("unlimited")
    # It is started again when it dies, and ends with the server, be that killed.
    os.kill(worker, signal.SIGKILL)
    assert server.client.post(CHAT, json=body).status_code == 200
    (other,) = workers(server.process.pid)
    assert other != worker
    server.stop()
    eventually(lambda: not Path(f"/proc/{other}").exists() or "\nState:\tZ" in status(other), "it outlives the server")


def status(process: int) -> str:
    try:
        return Path(f"/proc/{process}/status").read_text()
    except OSError:
        return ""


def test_a_process_that_does_nothing_is_given_up(trusting: RunningServer, monkeypatch: pytest.MonkeyPatch) -> None:
    assert said(trusting, OWN) == "hello"
    monkeypatch.setattr(request_templates, "_MAX_S", 0.3)
    for worker in workers(os.getpid()):
        os.kill(worker, signal.SIGSTOP)
    response = ask(trusting, OWN)
    assert response.status_code == 400
    assert "longer than 0.3 s" in response.json()["error"]["message"]
    monkeypatch.undo()
    assert said(trusting, OWN) == "hello"


def test_a_process_that_cannot_be_started(start_server: StartServer, monkeypatch: pytest.MonkeyPatch) -> None:
    server = start_server(trust_request_chat_template=True)
    monkeypatch.setattr(request_templates, "COMMAND", "raise SystemExit(3)")
    response = ask(server, OWN)
    assert (response.status_code, response.json()["error"]["param"]) == (503, "chat_template")
    monkeypatch.undo()
    assert said(server, OWN) == "hello"


# Templates without an end take the second that they get.
def test_waiting_is_bounded(start_server: StartServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(request_templates, "_MAX_S", 1.0)  # a template ends soon after its request
    limits = AdmissionLimits(max_queue=1, request_timeout_s=0.4)
    server = start_server(trust_request_chat_template=True, admission=limits)
    eventually(lambda: ask(server, OWN).status_code == 200, "it does not start")
    with ThreadPoolExecutor(8) as pool:
        responses = list(pool.map(lambda _: ask(server, ENDLESS), range(8)))
    statuses = {response.status_code for response in responses}
    assert 429 in statuses
    assert statuses <= {400, 429, 504}, "a busy machine may end a template before its request"
    assert all("retry-after" in response.headers for response in responses if response.status_code == 429)
    eventually(lambda: ask(server, OWN).status_code == 200, "the queue is never empty again")
