"""Images in conversations: where they stand in prompts, and texts that look like one."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest
from server.conftest import RunningServer, StartServer
from server.images import frames, part, seeing, sent, url

from tidewheel.engine.errors import BusyError
from tidewheel.engine.media.options import MediaOptions
from tidewheel.engine.media.vision import Marks

PATH = "/v1/chat/completions"
PAD = 260  # the slot's token

QWEN = (
    "{% for m in messages %}[{{ m.role }}]{% if m.content is string %}{{ m.content }}{% else %}"
    "{% for c in m.content %}{% if c.type == 'image' or 'image' in c or 'image_url' in c %}<v><image></v>"
    "{% elif 'text' in c %}{{ c.text }}{% endif %}{% endfor %}{% endif %}{% endfor %}"
)
IDEFICS = (
    "{% for m in messages %}{{ m['role'] }}{% if m['content'][0]['type'] == 'image' %}:{% else %}: {% endif %}"
    "{% for line in m['content'] %}{% if line['type'] == 'text' %}{{ line['text'] }}"
    "{% elif line['type'] == 'image' %}{{ '<image>' }}{% endif %}{% endfor %};{% endfor %}"
)
GEMMA = (
    "{% for m in messages %}[{{ m.role }}]{% if m['content'] is string %}{{ m['content'] | trim }}"
    "{% elif m['content'] is iterable %}{% for item in m['content'] %}{% if item['type'] == 'image' %}<image>"
    "{% elif item['type'] == 'text' %}{{ item['text'] | trim }}{% endif %}{% endfor %}{% endif %}{% endfor %}"
)
OLD_PIXTRAL = (
    "{% for m in messages %}[{{ m.role }}]{% if m.content is string %}{{ m.content }}{% else %}"
    "{% for c in m.content %}{% if c.type == 'image_url' %}<image>{% elif c.type == 'text' %}{{ c.text }}"
    "{% else %}{{ raise_exception('unknown part') }}{% endif %}{% endfor %}{% endif %}{% endfor %}"
)
TEXTS = "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}"
USERS_ONLY = (
    "{% for m in messages %}[{{ m.role }}]{% if m.role == 'user' and m.content is not string %}"
    "{% for c in m.content %}{% if c.type == 'image' %}<image>{% else %}{{ c.text }}{% endif %}{% endfor %}"
    "{% else %}{{ m.content }}{% endif %}{% endfor %}"
)


def said(*parts: str | int) -> dict[str, Any]:
    """A user's message of texts, and images of so many tokens."""
    return user([{"type": "text", "text": one} if isinstance(one, str) else part(one) for one in parts])


def user(content: Any) -> dict[str, Any]:
    return {"role": "user", "content": content}


def rendered(server: RunningServer, *messages: dict[str, Any], **body: Any) -> tuple[str, list[int]]:
    response = server.post(f"{PATH}/render", {"messages": messages, **body})
    assert response.status_code == 200, response.text
    prompt = response.json()
    return prompt["prompt"], prompt["token_ids"]


def refused(server: RunningServer, *messages: dict[str, Any], **body: Any) -> dict[str, Any]:
    response = server.post(PATH, {"messages": messages, **body})
    assert response.status_code == 400, response.text
    error: dict[str, Any] = response.json()["error"]
    return error


@pytest.mark.parametrize(
    ("template", "prompt"),
    [
        (QWEN, "[user]one <v>{}</v> two <v>{}</v>"),
        (IDEFICS, "user: one {} two {};"),
        (GEMMA, "[user]one{}two{}"),
        (OLD_PIXTRAL, "[user]one {} two {}"),
        (TEXTS, "[user]{}\n{}\none \n two "),
    ],
    ids=["qwen", "idefics", "gemma", "pixtral", "texts"],
)
def test_images_stand_where_the_template_puts_them(start_server: StartServer, template: str, prompt: str) -> None:
    """Between texts, or in front of them as in vLLM where contents are texts; each with its own number of tokens."""
    own = start_server(engine=seeing(template))
    text, ids = rendered(own, said("one ", 3, " two ", 2))
    slot = "<img><pad></img>"
    assert text == prompt.format(slot, slot)
    where = [i for i, token in enumerate(ids) if token == PAD]
    assert len(where) == 5
    assert where[2] - where[0] == 2
    assert where[4] - where[3] == 1
    other = start_server(engine=seeing(TEXTS), trust_request_chat_template=True)
    assert rendered(other, said("one ", 3, " two ", 2), chat_template=template)[0] == text


