"""The `ollama` package over real sockets, on a scripted model, and on the embedded one."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import encoder_zoo as zoo
import numpy as np
import ollama
import pydantic
import pytest
from server.conftest import RunningServer, ServerProcess, StartServer

from tidewheel.engine.encoders.load import load_encoders

CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Köln", "days": 2}}\n</tool_call>'
ARGUMENTS = {"city": "Köln", "days": 2}


def weather(city: str, days: int) -> str:
    """The weather of a city.

    Args:
        city: the city
        days: how many days
    """
    return f"SAY(Sunny in {city} for {days} days.)YAS"


@pytest.fixture(scope="module")
def server(start_server: StartServer) -> RunningServer:
    encoders = load_encoders([str(zoo.folder("bert"))], ["embed"])
    return start_server(
        engine={"specials": ("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>")},
        encoders=encoders,
        tool_call_parser="hermes",
        reasoning_parser="qwen3",
        served_model_names=["scripted", "other:7b"],
    )


@pytest.fixture(scope="module")
def client(server: RunningServer) -> ollama.Client:
    return ollama.Client(server.url)


@pytest.fixture(scope="module")
def demo(demo_server: ServerProcess) -> Iterator[ollama.Client]:
    return ollama.Client(demo_server.url)


def say(text: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": f"SAY({text})YAS"}]


def prompt_of(server: RunningServer) -> str:
    engine = server.engine
    text: str = engine.tokenizer.decode(list(engine.requests[-1].prompt_token_ids), skip_special_tokens=False)
    return text


@pytest.mark.parametrize("model", ["scripted", "scripted:latest", "other:7b"])
def test_chat(client: ollama.Client, model: str) -> None:
    answer = client.chat(model, say("grüß dich"))
    assert answer.message.content == "grüß dich"
    assert (answer.model, answer.done, answer.done_reason) == (model, True, "stop")
    assert answer.eval_count == len("grüß dich".encode()) + 1
    durations = (answer.load_duration, answer.prompt_eval_duration, answer.eval_duration)
    assert answer.prompt_eval_count
    assert answer.total_duration
    assert all(duration is not None and 0 < duration <= answer.total_duration for duration in durations)


def test_stream(client: ollama.Client) -> None:
    *parts, end = client.chat("scripted", say("one two"), stream=True)
    assert "".join(part.message.content or "" for part in parts) == "one two"
    assert not any(part.done or part.eval_count for part in parts)
    assert (end.done, end.done_reason, end.message.content, end.eval_count) == (True, "stop", "", 8)


def test_async(server: RunningServer) -> None:
    async def run() -> str:
        stream = await ollama.AsyncClient(server.url).chat("scripted", say("one"), stream=True)
        return "".join([part.message.content or "" async for part in stream])

    assert asyncio.run(run()) == "one"


@pytest.mark.parametrize("streamed", [False, True])
def test_a_loop_of_tools(client: ollama.Client, server: RunningServer, streamed: bool) -> None:
    messages: list[Any] = say(f"One moment.\n{CALL}\n{CALL}")
    asked: Any = client.chat("scripted", messages, tools=[weather], stream=streamed)  # type: ignore[call-overload]
    turns = [part.message for part in asked] if streamed else [asked.message]
    calls = [call for turn in turns for call in turn.tool_calls or ()]
    assert [(call.function.name, call.function.arguments) for call in calls] == [("weather", ARGUMENTS)] * 2
    assert "".join(turn.content or "" for turn in turns) == "One moment."
    turn = {"role": "assistant", "content": "One moment.", "tool_calls": calls}
    results = [{"role": "tool", "tool_name": "weather", "content": weather(**ARGUMENTS)}] * 2
    answer = client.chat("scripted", [*messages, turn, *results], tools=[weather])
    assert answer.message.content == "Sunny in Köln for 2 days."
    assert '[weather {"city": "Köln", "days": 2}]' in prompt_of(server)
    assert "[tool call00100]" in prompt_of(server)
    assert "[tool call00101]" in prompt_of(server)
    client.chat("scripted", [*messages, turn, {"role": "tool", "content": "sunny"}])  # as LangChain names no tool
    assert "[tool call00100]" in prompt_of(server)


def test_results_find_their_calls(client: ollama.Client, server: RunningServer) -> None:
    calls = [{"function": {"name": name, "arguments": {}}} for name in ("f", "g", "f", "h", "f")]
    named = ["f", "unknown", "h", "f", None, "f"]  # by name if there is one, and otherwise the next one
    results = [{"role": "tool", "content": "", **({"tool_name": name} if name else {})} for name in named]
    history: list[Any] = [*say("go"), {"role": "assistant", "tool_calls": calls}, *results]
    client.chat("scripted", history)
    found = re.findall(r"\[tool (\w*)\]", prompt_of(server))
    assert found == ["call00100", "call00101", "call00103", "call00102", "call00104", ""]


@pytest.mark.parametrize("streamed", [False, True])
def test_thinking(client: ollama.Client, streamed: bool) -> None:
    text = "<think>Hm.</think>Yes."

    def ask(**options: Any) -> tuple[str, str]:
        answer: Any = client.chat("scripted", say(text), stream=streamed, **options)
        turns = [part.message for part in answer] if streamed else [answer.message]
        return "".join(turn.thinking or "" for turn in turns), "".join(turn.content or "" for turn in turns)

    assert ask() == ask(think=True) == ask(think="high") == ("Hm.", "Yes.")
    assert ask(think=False) == ("", "Yes.")


def test_generate(client: ollama.Client, server: RunningServer) -> None:
    answer = client.generate("scripted", "SAY(one)YAS", system="Be brief.")
    assert (answer.response, answer.done_reason) == ("one", "stop")
    assert prompt_of(server) == "<system>Be brief.<user>SAY(one)YAS<assistant>"
    *parts, end = client.generate("scripted", "SAY(<think>Hm.</think>two)YAS", stream=True)
    assert "".join(part.response or "" for part in parts) == "two"
    assert "".join(part.thinking or "" for part in parts) == "Hm."
    assert end.eval_count


def test_generate_without_a_template(client: ollama.Client, server: RunningServer) -> None:
    text = "A text that has more than sixteen tokens."
    assert client.generate("scripted", f"SAY({text})YAS", raw=True).response == text
    assert prompt_of(server) == f"<bos>SAY({text})YAS"


def test_fill_in_the_middle(client: ollama.Client, server: RunningServer) -> None:
    assert client.generate("scripted", "SAY(x)YAS", suffix="after").response == "x"
    assert prompt_of(server) == "<bos><|fim_prefix|>SAY(x)YAS<|fim_suffix|>after<|fim_middle|>"


def test_options(client: ollama.Client, server: RunningServer) -> None:
    options = {
        "num_predict": 2, "temperature": 0.7, "top_k": 5, "top_p": 0.9, "min_p": 0.1, "seed": 3, "stop": ["z"],
        "repeat_penalty": 1.1, "presence_penalty": 0.2, "frequency_penalty": 0.3,
        "num_ctx": 4096, "num_thread": 4, "mirostat": 0,
    }  # fmt: skip
    answer = client.chat("scripted", say("one"), options=options, keep_alive="5m")
    assert (answer.message.content, answer.done_reason, answer.eval_count) == ("on", "length", 2)
    sampling = server.engine.requests[-1].sampling
    assert (sampling.max_tokens, sampling.temperature, sampling.top_k, sampling.top_p) == (2, 0.7, 5, 0.9)
    assert (sampling.min_p, sampling.seed, sampling.stop, sampling.repetition_penalty) == (0.1, 3, ("z",), 1.1)
    assert (sampling.presence_penalty, sampling.frequency_penalty) == (0.2, 0.3)


def test_log_probabilities(client: ollama.Client) -> None:
    for answer in (
        client.chat("scripted", say("one"), logprobs=True, top_logprobs=2),
        client.generate("scripted", "SAY(one)YAS", raw=True, logprobs=True, top_logprobs=2),
    ):
        assert answer.logprobs
        assert [entry.token for entry in answer.logprobs][:3] == ["o", "n", "e"]
        assert all(len(entry.top_logprobs or ()) == 2 for entry in answer.logprobs)
    parts = list(client.chat("scripted", say("one"), stream=True, logprobs=True))
    assert "".join(entry.token for part in parts for entry in part.logprobs or ()).startswith("one")


def test_nothing_to_say_loads_the_model(client: ollama.Client) -> None:
    assert client.chat("scripted").done_reason == "load"
    assert client.generate("scripted", keep_alive=-1).done_reason == "load"
    with pytest.raises(ollama.ResponseError, match=r"^tools\[0\]\.function\.name must be"):
        client.chat("scripted", tools=[{"type": "function", "function": {"name": "no name"}}])


class Wheel(pydantic.BaseModel):
    spokes: int = pydantic.Field(ge=3, le=9)
    oak: bool


def test_structured_output(demo: ollama.Client) -> None:
    pytest.importorskip("llguidance")  # not there on every machine
    ask = [{"role": "user", "content": "Invent a wheel."}]
    answer = demo.chat("tidewheel-demo", ask, format=Wheel.model_json_schema())
    assert Wheel.model_validate_json(answer.message.content or "")
    parts = list(
        demo.generate("tidewheel-demo:latest", "Invent a wheel.", format=Wheel.model_json_schema(), stream=True)
    )
    assert Wheel.model_validate_json("".join(part.response or "" for part in parts))
    answer = demo.chat("tidewheel-demo", ask, format="json", options={"num_predict": 40})
    assert (answer.message.content or "").lstrip().startswith("{")


def test_embeddings(client: ollama.Client) -> None:
    texts = zoo.texts(5)
    wanted = zoo.reference("bert", texts)
    wanted /= np.linalg.norm(wanted, axis=1, keepdims=True)
    answer = client.embed("embed:latest", texts)
    np.testing.assert_allclose(answer.embeddings, wanted, rtol=1e-4, atol=2e-5)
    assert answer.prompt_eval_count
    np.testing.assert_allclose(client.embed("embed", texts[0]).embeddings[0], wanted[0], rtol=1e-4, atol=2e-5)
    old = client.embeddings("embed", texts[0]).embedding
    np.testing.assert_allclose(old, zoo.reference("bert", texts[:1])[0], rtol=1e-4, atol=2e-5)
    assert len(client.embed("embed", "long " * 5000).embeddings) == 1
    with pytest.raises(ollama.ResponseError, match="tokens"):
        client.embed("embed", "long " * 5000, truncate=False)


def test_models(client: ollama.Client, demo: ollama.Client) -> None:
    assert [model.model for model in client.list().models] == ["scripted:latest", "other:7b", "embed:latest"]
    shown = client.show("scripted")
    assert shown.capabilities == ["completion", "tools", "thinking", "insert"]
    assert shown.modelinfo
    assert shown.modelinfo[f"{shown.modelinfo['general.architecture']}.context_length"] == 8192
    assert shown.parameters == "temperature 0.5"
    assert client.show("embed").capabilities == ["embedding"]
    (running, *_) = client.ps().models
    assert (running.model, running.context_length) == ("scripted:latest", 8192)
    (model,) = demo.list().models
    assert model.details
    assert model.size
    assert model.details.family
    assert (model.details.parameter_size or "").endswith("M")


def test_errors(client: ollama.Client, server: RunningServer) -> None:
    with pytest.raises(ollama.ResponseError, match="not served here; served: scripted") as caught:
        client.chat("absent", say("hi"))
    assert caught.value.status_code == 404
    with pytest.raises(ollama.ResponseError, match=r"^options\.temperature"):
        client.chat("scripted", say("hi"), options={"temperature": -1})
    with pytest.raises(ollama.ResponseError, match="cannot be turned into text"):
        list(client.chat("scripted", say("BREAK("), stream=True))
    response = server.post("/api/chat", {"messages": say("hi"), "max_tokens": 1})
    assert (response.status_code, list(response.json())) == (400, ["error"])
    assert "send options.num_predict" in response.json()["error"]
    assert server.http.get("/api/nothing").json() == {"error": "there is no endpoint /api/nothing"}


@pytest.mark.parametrize(
    ("path", "fields", "named"),
    [
        ("/api/chat", {"messages": [{"role": "user", "content": "a", "images": ["AAAA"]}]}, "messages[0].images"),
        ("/api/chat", {"messages": say("a"), "format": "yaml"}, "format"),
        ("/api/chat", {"messages": say("a"), "format": {"type": "nothing"}}, "format"),
        ("/api/chat", {"messages": say("a"), "options": {"mirostat": 2}}, "options.mirostat"),
        ("/api/chat", {"messages": say("a"), "options": {"typical_p": 0.5}}, "options.typical_p"),
        ("/api/chat", {"messages": say("a"), "options": {"wings": 2}}, "options.wings"),
        ("/api/chat", {"messages": say("a"), "options": {"num_predict": 0}}, "options.num_predict"),
        ("/api/chat", {"messages": say("a" * 9000)}, "messages"),
        ("/api/generate", {"prompt": "a", "images": ["AAAA"]}, "images"),
        ("/api/generate", {"prompt": "a", "template": "{{ .Prompt }}"}, "template"),
        ("/api/generate", {"prompt": "a", "context": [1]}, "context"),
        ("/api/generate", {"prompt": "a", "raw": True, "system": "b"}, "system"),
        ("/api/generate", {"prompt": "a", "raw": True, "think": True}, "think"),
        ("/api/generate", {"prompt": "a" * 9000}, "prompt"),
        ("/api/generate", {"prompt": "a", "steps": 3}, "steps"),
        ("/api/embed", {"model": "embed", "input": []}, "input"),
    ],
)
def test_what_is_not_served_is_refused_by_name(
    server: RunningServer, path: str, fields: dict[str, Any], named: str
) -> None:
    response = server.post(path, fields)
    assert response.status_code == 400
    assert response.json()["error"].replace("unknown parameter ", "").startswith(named), response.text


def test_harmless_values_are_accepted(server: RunningServer) -> None:
    body = {"messages": [{"role": "user", "content": "SAY(a)YAS", "images": []}], "format": "", "stream": False,
            "tools": None, "think": None, "options": {"num_predict": -1, "tfs_z": 1, "typical_p": 1.0}}  # fmt: skip
    assert server.post("/api/chat", body).json()["message"]["content"] == "a"
    body = {"prompt": "SAY(a)YAS", "images": [], "template": "", "context": [], "suffix": "", "stream": False}
    assert server.post("/api/generate", body).json()["response"] == "a"


def test_a_model_that_does_not_think_refuses_to(start_server: StartServer) -> None:
    client = ollama.Client(start_server().url)
    with pytest.raises(ollama.ResponseError, match="think is not supported"):
        client.chat("scripted", say("a"), think=True)
    assert client.chat("scripted", say("a"), think=False).message.content == "a"


def test_the_oldest_turns_are_dropped_on_request(client: ollama.Client, server: RunningServer) -> None:
    messages = [{"role": "user", "content": "old" * 3000}, {"role": "assistant", "content": "ok"}, *say("new")]
    body = {"messages": messages, "truncate": True, "stream": False}
    assert server.post("/api/chat", body).json()["message"]["content"] == "new"


def test_a_program_may_leave_the_content_type_out(server: RunningServer) -> None:
    def status(**headers: str) -> int:
        request = server.http.build_request("POST", "/api/chat", content=b'{"stream": false}', headers=headers)
        if not headers.get("content-type"):
            del request.headers["content-type"]
        return server.http.send(request).status_code

    assert status() == 200
    assert {status(origin="https://a.example"), status(**{"sec-fetch-site": "cross-site"})} == {415}
    form = {"content-type": "application/x-www-form-urlencoded"}
    assert status(**form) == 200
    assert status(**form, origin="https://a.example") == 415


def test_models_are_not_managed(client: ollama.Client, server: RunningServer) -> None:
    with pytest.raises(ollama.ResponseError, match="start it with another one"):
        client.pull("llama3")
    with pytest.raises(ollama.ResponseError, match="/api/create is not supported"):
        client.create("mine", from_="scripted")
    for refused in (lambda: client.delete("scripted"), lambda: client.copy("a", "b"), lambda: client.push("scripted")):
        with pytest.raises(ollama.ResponseError, match="is not supported: "):
            refused()
    assert server.http.post("/api/blobs/sha256:00", content=b"{}").status_code == 400
    assert server.http.head("/").status_code == 200  # as `ollama` asks whether a server runs
    assert server.http.get("/api/version").json()["version"] >= "0.13"


def test_the_documentations_example(demo_server: ServerProcess, capsys: pytest.CaptureFixture[str]) -> None:
    page = (Path(__file__).parents[3] / "docs" / "clients.md").read_text("utf-8")
    page = page.replace("http://127.0.0.1:8000", demo_server.url)
    (example,) = re.findall(r"^```python\n(.*?)^```$", page, re.MULTILINE | re.DOTALL)
    exec(example, {})
    assert "Tidewheel" in capsys.readouterr().out
