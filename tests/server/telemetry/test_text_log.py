"""Prompts and answers in the log: only those that were asked for, cut, and unable to look like other lines."""

from __future__ import annotations

import io
import json
import logging
from collections.abc import Iterator
from typing import Any

import encoder_zoo as zoo
import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st
from server.conftest import RunningServer, ServerProcess, StartServer

from tidewheel.engine.encoders.load import load_encoders
from tidewheel.engine.outputs import RequestOutput
from tidewheel.server.options.serve import parse_options
from tidewheel.server.telemetry.logs import JsonFormatter
from tidewheel.server.telemetry.text_log import AnswerTexts, TextLog

COMPLETIONS = "/v1/completions"
CHAT = "/v1/chat/completions"


@pytest.fixture(scope="module")
def cutting(start_server: StartServer) -> RunningServer:
    encoders = load_encoders([str(zoo.folder("bert"))], ["embed"])
    return start_server(encoders=encoders, max_log_len=12, enable_log_outputs=True)


@pytest.fixture
def logged(caplog: pytest.LogCaptureFixture) -> Iterator[pytest.LogCaptureFixture]:
    with caplog.at_level("INFO", logger="tidewheel.requests"):
        yield caplog


def said(logged: pytest.LogCaptureFixture, name: str) -> list[Any]:
    """The values of a field, in the order of the lines."""
    fields: list[dict[str, Any]] = [getattr(record, "fields", {}) for record in logged.records]
    return [field[name] for field in fields if name in field]


def test_prompts_and_answers_are_cut(cutting: RunningServer, logged: pytest.LogCaptureFixture) -> None:
    body = {"prompt": ["SAY(a long answer)YAS", "SAY(b)YAS"], "stream": True}
    response = cutting.post(COMPLETIONS, body, headers={"x-request-id": "mine"})
    assert response.status_code == 200
    assert said(logged, "prompt_text") == ["SAY(a long a", "SAY(b)YAS"]
    assert said(logged, "answer_text") == ["a long answe", "b"]
    first = logged.messages[0]
    assert first.startswith("cmpl-")
    assert first.endswith("x-request-id=mine index=0 prompt_text='SAY(a long a'")


def test_a_chat_prompt_is_what_the_template_makes(cutting: RunningServer, logged: pytest.LogCaptureFixture) -> None:
    cutting.post(CHAT, {"messages": [{"role": "user", "content": "SAY(hi)YAS"}], "n": 2})
    (prompt,) = said(logged, "prompt_text")
    rendered = cutting.post(f"{CHAT}/render", {"messages": [{"role": "user", "content": "SAY(hi)YAS"}]}).json()
    assert rendered["prompt"].startswith(prompt)
    assert len(prompt) == 12
    assert said(logged, "answer_text") == ["hi", "hi"]


def test_token_ids_are_logged_where_the_prompt_has_them(
    cutting: RunningServer, logged: pytest.LogCaptureFixture
) -> None:
    token_ids = cutting.engine.tokenizer.encode("SAY(some longer text)YAS", False)
    assert len(token_ids) > 12
    cutting.post(COMPLETIONS, {"prompt": token_ids})
    assert said(logged, "prompt_token_ids") == [token_ids[:12]]
    cutting.post(COMPLETIONS, {"prompt": "SAY(some longer text)YAS", "truncate_prompt_tokens": 5})
    assert said(logged, "prompt_token_ids")[1] == token_ids[-5:]  # what the model has read


def test_inputs_of_embeddings_are_prompts(cutting: RunningServer, logged: pytest.LogCaptureFixture) -> None:
    for text in ("the first of the texts", [1, 2]):
        assert cutting.post("/v1/embeddings", {"input": text}).status_code == 200
    assert said(logged, "prompt_text") == ["the first of"]
    assert said(logged, "prompt_token_ids") == [[1, 2]]


def test_answers_are_logged_whole_without_a_length(start_server: StartServer, logged: pytest.LogCaptureFixture) -> None:
    server = start_server(enable_log_outputs=True)
    server.post(COMPLETIONS, {"prompt": "SAY(an answer of some words)YAS", "max_tokens": 40})
    assert said(logged, "answer_text") == ["an answer of some words"]
    assert said(logged, "prompt_text") == []


@pytest.mark.parametrize("options", [{}, {"max_log_len": 0, "enable_log_outputs": True}])
def test_nothing_is_logged_that_was_not_asked_for(
    start_server: StartServer, options: dict[str, Any], logged: pytest.LogCaptureFixture
) -> None:
    start_server(**options).post(COMPLETIONS, {"prompt": "SAY(a secret)YAS"})
    (line,) = logged.messages
    assert "secret" not in line


def test_turning_requests_off_turns_prompts_off(start_server: StartServer, logged: pytest.LogCaptureFixture) -> None:
    start_server(log_requests=False, max_log_len=100).post(COMPLETIONS, {"prompt": "SAY(a secret)YAS"})
    assert logged.messages == []
    app = parse_options(["m", "--disable-log-requests", "--max-log-len", "100"], {}).app
    assert [line.partition(" has")[0] for line in app.without_effect()] == ["--max-log-len"]


def test_answers_cannot_be_logged_without_requests(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parse_options(["m", "--no-enable-log-requests", "--enable-log-outputs"], {})
    assert "--enable-log-outputs needs --enable-log-requests" in capsys.readouterr().err


def test_a_text_stays_on_its_line() -> None:
    forged = "hi\nERROR tidewheel: \x1b[2J forged\r\u2028\u202e'\""
    process = ServerProcess("--max-log-len", "100")
    try:
        httpx.post(f"{process.url}{COMPLETIONS}", json={"prompt": forged, "max_tokens": 1}, trust_env=False)
    finally:
        process.stop()
    (line,) = [line for line in process.log.splitlines() if "forged" in line]
    assert "prompt_text='hi\\nERROR tidewheel: \\x1b[2J forged\\r\\u2028\\u202e\\'\"'" in line
    assert "\x1b" not in process.log


@given(st.text(alphabet=st.characters(codec=None, categories=None), max_size=40), st.integers(1, 50))
def test_any_text_is_one_line_of_characters_that_can_be_seen(text: str, max_len: int) -> None:
    stream = io.StringIO()
    handler = logging.StreamHandler(stream)
    logger = logging.getLogger("tidewheel.requests")
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    try:
        for formatter in (logging.Formatter(), JsonFormatter()):
            handler.setFormatter(formatter)
            TextLog(max_len).log_prompts("cmpl-1", "mine", [text])
    finally:
        logger.removeHandler(handler)
        logger.setLevel(logging.NOTSET)
    plain, as_json = stream.getvalue().removesuffix("\n").split("\n")
    assert plain.isprintable()
    assert as_json.isprintable()
    assert json.loads(as_json)["prompt_text"] == text[:max_len]


def test_answers_without_text_are_token_ids() -> None:
    answers = AnswerTexts(3, has_text=False)
    for token_ids in ((1, 2), (3, 4), (5,)):
        answers.add(RequestOutput(0, "", token_ids))
    assert answers.shown() == {0: [1, 2, 3, 4]}