def test_the_engine_gets_spans_in_order(start_server: StartServer) -> None:
    server = start_server(engine=seeing(QWEN, tiles=2))
    response = server.post(PATH, {"messages": [said(2, "SAY(seen)YAS", 3), user("again")]})
    assert response.json()["choices"][0]["message"]["content"] == "seen"
    request = server.engine.requests[-1]
    assert [(span.media.num_tokens, span.length, span.first_row) for span in request.media] == [
        (4, 2, 0),
        (4, 2, 2),
        (6, 3, 0),
        (6, 3, 3),
    ]
    for span in request.media:
        assert list(request.prompt_token_ids[span.start : span.end]) == [PAD] * span.length
    assert response.json()["usage"]["prompt_tokens"] == len(request.prompt_token_ids)


def test_images_stay_in_place_among_texts_if_wanted(start_server: StartServer) -> None:
    server = start_server(engine=seeing(TEXTS), media=MediaOptions(interleave_mm_strings=True))
    assert rendered(server, said("one", 3, "two"))[0] == "[user]one\n<img><pad></img>\ntwo"


@pytest.mark.parametrize("template", [QWEN, IDEFICS, GEMMA, TEXTS], ids=["qwen", "idefics", "gemma", "texts"])
@pytest.mark.parametrize("word", ["<image>", "<pad>", "\U0010fffcimage\U0010fffc", "<image><image><pad>"])
def test_a_text_that_looks_like_an_image_is_a_text(start_server: StartServer, template: str, word: str) -> None:
    """It neither moves an image nor gets its embeddings, before, behind or instead of it."""
    server = start_server(engine=seeing(template))
    messages = [user(f"what is {word}?"), said(f"say {word} ", 3, f" or {word}")]
    text, _ = rendered(server, *messages)
    assert text.count(word) >= 3
    response = server.post(PATH, {"messages": messages})
    assert response.status_code == 200, response.text
    request = server.engine.requests[-1]
    (span,) = request.media
    decoded = server.engine.tokenizer.decode(list(request.prompt_token_ids[: span.start]), skip_special_tokens=False)
    assert decoded.endswith("<img>")
    assert span.length == 3
    assert list(request.prompt_token_ids).count(PAD) == 3 + 3 * word.count("<pad>")


def test_words_in_tools_and_calls_are_texts_too(start_server: StartServer) -> None:
    template = (
        QWEN + "{{ tools | tojson }}{% for m in messages %}{{ m.tool_calls | tojson if m.tool_calls }}{% endfor %}"
    )
    server = start_server(engine=seeing(template), tool_call_parser="hermes")
    call = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": '{"a": "<image>"}'}}
    tool = {"type": "function", "function": {"name": "f", "description": "shows <image> and <pad>"}}
    messages = [
        user("go"),
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c1", "content": "<image>"},
        said("so", 2),
    ]
    text, ids = rendered(server, *messages, tools=[tool])
    assert '"a": "<image>"' in text
    assert "shows <image> and <pad>" in text
    assert ids.count(PAD) == 2 + 1


def test_a_word_from_two_parts_is_refused(start_server: StartServer) -> None:
    """The template joins what nobody could find in either part."""
    server = start_server(engine=seeing(QWEN))
    assert "has 1 images, and the chat template shows 2" in refused(server, said("<ima", "ge>", 3))["message"]
    assert "'<pad>'" in refused(server, said("<p", "ad>", 3))["message"]


def test_a_template_that_drops_images_is_refused(start_server: StartServer) -> None:
    server = start_server(
        engine=seeing("{% for m in messages %}{% if m.role == 'user' %}{{ m.content }}{% endif %}{% endfor %}")
    )
    error = refused(server, {"role": "assistant", "content": [part(2)]}, user("what was it?"))
    assert error["param"] == "messages"
    assert "does not show the 1 images" in error["message"]


@pytest.mark.parametrize(
    ("template", "prompt"),
    [
        (QWEN, "[user]go[assistant][tool]a picture<v>{0}</v>[user]and?"),
        (USERS_ONLY, "[user]go[assistant][tool]a picture[user]{0}[user]and?"),
    ],
    ids=["in the result", "behind the result"],
)
def test_an_image_in_a_result_is_shown(start_server: StartServer, template: str, prompt: str) -> None:
    server = start_server(engine=seeing(template), tool_call_parser="hermes")
    call = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    messages = [
        user("go"),
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c1", "content": [{"type": "text", "text": "a picture"}, part(2)]},
        user("and?"),
    ]
    assert rendered(server, *messages)[0] == prompt.format("<img><pad></img>")


