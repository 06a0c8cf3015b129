"""Images in the messages of Anthropic's, Ollama's and the Responses API."""

from __future__ import annotations

from typing import Any

import pytest
from server.conftest import RunningServer, StartServer, named_events
from server.images import seeing, sent, url

PAD = 260
TEMPLATE = (
    "{% for m in messages %}[{{ m.role }}]{% if m.content is string %}{{ m.content }}{% else %}"
    "{% for c in m.content %}{% if c.type == 'image' %}<image>{% else %}{{ c.text }}{% endif %}{% endfor %}"
    "{% endif %}{% endfor %}"
)
BLOCK = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": sent(3)}}
ITEM = {"type": "input_image", "image_url": url(3), "detail": "auto"}


@pytest.fixture(scope="module")
def sighted(start_server: StartServer) -> RunningServer:
    return start_server(engine=seeing(TEMPLATE), tool_call_parser="hermes")


def prompt_of(server: RunningServer) -> str:
    """The last request's prompt, with an image as the number of its tokens."""
    request = server.engine.requests[-1]
    ids, at, pieces = list(request.prompt_token_ids), 0, []
    decode = server.engine.tokenizer.decode
    for span in request.media:
        assert ids[span.start : span.end] == [PAD] * span.length
        pieces += [decode(ids[at : span.start], skip_special_tokens=False), str(span.length)]
        at = span.end
    pieces.append(decode(ids[at:], skip_special_tokens=False))
    return "".join(pieces).replace("<img>", "(").replace("</img>", ")")


def answered(server: RunningServer, path: str, body: dict[str, Any]) -> Any:
    response = server.post(path, body)
    assert response.status_code == 200, response.text
    return response.json()


def complaint(server: RunningServer, path: str, body: dict[str, Any]) -> str:
    response = server.post(path, body)
    assert response.status_code == 400, response.text
    error = response.json()["error"]
    return error if isinstance(error, str) else str(error["message"])


def message(*blocks: Any, role: str = "user") -> dict[str, Any]:
    return {"role": role, "content": list(blocks)}


def text(said: str) -> dict[str, Any]:
    return {"type": "text", "text": said}


# Anthropic's messages


def anthropic(*messages: Any) -> dict[str, Any]:
    return {"max_tokens": 16, "messages": list(messages)}


def test_blocks_of_images_stand_in_order(sighted: RunningServer) -> None:
    body = anthropic(
        message(text("a"), BLOCK, text("b SAY(seen)YAS"), {"type": "image", "source": {**BLOCK["source"]}})
    )
    answer = answered(sighted, "/v1/messages", body)
    assert answer["content"][0]["text"] == "seen"
    assert prompt_of(sighted) == "[user]a(3)b SAY(seen)YAS(3)"
    assert answer["usage"]["input_tokens"] == len(sighted.engine.requests[-1].prompt_token_ids)
    count = answered(sighted, "/v1/messages/count_tokens", {"messages": body["messages"]})
    assert count["input_tokens"] == answer["usage"]["input_tokens"]
    assert named_events(sighted.post("/v1/messages", {**body, "stream": True}))[-1]["type"] == "message_stop"


def test_images_in_tools_results_are_seen(sighted: RunningServer, server: RunningServer) -> None:
    call = {"type": "tool_use", "id": "t1", "name": "look", "input": {}}
    result = {"type": "tool_result", "tool_use_id": "t1", "content": [text("here"), BLOCK], "is_error": False}
    body = anthropic(message(text("look")), message(call, role="assistant"), message(result, text("and?")))
    answered(sighted, "/v1/messages", body)
    assert prompt_of(sighted) == "[user]look[assistant][tool]here(3)[user]and?"
    failed = {**result, "is_error": True, "content": [BLOCK]}
    answered(sighted, "/v1/messages", anthropic(*body["messages"][:2], message(failed)))
    assert prompt_of(sighted) == "[user]look[assistant][tool]Error: (3)"
    # Agents send results with every turn, and are not refused where the model sees none.
    answered(server, "/v1/messages", body)
    assert "[An image, which this model cannot see.]" in prompt_of(server)


