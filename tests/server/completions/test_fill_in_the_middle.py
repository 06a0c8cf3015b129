"""Fill-in-the-middle: a hole's prefix and suffix between the marks of the model's tokenizer."""
# ruff: noqa: RUF001 - DeepSeek's tokens are spelt with full-width bars

from __future__ import annotations

from typing import Any

import pytest
from server.conftest import RunningServer, StartServer

QWEN = ("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>", "<|fim_pad|>", "<|repo_name|>", "<|file_sep|>")
DEEPSEEK = ("<｜fim▁begin｜>", "<｜fim▁hole｜>", "<｜fim▁end｜>")
BOS = "<bos>"


@pytest.fixture(scope="module")
def coder(start_server: StartServer) -> RunningServer:
    return start_server(engine={"specials": QWEN})


def complete(server: RunningServer, **body: Any) -> Any:
    response = server.post("/v1/completions", {"max_tokens": 40, **body})
    assert response.status_code == 200, response.text
    return response.json()


def prompt_of(server: RunningServer) -> str:
    engine = server.engine
    text: str = engine.tokenizer.decode(list(engine.requests[-1].prompt_token_ids), skip_special_tokens=False)
    return text


@pytest.mark.parametrize(
    ("marks", "wanted"),
    [
        (QWEN[:3], "<|fim_prefix|>SAY(x)YAS<|fim_suffix|>after<|fim_middle|>"),
        (("▁<PRE>", "▁<SUF>", "▁<MID>"), "▁<PRE>SAY(x)YAS▁<SUF>after▁<MID>"),
        (
            ("<｜fim▁begin｜>", "<｜fim▁hole｜>", "<｜fim▁end｜>"),
            "<｜fim▁begin｜>SAY(x)YAS<｜fim▁hole｜>after<｜fim▁end｜>",
        ),
        (("[SUFFIX]", "[PREFIX]"), "[SUFFIX]after[PREFIX]SAY(x)YAS"),
    ],
)
def test_each_models_own_marks(start_server: StartServer, marks: tuple[str, ...], wanted: str) -> None:
    server = start_server(engine={"specials": marks})
    assert complete(server, prompt="SAY(x)YAS", suffix="after")["choices"][0]["text"] == "x"
    assert prompt_of(server) == BOS + wanted


def test_each_of_several_prompts_has_the_suffix(coder: RunningServer) -> None:
    answer = complete(coder, prompt=["SAY(x)YAS", "SAY(y)YAS"], suffix="after", add_special_tokens=False)
    assert [choice["text"] for choice in answer["choices"]] == ["x", "y"]
    assert prompt_of(coder) == "<|fim_prefix|>SAY(y)YAS<|fim_suffix|>after<|fim_middle|>"


def test_the_text_before_may_be_token_ids_or_empty(coder: RunningServer) -> None:
    complete(coder, prompt=list(b"SAY(x)YAS"), suffix="after")
    assert prompt_of(coder) == BOS + "<|fim_prefix|>SAY(x)YAS<|fim_suffix|>after<|fim_middle|>"
    assert complete(coder, prompt="", suffix="SAY(x)YAS")["choices"][0]["text"] == "x"


def test_an_answer_ends_where_another_file_would_begin(coder: RunningServer) -> None:
    asked = "SAY(x<|file_sep|>y)YAS"
    assert complete(coder, prompt=asked, suffix="after")["choices"][0]["text"] == "x"
    assert complete(coder, prompt=asked)["choices"][0]["text"] == "xy"


def test_an_empty_suffix_is_none(coder: RunningServer) -> None:
    complete(coder, prompt="SAY(x)YAS", suffix="")
    assert prompt_of(coder) == BOS + "SAY(x)YAS"


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"echo": True}, "echo"),
        ({"truncate_prompt_tokens": 4}, "truncate_prompt_tokens"),
        ({"suffix": "a" * 9000}, "prompt"),
        ({"suffix": "a" * 1_000_000}, "suffix"),
        ({"prompt": "a" * 1_000_000}, "prompt"),
    ],
)
def test_what_cannot_be_filled_is_refused(coder: RunningServer, fields: dict[str, Any], param: str) -> None:
    response = coder.post("/v1/completions", {"prompt": "a", "suffix": "b", **fields})
    assert (response.status_code, response.json()["error"]["param"]) == (400, param)


def test_a_model_without_marks_refuses_a_suffix(start_server: StartServer) -> None:
    response = start_server().post("/v1/completions", {"prompt": "a", "suffix": "b"})
    assert response.status_code == 400
    assert response.json()["error"]["param"] == "suffix"
    assert "fill-in-the-middle" in response.json()["error"]["message"]