@pytest.mark.parametrize("given", ["url", "text", "input_image"])
def test_an_image_is_given_in_several_forms(start_server: StartServer, given: str) -> None:
    server = start_server(engine=seeing(QWEN))
    forms = {
        "url": {"type": "image_url", "image_url": {"url": url(3), "detail": "low"}, "uuid": "one"},
        "text": {"type": "image_url", "image_url": url(3)},
        "input_image": {"type": "input_image", "image_url": url(3), "detail": "high"},
    }
    assert rendered(server, user([forms[given]]))[1].count(PAD) == 3


def test_an_image_is_asked_about_again_by_its_uuid(start_server: StartServer) -> None:
    server = start_server(engine=seeing(QWEN))
    again = {"type": "image_url", "image_url": None, "uuid": "one"}
    assert rendered(server, user([{**part(3), "uuid": "one"}]), cache_salt="a")[1].count(PAD) == 3
    assert rendered(server, user([again]), cache_salt="a")[1].count(PAD) == 3
    assert rendered(server, user([{**again, "image_url": {"url": None}}]), cache_salt="a")[1].count(PAD) == 3
    for salt in (None, "b"):
        assert "for this uuid: send the image again" in refused(server, user([again]), cache_salt=salt)["message"]
    assert rendered(server, user([{**part(5), "uuid": "one"}]), cache_salt="a")[1].count(PAD) == 5
    assert rendered(server, user([again]), cache_salt="a")[1].count(PAD) == 5


@pytest.mark.parametrize(
    ("image", "param", "message"),
    [
        ({"type": "image_url"}, "image_url", "is required"),
        ({"type": "image_url", "image_url": {"url": ""}}, "image_url", "is required"),
        ({"type": "image_url", "image_url": None, "uuid": "one"}, "image_url", "no image is kept for this uuid"),
        ({"type": "input_image", "file_id": "file-1"}, "file_id", "no images are stored"),
        ({"type": "image_url", "image_url": "data:image/png;base64,!!!!"}, "image_url", "base64"),
        ({"type": "image_url", "image_url": "data:image/png;base64,AAAA"}, "image_url", "cannot be read as an image"),
        ({"type": "image_url", "image_url": "https://example.org/a.png"}, "image_url", "--allowed-media-domains"),
        ({"type": "image_url", "image_url": "http://169.254.169.254/"}, "image_url", "--allowed-media-domains"),
        ({"type": "image_url", "image_url": "file:///etc/passwd"}, "image_url", "--allowed-local-media-path"),
        ({"type": "image_url", "image_url": "ftp://example.org/a"}, "image_url", "no data:, https: or http: URL"),
        ({"type": "video_url"}, "type", "this model reads text and images"),
        ({"type": "input_audio"}, "type", "this model reads text and images"),
        ({"type": "image_embeds"}, "type", "this model reads text and images"),
    ],
)
def test_an_image_that_cannot_be_read(
    start_server: StartServer, image: dict[str, Any], param: str, message: str
) -> None:
    server = start_server(engine=seeing(QWEN))
    error = refused(server, said("a"), user([{"type": "text", "text": "b"}, image]))
    assert error["param"] == f"messages[1].content[1].{param}"
    assert message in error["message"]


def test_too_many_images_are_refused_before_any_is_read(start_server: StartServer) -> None:
    server = start_server(engine=seeing(QWEN), media=MediaOptions(limit_mm_per_prompt={"image": 2}))
    assert rendered(server, said(1), said(1))[1].count(PAD) == 2
    reader = server.engine.media
    reader.params.clear()
    for count in (3, 10_000):
        error = refused(server, user([{"type": "image_url", "image_url": "data:image/png;base64,AA=="}] * count))
        assert f"messages has {count} images; this server takes at most 2" in error["message"]
        assert "--limit-mm-per-prompt" in error["message"]
    assert "at most 16384 messages" in refused(server, user([part(1)] * 20_000))["message"]
    assert reader.params == []