@pytest.mark.parametrize(
    ("source", "said"),
    [
        ({"type": "base64", "media_type": "image/png", "data": "!"}, "source cannot be fetched: its base64"),
        ({"type": "base64", "media_type": "text/html", "data": "AAAA"}, "source cannot be fetched: a data: URL begins"),
        ({"type": "base64", "media_type": "image/png", "data": "AAAA"}, "source cannot be read as an image"),
        ({"type": "url", "url": "https://example.org/a.png"}, "source cannot be fetched: its host is not among"),
        ({"type": "file", "file_id": "f"}, "source.type is not supported by this server: 'file'"),
    ],
)
@pytest.mark.parametrize("in_result", [False, True])
def test_a_source_that_cannot_be_used_is_named(
    sighted: RunningServer, source: dict[str, Any], said: str, in_result: bool
) -> None:
    block: dict[str, Any] = {"type": "image", "source": source}
    path = "messages[2].content[1]"
    reminder = message(text("be kind"), role="system")  # goes before the user's parts
    if in_result:
        block = {"type": "tool_result", "tool_use_id": "t", "content": [text("a"), text("b"), block]}
        path += ".content[2]"
    hi = message(text("hi"), role="assistant")
    assert complaint(sighted, "/v1/messages", anthropic(hi, reminder, message(text("a"), block))).startswith(
        f"{path}.{said}"
    )


def test_a_block_of_an_image_is_refused_without_eyes(server: RunningServer) -> None:
    said = complaint(server, "/v1/messages", anthropic(message(text("a"), BLOCK)))
    assert said.startswith("messages[0].content[1].type is not supported")


# Ollama


def test_ollamas_images_stand_before_the_text(sighted: RunningServer) -> None:
    images = [sent(2), sent(3)]
    chat = {"messages": [{"role": "user", "content": "what SAY(two)YAS", "images": images}], "stream": False}
    answer = answered(sighted, "/api/chat", chat)
    assert answer["message"]["content"] == "two"
    assert prompt_of(sighted) == "[user](2)(3)what SAY(two)YAS"
    assert answer["prompt_eval_count"] == len(sighted.engine.requests[-1].prompt_token_ids)
    answered(sighted, "/api/generate", {"prompt": "what?", "images": images, "system": "kind", "stream": False})
    assert prompt_of(sighted) == "[system]kind[user](2)(3)what?"
    answered(sighted, "/api/generate", {"prompt": "", "images": images[:1], "stream": False})
    assert prompt_of(sighted) == "[user](2)"


def test_ollamas_images_are_named(sighted: RunningServer, server: RunningServer) -> None:
    images = [sent(1), "AA=A"]
    chat = {"messages": [{"role": "user", "content": "a"}, {"role": "user", "content": "b", "images": images}]}
    assert complaint(sighted, "/api/chat", chat).startswith("messages[1].images[1] cannot be")
    generate = {"prompt": "a", "images": images, "system": "b"}
    assert complaint(sighted, "/api/generate", generate).startswith("images[1] cannot be")
    assert "images cannot be given with raw" in complaint(
        sighted, "/api/generate", {"prompt": "a", "images": images, "raw": True}
    )
    assert complaint(server, "/api/chat", chat).startswith("messages[1].images is not supported")
    assert complaint(server, "/api/generate", generate).startswith("images is not supported")
    many = [{"role": "user", "images": [""] * 10_000}]
    assert "10000 images; this server takes at most 16" in complaint(sighted, "/api/chat", {"messages": many})
    assert "at most 16384" in complaint(sighted, "/api/chat", {"messages": many * 2})
    assert "at most 16384" in complaint(sighted, "/api/generate", {"prompt": "a", "images": [""] * 20_000})


