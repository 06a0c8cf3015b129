"""A model that sees, through all doors: real files, decoded in a sandbox, computed by its tower."""

from __future__ import annotations

import base64
import io
from pathlib import Path
from typing import Any

import pytest
from server.conftest import RunningServer, StartServer, events

pytest.importorskip("torch")
pytest.importorskip("transformers")
pytest.importorskip("tidewheel._native")

from PIL import Image
from vision_zoo import CASES, photo, tokenizer_of, vision_model

from tidewheel.engine.loading.load import load_engine
from tidewheel.engine.media.options import MediaOptions
from tidewheel.engine.options import EngineOptions
from tidewheel.offline.llm import LLM
from tidewheel.offline.params import SamplingParams

CHAT = "/v1/chat/completions"
TEMPLATE = (
    "{% for m in messages %}[{{ m.role }}]{% if m.content is string %}{{ m.content }}{% else %}"
    "{% for c in m.content %}{% if c.type == 'image' or 'image' in c %}<|vision_start|><|image_pad|><|vision_end|>"
    "{% elif c.type == 'video' %}<|vision_start|><|video_pad|><|vision_end|>"
    "{% else %}{{ c.text }}{% endif %}{% endfor %}{% endif %}{% endfor %}"
)


def encoded(seed: int, kind: str = "PNG", height: int = 61, width: int = 97) -> bytes:
    content = io.BytesIO()
    Image.fromarray(photo(height, width, seed)).save(content, kind)
    return content.getvalue()


def base64_of(file: bytes) -> str:
    return base64.b64encode(file).decode()


def part(file: bytes, kind: str = "png") -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": f"data:image/{kind};base64,{base64_of(file)}"}}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Qwen2-VL whose language model knows all tokens of its tokenizer."""
    made = tmp_path_factory.mktemp("sees")
    case = CASES["qwen2-vl"]
    tokenizer = tokenizer_of(case)
    text = {**case.text, "vocab_size": tokenizer.get_vocab_size() + 1}
    others = {f"{kind}_token_id": tokenizer.token_to_id(f"<|{kind}_pad|>") for kind in ("image", "video")}
    vision_model(case._replace(text=text, others=others), made)
    tokenizer.save(str(made / "tokenizer.json"))
    (made / "chat_template.jinja").write_text(TEMPLATE)
    return made