def test_images_that_do_not_fit_are_not_all_read(start_server: StartServer) -> None:
    server = start_server(engine={**seeing(QWEN), "max_model_len": 100})
    error = refused(server, said(60, 60, 60, 60))
    assert (error["param"], error["code"]) == ("messages[0].content[1].image_url", "context_length_exceeded")
    assert server.engine.media.params[-1] == "messages[0].content[1].image_url"
    error = refused(server, said(95))
    assert error["code"] == "context_length_exceeded"
    assert "messages has 1" in error["message"]


def test_a_prompt_with_images_is_not_cut(start_server: StartServer) -> None:
    server = start_server(engine=seeing(QWEN))
    assert refused(server, said("what is it?", 50), truncate_prompt_tokens=40)["param"] == "truncate_prompt_tokens"
    response = server.post(PATH, {"messages": [said("what?", 50)], "truncate_prompt_tokens": 1000})
    assert response.status_code == 200, response.text


def test_tokens_are_counted_with_images(start_server: StartServer) -> None:
    server = start_server(engine={**seeing(QWEN), "max_model_len": 64})
    response = server.post("/tokenize", {"messages": [said("a", 7)], "return_token_strs": True}).json()
    assert response["tokens"].count(PAD) == 7
    assert response["token_strs"].count("<pad>") == 7
    assert response["count"] == len("[user]a<v><img></img></v>") + 7
    longer = server.post("/tokenize", {"messages": [said("a", 1000)]}).json()
    assert longer["count"] == len("[user]a<v><img></img></v>") + 1000


def test_a_request_may_change_settings_of_the_processor(start_server: StartServer) -> None:
    server = start_server(engine=seeing(QWEN))
    rendered(server, said(1, "SAY(x)YAS", 2), mm_processor_kwargs={"max_pixels": 1})
    rendered(server, said(1))
    assert server.engine.media.settings == [{"max_pixels": 1}] * 2 + [None]
    server.post("/tokenize", {"messages": [said(1)], "mm_processor_kwargs": {"max_pixels": 2}})
    assert server.engine.media.settings[3:] == [{"max_pixels": 2}]
    error = refused(server, said(1), mm_processor_kwargs={"mean": 1})
    assert error["param"] == "mm_processor_kwargs"
    assert "only max_pixels" in error["message"]


def test_a_model_without_eyes_has_no_processor(server: RunningServer) -> None:
    error = refused(server, user("a"), mm_processor_kwargs={"max_pixels": 1})
    assert error["param"] == "mm_processor_kwargs"
    assert "this model reads text" in error["message"]


VIDEO = Marks("<vid>", "<frame>")
FOUR = {"video": {"fps": 4}}
WITH_VIDEO = QWEN.replace("{% elif 'text'", "{% elif c.type == 'video' %}<vid>{% elif 'text'")


def shown(**video: Any) -> dict[str, Any]:
    return user([{"type": "text", "text": "a"}, video, {"type": "text", "text": "b"}, part(2)])


@pytest.mark.parametrize(
    ("video", "times"),
    [
        ({"type": "video_url", "video_url": {"url": frames(3, 4)}}, "<0>{0}<1>{0}"),
        ({"type": "video_url", "video_url": frames(3, 4), "fps": 4}, "<0>{0}<0.25>{0}"),
        ({"type": "video", "video": [url(3), url(4)]}, "<0>{0}<0.5>{0}"),
        ({"type": "video", "video": url(7)}, "<0>{0}"),
    ],
    ids=["vllm", "with fps", "qwen", "an animation"],
)
def test_videos_stand_in_their_places(start_server: StartServer, video: dict[str, Any], times: str) -> None:
    server = start_server(engine=seeing(WITH_VIDEO, video=VIDEO))
    text, ids = rendered(server, shown(**video))
    assert text == f"[user]a{times.format('<frame>')}b<v><img><pad></img></v>"
    assert (ids.count(263), ids.count(PAD)) == (7, 2)
    texts = start_server(engine=seeing(TEXTS, video=VIDEO))
    assert rendered(texts, shown(**video))[0] == f"[user]{times.format('<frame>')}\n<img><pad></img>\na\nb"


