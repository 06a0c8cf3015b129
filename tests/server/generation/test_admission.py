"""A full server says so at once, and says when to come back; what may be asked for is bounded."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import encoder_zoo
import pytest
from samples import sample
from server.conftest import RunningServer, StartServer, events
from server.raw_http import post_raw
from server.waiting import eventually, is_idle

from tidewheel.engine.encoders.engine import EncoderEngine
from tidewheel.engine.encoders.load import load_encoders
from tidewheel.server.http.limits import AdmissionLimits

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"


def endless(server: RunningServer, **fields: Any) -> Any:
    return post_raw(server, {"prompt": "LOOP(", "max_tokens": 600, "stream": True, **fields})


@pytest.fixture
def small(start_server: StartServer) -> RunningServer:
    """1,024 tokens of cache hold three answers of the expected 256 tokens; two more may wait."""
    return start_server(engine={"step_s": 0.01, "num_blocks": 64}, admission=AdmissionLimits(max_queue=2))


def test_what_neither_fits_nor_may_wait_is_sent_away(small: RunningServer) -> None:
    streams = [endless(small) for _ in range(5)]
    eventually(lambda: len(small.engine.requests) == 5, "five should be let in")
    try:
        for path, body in ((COMPLETIONS, {"prompt": "a"}), (CHAT, {"messages": [{"role": "user", "content": "a"}]})):
            for stream in (False, True):
                response = small.post(path, {**body, "max_tokens": 600, "stream": stream})
                assert response.status_code == 429
                assert response.json()["error"]["type"] == "rate_limit_error"
                assert response.json()["error"]["code"] == "queue_full"
                assert 1 <= int(response.headers["retry-after"]) <= 60
    finally:
        for stream in streams:
            stream.close()
    eventually(lambda: is_idle(small), "clients have gone")
    # Those that were sent away hold no place, nor do those that have gone. How long their answers had become does not
    # count here: more than 250 tokens are not asked for.
    again = [endless(small, max_tokens=250) for _ in range(5)]
    eventually(lambda: len(small.engine.requests) == 10, "five should be let in again")
    for stream in again:
        stream.close()
    eventually(lambda: is_idle(small), "clients have gone")


def test_a_full_queue_takes_in_a_client_that_has_less_than_its_part(small: RunningServer) -> None:
    streams = [endless(small) for _ in range(5)]
    eventually(lambda: small.engine.stats().num_running + small.engine.stats().num_waiting == 5, "five are let in")
    body = {"prompt": "LOOP(", "max_tokens": 600, "stream": True}
    with small.another_client() as other, other.stream("POST", COMPLETIONS, json=body) as response:
        assert response.status_code == 200
        assert other.post(COMPLETIONS, json=body).status_code == 429
        assert small.post(COMPLETIONS, body).status_code == 429
    for stream in streams:
        stream.close()
    eventually(lambda: is_idle(small), "clients have gone")


def test_short_answers_take_less_of_the_cache(small: RunningServer) -> None:
    streams = [endless(small, max_tokens=600, prompt=f"{i} LOOP(") for i in range(4)]
    before = len(small.engine.requests)
    eventually(lambda: small.engine.stats().num_running == 4, "they never ran")
    assert small.post(COMPLETIONS, {"prompt": "SAY(a)YAS", "max_tokens": 4}).status_code == 200
    assert len(small.engine.requests) >= before
    for stream in streams:
        stream.close()
    eventually(lambda: is_idle(small), "clients have gone")


def test_a_request_that_could_never_be_let_in_is_told_so(small: RunningServer) -> None:
    for body in ({"prompt": "LOOP(", "n": 100}, {"prompt": ["LOOP("] * 100}):
        response = small.post(COMPLETIONS, {**body, "max_tokens": 600})
        assert response.status_code == 400
        assert "--max-queue" in response.json()["error"]["message"]


# A refused client waits for at least a second.
@pytest.mark.sweep
def test_clients_come_back_by_themselves(small: RunningServer) -> None:
    import openai

    client = openai.OpenAI(base_url=f"{small.url}/v1", api_key="none", max_retries=20)
    texts: list[str] = []

    def ask(i: int) -> None:
        answer = client.completions.create(model="scripted", prompt=f"SAY(answer {i})YAS", max_tokens=600)
        texts.append(answer.choices[0].text)

    threads = [threading.Thread(target=ask, args=(i,)) for i in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert sorted(texts) == sorted(f"answer {i}" for i in range(8))


def test_limits_of_one_request(start_server: StartServer) -> None:
    bounded = start_server(admission=AdmissionLimits(max_prompts=2, max_n=3))
    assert bounded.post(COMPLETIONS, {"prompt": ["a", "b"], "n": 3}).status_code == 200
    for body, param, flag in (
        ({"prompt": ["a", "b", "c"]}, "prompt", "--max-prompts"),
        ({"prompt": "a", "n": 4}, "n", "--max-n"),
        ({"prompt": "a", "best_of": 4}, "best_of", "--max-n"),
        ({"prompt": "a", "best_of": 4, "use_beam_search": True}, "best_of", "--max-n"),
    ):
        error = bounded.post(COMPLETIONS, body).json()["error"]
        assert error["param"] == param
        assert flag in error["message"]
    chat = {"messages": [{"role": "user", "content": "a"}], "n": 4}
    assert bounded.post(CHAT, chat).json()["error"]["param"] == "n"
    beams = {**chat, "n": 1, "best_of": 4, "use_beam_search": True}
    assert bounded.post(CHAT, beams).json()["error"]["param"] == "best_of"
    roomy = start_server(admission=AdmissionLimits(max_n=200))
    assert len(roomy.post(COMPLETIONS, {"prompt": "a", "n": 150}).json()["choices"]) == 150


def test_answers_that_take_too_long(start_server: StartServer) -> None:
    hasty = start_server(engine={"step_s": 0.01}, admission=AdmissionLimits(request_timeout_s=0.4))
    body = {"prompt": "LOOP(", "max_tokens": 8000}
    response = hasty.post(COMPLETIONS, body)
    assert response.status_code == 504
    assert response.json()["error"]["code"] == "request_timeout"
    *chunks, error = events(hasty.post(COMPLETIONS, {**body, "stream": True}))
    assert chunks
    assert error["error"]["code"] == "request_timeout"
    eventually(lambda: is_idle(hasty), "the engine works on for answers that are too late")
    assert hasty.post(COMPLETIONS, {"prompt": "SAY(quick)YAS"}).json()["choices"][0]["text"] == "quick"


TEXTS = ["the tide"] * 20
ENCODER_BODIES = [
    ("/v1/embeddings", {"model": "embed", "input": "corn"}, {"model": "embed", "input": TEXTS}),
    ("/v1/score", {"text_1": "corn", "text_2": "rain"}, {"text_1": "corn", "text_2": TEXTS}),
    ("/v1/rerank", {"query": "corn", "documents": ["rain"]}, {"query": "corn", "documents": TEXTS}),
    ("/predict", {"inputs": "corn"}, {"inputs": [[text] for text in TEXTS]}),
]


def gated_encoders(monkeypatch: pytest.MonkeyPatch) -> tuple[EncoderEngine, threading.Event]:
    """Encoders that compute nothing before the event is set."""
    folders = [str(encoder_zoo.folder(name)) for name in ("bert", "bert-cross")]
    encoders, opened = load_encoders(folders, ["embed", "rank"]), threading.Event()
    for encoder in encoders.encoders.values():
        monkeypatch.setattr(encoder, "pieces", lambda *asked, pieces=encoder.pieces: opened.wait() and pieces(*asked))
    return encoders, opened


@pytest.mark.parametrize(("path", "one", "many"), sample(ENCODER_BODIES, lambda case: case[0] == "/v1/score"))
def test_encoders_queues_are_bounded(
    start_server: StartServer, path: str, one: Any, many: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    encoders, opened = gated_encoders(monkeypatch)
    server = start_server(encoders=encoders, admission=AdmissionLimits(max_queue=4))
    with post_raw(server, many, path):
        eventually(lambda: encoders.backlog >= 20, "it never came in")
        response = server.post(path, one)
        assert (response.status_code, response.json()["error"]["code"]) == (429, "queue_full")
        assert 1 <= int(response.headers["retry-after"]) <= 60
    eventually(lambda: encoders.backlog == 0, "what nobody waits for any more is left in the queue")
    opened.set()
    assert server.post(path, one).status_code == 200
    name = one.get("model", "rank")
    assert f'tidewheel:encoder_requests_rejected_total{{model_name="{name}"}} 1.0' in server.http.get("/metrics").text


def test_a_full_queue_of_encoders_takes_in_another_client(
    start_server: StartServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    encoders, opened = gated_encoders(monkeypatch)
    server = start_server(encoders=encoders, admission=AdmissionLimits(max_queue=12))
    path, one, many = ENCODER_BODIES[0]
    with post_raw(server, many, path), server.another_client() as other, ThreadPoolExecutor() as pool:
        try:
            eventually(lambda: encoders.backlog == 20, "it never came in")
            assert server.post(path, one).status_code == 429
            assert other.post(path, json={**one, "input": TEXTS[:7]}).status_code == 429, "more than half of the queue"
            let_in = pool.submit(other.post, path, json=one)
            eventually(lambda: encoders.backlog == 21, "it never came in")
        finally:
            opened.set()
        assert let_in.result().status_code == 200


@pytest.mark.parametrize(("path", "one", "many"), sample(ENCODER_BODIES, lambda case: case[0] == "/v1/score"))
def test_encoders_that_take_too_long(
    start_server: StartServer, path: str, one: Any, many: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    encoders, opened = gated_encoders(monkeypatch)
    server = start_server(encoders=encoders, admission=AdmissionLimits(request_timeout_s=0.2))
    response = server.post(path, many)
    assert (response.status_code, response.json()["error"]["code"]) == (504, "request_timeout")
    eventually(lambda: encoders.backlog == 0, "what comes too late is left in the queue")
    opened.set()
    eventually(lambda: server.post(path, one).status_code == 200, "the queue never moves again")