@pytest.fixture(scope="module")
def pictures(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of this machine that requests may name images of."""
    made = tmp_path_factory.mktemp("pictures")
    (made / "a.png").write_bytes(encoded(1))
    return made


@pytest.fixture(scope="module")
def sighted(start_server: StartServer, folder: Path, pictures: Path) -> RunningServer:
    media = MediaOptions(allowed_local_media_path=str(pictures))
    engine = load_engine(EngineOptions(str(folder), device="cpu", dtype="float32", max_model_len=400, media=media))
    return start_server(engine=engine, media=media, chat_template=TEMPLATE)


def ask(server: RunningServer, *content: Any, **fields: Any) -> tuple[list[float], dict[str, Any]]:
    """The log-probabilities of an answer to a message, and the whole of the answer."""
    options = {"temperature": 0, "max_tokens": 5, "ignore_eos": True, "logprobs": True, **fields}
    response = server.post(CHAT, {"messages": [{"role": "user", "content": [*content]}], **options})
    assert response.status_code == 200, response.text
    answer = response.json()
    return [entry["logprob"] for entry in answer["choices"][0]["logprobs"]["content"]], answer


def text(said: str) -> dict[str, Any]:
    return {"type": "text", "text": said}


def test_answers_depend_on_what_is_seen(sighted: RunningServer) -> None:
    one, answer = ask(sighted, text("what?"), part(encoded(1)))
    again, cached = ask(sighted, text("what?"), part(encoded(1)))
    other, _ = ask(sighted, text("what?"), part(encoded(2)))
    two, longer = ask(sighted, text("what?"), part(encoded(1)), part(encoded(2)))
    assert one == again != other
    assert two not in (one, other)
    assert cached["usage"]["prompt_tokens_details"]["cached_tokens"] > 0
    assert longer["usage"]["prompt_tokens"] > answer["usage"]["prompt_tokens"] + 10
    chunks = events(
        sighted.post(
            CHAT,
            {
                "messages": [{"role": "user", "content": [text("what?"), part(encoded(1))]}],
                "temperature": 0,
                "max_tokens": 5,
                "ignore_eos": True,
                "stream": True,
            },
        )
    )
    streamed = "".join(chunk["choices"][0]["delta"].get("content", "") for chunk in chunks)
    assert streamed == answer["choices"][0]["message"]["content"]


def test_all_doors_lead_to_the_same_prompt(sighted: RunningServer, folder: Path, pictures: Path) -> None:
    file = encoded(1)
    logprobs, chat = ask(sighted, part(file), text("what?"))
    said, num_tokens = chat["choices"][0]["message"]["content"], chat["usage"]["prompt_tokens"]
    block = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": base64_of(file)}}
    messages = {"max_tokens": 5, "temperature": 0, "messages": [{"role": "user", "content": [block, text("what?")]}]}
    counted = sighted.post("/v1/messages/count_tokens", {"messages": messages["messages"]}).json()
    assert counted["input_tokens"] == num_tokens
    usage = sighted.post("/v1/messages", messages).json()["usage"]
    assert usage["input_tokens"] + usage["cache_read_input_tokens"] == num_tokens
    image = {"type": "input_image", "image_url": part(file)["image_url"]["url"]}
    content = [image, {"type": "input_text", "text": "what?"}]
    items = {"input": [{"role": "user", "content": content}], "max_output_tokens": 5, "temperature": 0}
    answer = sighted.post("/v1/responses", {**items, "ignore_eos": True}).json()
    assert answer["usage"]["input_tokens"] == num_tokens
    assert answer["output"][0]["content"][0]["text"] == said
    ollama = {"messages": [{"role": "user", "content": "what?", "images": [base64_of(file)]}], "stream": False}
    told = sighted.post("/api/chat", {**ollama, "options": {"num_predict": 5, "temperature": 0}}).json()
    assert told["prompt_eval_count"] == num_tokens
    local = {"type": "image_url", "image_url": {"url": f"file://{pictures}/a.png"}}
    assert ask(sighted, local, text("what?"))[0] == logprobs
    outside = {"type": "image_url", "image_url": {"url": f"file://{pictures}/../a.png"}}
    assert "there is no such file below --allowed-local-media-path" in refused(sighted, outside)
    with LLM(str(folder), device="cpu", dtype="float32", max_model_len=400, kv_cache_space=0.05) as llm:
        params = SamplingParams(temperature=0, max_tokens=5, ignore_eos=True)
        picture = Image.open(io.BytesIO(file))
        spoken = [{"role": "user", "content": [{"type": "image_pil", "image_pil": picture}, text("what?")]}]
        (by_chat,) = llm.chat(spoken, params, use_tqdm=False, chat_template=TEMPLATE)
        spoken[0]["content"] = [{"type": "image"}, text("what?")]
        prompt = llm.get_tokenizer().apply_chat_template(spoken, tokenize=False, chat_template=TEMPLATE)
        (by_prompt,) = llm.generate({"prompt": prompt, "multi_modal_data": {"image": picture}}, params, use_tqdm=False)
    assert [output.outputs[0].text for output in (by_chat, by_prompt)] == [said, said]
    assert len(by_chat.prompt_token_ids) == num_tokens


def refused(server: RunningServer, *content: Any) -> str:
    response = server.post(CHAT, {"messages": [{"role": "user", "content": [*content]}], "max_tokens": 2})
    assert response.status_code == 400, response.text
    error = response.json()["error"]
    assert error["param"].startswith("messages[0].content[0].image_url")
    return str(error["message"])


def test_videos_are_the_same_by_all_doors(sighted: RunningServer, folder: Path) -> None:
    frames = [encoded(seed) for seed in (1, 2, 3)]
    content = io.BytesIO()
    pictures = [Image.open(io.BytesIO(frame)) for frame in frames]
    pictures[0].save(content, "PNG", save_all=True, append_images=pictures[1:], duration=1000)
    urls = [part(frame)["image_url"]["url"] for frame in frames]
    in_one = {"url": "data:video/jpeg;base64," + ",".join(map(base64_of, frames))}
    animation = {"url": f"data:image/png;base64,{base64_of(content.getvalue())}"}
    forms: list[dict[str, Any]] = [
        {"type": "video_url", "video_url": in_one},
        {"type": "video", "video": urls, "fps": 1},
        {"type": "video_url", "video_url": animation},
    ]
    answers = [ask(sighted, form, text("what?")) for form in forms]
    logprobs, answer = answers[0]
    assert all(found == logprobs for found, _ in answers)
    assert ask(sighted, {"type": "video", "video": urls[::-1]}, text("what?"))[0] != logprobs
    num_tokens = answer["usage"]["prompt_tokens"]
    assert num_tokens > ask(sighted, part(frames[0]), text("what?"))[1]["usage"]["prompt_tokens"] + 10
    smaller = ask(sighted, forms[0], text("what?"), mm_processor_kwargs={"max_pixels": 700})[1]["usage"]
    assert smaller["prompt_tokens"] < num_tokens - 10
    with LLM(str(folder), device="cpu", dtype="float32", max_model_len=400, kv_cache_space=0.05) as llm:
        params = SamplingParams(temperature=0, max_tokens=5, ignore_eos=True)
        said = [{"role": "user", "content": [{"type": "video", "video": pictures, "fps": 1}, text("what?")]}]
        (by_chat,) = llm.chat(said, params, use_tqdm=False, chat_template=TEMPLATE)
        prompt = llm.get_tokenizer().apply_chat_template(said, tokenize=False, chat_template=TEMPLATE)
        asked = {"prompt": prompt, "multi_modal_data": {"video": pictures}}
        (by_prompt,) = llm.generate(asked, params, use_tqdm=False)
        (by_smaller,) = llm.generate({**asked, "mm_processor_kwargs": {"max_pixels": 700}}, params, use_tqdm=False)
    spoken = answer["choices"][0]["message"]["content"]
    assert [output.outputs[0].text for output in (by_chat, by_prompt)] == [spoken, spoken]
    assert len(by_prompt.prompt_token_ids) == num_tokens
    assert len(by_smaller.prompt_token_ids) == smaller["prompt_tokens"]


def test_a_video_file_is_refused_with_what_to_do(sighted: RunningServer) -> None:
    file = base64_of(b"\0\0\0\x20ftypisom" + bytes(40))
    said = [{"type": "video_url", "video_url": {"url": f"data:video/mp4;base64,{file}"}}]
    response = sighted.post(CHAT, {"messages": [{"role": "user", "content": said}]})
    assert response.status_code == 400
    assert "videos are sent as their frames: a list of images" in response.json()["error"]["message"]


def test_other_formats_are_read(sighted: RunningServer) -> None:
    for kind in ("JPEG", "WEBP", "GIF"):
        _, answer = ask(sighted, part(encoded(1, kind), kind.lower()), text("what?"))
        assert answer["usage"]["prompt_tokens"] > 20


@pytest.mark.parametrize(
    ("file", "said"),
    [
        (b"", "is empty"),
        (b"GIF89a", "cannot be read as an image"),
        (encoded(1)[:200], "cannot be read as an image"),
        (b"%PDF-1.7", "cannot be read as an image"),
        (b"<svg xmlns='http://www.w3.org/2000/svg'/>", "cannot be read as an image"),
    ],
)
def test_broken_files_are_refused_by_name(sighted: RunningServer, file: bytes, said: str) -> None:
    assert said in refused(sighted, part(file))
    assert ask(sighted, part(encoded(1)), text("still?"))[0]