def test_a_request_may_say_how_fast_frames_are(start_server: StartServer) -> None:
    server = start_server(engine=seeing(WITH_VIDEO, video=VIDEO), media=MediaOptions(media_io_kwargs=FOUR))
    video = {"type": "video_url", "video_url": frames(3, 4)}
    assert "<0.25><frame>" in rendered(server, shown(**video))[0]
    assert "<0.5><frame>" in rendered(server, shown(**video), media_io_kwargs={"video": {"fps": 2}})[0]
    assert "<2><frame>" in rendered(server, shown(**video, fps=0.5), media_io_kwargs={"video": {"fps": 2}})[0]
    for given in ({"video": {"num_frames": 2}}, {"image": {}}, {"video": {"fps": "2"}}, {"video": 2}):
        error = refused(server, shown(**video), media_io_kwargs=given)
        assert (error["param"], "video.fps" in error["message"]) == ("media_io_kwargs", True)


@pytest.mark.parametrize(
    ("video", "param", "complaint"),
    [
        ({"type": "video_url"}, "video_url", "is required"),
        ({"type": "video", "video": []}, "video", "is required"),
        ({"type": "video", "video": [url(1), ""]}, "video", "is required"),
        ({"type": "video", "video": [url(1)] * 769}, "video", "has 769 frames; 768 are the most"),
        ({"type": "video_url", "video_url": frames(*[1] * 769)}, "video_url", "has 769 frames, and 768 are the most"),
        ({"type": "video", "video": [url(1), url(1)], "fps": 0}, "video", "fps must be from 0.01 to 1000, got 0"),
        ({"type": "video", "video": [url(1), "data:image/png;base64,abc"]}, "video", "cannot be read as an image"),
        ({"type": "video_url", "video_url": "https://a.org/a.mp4"}, "video_url", "--allowed-media-domains"),
    ],
)
def test_videos_that_cannot_be_read(
    start_server: StartServer, video: dict[str, Any], param: str, complaint: str
) -> None:
    server = start_server(engine=seeing(WITH_VIDEO, video=VIDEO))
    error = refused(server, shown(**video))
    assert error["param"].startswith(f"messages[0].content[1].{param}")
    assert complaint in error["message"]


def test_there_are_so_many_videos(start_server: StartServer) -> None:
    media = MediaOptions(limit_mm_per_prompt={"video": 1})
    server = start_server(engine=seeing(WITH_VIDEO, video=VIDEO), media=media)
    video = {"type": "video_url", "video_url": {"url": frames(3)}}
    rendered(server, shown(**video))
    assert "2 videos; this server takes at most 1" in refused(server, shown(**video), shown(**video))["message"]


def test_a_model_that_sees_no_videos_refuses_them(start_server: StartServer) -> None:
    server = start_server(engine=seeing(QWEN))
    error = refused(server, shown(type="video_url", video_url=frames(3)))
    assert error["param"] == "messages[0].content[1].type"
    assert "'video_url'; this model reads text and images" in error["message"]


@pytest.mark.parametrize("word", ["<vid>", "<frame>", "\U0010fffcvideo\U0010fffc", "<frame><pad>"])
def test_a_text_that_looks_like_a_video_is_a_text(start_server: StartServer, word: str) -> None:
    server = start_server(engine=seeing(WITH_VIDEO, video=VIDEO))
    messages = [user(f"what is {word}?"), shown(type="video_url", video_url=frames(3, 2))]
    assert server.post(PATH, {"messages": messages}).status_code == 200
    request = server.engine.requests[-1]
    assert [(span.media.modality, span.length) for span in request.media] == [("video", 3), ("video", 2), ("image", 2)]
    for span in request.media:
        token = {"video": 263, "image": PAD}[span.media.modality]
        assert list(request.prompt_token_ids[span.start : span.end]) == [token] * span.length
    assert list(request.prompt_token_ids).count(263) == 5 + word.count("<frame>")


def test_a_model_without_eyes_refuses_by_name(server: RunningServer) -> None:
    error = refused(server, said("a", 3))
    assert error["param"] == "messages[0].content[1].type"
    assert "'image_url'; this model reads text" in error["message"]


def test_the_models_card_says_what_messages_may_have(start_server: StartServer, server: RunningServer) -> None:
    seeing_one = start_server(engine=seeing(QWEN))
    for one, modalities, capabilities in ((seeing_one, ["text", "image"], True), (server, ["text"], False)):
        (card,) = one.http.get("/v1/models").json()["data"]
        assert card["input_modalities"] == modalities
        shown = one.post("/api/show", {"model": card["id"]}).json()
        assert ("vision" in shown["capabilities"]) == capabilities


