"""Open WebUI's requests, without Open WebUI: models, chats with tools, titles, suggestions, tags, embeddings, rankings.

They are made to the OpenAI API and to the Ollama API. The texts are our own.
"""

from __future__ import annotations

import json
from typing import Any

import pytest
from server.conftest import RunningServer, events

KEY = {"authorization": "Bearer secret"}
NOTE = {
    "type": "function",
    "function": {
        "name": "write_note",
        "description": "Keep a note.",
        "parameters": {
            "properties": {"title": {"type": "string", "default": ""}, "tags": {"anyOf": [
                {"items": {"type": "string"}, "type": "array"}, {"type": "null"}], "default": None}},
            "type": "object",
        },
    },
}  # fmt: skip
NOW = {"type": "function", "function": {"name": "now", "description": "", "parameters": {
    "properties": {}, "type": "object"}}}  # fmt: skip
ASKED = 'SAY(<tool_call>{"name": "write_note", "arguments": {"title": "mill"}}</tool_call>)YAS'
TASKS = {
    "title": ("JSON format: { \"title\": \"a title\" }", "The mill"),
    "follow_ups": ("JSON format: { \"follow_ups\": [\"a question\", \"another\"] }", ["Why?", "How?"]),
    "tags": ("JSON format: { \"tags\": [\"one\"] }", ["mill", "wheel"]),
}  # fmt: skip


def get(server: RunningServer, path: str) -> Any:
    response = server.http.get(path, headers=KEY)
    assert response.status_code == 200, response.text
    return response.json()


def post(server: RunningServer, path: str, **body: Any) -> Any:
    response = server.post(path, body, headers=KEY)
    assert response.status_code == 200, response.text
    return response


def test_models_are_listed_for_both_sides(scripted: RunningServer) -> None:
    assert [model["id"] for model in get(scripted, "/v1/models")["data"]] == ["scripted", "embed"]
    assert get(scripted, "/api/version")["version"]
    tags, running = get(scripted, "/api/tags")["models"], get(scripted, "/api/ps")["models"]
    assert (
        [model["model"] for model in tags]
        == [model["model"] for model in running]
        == ["scripted:latest", "embed:latest"]
    )
    for model in tags:
        assert {"name", "modified_at", "size", "digest", "details"} <= model.keys()
    assert all(model["expires_at"] for model in running)


def test_a_chat_with_tools(scripted: RunningServer) -> None:
    user = {"role": "user", "content": ASKED}
    fields = {"stream": True, "model": "scripted", "tools": [NOTE, NOW]}
    chunks = events(post(scripted, "/v1/chat/completions", messages=[user], **fields))
    deltas = [choice["delta"] for chunk in chunks for choice in chunk["choices"]]
    calls = [call for delta in deltas for call in delta.get("tool_calls") or ()]
    arguments = "".join(call["function"].get("arguments") or "" for call in calls)
    assert (calls[0]["function"]["name"], json.loads(arguments)) == ("write_note", {"title": "mill"})
    assert chunks[-1]["choices"][0]["finish_reason"] == "tool_calls"
    call = {"id": calls[0]["id"], "type": "function", "function": {"name": "write_note", "arguments": arguments}}
    result = json.dumps({"status": "success", "id": "n", "title": "SAY(kept)YAS", "created_at": 1795915526312380059})
    messages = [
        user,
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": call["id"], "content": result},
    ]
    chunks = events(post(scripted, "/v1/chat/completions", messages=messages, **fields))
    assert "".join(chunk["choices"][0]["delta"].get("content") or "" for chunk in chunks if chunk["choices"]) == "kept"


def test_a_chat_with_tools_on_ollamas_side(scripted: RunningServer) -> None:
    user = {"role": "user", "content": ASKED}
    fields = {"model": "scripted:latest", "stream": True, "tools": [NOTE, NOW]}
    lines = [json.loads(line) for line in post(scripted, "/api/chat", messages=[user], **fields).text.splitlines()]
    (call,) = [call for line in lines for call in line["message"].get("tool_calls") or ()]
    assert call["function"]["arguments"] == {"title": "mill"}
    assert (lines[-1]["done"], lines[-1]["eval_count"] > 0) == (True, True)
    past = {"index": 0, "id": "call_1", "function": {"name": "write_note", "arguments": {"title": "mill"}}}
    messages = [
        user,
        {"role": "assistant", "content": "", "tool_calls": [past]},
        {"role": "tool", "content": '{"title": "SAY(kept)YAS"}', "tool_call_id": "call_1"},
    ]
    answer = post(scripted, "/api/chat", messages=messages, **fields)
    assert "".join(json.loads(line)["message"]["content"] for line in answer.text.splitlines()) == "kept"


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/api/chat"])
@pytest.mark.parametrize("task", [*TASKS])
def test_titles_suggestions_and_tags_are_read_from_json(path: str, task: str, scripted: RunningServer) -> None:
    form, wanted = TASKS[task]
    chat = f"USER: How is the mill?\nASSISTANT: SAY({json.dumps({task: wanted})})YAS"
    prompt = f"### Task:\nRead it.\n### Output:\n{form}\n### Chat History:\n<chat_history>\n{chat}\n</chat_history>"
    body = {"messages": [{"role": "user", "content": prompt}], "stream": False}
    if path == "/api/chat":
        answer = post(scripted, path, model="scripted:latest", options={"num_predict": 1000}, **body).json()
        text = answer["message"]["content"]
    else:
        answer = post(scripted, path, model="scripted", max_tokens=1000, **body).json()
        text = answer["choices"][0]["message"]["content"]
    assert json.loads(text[text.find("{") : text.rfind("}") + 1]) == {task: wanted}


def test_embeddings_of_files(scripted: RunningServer) -> None:
    texts = ["The tide turns.", "Corn is ground."]
    data = post(scripted, "/v1/embeddings", input=texts, model="embed").json()["data"]
    batch = post(scripted, "/api/embed", input=texts, model="embed:latest", truncate=True).json()["embeddings"]
    assert [item["index"] for item in data] == [0, 1]
    assert [item["embedding"] for item in data] == [pytest.approx(one, abs=1e-5) for one in batch]
    body = {"model": "embed", "query": texts[0], "documents": texts, "top_n": len(texts)}
    ranked = post(scripted, "/v1/rerank", **body).json()["results"]
    assert [result["index"] for result in ranked] == [0, 1]
    assert all(isinstance(result["relevance_score"], float) for result in ranked)
    one = post(scripted, "/api/embeddings", model="embed", prompt=texts[0]).json()["embedding"]
    assert len(one) == len(batch[0])
