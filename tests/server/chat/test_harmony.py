"""The harmony format of gpt-oss: what is reasoning, text or a call, however the text is cut; and over every API."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from server.conftest import RunningServer, StartServer, events
from server.scripted_engine import ByteBackend, ScriptedEngine

from tidewheel import LLM, SamplingParams, StructuredOutputsParams
from tidewheel.engine.errors import ModelError
from tidewheel.engine.text.tokenizer import Tokenizer
from tidewheel.server.chat.harmony import TAGS, HarmonyParser, ReasoningTokens
from tidewheel.server.chat.model_template import model_template
from tidewheel.server.chat.pieces import Turn

CHAT = "/v1/chat/completions"
PROMPT = "<|start|>user<|message|>Hi<|end|><|start|>assistant"
NEXT = "<|end|><|start|>assistant"
THINK = "<|channel|>analysis<|message|>"
FINAL = "<|channel|>final<|message|>"
TO_F = "<|channel|>commentary to=functions.f <|constrain|>json<|message|>"
Parsed = tuple[str, str, list[tuple[str, str]]]  # reasoning, content, calls


def parse(*texts: str, prompt: str = PROMPT, calls: bool = True, cut_off: bool = False) -> Parsed:
    parser = HarmonyParser(prompt, new_call_id=(lambda: "id") if calls else None)
    turn = Turn.of([piece for text in texts for piece in parser.feed(text)] + parser.finish(cut_off=cut_off))
    return turn.reasoning, turn.content, [(call.name, call.arguments) for call in turn.calls]


CASES: list[tuple[str, Parsed]] = [
    (f"{THINK}Hm hm.{NEXT}{FINAL} Four. \n<|return|>", ("Hm hm.", " Four. \n", [])),
    (f"{THINK}Hm.{NEXT}{TO_F}{{\"a\": 1}}<|call|>", ("Hm.", "", [("f", '{"a": 1}')])),
    # Preambles are shown to the user; a second message of a kind is a paragraph of its own.
    (f"<|channel|>commentary<|message|>I look.{NEXT}{FINAL}Done.", ("", "I look.\n\nDone.", [])),
    (f"{THINK}A.{NEXT}{THINK}{NEXT}{THINK}B.", ("A.\n\nB.", "", [])),
    # Variants of headers.
    (' to=functions.f<|channel|>commentary json<|message|>{"a": 1}', ("", "", [("f", '{"a": 1}')])),
    ("<|channel|>analysis to=functions.f code<|message|> {}<|call|>", ("", "", [("f", "{}")])),
    ("to=functions.f<|channel|>commentary<|message|>{}", ("", "", [("f", "{}")])),
    ("<|channel|>commentary to=my.tool-2 json<|message|>{}", ("", "", [("my.tool-2", "{}")])),
    ("<|channel|>commentary to=functions.f<|message|><|call|>", ("", "", [("f", "{}")])),
    ("<|channel|>commentary to=functions.f<|channel|>commentary<|message|>{}", ("", "", [("f", "{}")])),
    (f"{TO_F}{{}}{NEXT}<|channel|>commentary to=functions.g<|message|>{{}}", ("", "", [("f", "{}"), ("g", "{}")])),
    ("<|channel|>final <|constrain|>json<|message|>[]", ("", "[]", [])),
    ("<|message|>Four.", ("", "Four.", [])),
    ("<|channel|>comment<|message|>Four.", ("", "Four.", [])),
    ("<|channel|>commentary to=assistant<|message|>Four.", ("", "Four.", [])),
    # What the model makes up in another one's name is not for the user.
    (f"{TO_F}{{}}<|call|><|start|>functions.f to=assistant<|channel|>commentary<|message|>sunny{NEXT}{FINAL}Sun.",
     ("sunny", "Sun.", [("f", "{}")])),
    (f"{THINK}So?<|end|><|start|>user<|message|>Yes!{NEXT}{FINAL}Well.", ("So?\n\nYes!", "Well.", [])),
    # Parts that models leave out.
    (f"{THINK}Hm.<|end|>{FINAL}Four.", ("Hm.", "Four.", [])),
    (f"{THINK}Hm.<|start|>assistant{FINAL}Four.", ("Hm.", "Four.", [])),
    (f"{THINK}Hm.{FINAL}Four.", ("Hm.", "Four.", [])),
    (f"{THINK}Hm.<|end|>\n\n<|start|>assistant{FINAL}Four.<|end|>\n", ("Hm.", "Four.", [])),
    (f"{THINK}Hm.<|end|>Four.", ("Hm.", "Four.", [])),
    (f"{THINK}Hm.<|end|>assistant{FINAL}Four.", ("Hm.", "Four.", [])),
    (f"{THINK}Hm.<|end|>\nassistant to=functions.f<|channel|>commentary json<|message|>{{}}",
     ("Hm.", "", [("f", "{}")])),
    (f"{THINK}Hm.<|end|> to=functions.f <|constrain|>json<|message|>{{}}", ("Hm.", "", [("f", "{}")])),
    (f"{THINK}Hm.<|end|>user<|message|>Yes!<|end|>assistant{FINAL}Four.", ("Hm.\n\nYes!", "Four.", [])),
    (f"{THINK}Hm.<|end|>assistants to=be <|not|>", ("Hm.", "assistants to=be <|not|>", [])),
    (f"{THINK}Hm.<|end|>assistant to=", ("Hm.", "assistant to=", [])),
    ("Four. \n", ("", "Four. \n", [])),
    (" to be or <not> ", ("", " to be or <not> ", [])),
    ("", ("", "", [])),
    # What is no header stays text of what it stands in.
    ("<|channel|>final Four.<|return|>", ("", "<|channel|>final Four.", [])),
    (f"{THINK}The <|channel|> tag.{NEXT}{FINAL}<|start|>", ("The <|channel|> tag.", "<|start|>", [])),
    (f'{TO_F}{{"a": "<|start|> {"x" * 600}"}}', ("", "", [("f", f'{{"a": "<|start|> {"x" * 600}"}}')])),
    (f"<|channel|>{'a' * 504}<|message|>b", ("", f"<|channel|>{'a' * 504}<|message|>b", [])),
    (f"<|channel|>{'a' * 501}<|message|>b", ("", "b", [])),
    (f"{THINK}a < b <| c <|en{NEXT}{FINAL}<|mess", ("a < b <| c <|en", "<|mess", [])),
]  # fmt: skip


def test_much_white_space_takes_linear_time() -> None:
    text = "\n" * 100_000
    assert parse(f"{THINK}Hm.<|end|>", *([text[:100]] * 1000), f"<|start|>assistant{FINAL}Four.") == (
        "Hm.",
        "Four.",
        [],
    )


@pytest.mark.parametrize(("text", "expected"), CASES)
def test_messages_at_every_cut(text: str, expected: Parsed) -> None:
    assert parse(text) == expected
    assert parse(*text) == expected
    for cut in range(len(text)):
        assert parse(text[:cut], text[cut:]) == expected


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (f"{THINK}Hm", ("Hm", "", [])),
        (f"{THINK}Hm{NEXT}<|channel|>fin", ("Hm", "", [])),
        (f"{THINK}Hm<|en", ("Hm", "", [])),
        (f'{TO_F}{{"a', ("", "", [("f", '{"a')])),
        (TO_F, ("", "", [("f", "")])),
        ("<|channel|>commentary to=functions.f <|cons", ("", "", [("f", "")])),
        ("<|channel|>commentary to=functions.f", ("", "", [])),  # more of it may be to come
    ],
)
def test_what_max_tokens_cuts_off(text: str, expected: Parsed) -> None:
    assert parse(text, cut_off=True) == expected


@pytest.mark.parametrize(
    ("prompt", "text", "expected"),
    [
        (f"{PROMPT}{FINAL}It is", f" four.{NEXT}{FINAL}Yes.", ("", " four.\n\nYes.", [])),
        (f"{PROMPT}{FINAL}It is <", "|end|>", ("", "|end|>", [])),
        (f"{PROMPT}{THINK}Hm", f" hm{NEXT}{FINAL}Four.", (" hm", "Four.", [])),
        (f"{PROMPT}<|channel|>", "final<|message|>Four.", ("", "Four.", [])),
        (f"{PROMPT}{TO_F}{{}}<|call|>", f"<|start|>assistant{FINAL}Four.", ("", "Four.", [])),
        ("", f"{THINK}Hm{NEXT}{FINAL}Four.", ("Hm", "Four.", [])),
    ],
)
def test_an_answer_goes_on_where_the_prompt_ends(prompt: str, text: str, expected: Parsed) -> None:
    assert parse(text, prompt=prompt) == parse(*text, prompt=prompt) == expected


def test_without_tools_what_is_said_to_a_function_is_text_of_its_channel() -> None:
    assert parse(f"{TO_F}{{}}", calls=False) == ("", "{}", [])
    assert parse("<|channel|>analysis to=python code<|message|>1+1", calls=False) == ("1+1", "", [])


def test_a_header_without_its_start_is_read_however_much_comes_with_it() -> None:
    text = f"assistant{THINK}{'x' * 1000}"
    assert parse(text) == parse(*text) == ("x" * 1000, "", [])
    text = " " * 600 + THINK  # longer than a header may be
    assert parse(text) == parse(*text)


def test_text_is_given_as_it_comes() -> None:
    parser = HarmonyParser(PROMPT, new_call_id=lambda: "id")
    assert [parser.feed(text) for text in ("Hel", "lo ")] == [["Hel"], ["lo"]]
    parser = HarmonyParser(PROMPT, new_call_id=lambda: "id")
    assert parser.feed(f"{FINAL}Hel") == ["Hel"]
    assert [parser.feed(text) for text in ("lo", " \n", "<b>", "<", "|end")] == [["lo"], [" \n"], ["<b>"], [], []]
    assert parser.feed(f"|>{TO_F}")[0].name == "f"  # type: ignore[union-attr]
    assert [getattr(piece, "text", None) for text in ('{"a": ', "1}") for piece in parser.feed(text)] == [
        '{"a": ',
        "1}",
    ]


fragments = st.one_of(
    st.sampled_from([*TAGS, "assistant", "analysis", "final", " to=functions.f", "json", "user", " ", "\n", "{}"]),
    st.sampled_from([THINK, FINAL, TO_F, NEXT, "<|", "<|e", "x" * 500]),
    st.text(max_size=5),
)


# Each character is a piece of its own: up to 6000 in an example.
@settings(deadline=None, max_examples=50)
@given(st.lists(fragments, max_size=12).map("".join), st.booleans(), st.data())
def test_any_text_gives_the_same_in_any_pieces(text: str, calls: bool, data: st.DataObject) -> None:
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=6)))
    pieces = [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    for prompt in (PROMPT, f"{PROMPT}{THINK}", ""):
        whole = parse(text, prompt=prompt, calls=calls)
        assert parse(*pieces, prompt=prompt, calls=calls) == parse(*text, prompt=prompt, calls=calls) == whole


bodies = st.text(st.characters(exclude_characters="<", exclude_categories=["Cs"]), min_size=1, max_size=30)


@settings(deadline=None, max_examples=40)
@given(st.lists(st.tuples(st.sampled_from([THINK, FINAL, TO_F]), bodies), max_size=6), st.integers(1, 7))
def test_nothing_is_lost_and_no_tag_is_left(messages: list[tuple[str, str]], size: int) -> None:
    text = NEXT.join(header + body for header, body in messages)
    reasoning, content, calls = parse(*(text[i : i + size] for i in range(0, len(text), size)))
    assert reasoning == "\n\n".join(body for header, body in messages if header == THINK)
    assert content == "\n\n".join(body for header, body in messages if header == FINAL)
    assert calls == [("f", body.lstrip() or "{}") for header, body in messages if header == TO_F]


def test_hostile_texts_take_no_long_time() -> None:
    for text in ("<|start|>", "<|channel|>", "<|start|>assistant", "<|end|>", "<|", "x", THINK):
        parse(text * 20_000)
        parse(*[text] * 5_000)
        parse("", prompt=PROMPT + text * 20_000)


@pytest.mark.parametrize(
    ("prompt", "text", "count"),
    [
        (PROMPT, f"{THINK}Hm.{NEXT}{FINAL}Four.", len("Hm.") + len("analysis") + 3),
        (PROMPT, f"{THINK}Hm.{NEXT}{THINK}Hm.<|end|>", 2 * (len("Hm.analysis") + 3) + len("assistant") + 1),
        (PROMPT, f"{THINK}Hm", len("Hm") + len("analysis") + 2),
        (f"{PROMPT}{THINK}", f"Hm{NEXT}{FINAL}Four.", len("Hm") + 1),
        (PROMPT, f"{FINAL}Four.", 0),
        (PROMPT, f"{TO_F}{{}}", 0),
    ],
)
def test_tokens_of_reasoning_are_counted(prompt: str, text: str, count: int) -> None:
    tokenizer = Tokenizer(ByteBackend(TAGS))
    for size in (1, 7, 100):
        tokens = ReasoningTokens(tokenizer, HarmonyParser(prompt))
        ids = tokenizer.encode(text, False)
        for i in range(0, len(ids), size):
            tokens.push(ids[i : i + size])
        assert tokens.count == count


# Over a socket, with a template that has the variables and the restrictions of gpt-oss's.

TEMPLATE = """
{%- macro say(header, text, end='<|end|>') -%}<|start|>{{ header }}<|message|>{{ text }}{{ end }}{%- endmacro -%}
{{ say('system', 'Effort: ' ~ (reasoning_effort or 'medium')) }}
{%- if tools %}{{ say('developer', tools | map(attribute='function') | map(attribute='name') | join(', ')) }}{% endif %}
{%- set last = namespace(name=none) %}
{%- for m in messages %}
    {%- if m.role == 'system' %}{{ say('developer', m.content) }}
    {%- elif m.role == 'user' %}{{ say('user', m.content) }}
    {%- elif m.role == 'tool' %}{{ say('functions.' ~ last.name ~ ' to=assistant<|channel|>commentary', m.content) }}
    {%- elif m.tool_calls %}
        {%- if m.content and m.thinking %}{{ raise_exception('content or thinking, not both') }}{% endif %}
        {%- if m.content or m.thinking %}{{ say('assistant<|channel|>analysis', m.content or m.thinking) }}{% endif %}
        {%- set last.name = m.tool_calls[0].function.name %}
        {{- say('assistant to=functions.' ~ last.name ~ '<|channel|>commentary json',
                m.tool_calls[0].function.arguments | tojson, '<|call|>') }}
    {%- else %}{{ say('assistant<|channel|>final', m.content) }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}<|start|>assistant{% endif %}