def test_the_oldest_turns_go_with_their_images(start_server: StartServer) -> None:
    server = start_server(engine={**seeing(TEMPLATE), "max_model_len": 200})
    turns = [{"role": "user", "content": f"{i}", "images": [sent(60)]} for i in range(5)]
    assert answered(server, "/api/chat", {"messages": turns, "truncate": True, "stream": False})["done"]
    assert prompt_of(server) == "[user](60)3[user](60)4"


# The Responses API


def test_items_with_images(sighted: RunningServer) -> None:
    said = {"role": "user", "content": [{"type": "input_text", "text": "a"}, ITEM]}
    first = answered(sighted, "/v1/responses", {"input": [said]})
    assert prompt_of(sighted) == "[user]a(3)"
    assert first["usage"]["input_tokens"] == len(sighted.engine.requests[-1].prompt_token_ids)
    # What is kept has the image.
    answered(sighted, "/v1/responses", {"input": "and?", "previous_response_id": first["id"]})
    assert prompt_of(sighted) == "[user]a(3)[assistant]ok[user]and?"
    items = sighted.http.get(f"/v1/responses/{first['id']}/input_items").json()["data"]
    assert items[0]["content"][1] == ITEM
    counted = answered(sighted, "/v1/responses/input_tokens", {"input": [said]})
    assert counted["input_tokens"] == first["usage"]["input_tokens"]
    call = {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"}
    result = {"type": "function_call_output", "call_id": "c", "output": [{"type": "input_text", "text": "b"}, ITEM]}
    answered(sighted, "/v1/responses", {"input": [{"role": "user", "content": "go"}, call, result]})
    assert prompt_of(sighted) == "[user]go[assistant][tool]b(3)"


def test_items_that_cannot_be_used_are_named(sighted: RunningServer, server: RunningServer) -> None:
    def ask(image: dict[str, Any]) -> dict[str, Any]:
        content = [{"type": "input_text", "text": "a"}, {"type": "input_image", **image}]
        return {"instructions": "kind", "input": [{"role": "user", "content": content}]}

    path = "input[0].content[1]"
    for image, said in (
        ({"file_id": "file-1"}, "file_id is not supported by this server: no images are stored"),
        ({}, "image_url is required"),
        ({"image_url": "data:image/png;base64,AA=A"}, "image_url cannot be fetched"),
    ):
        assert complaint(sighted, "/v1/responses", ask(image)).startswith(f"{path}.{said}")
    assert complaint(server, "/v1/responses", ask({"image_url": url(3)})).startswith(f"{path}.type is not supported")


def test_a_file_may_be_an_image(sighted: RunningServer, server: RunningServer) -> None:
    def ask(**file: Any) -> dict[str, Any]:
        return {"input": [message({"type": "input_text", "text": "a"}, {"type": "input_file", **file})]}

    first = answered(sighted, "/v1/responses", ask(file_data=url(3), filename="a.png"))
    assert prompt_of(sighted) == "[user]a(3)"
    items = sighted.http.get(f"/v1/responses/{first['id']}/input_items").json()["data"]
    assert items[0]["content"][1] == {"type": "input_file", "file_data": url(3), "filename": "a.png"}
    path = "input[0].content[1]"
    for file, said in (
        ({"file_id": "file-1"}, "file_id is not supported by this server: no images are stored"),
        ({"filename": "a.png"}, "file_data is required"),
        ({"file_data": "data:application/pdf;base64,JVBERg=="}, "file_data cannot be fetched: a data: URL begins like"),
        ({"file_url": "https://example.org/a.png"}, "file_url cannot be fetched"),
    ):
        assert complaint(sighted, "/v1/responses", ask(**file)).startswith(f"{path}.{said}")
    refused = complaint(server, "/v1/responses", ask(file_data=url(3)))
    assert refused == f"{path}.type is not supported by this server: 'input_file'; this model reads text"


def test_completions_are_of_texts(sighted: RunningServer) -> None:
    answered(sighted, "/v1/completions", {"prompt": "an <image> and a <pad>"})
    assert sighted.engine.requests[-1].media == ()
