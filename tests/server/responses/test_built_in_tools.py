"""The tools that clients run for OpenAI's models: their text for the model, its calls as items, and results."""

from __future__ import annotations

import json
from typing import Any

import httpx
import openai
import pytest
from server.conftest import RunningServer, ServerProcess, StartServer, named_events

PATH = "/v1/responses"
SHELL = {"type": "shell", "environment": {"type": "local"}}
RUN = {"command": ["ls", "-l"], "env": {"A": "b"}, "working_directory": "/mill"}
LIST = {"commands": ["ls", "pwd"], "timeout_ms": 900}
EDIT = {"type": "update_file", "path": "mill.py", "diff": "@@\n-off\n+on\n"}
CALLS: list[tuple[str, dict[str, Any], dict[str, Any]]] = [
    ("local_shell", RUN, {"action": {"type": "exec", **RUN}}),
    ("shell", LIST, {"action": {"max_output_length": None, **LIST}, "environment": {"type": "local"}}),
    ("apply_patch", EDIT, {"operation": EDIT}),
    ("apply_patch", {"type": "delete_file", "path": "a"}, {"operation": {"type": "delete_file", "path": "a"}}),
]


@pytest.fixture
def server(parsing_server: RunningServer) -> RunningServer:
    return parsing_server


def asked(name: str, arguments: dict[str, Any]) -> str:
    return f"SAY(<tool_call>{json.dumps({'name': name, 'arguments': arguments})}</tool_call>)YAS"


def create(server: RunningServer, **body: Any) -> Any:
    response = server.post(PATH, body)
    assert response.status_code == 200, response.text
    return response.json()


def prompt_of(server: RunningServer) -> str:
    return server.engine.tokenizer.decode(list(server.engine.requests[-1].prompt_token_ids))


@pytest.mark.parametrize(("tool", "arguments", "fields"), CALLS)
def test_a_call_is_an_item_of_its_own(
    tool: str, arguments: dict[str, Any], fields: dict[str, Any], server: RunningServer, client: openai.OpenAI
) -> None:
    body: Any = {"model": "scripted", "input": asked(tool, arguments), "tools": [{"type": tool}]}
    (call,) = client.responses.create(**body).output
    assert call.type == f"{tool}_call"
    shown = call.to_dict()
    assert {name: shown[name] for name in fields} == fields
    assert (shown["status"], shown["call_id"] != shown["id"]) == ("completed", True)

    events = list(client.responses.create(**body, stream=True))
    kinds = [event.type.removeprefix("response.") for event in events]
    assert kinds == ["created", "in_progress", "output_item.added", "output_item.done", "completed"]
    assert [event.sequence_number for event in events] == list(range(5))
    done = events[3].to_dict()["item"]  # type: ignore[union-attr]
    assert {name: done[name] for name in fields} == fields


@pytest.mark.parametrize(
    ("tool", "arguments", "action"),
    [("shell", {"commands": "ls | wc"}, {"commands": ["ls | wc"]}),
     ("local_shell", {"command": "ls | wc"}, {"command": ["sh", "-c", "ls | wc"]})],
)  # fmt: skip
def test_models_write_one_command_as_text(
    tool: str, arguments: dict[str, Any], action: dict[str, Any], server: RunningServer
) -> None:
    (call,) = create(server, input=asked(tool, arguments), tools=[{"type": tool}])["output"]
    assert {name: call["action"][name] for name in action} == action


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("tool", "arguments"),
    [("shell", {"run": "ls"}), ("local_shell", {"command": 3}), ("apply_patch", {"type": "create_file", "path": "a"})],
)
def test_what_does_not_say_what_to_do_is_a_functions_call(
    tool: str, arguments: dict[str, Any], stream: bool, server: RunningServer
) -> None:
    body = {"input": asked(tool, arguments), "tools": [{"type": tool}]}
    if stream:
        events = named_events(server.post(PATH, {**body, "stream": True}))
        (call,) = events[-1]["response"]["output"]
        assert "".join(e["delta"] for e in events if e["type"].endswith("arguments.delta")) == call["arguments"]
    else:
        (call,) = create(server, **body)["output"]
    assert (call["type"], call["name"], json.loads(call["arguments"])) == ("function_call", tool, arguments)


def test_a_call_that_is_cut_off_cannot_be_run(server: RunningServer) -> None:
    said = asked("shell", {"commands": ["rm -r /mill/old"]})
    response = create(server, input=said, tools=[SHELL], max_output_tokens=said.index("/old"))
    (call,) = response["output"]
    assert (response["status"], call["type"], call["status"]) == ("incomplete", "function_call", "incomplete")
    assert call["arguments"].startswith('{"commands": ["rm -r')


def test_calls_and_texts_are_in_the_order_of_the_answer(server: RunningServer) -> None:
    calls = [asked("shell", LIST), asked("add", {"a": 1}), asked("apply_patch", EDIT)]
    text = "".join(["One moment.", *(call.removeprefix("SAY(").removesuffix(")YAS") for call in calls)])
    tools = [SHELL, {"type": "apply_patch"}, {"type": "function", "name": "add", "parameters": {"type": "object"}}]
    output = create(server, input=f"SAY({text})YAS", tools=tools, max_output_tokens=900)["output"]
    assert [item["type"] for item in output] == ["message", "shell_call", "function_call", "apply_patch_call"]
    assert len({item["id"] for item in output}) == 4


