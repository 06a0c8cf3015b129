"""Reasoning: separated from the answer however the text is cut, and whoever opened it; counted; without calls."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from server.conftest import RunningServer, StartServer, events
from server.scripted_engine import ByteBackend

from tidewheel.engine.text.tokenizer import Tokenizer
from tidewheel.server.chat.parser_names import REASONING_PARSER_NAMES
from tidewheel.server.chat.pieces import Reasoning, Turn
from tidewheel.server.chat.reasoning import ReasoningParser, count_reasoning_tokens
from tidewheel.server.chat.reasoning_formats import REASONING_PARSERS
from tidewheel.server.chat.tools import TOOL_CALL_PARSERS
from tidewheel.server.protocol.chat import Tool, ToolFunction

PATH = "/v1/chat/completions"
CALL = '<tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>'
TOOLS = [{"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}]
NAMES = sorted(REASONING_PARSERS)


def split(name: str, begun: str, *texts: str, continues: bool = False) -> tuple[str, str]:
    """The reasoning and the content of a text that arrives in these pieces."""
    parser = REASONING_PARSERS[name](begun, continues=continues)
    turn = Turn.of([piece for text in texts for piece in parser.feed(text)] + parser.finish())
    return turn.reasoning, turn.content


OPEN, CLOSED = "<|assistant|>\n<think>\n", "<|assistant|>\n<think>\n\n</think>\n\n"
CASES: list[tuple[str, str, str, tuple[str, str]]] = [
    ("qwen3", "", "<think>\nLet me see.\n</think>\n\nFour.", ("Let me see.", "Four.")),
    ("qwen3", "", "Four.", ("", "Four.")),
    ("qwen3", "", " \n Four </think>", ("", " \n Four </think>")),
    ("qwen3", "", "<thin", ("", "<thin")),
    ("qwen3", "", "<think>\n\n</think>\n\nFour.", ("", "Four.")),
    ("qwen3", "", "<think>never ends \n", ("never ends", "")),
    ("qwen3", OPEN, "Let me see.</think>Four. </think> \n", ("Let me see.", "Four. </think> \n")),
    ("qwen3", OPEN, "a <b </thin </think>\n", ("a <b </thin", "")),
    ("qwen3", OPEN, "unfinished </thi", ("unfinished </thi", "")),
    ("qwen3", CLOSED, "Four. <think>", ("", "Four. <think>")),
    ("qwen3", "<think> said a user</think>?<|assistant|>", "Four.", ("", "Four.")),
    ("deepseek_r1", "<|Assistant|>", "Let me see.\n</think>\n\nFour.", ("Let me see.", "Four.")),
    ("deepseek_r1", "<|Assistant|>", "<think>\nLet me see.\n</think>\n\nFour.", ("Let me see.", "Four.")),
    ("deepseek_r1", "<|Assistant|><think>\n", "Let me see.", ("Let me see.", "")),
    ("deepseek_r1", "<|Assistant|><think>\n\n</think>\n\n", "Four.", ("", "Four.")),
    ("deepseek_v3", "<|Assistant|></think>", "Four.", ("", "Four.")),
    ("mistral", "[/INST]", "[THINK]Let me see.[/THINK]Four.", ("Let me see.", "Four.")),
    ("gemma4", "", "<|channel>thought\nLet me see.<channel|>Four.", ("Let me see.", "Four.")),
    ("gemma4", "<|channel>thought\n", "Let me see.\n<channel|>Four.", ("Let me see.", "Four.")),
    ("gemma4", "<|channel>thought\n<channel|>", "Four.", ("", "Four.")),
    (
        "cohere_command3",
        "",
        "<|START_THINKING|>Let me see.<|END_THINKING|><|START_RESPONSE|>Four.<|END_RESPONSE|>",
        ("Let me see.", "Four."),
    ),
    ("cohere_command3", "<|START_RESPONSE|>", "Four. <|END_RESPONSE|>", ("", "Four.")),
    ("cohere_command4", "<|START_THINKING|>", "Hm.<|END_THINKING|><|START_TEXT|>Four<|END_TEXT|>", ("Hm.", "Four")),
    ("minimax_m3", "", "<mm:think>Hm.</mm:think>Four.", ("Hm.", "Four.")),
    ("solar_open2", "<|think:start|>", "Hm.<|think:end|>Four.", ("Hm.", "Four.")),
    (
        "solar_open",
        "<|begin|>assistant",
        "<|think|>Hm.<|end|><|begin|>assistant<|content|>Four.<|end|>",
        ("Hm.", "Four."),
    ),
    ("solar_open", "<|think|><|end|><|begin|>assistant", "<|content|>Four.<|end|>", ("", "Four.")),
    (
        "muse_glimmer",
        "<|start|>assistant",
        " to=self<|message|>Hm.<|eom|><|start|>assistant to=user<|message|>Four.<|eot|>",
        ("Hm.", "Four."),
    ),
    (
        "muse_glimmer",
        "<|start|>assistant",
        " to=f<|message|>{}<|eom|><|start|>assistant to=self<|message|>B.",
        ("B.", "{}"),
    ),
    ("muse_glimmer", "<|start|>assistant", " to be", ("", " to be")),
    ("apertus", "", "<|inner_prefix|>Hm.<|inner_suffix|>Four.", ("Hm.", "Four.")),
    ("longcat", "", "<longcat_think>Hm.</longcat_think>Four.", ("Hm.", "Four.")),
    ("ernie45", OPEN, "Hm.\n</think>\n\n<response>\nFour.\n</response>\n", ("Hm.", "Four.")),
    ("ernie45", OPEN, "Hm.</think>Four.", ("Hm.", "Four.")),
    ("ernie45", CLOSED, "<response>a </response> b</response>", ("", "a </response> b")),
    ("ernie45", CLOSED, "<response>a</response>\n<tool_call>", ("", "a\n<tool_call>")),
    ("ernie45", CLOSED, " <b> a </response>", ("", " <b> a </response>")),
    ("hunyuan_a13b", "", "<think>\nHm.\n</think>\n<answer>\nFour.\n</answer>", ("Hm.", "Four.")),
    ("hunyuan_a13b", f"{CLOSED}<answer>\n", "Four.\n</answer>", ("", "Four.")),
    ("granite", "", "Here is my thought process: Hm. Here is my response: Four.", ("Hm.", "Four.")),
    (
        "granite",
        "",
        "Here's my thought process:\nHere is a plan.\nHere's my response:\nFour.",
        ("Here is a plan.", "Four."),
    ),
    ("granite", "", "<think>Hm.</think><response>Four.</response>", ("Hm.", "Four.")),
    ("granite", "", "Here is my answer: four.", ("", "Here is my answer: four.")),
    (
        "apriel",
        "Here are my reasoning steps:\n",
        "Hm.\n[BEGIN FINAL RESPONSE]\nFour.[END FINAL RESPONSE]",
        ("Hm.", "Four."),
    ),
    (
        "kimi_k3",
        "<|open|>think<|sep|>",
        "Hm.<|close|>think<|sep|><|open|>response<|sep|>Four.<|close|>response<|sep|><|close|>message<|sep|>",
        ("Hm.", "Four."),
    ),
    ("kimi_k3", "<|open|>response<|sep|>", "Four.<|close|>response<|sep|>", ("", "Four.")),
    (
        "inkling",
        "<|message_model|>",
        "<|content_thinking|>Hm.<|end_message|><|message_model|><|content_text|>Four.<|end_message|>",
        ("Hm.", "Four."),
    ),
    (
        "inkling",
        "<|message_model|>",
        "f<|content_invoke_tool_json|>{}<|end_message|>",
        ("", "<|content_invoke_tool_json|>{}"),
    ),
    (
        "inkling",
        "<|message_model|>",
        "<|content_text|>A.<|end_message|><|message_model|><|content_thinking|>B.",
        ("B.", "A."),
    ),
    ("inkling", "<|content_thinking|>", "Hm.<|end_message|><|message_model|>name is", ("Hm.", "name is")),
    ("seed_oss", "", "<seed:think>Let me see.</seed:think>Four.", ("Let me see.", "Four.")),
]


def test_the_option_knows_every_parser() -> None:
    assert tuple(REASONING_PARSERS) == REASONING_PARSER_NAMES


@pytest.mark.parametrize(("name", "begun", "text", "expected"), CASES)
def test_reasoning_at_every_cut(name: str, begun: str, text: str, expected: tuple[str, str]) -> None:
    assert split(name, begun, text) == expected
    assert split(name, begun, *text) == expected
    for cut in range(len(text)):
        assert split(name, begun, text[:cut], text[cut:]) == expected


@pytest.mark.parametrize(
    ("begun", "text", "expected"),
    [
        ("<think>I was", " thinking</think>Four.", ("thinking", "Four.")),
        ("<think>I was</think>It is", " four.", ("", " four.")),
        ("It is", " four.", ("", " four.")),
        ("", "I think.</think>Four.", ("I think.", "Four.")),
    ],
)
def test_a_turn_that_goes_on(begun: str, text: str, expected: tuple[str, str]) -> None:
    assert split("deepseek_r1" if not begun else "qwen3", begun, text, continues=bool(begun)) == expected


TAGS = ["<think>", "</think>", "[THINK]", "[/THINK]", "<thi", "nk>", "</", "\n", " ", "<tool_call"]


def fragments(name: str) -> st.SearchStrategy[str]:
    parser = REASONING_PARSERS[name]
    own = parser.tags() if issubclass(parser, ReasoningParser) else ()
    return st.one_of(st.text(max_size=8), st.sampled_from([*TAGS, *filter(None, own)]))


@settings(deadline=None, max_examples=30)
@pytest.mark.parametrize("name", NAMES)
@given(st.sampled_from(["", OPEN, CLOSED]), st.data())
def test_any_text_gives_the_same_in_any_pieces(name: str, begun: str, data: st.DataObject) -> None:
    text = data.draw(st.lists(fragments(name), max_size=8).map("".join))
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=6)))
    pieces = [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    assert split(name, begun, *pieces) == split(name, begun, *text) == split(name, begun, text)


@pytest.mark.parametrize("specials", [[], ["</think>"]])
def test_tokens_are_counted_with_a_tag_of_one_token_or_many(specials: list[str]) -> None:
    tokenizer = Tokenizer(ByteBackend(specials))
    for text, rest in (("hm</think>", "four</think>"), ("</think>", ""), ("hm", "")):
        ids = tokenizer.encode(text, False)
        assert count_reasoning_tokens(ids + tokenizer.encode(rest, False), "</think>", tokenizer) == len(ids)


# Over a socket. The template opens or closes the reasoning as Qwen3's and DeepSeek's do.

TEMPLATE = (
    "{% for m in messages %}<{{ m.role }}>{% if m.reasoning_content %}({{ m.reasoning_content }}){% endif %}"
    "{{ m.content }}{% endfor %}{% if add_generation_prompt %}<assistant>"
    "{% if enable_thinking is defined and not enable_thinking %}<think>\n\n</think>\n\n"
    "{% elif opened %}<think>\n{% endif %}{% endif %}"
)


def say(text: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": f"SAY({text})YAS"}]


def chat(server: RunningServer, text: str, **body: Any) -> Any:
    response = server.post(PATH, {"messages": say(text), **body})
    assert response.status_code == 200, response.text
    return response.json()


@pytest.fixture(scope="module")
def server(start_server: StartServer) -> RunningServer:
    return start_server(engine={"template": TEMPLATE}, reasoning_parser="qwen3", tool_call_parser="hermes")


def test_a_whole_answer(server: RunningServer) -> None:
    answer = chat(server, "<think>\nhm hm\n</think>\n\nFour.")
    message = answer["choices"][0]["message"]
    assert (message["reasoning_content"], message["reasoning"], message["content"]) == ("hm hm", "hm hm", "Four.")
    assert answer["usage"]["completion_tokens_details"] == {"reasoning_tokens": len("<think>\nhm hm\n</think>")}


def test_a_streamed_answer(server: RunningServer) -> None:
    body = {"messages": say("hm</think>Four."), "stream": True, "stream_options": {"include_usage": True}, "n": 2,
            "chat_template_kwargs": {"opened": True}}  # fmt: skip
    *chunks, last = events(server.post(PATH, body))
    for index in range(2):
        deltas = [c["choices"][0]["delta"] for c in chunks if c["choices"][0]["index"] == index]
        assert "".join(delta.get("reasoning_content", "") for delta in deltas) == "hm"
        assert "".join(delta.get("content", "") for delta in deltas) == "Four."
    assert last["usage"]["completion_tokens_details"] == {"reasoning_tokens": 2 * len("hm</think>")}


def test_thinking_is_switched_off_by_the_template(server: RunningServer) -> None:
    answer = chat(server, "Four.", chat_template_kwargs={"enable_thinking": False})
    message = answer["choices"][0]["message"]
    assert message["content"] == "Four."
    assert "reasoning_content" not in message
    assert answer["usage"]["completion_tokens_details"] == {"reasoning_tokens": 0}


def test_thinking_is_switched_off_for_all(start_server: StartServer) -> None:
    options: dict[str, Any] = {"reasoning_parser": "deepseek_r1", "engine": {"template": TEMPLATE}}
    off = start_server(default_chat_template_kwargs={"enable_thinking": False}, **options)
    assert chat(off, "Four.")["choices"][0]["message"]["content"] == "Four."
    message = chat(off, "hm", chat_template_kwargs={"enable_thinking": True})["choices"][0]["message"]
    assert (message["reasoning_content"], message["content"]) == ("hm", None)


def test_calls_are_looked_for_after_the_reasoning_only(server: RunningServer) -> None:
    choice = chat(server, f"<think>shall I {CALL}?</think>\n{CALL}", tools=TOOLS)["choices"][0]
    assert choice["message"]["reasoning_content"] == f"shall I {CALL}?"
    assert [call["function"]["name"] for call in choice["message"]["tool_calls"]] == ["add"]
    assert choice["message"]["content"] is None
    assert choice["finish_reason"] == "tool_calls"


XML_CALL = "<tool_call>\n<function=add>\n<parameter=a>\n1\n</parameter>\n</function>\n</tool_call>"
UNCLOSED: list[tuple[str, str, str, str, str, int]] = [
    ("qwen3", "hermes", "<think>", f"I add.\n{CALL}", "I add.", 1),
    ("qwen3", "hermes", "<think>", f"I add.\n{CALL}\n{CALL}\n", "I add.", 2),
    ("qwen3", "hermes", "<think>", CALL, "", 1),
    ("qwen3", "qwen3_coder", "<think>", f"With <tool_call>, or <function=\nI add.\n\n{XML_CALL}",
     "With <tool_call>, or <function=\nI add.", 1),
    ("mistral", "mistral", "[THINK]", 'I add.[TOOL_CALLS]add[ARGS]{"a": 1}', "I add.", 1),
    ("deepseek_r1", "hermes", "", f"I <b> add. {CALL}", "I <b> add.", 1),
    # Nothing is called if the tag is only spoken of, or if the reasoning is closed after all.
    ("qwen3", "hermes", "<think>", "Shall I write <tool_call> now? \n", "Shall I write <tool_call> now?", 0),
    ("qwen3", "hermes", "<think>", 'A <tool_call>{"name": ', 'A <tool_call>{"name":', 0),
    ("qwen3", "hermes", "<think>", f"I add.\n{CALL}\nor not </think> No.", f"I add.\n{CALL}\nor not", 0),
    ("qwen3", "hermes", "<think>", f"{CALL}</thin", "", 1),
]  # fmt: skip


@pytest.mark.parametrize(("reasoning", "calls", "opening", "said", "thought", "num_calls"), UNCLOSED)
def test_a_call_ends_a_reasoning_that_is_never_closed(
    reasoning: str, calls: str, opening: str, said: str, thought: str, num_calls: int
) -> None:
    text = opening + said
    tools = [Tool("function", ToolFunction("add", parameters={"properties": {"a": {"type": "integer"}}}))]

    def turn(*parts: str) -> Turn:
        parser = REASONING_PARSERS[reasoning]("", calls=TOOL_CALL_PARSERS[calls](tools))  # type: ignore[call-arg]
        pieces = [piece for part in parts for piece in parser.feed(part)] + parser.finish()
        others = TOOL_CALL_PARSERS[calls](tools)
        rest = [piece for text in pieces if isinstance(text, str) for piece in others.feed(text)]
        return Turn.of([*(piece for piece in pieces if isinstance(piece, Reasoning)), *rest, *others.finish()])

    for parts in ([text], list(text), *([text[:cut], text[cut:]] for cut in range(len(text)))):
        found = turn(*parts)
        assert found.reasoning == thought
        assert [(call.name, json.loads(call.arguments)) for call in found.calls] == [("add", {"a": 1})] * num_calls
        assert found.content.strip() == ("No." if "</think>" in said else "</thin" if "</thin" in said else "")


@pytest.mark.parametrize("opened", [True, False])
def test_a_call_in_unclosed_reasoning_over_a_socket(server: RunningServer, opened: bool) -> None:
    said = f"I add.\n{CALL}"
    body = {"messages": say(said if opened else f"<think>{said}"), "chat_template_kwargs": {"opened": opened},
            "tools": TOOLS}  # fmt: skip
    answer = server.post(PATH, body).json()
    (choice,), usage = answer["choices"], answer["usage"]
    assert (choice["message"]["reasoning"], choice["message"]["content"]) == ("I add.", None)
    assert choice["message"]["tool_calls"][0]["function"] == {"name": "add", "arguments": '{"a": 1}'}
    assert choice["finish_reason"] == "tool_calls"
    thought = usage["completion_tokens_details"]["reasoning_tokens"]
    assert thought == len("I add.\n" if opened else "<think>I add.\n")
    chunks = events(server.post(PATH, {**body, "stream": True}))
    deltas = [chunk["choices"][0]["delta"] for chunk in chunks]
    assert "".join(delta.get("reasoning", "") for delta in deltas) == "I add."
    calls = [call["function"] for delta in deltas for call in delta.get("tool_calls", [])]
    assert "".join(call.get("arguments", "") for call in calls) == '{"a": 1}'
    no_tools = server.post(PATH, {**body, "tools": None}).json()["choices"][0]["message"]
    assert no_tools["reasoning"] == said


def test_reasoning_can_be_left_out(server: RunningServer) -> None:
    answer = chat(server, "<think>hm</think>Four.", include_reasoning=False)
    assert answer["choices"][0]["message"] == {"role": "assistant", "content": "Four.", "refusal": None}
    assert answer["usage"]["completion_tokens_details"]["reasoning_tokens"] == len("<think>hm</think>")


@pytest.mark.parametrize("name", ["reasoning_content", "reasoning"])
def test_reasoning_goes_back_to_the_template(server: RunningServer, name: str) -> None:
    messages = [{"role": "assistant", "content": "Four.", name: "hm"}, *say("ok")]
    assert server.post(PATH, {"messages": messages}).status_code == 200
    prompt = server.engine.tokenizer.decode(list(server.engine.requests[-1].prompt_token_ids))
    assert prompt.startswith("<assistant>(hm)Four.<user>")


def test_tags_that_are_special_tokens_are_seen(start_server: StartServer) -> None:
    specials = ["[THINK]", "[/THINK]", "[TOOL_CALLS]", "[ARGS]", "[INST]"]
    mistral = start_server(engine={"specials": specials}, reasoning_parser="mistral", tool_call_parser="mistral")
    text = '[INST][THINK]hm[/THINK]So[INST]:[TOOL_CALLS]add[ARGS]{"a": 1}'
    message = chat(mistral, text, tools=TOOLS)["choices"][0]["message"]
    assert (message["reasoning_content"], message["content"]) == ("hm", "So:")
    assert [call["function"] for call in message["tool_calls"]] == [{"name": "add", "arguments": '{"a": 1}'}]
    message = chat(mistral, text, tools=TOOLS, tool_choice="none")["choices"][0]["message"]
    assert (message["reasoning_content"], message["content"]) == ("hm", 'So:add{"a": 1}')
    assert chat(mistral, "[INST]a", skip_special_tokens=False)["choices"][0]["message"]["content"] == "[INST]a"
