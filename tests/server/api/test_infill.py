"""llama.cpp's `/infill` and `/completion`."""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest
from server.conftest import RunningServer, ServerProcess, StartServer

MARKS = ("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>")
REPOSITORY = ("<|repo_name|>", "<|file_sep|>")


@pytest.fixture(scope="module")
def server(start_server: StartServer) -> RunningServer:
    return start_server(engine={"specials": MARKS + REPOSITORY})


def infill(server: RunningServer, **body: Any) -> Any:
    response = server.post("/infill", {"input_prefix": "SAY(one)YAS", "input_suffix": "after", **body})
    assert response.status_code == 200, response.text
    return response.json()


def prompt_of(server: RunningServer) -> str:
    engine = server.engine
    text: str = engine.tokenizer.decode(list(engine.requests[-1].prompt_token_ids), skip_special_tokens=False)
    return text


def test_the_answer_and_what_it_took(server: RunningServer) -> None:
    answer = infill(server, cache_prompt=True, samplers=["top_k"], t_max_predict_ms=500)
    assert (answer["content"], answer["stop"], answer["stop_type"]) == ("one", True, "eos")
    assert answer["tokens_predicted"] == answer["timings"]["predicted_n"] == 4
    assert answer["tokens_evaluated"] == len("<SAY(one)YAS") + 3 + len("after")
    assert prompt_of(server) == "<bos><|fim_prefix|>SAY(one)YAS<|fim_suffix|>after<|fim_middle|>"


def test_limits_and_stop_strings(server: RunningServer) -> None:
    assert infill(server, n_predict=2)["stop_type"] == "limit"
    stopped = infill(server, stop=["e"], n_predict=-1)
    assert (stopped["content"], stopped["stop_type"], stopped["stopping_word"]) == ("on", "word", "e")


def test_stream(server: RunningServer) -> None:
    body = {"input_prefix": "SAY(one)YAS", "input_suffix": "", "stream": True}
    response = server.post("/infill", body)
    assert response.headers["content-type"].startswith("text/event-stream")
    *pieces, end = [json.loads(frame.removeprefix("data: ")) for frame in response.text.split("\n\n")[:-1]]
    assert "".join(piece["content"] for piece in pieces) == "one"
    assert not any(piece["stop"] for piece in pieces)
    assert (end["stop"], end["content"], end["tokens_predicted"]) == (True, "", 4)


def test_other_files_and_a_begun_filling(server: RunningServer, start_server: StartServer) -> None:
    extra = [{"filename": "a.py", "text": "x = 1"}]
    infill(server, input_extra=extra, prompt="be")
    hole = "<|fim_prefix|>SAY(one)YAS<|fim_suffix|>after<|fim_middle|>be"
    context = "<|repo_name|>repository\n<|file_sep|>a.py\nx = 1\n<|file_sep|>current\n"
    assert prompt_of(server) == f"<bos>{context}{hole}"
    plain = start_server(engine={"specials": MARKS})
    infill(plain, input_extra=extra, prompt="be")
    assert prompt_of(plain) == f"<bos>x = 1\n\n{hole}"


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"input_suffix": None}, "input_suffix"),
        ({"input_prefix": "a" * 9000}, "input_prefix"),
        ({"input_suffix": "a" * 1_000_000}, "input_suffix"),
        ({"input_extra": [{"text": ""}] * 257}, "input_extra"),
        ({"input_extra": [{"text": "a" * 1_000_000}]}, "input_extra[0].text"),
        ({"input_extra": [{"text": "a" * 5000}] * 256}, "input_extra"),
        ({"temperature": -1}, "temperature"),
        ({"repeat_penalty": 0}, "repeat_penalty"),
    ],
)
def test_errors_name_the_field(server: RunningServer, fields: dict[str, Any], param: str) -> None:
    response = server.post("/infill", {"input_prefix": "a", "input_suffix": "b", **fields})
    assert (response.status_code, response.json()["error"]["param"]) == (400, param), response.text


def test_a_model_without_marks_refuses(start_server: StartServer) -> None:
    response = start_server().post("/infill", {"input_prefix": "a", "input_suffix": ""})
    assert response.status_code == 400
    assert "fill-in-the-middle" in response.json()["error"]["message"]


def test_a_text_goes_on(server: RunningServer) -> None:
    body = {"prompt": "SAY(one)YAS", "n_predict": 9, "cache_prompt": True}
    answer = server.post("/completion", body).json()
    assert (answer["content"], answer["stop"], answer["stop_type"]) == ("one", True, "eos")
    assert prompt_of(server) == "<bos>SAY(one)YAS"
    assert server.post("/completion", {**body, "n_predict": 2}).json()["content"] == "on"
    assert server.post("/completion", {"prompt": [*b"SAY(two)YAS"], "n_predict": -1}).json()["content"] == "two"
    streamed = server.post("/completion", {**body, "stream": True}).text
    *pieces, end = [json.loads(frame.removeprefix("data: ")) for frame in streamed.split("\n\n")[:-1]]
    assert "".join(piece["content"] for piece in pieces) == "one"
    assert (end["stop"], end["tokens_predicted"]) == (True, 4)


def test_json_of_a_schema(demo_server: ServerProcess) -> None:
    pytest.importorskip("llguidance")  # not there on every machine
    body = {"prompt": "Which wheel?", "n_predict": 40, "json_schema": {"enum": ["oak", "iron"]}, "temperature": 0}
    answer = httpx.post(f"{demo_server.url}/completion", json=body, trust_env=False)
    assert json.loads(answer.json()["content"]) in ("oak", "iron")


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({}, "prompt"),
        ({"prompt": {"prompt_string": "a"}}, "prompt"),
        ({"prompt": "a", "grammar": "root ::= [0-9]"}, "grammar"),
        ({"prompt": "a", "n_probs": 2}, "n_probs"),
        ({"prompt": "a", "json_schema": {"type": "wheel"}}, "json_schema"),
        ({"prompt": "a", "n_predict": 0}, "n_predict"),
    ],
)
def test_errors_of_texts_name_the_field(server: RunningServer, body: dict[str, Any], param: str) -> None:
    response = server.post("/completion", body)
    assert (response.status_code, response.json()["error"]["param"]) == (400, param), response.text