def test_bodies_may_be_larger_with_images(start_server: StartServer, server: RunningServer) -> None:
    """But not if the operator says how large."""
    body = b'{"messages": [{"role": "user", "content": "' + b"a" * (20 << 20) + b'"}]}'
    seeing_one = start_server(engine=seeing(QWEN))
    assert seeing_one.http.post(PATH, content=body).status_code == 400  # it is longer than the context
    assert server.http.post(PATH, content=body).status_code == 413
    bounded = start_server(engine=seeing(QWEN), max_body_bytes=16 << 20)
    assert bounded.http.post(PATH, content=body).status_code == 413


def test_a_huge_image_is_refused(start_server: StartServer) -> None:
    server = start_server(engine=seeing(QWEN))
    huge = "data:image/png;base64," + "A" * (30 << 20)
    error = refused(server, user([{"type": "image_url", "image_url": huge}]))
    assert error["param"] == "messages[0].content[0].image_url"
    assert "bytes" in error["message"]


def test_bodies_with_images_that_wait_are_bounded(start_server: StartServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tidewheel.server.chat.request_images._MAX_HELD", 1000)
    server = start_server(engine=seeing(QWEN))
    server.engine.media.gate.clear()
    body = {"messages": [said("a" * 400, 3)]}
    with ThreadPoolExecutor(1) as pool, server.another_client() as other:
        first = pool.submit(server.post, PATH, body)  # which alone is always read
        while not server.engine.media.params:
            time.sleep(0.01)
        refusal = other.post(PATH, json=body)
        assert refusal.status_code == 503
        assert refusal.json()["error"]["code"] == "too_many_images"
        assert int(refusal.headers["retry-after"]) > 0
        assert other.post(PATH, json={"messages": [said("a" * 400)]}).status_code == 200
        server.engine.media.gate.set()
        assert first.result().status_code == 200
    assert server.post(PATH, body).status_code == 200


@pytest.mark.parametrize("path", [PATH, "/v1/messages", "/api/chat", "/v1/responses"])
def test_images_of_a_client_that_hangs_up_are_not_read(start_server: StartServer, path: str) -> None:
    server = start_server(engine=seeing(QWEN))
    reader = server.engine.media
    reader.gate.clear()
    source = {"type": "base64", "media_type": "image/png", "data": sent(1)}
    body = {
        PATH: {"messages": [said(1, 1)]},
        "/v1/messages": {"max_tokens": 1, "messages": [user([{"type": "image", "source": source}] * 2)]},
        "/api/chat": {"messages": [{"role": "user", "images": [sent(1)] * 2}], "truncate": True},
        "/v1/responses": {"input": [user([{"type": "input_image", "image_url": url(1)}] * 2)], "truncation": "auto"},
    }[path]
    with pytest.raises(httpx.ReadTimeout):
        server.post(path, body, timeout=0.5)
    deadline = time.monotonic() + 20
    while not reader.num_cancelled:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    reader.gate.set()
    assert server.post(PATH, {"messages": [said(1)]}).status_code == 200
    assert len(reader.params) == 2  # the first image of either request


def test_images_of_requests_that_run_are_bounded(start_server: StartServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tidewheel.server.generation.admission._MAX_MEDIA_BYTES", 100)  # an image has 48
    server = start_server(engine={**seeing(QWEN), "step_s": 0.01})
    body = {"messages": [said("LOOP(", 1, 1)], "stream": True}
    with server.http.stream("POST", PATH, json=body) as running:
        next(running.iter_bytes())
        refusal = server.post(PATH, {"messages": [said(1)]})
        assert refusal.status_code == 429
        assert refusal.json()["error"]["code"] == "queue_full"
        assert server.post(PATH, {"messages": [said("hi")]}).status_code == 200
    deadline = time.monotonic() + 20
    while (response := server.post(PATH, {"messages": [said(1, 1, 1)]})).status_code == 429:
        assert time.monotonic() < deadline
        time.sleep(0.02)
    assert response.status_code == 200


def test_a_busy_decoder_is_no_fault_of_the_request(start_server: StartServer, monkeypatch: pytest.MonkeyPatch) -> None:
    server = start_server(engine=seeing(QWEN))

    async def busy(*given: Any) -> None:
        raise BusyError("too many other images are being decoded; try again later")

    monkeypatch.setattr(server.engine.media, "read", busy)
    response = server.post(PATH, {"messages": [said(1)]})
    assert response.status_code == 503
    assert response.json()["error"]["code"] == "busy"
    assert "retry-after" in response.headers
