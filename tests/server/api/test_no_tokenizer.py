"""`--skip-tokenizer-init`: a folder without a tokenizer answers token ids with token ids, and refuses text."""

from __future__ import annotations

import math
import shutil
from pathlib import Path
from typing import Any

import pytest
from server.conftest import RunningServer, StartServer, events

from tidewheel import LLM, SamplingParams, StructuredOutputsParams
from tidewheel.engine.errors import InvalidRequestError
from tidewheel.engine.loading.load import load_engine
from tidewheel.engine.options import EngineOptions

IDS = [5, 6, 7]
NO_TOKENIZER = "needs a tokenizer, which --skip-tokenizer-init leaves out: send prompts as token ids"
MESSAGES = [{"role": "user", "content": "Hello"}]


@pytest.fixture(scope="module")
def folder(dummy_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("no-tokenizer")
    shutil.copy(dummy_model / "config.json", folder)
    return folder


@pytest.fixture(scope="module")
def server(folder: Path, start_server: StartServer) -> RunningServer:
    engine = load_engine(EngineOptions(str(folder), load_format="dummy", skip_tokenizer_init=True, max_logprobs=-1))
    return start_server(engine, enable_tokenizer_info_endpoint=True)


@pytest.fixture(scope="module")
def tokens(server: RunningServer) -> list[int]:
    """The answer to IDS."""
    (choice,) = complete(server)["choices"]
    assert (choice["text"], choice["prompt_token_ids"], choice["finish_reason"]) == ("", IDS, "length")
    token_ids: list[int] = choice["token_ids"]
    assert len(token_ids) == 8
    return token_ids


def complete(server: RunningServer, **body: Any) -> Any:
    response = server.post("/v1/completions", {"prompt": IDS, "max_tokens": 8, "temperature": 0, **body})
    assert response.status_code == 200, response.text
    return response.json()


def test_token_ids_are_answered_with_token_ids(server: RunningServer, tokens: list[int]) -> None:
    body = {"prompt": [IDS, IDS], "max_tokens": 8, "temperature": 0, "stream": True}
    pieces = [choice for chunk in events(server.post("/v1/completions", body)) for choice in chunk["choices"]]
    for index in range(2):
        mine = [piece for piece in pieces if piece["index"] == index]
        assert [token for piece in mine for token in piece["token_ids"]] == tokens
        assert {piece["text"] for piece in mine} == {""}
    ended = complete(server, stop_token_ids=[tokens[3]])["choices"][0]
    assert (ended["token_ids"], ended["stop_reason"]) == (tokens[: tokens.index(tokens[3]) + 1], tokens[3])
    assert complete(server, allowed_token_ids=[9])["choices"][0]["token_ids"] == [9] * 8


def test_log_probabilities_name_tokens_by_their_ids(server: RunningServer, tokens: list[int]) -> None:
    choice = complete(server, logprobs=2, echo=True, prompt_logprobs=1)["choices"][0]
    assert choice["logprobs"]["tokens"] == [f"token_id:{token}" for token in [*IDS, *tokens]]
    assert set(choice["logprobs"]["text_offset"]) == {0}
    assert all(str(token) in place for token, place in zip(IDS[1:], choice["prompt_logprobs"][1:], strict=True))
    assert choice["text"] == ""


@pytest.mark.parametrize("streamed", [False, True])
def test_log_probabilities_of_the_whole_vocabulary(server: RunningServer, streamed: bool) -> None:
    body = {"prompt": IDS, "max_tokens": 4, "echo": True, "logprobs": -1, "stream": streamed, "temperature": 0}
    response = server.post("/v1/completions", body)
    chunks = events(response) if streamed else [response.json()]
    places = [place for chunk in chunks for place in chunk["choices"][0]["logprobs"]["top_logprobs"]]
    assert len(places) == 7
    for place in places[1:]:
        assert place.keys() == {f"token_id:{token}" for token in range(320)}
        assert sum(map(math.exp, place.values())) == pytest.approx(1, abs=1e-4)
    if not streamed:
        first, *rest = complete(server, prompt_logprobs=-1)["choices"][0]["prompt_logprobs"]
        assert first is None
        assert [sorted(entry["rank"] for entry in place.values()) for place in rest] == [[*range(1, 321)]] * 2
    refused = server.post("/v1/completions", {**body, "logprobs": 321})
    assert "logprobs must be at most 320 on this server (--max-logprobs)" in refused.json()["error"]["message"]


@pytest.mark.parametrize(
    ("path", "fields", "param"),
    [
        ("/v1/completions", {"prompt": "text"}, "prompt"),
        ("/v1/completions", {"prompt": IDS, "stop": "x"}, "stop"),
        ("/v1/completions", {"prompt": IDS, "suffix": "x"}, "suffix"),
        ("/v1/completions", {"prompt": IDS, "bad_words": ["x"]}, "bad_words"),
        ("/v1/completions", {"prompt": IDS, "guided_choice": ["x"]}, "guided_choice"),
        ("/v1/completions/render", {"prompt": IDS}, "text"),
        ("/v1/chat/completions", {"messages": MESSAGES}, "messages"),
        ("/v1/chat/completions/render", {"messages": MESSAGES}, "messages"),
        ("/v1/responses", {"input": "Hello"}, "input"),
        ("/v1/messages", {"messages": MESSAGES, "max_tokens": 4}, None),
        ("/v1/messages/count_tokens", {"messages": MESSAGES}, None),
        ("/api/generate", {"model": "", "prompt": "Hello"}, None),
        ("/api/chat", {"model": "", "messages": MESSAGES}, None),
        ("/infill", {"input_prefix": "a", "input_suffix": "b"}, "input_suffix"),
        ("/tokenize", {"prompt": "text"}, "prompt"),
        ("/tokenize", {"messages": MESSAGES}, "messages"),
        ("/detokenize", {"tokens": IDS}, "tokens"),
    ],
    ids=str,
)
def test_what_needs_text_is_refused(
    server: RunningServer, path: str, fields: dict[str, Any], param: str | None
) -> None:
    response = server.post(path, {**fields, **({"model": server.engine.model_name} if "model" in fields else {})})
    assert response.status_code == 400, response.text
    error = response.json()["error"]
    assert NO_TOKENIZER in (error if isinstance(error, str) else error["message"])
    assert param is None or (error["param"] == param and error["message"].startswith(param))


def test_what_needs_no_text_is_there(server: RunningServer, caplog: pytest.LogCaptureFixture) -> None:
    assert server.http.get("/v1/models").json()["data"][0]["max_model_len"] == 512
    assert NO_TOKENIZER in server.http.get("/tokenizer_info").json()["error"]["message"]
    server.engine.warm_up()  # for grammars, but there are none
    assert not caplog.records


def test_llm_without_a_tokenizer(folder: Path, tokens: list[int], caplog: pytest.LogCaptureFixture) -> None:
    with LLM(str(folder), load_format="dummy", skip_tokenizer_init=True, tokenizer="elsewhere") as llm:
        params = SamplingParams(temperature=0, max_tokens=8, logprobs=20)
        [output] = llm.generate({"prompt_token_ids": IDS}, params, use_tqdm=False)
        assert (output.outputs[0].token_ids, output.outputs[0].text) == (tokens, "")
        assert output.outputs[0].logprobs is not None
        assert output.outputs[0].logprobs[0][tokens[0]].decoded_token is None
        for fields in ({"logprobs": 21}, {"prompt_logprobs": -1}):
            with pytest.raises(InvalidRequestError, match=r"logprobs must be at most 20 \(--max-logprobs\)"):
                llm.generate(IDS, SamplingParams(**fields), use_tqdm=False)
        impossible = [("text", params), (IDS, SamplingParams(stop="x"))]
        impossible.append((IDS, SamplingParams(structured_outputs=StructuredOutputsParams(choice=["x"]))))
        for prompt, wanted in impossible:
            with pytest.raises(InvalidRequestError, match=NO_TOKENIZER):
                llm.generate(prompt, wanted, use_tqdm=False)
        with pytest.raises(InvalidRequestError, match=NO_TOKENIZER):
            llm.chat(MESSAGES)
        with pytest.raises(InvalidRequestError, match=NO_TOKENIZER):
            llm.get_tokenizer()
    assert "--tokenizer has no effect: --skip-tokenizer-init turns the tokenizer off" in caplog.text