def test_results_go_back_to_the_model(server: RunningServer) -> None:
    calls = [
        *create(server, input=asked("local_shell", RUN), tools=[{"type": "local_shell"}])["output"],
        *create(server, input=asked("shell", {**LIST, "max_output_length": 4}), tools=[SHELL])["output"],
        *create(server, input=asked("apply_patch", EDIT), tools=[{"type": "apply_patch"}])["output"],
    ]
    printed = {"stdout": "mill", "stderr": "no wind", "outcome": {"type": "exit", "exit_code": 1}}
    results = [
        {"type": "local_shell_call_output", "id": calls[0]["call_id"], "output": "two files"},
        {"type": "local_shell_call_output", "id": calls[0]["id"], "output": "they name the item too"},
        {"type": "shell_call_output", "call_id": calls[1]["call_id"], "max_output_length": 6,
         "output": [printed, {**printed, "outcome": {"type": "timeout"}}]},
        {"type": "apply_patch_call_output", "call_id": calls[2]["call_id"], "status": "failed", "output": "no @@"},
    ]  # fmt: skip
    create(server, input=[*calls, *results], tools=[SHELL])
    prompt = prompt_of(server)
    ids = [call["call_id"] for call in calls]
    assert f"[local_shell {json.dumps(RUN)}]" in prompt
    assert f"[apply_patch {json.dumps(EDIT)}]" in prompt
    assert f"[tool {ids[0]}]<tool>two files[tool {ids[0]}]<tool>they name the item too" in prompt
    assert f'[tool {ids[1]}]<tool>[{{"stdout":"mill","stderr":"no"' in prompt
    assert '{"type":"timeout"}' in prompt
    assert f'[tool {ids[2]}]<tool>{{"status":"failed","output":"no @@"}}' in prompt


def test_a_conversation_goes_on_from_a_call(server: RunningServer) -> None:
    first = create(server, input=asked("shell", LIST), tools=[SHELL])
    call_id = first["output"][0]["call_id"]
    printed = {"stdout": "SAY(all is well)YAS", "stderr": "", "outcome": {"type": "exit", "exit_code": 0}}
    result = {"type": "shell_call_output", "call_id": call_id, "output": [printed]}
    again = create(server, input=[result], tools=[SHELL], previous_response_id=first["id"])
    assert again["output"][0]["content"][0]["text"] == "all is well"
    assert f"[tool {call_id}]" in prompt_of(server)


def test_the_model_is_told_of_functions(start_server: StartServer) -> None:
    server = start_server(engine={"template": "{{ [tools, messages] | tojson }}"}, tool_call_parser="hermes")
    skill = {"name": "mill", "description": "Runs the mill.", "path": "/skills/mill"}
    environment = {"type": "local", "skills": [skill]}
    tools = [{"type": "local_shell"}, {"type": "shell", "environment": environment}, {"type": "apply_patch"}]
    shown = create(server, input="hi", tools=tools)["tools"]
    assert shown == tools
    functions = {tool["function"]["name"]: tool["function"] for tool in json.loads(prompt_of(server))[0]}
    assert [*functions] == ["local_shell", "shell", "apply_patch"]
    assert [function["parameters"]["required"] for function in functions.values()] == [
        ["command"], ["commands"], ["type", "path"]]  # fmt: skip
    assert "- /skills/mill (mill): Runs the mill." in functions["shell"]["description"]


@pytest.mark.parametrize("choice", [{"type": "shell"}, {
    "type": "allowed_tools", "mode": "required", "tools": [{"type": "shell"}]}])  # fmt: skip
def test_a_demanded_shell_is_called(demo_server: ServerProcess, choice: Any) -> None:
    pytest.importorskip("llguidance")  # not there on every machine
    body = {"input": "Which files are there?", "tools": [{"type": "apply_patch"}, SHELL], "tool_choice": choice,
            "temperature": 0, "max_output_tokens": 200}  # fmt: skip
    answer = httpx.post(f"{demo_server.url}{PATH}", json=body, trust_env=False).json()
    call = answer["output"][-1]
    name = call["name"] if call["type"] == "function_call" else call["type"].removesuffix("_call")
    assert name == "shell"


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"tools": [{"type": "shell", "environment": {"type": "container_auto"}}]}, "tools[0].environment"),
        ({"tools": [{"type": "shell", "allowed_callers": ["programmatic"]}]}, "tools[0].allowed_callers"),
        ({"tools": [SHELL, SHELL]}, "tools[1].name"),
        ({"tools": [{"type": "computer_use_preview"}]}, "tools[0].type"),
        ({"tools": [SHELL], "tool_choice": {"type": "apply_patch"}}, "tool_choice"),
        ({"input": [{"type": "local_shell_call_output", "id": "lsh_1", "output": "a"}]}, "input[0].call_id"),
    ],
)
def test_what_cannot_be_served_is_refused_by_name(body: dict[str, Any], param: str, server: RunningServer) -> None:
    response = server.post(PATH, {"input": "hi", **body})
    assert (response.status_code, response.json()["error"]["param"]) == (400, param)