"""
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"], "additionalProperties": False}
TOOLS = [{"type": "function", "function": {"name": name, "parameters": SCHEMA}} for name in ("f", "g")]
FORMAT = {"type": "json_schema", "json_schema": {"name": "answer", "schema": SCHEMA}}
ARGUMENTS = '{"a": 1}'
PREAMBLE = f"{THINK}Hm.{NEXT}<|channel|>commentary<|message|>I look.{NEXT}"
CALL = {"id": "f", "type": "function", "function": {"name": "f", "arguments": ARGUMENTS}}
ALL = f"{PREAMBLE}{TO_F}{ARGUMENTS}<|call|>"


@pytest.fixture(scope="module")
def server(start_server: StartServer) -> RunningServer:
    """It finds the format by itself."""
    return start_server(engine={"template": TEMPLATE, "specials": TAGS, "ends": ["<|call|>", "<|return|>"]})


def say(text: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": f"SAY({text})YAS"}]


def ask(server: RunningServer, text: str, **body: Any) -> dict[str, Any]:
    response = server.post(CHAT, {"messages": say(text), "tools": TOOLS, **body})
    assert response.status_code == 200, response.text
    choice: dict[str, Any] = response.json()["choices"][0]
    return choice


def calls_of(choice: dict[str, Any]) -> list[tuple[str, str]]:
    calls = [call["function"] for call in choice["message"].get("tool_calls") or ()]
    return [(call["name"], call["arguments"]) for call in calls]


def test_a_whole_answer(server: RunningServer) -> None:
    info = server.http.get("/server_info").json()
    assert (info["tool_call_parser"], info["reasoning_parser"]) == ("openai", "openai_gptoss")
    answer = server.post(CHAT, {"messages": say(ALL), "tools": TOOLS}).json()
    (choice,) = answer["choices"]
    assert (choice["message"]["reasoning_content"], choice["message"]["content"]) == ("Hm.", "I look.")
    assert (calls_of(choice), choice["finish_reason"]) == ([("f", ARGUMENTS)], "tool_calls")
    assert answer["usage"]["completion_tokens_details"] == {"reasoning_tokens": len("analysisHm.") + 3}
    choice = ask(server, f"{THINK}Hm.{NEXT}{FINAL}Four.<|return|>", tools=None, include_reasoning=False)
    assert choice["message"] == {"role": "assistant", "content": "Four.", "refusal": None}
    assert choice["finish_reason"] == "stop"
    cut = len(server.engine.tokenizer.encode(ALL.removesuffix(": 1}<|call|>"), False))
    choice = ask(server, ALL, max_tokens=cut)
    assert (calls_of(choice), choice["finish_reason"]) == ([("f", '{"a"')], "length")


def test_a_streamed_answer(server: RunningServer) -> None:
    body = {"messages": say(ALL), "tools": TOOLS, "stream": True}
    chunks = [chunk["choices"][0] for chunk in events(server.post(CHAT, body))]
    deltas = [chunk["delta"] for chunk in chunks]
    assert "".join(delta.get("reasoning_content") or "" for delta in deltas) == "Hm."
    assert "".join(delta.get("content") or "" for delta in deltas) == "I look."
    functions = [call["function"] for delta in deltas for call in delta.get("tool_calls") or ()]
    assert functions[0]["name"] == "f"
    assert "".join(function.get("arguments") or "" for function in functions) == ARGUMENTS
    assert len(functions) > 3  # as they come
    assert chunks[-1]["finish_reason"] == "tool_calls"


def test_the_other_apis(server: RunningServer) -> None:
    tool = {"name": "f", "parameters": SCHEMA}
    body: dict[str, Any] = {"input": say(ALL), "tools": [{"type": "function", **tool}]}
    items = {item["type"]: item for item in server.post("/v1/responses", body).json()["output"]}
    assert items["reasoning"]["content"][0]["text"] == "Hm."
    assert items["message"]["content"][0]["text"] == "I look."
    assert (items["function_call"]["name"], items["function_call"]["arguments"]) == ("f", ARGUMENTS)
    body = {"model": "scripted", "max_tokens": 500, "messages": say(ALL)}
    answer = server.post("/v1/messages", {**body, "tools": [{"name": "f", "input_schema": SCHEMA}]}).json()
    assert [block["type"] for block in answer["content"]] == ["thinking", "text", "tool_use"]
    assert (answer["content"][2]["input"], answer["stop_reason"]) == ({"a": 1}, "tool_use")
    body = {"model": "scripted", "messages": say(ALL), "tools": TOOLS, "stream": False}
    message = server.post("/api/chat", body).json()["message"]
    assert (message["thinking"], message["content"]) == ("Hm.", "I look.")
    assert message["tool_calls"][0]["function"] == {"index": 0, "name": "f", "arguments": {"a": 1}}


def prompt_of(server: RunningServer, messages: list[dict[str, Any]], **body: Any) -> str:
    response = server.post(CHAT, {"messages": messages, **body})
    assert response.status_code == 200, response.text
    return server.engine.tokenizer.decode(list(server.engine.requests[-1].prompt_token_ids), skip_special_tokens=False)


def test_a_conversation_goes_back(server: RunningServer) -> None:
    calls = [CALL, {**CALL, "id": "g", "function": {"name": "g", "arguments": ARGUMENTS}}]
    messages: list[dict[str, Any]] = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Hi"},
        {"role": "developer", "content": "Be kind."},
        {"role": "assistant", "content": "I look.", "reasoning": "Hm.", "tool_calls": calls},
        {"role": "tool", "tool_call_id": "g", "content": "rain"},
        {"role": "tool", "tool_call_id": "f", "content": "sun"},
    ]
    call = '<|start|>assistant to=functions.{0}<|channel|>commentary json<|message|>{{"a": 1}}<|call|>'
    result = "<|start|>functions.{0} to=assistant<|channel|>commentary<|message|>{1}<|end|>"
    assert "Effort: high" in prompt_of(server, messages, reasoning_effort="xhigh")
    assert "Effort: low" in prompt_of(server, messages, reasoning_effort="minimal")
    assert prompt_of(server, messages, reasoning_effort="high") == (
        "<|start|>system<|message|>Effort: high<|end|><|start|>developer<|message|>Be brief.\n\nBe kind.<|end|>"
        "<|start|>user<|message|>Hi<|end|><|start|>assistant<|channel|>analysis<|message|>Hm.\n\nI look.<|end|>"
        f"{call.format('f')}{result.format('f', 'sun')}{call.format('g')}{result.format('g', 'rain')}"
        "<|start|>assistant"
    )
    assert "Effort: low" in prompt_of(server, messages, chat_template_kwargs={"reasoning_effort": "low"})
    # Results without a known id belong to the calls in turn.
    for message in messages[-2:]:
        message["tool_call_id"] = "?"
    assert result.format("f", "rain") + call.format("g") + result.format("g", "sun") in prompt_of(server, messages)


def test_a_turn_goes_on(server: RunningServer) -> None:
    messages = [*say(f" four.{NEXT}{FINAL}Yes."), {"role": "assistant", "content": "It is"}]
    body = {"messages": messages, "continue_final_message": True, "add_generation_prompt": False}
    (choice,) = server.post(CHAT, body).json()["choices"]
    assert choice["message"]["content"] == " four.\n\nYes."


@pytest.mark.parametrize(
    ("fields", "param", "says"),
    [
        ({"reasoning_effort": "none"}, "reasoning_effort", "low, medium, high"),
        ({"chat_template_kwargs": {"reasoning_effort": 3}}, "reasoning_effort", "got"),
        ({"chat_template_kwargs": {"builtin_tools": ["browser", "python"]}}, "chat_template_kwargs.builtin_tools",
         "browser, python would not be run"),
        ({"messages": [{"role": "assistant", "tool_calls": [CALL] * 3000}]}, "messages", "3000 tool calls"),
    ],
)  # fmt: skip
def test_what_the_model_cannot_do_is_refused(
    server: RunningServer, fields: dict[str, Any], param: str, says: str
) -> None:
    response = server.post(CHAT, {"messages": say("x"), **fields})
    assert response.status_code == 400
    assert response.json()["error"]["param"] == param
    assert says in response.json()["error"]["message"]


def test_structured_content_is_in_the_final_message(server: RunningServer) -> None:
    pytest.importorskip("llguidance")
    think = f"{THINK}any < thing {{{NEXT}"
    for said, status in (
        (f"{think}{FINAL}{ARGUMENTS}", 200),
        (f"{think}<|channel|>final <|constrain|>json<|message|>{ARGUMENTS}", 200),
        (f"{FINAL}{ARGUMENTS}", 200),
        (f"{think}{FINAL}Hello", 500),
        (f"{think}<|channel|>commentary<|message|>Hello", 500),
        (ARGUMENTS, 500),
    ):
        response = server.post(CHAT, {"messages": say(said), "response_format": FORMAT})
        assert response.status_code == status, (said, response.text)
        if status == 200:
            assert response.json()["choices"][0]["message"]["content"] == ARGUMENTS
    # Beside tools it is this or one call.
    assert calls_of(ask(server, f"{think}{TO_F}{ARGUMENTS}<|call|>", response_format=FORMAT)) == [("f", ARGUMENTS)]
    assert ask(server, f"{think}{FINAL}{ARGUMENTS}", response_format=FORMAT)["message"]["content"] == ARGUMENTS
    body = {"messages": [*say('{"a": 1}'), {"role": "assistant", "content": ""}], "response_format": FORMAT}
    going_on = {**body, "continue_final_message": True, "add_generation_prompt": False}
    assert server.post(CHAT, going_on).json()["choices"][0]["message"]["content"] == ARGUMENTS


def test_demanded_calls_are_messages(server: RunningServer) -> None:
    pytest.importorskip("llguidance")
    to_g, before = TO_F.replace("functions.f", "functions.g"), " to=functions.g<|channel|>commentary json<|message|>"
    named = {"type": "function", "function": {"name": "g"}}
    for choice, said, status, reason in (
        ("required", f"{THINK}Hm.{NEXT}{TO_F}{ARGUMENTS}", 200, "tool_calls"),
        ("required", f"{before}{ARGUMENTS}", 200, "tool_calls"),
        (named, f"{THINK}Hm.{NEXT}{to_g}{ARGUMENTS}", 200, "stop"),
        (named, f"{TO_F}{ARGUMENTS}", 500, ""),
        ("required", f"{TO_F}{{}}", 500, ""),
        ("required", f"{FINAL}No.", 500, ""),
    ):
        response = server.post(CHAT, {"messages": say(said), "tools": TOOLS, "tool_choice": choice})
        assert response.status_code == status, (said, response.text)
        if status == 200:
            (answer,) = response.json()["choices"]
            assert calls_of(answer) == [("f" if TO_F in said else "g", ARGUMENTS)]
            assert (answer["finish_reason"], answer["message"]["content"]) == (reason, None)


def test_structured_chats_offline(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("llguidance")
    engine = ScriptedEngine(template=TEMPLATE, specials=TAGS)
    monkeypatch.setattr("tidewheel.offline.model.load_engine", lambda options: engine)
    params = SamplingParams(max_tokens=200, structured_outputs=StructuredOutputsParams(json=SCHEMA))
    with LLM("scripted", runner="generate") as llm:
        (answer,) = llm.chat(say(f"{THINK}Hm.{NEXT}{FINAL}{ARGUMENTS}"), params, use_tqdm=False)  # type: ignore[arg-type]
        assert answer.outputs[0].text == f"analysisHm.assistantfinal{ARGUMENTS}"
        (answer,) = llm.generate(f"SAY({ARGUMENTS})YAS", params, use_tqdm=False)
        assert answer.outputs[0].text == ARGUMENTS


def test_parsers_that_do_not_fit_are_refused_at_the_start() -> None:
    tokenizer = Tokenizer(ByteBackend(TAGS), {}, TEMPLATE)
    assert model_template(tokenizer, None, "none", "none").formats[:2] == (None, None)
    assert model_template(tokenizer, None, "hermes", "gpt_oss").formats[:2] == ("hermes", "gpt_oss")
    with pytest.raises(ModelError, match="add --reasoning-parser openai_gptoss"):
        model_template(tokenizer, None, "openai", "qwen3")
    with pytest.raises(ModelError, match="the tokenizer has no <|start|>".replace("|", r"\|")):
        model_template(Tokenizer(ByteBackend(), {}, TEMPLATE), None, "auto", "auto")
