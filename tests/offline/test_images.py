"""Images in prompts of programs: PIL's, bytes and paths, as vLLM takes them."""

from __future__ import annotations

import asyncio
import io
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from server.images import CountingReader, file, part, sent
from server.scripted_engine import ByteBackend

from tidewheel.engine.errors import InvalidRequestError
from tidewheel.engine.media.fetching import MediaFetcher
from tidewheel.engine.media.media import MediaFiles
from tidewheel.engine.media.vision import Marks
from tidewheel.engine.text.tokenizer import Tokenizer
from tidewheel.offline.images import image_file, media_files
from tidewheel.offline.prompts import EncodedPrompt, Prompts
from tidewheel.server.chat.request_images import RequestImages
from tidewheel.server.generation.prompt_encoding import PromptEncoder

PAD = 260
TEMPLATE = (
    "{% for m in messages %}{% if m.content is string %}{{ m.content }}{% else %}{% for c in m.content %}"
    "{% if c.type == 'image' %}<image>{% elif c.type == 'video' %}<video>"
    "{% else %}{{ c.text }}{% endif %}{% endfor %}{% endif %}{% endfor %}"
)


class _AnyReader(CountingReader):
    """Takes files of all kinds; one that is no CountingReader's has a token for each byte of its sign."""

    async def read(self, sent: MediaFiles, param: str, *settings: Any) -> Any:
        known = tuple(data if data.startswith(b"an image") else file(3) for data in sent.files)
        return await super().read(replace(sent, files=known), param, *settings)


@pytest.fixture
def prompts() -> Iterator[Prompts]:
    encoder = PromptEncoder(Tokenizer(ByteBackend(["<pad>", "<image>", "<video>"]), {}, TEMPLATE), 512)
    fetcher, reader = MediaFetcher(), _AnyReader(PAD, video=(Marks("<video>", "<video>"), PAD + 2))
    yield Prompts(encoder, TEMPLATE, RequestImages(reader, fetcher, most={"image": 2, "video": 1}))
    fetcher.close()
    encoder.close()


def encoded(prompts: Prompts, prompt: Any, truncate_to: int | None = None) -> EncodedPrompt:
    return asyncio.run(prompts.encode(prompt, context=512, truncate_to=truncate_to, room=1))


def chatted(prompts: Prompts, *parts: Any) -> EncodedPrompt:
    said = [{"role": "user", "content": list(parts)}]
    return asyncio.run(prompts.render(said, context=512, truncate_to=None))


def picture() -> Image.Image:
    return Image.new("RGB", (4, 3), (200, 10, 30))


@pytest.mark.parametrize("mode", ["RGB", "RGBA", "L", "P", "CMYK", "1"])
def test_a_picture_of_pil_keeps_its_pixels(mode: str) -> None:
    original = picture().convert(mode)
    read = Image.open(io.BytesIO(image_file(original, "image")))
    assert read.size == original.size
    assert read.convert("RGB").tobytes() == original.convert("RGB").tobytes()


def test_bytes_and_paths_are_files(tmp_path: Path) -> None:
    path = tmp_path / "a.png"
    path.write_bytes(file(3))
    found = media_files({"image": [file(2), path, str(path), bytearray(file(1))]}, "m")
    assert found == [MediaFiles((data,)) for data in (file(2), file(3), file(3), file(1))]
    assert media_files({"image": None, "video": None, "audio": []}, "m") == []


@pytest.mark.parametrize(
    ("video", "fps"),
    [
        ([Image.new("RGB", (4, 3))] * 3, 1.0),
        (np.zeros((3, 3, 4, 3), np.uint8), 1.0),
        ((np.zeros((3, 3, 4, 3), np.uint8), {"fps": 4}), 4.0),
        ([np.zeros((3, 3, 4, 3), np.uint8)], 1.0),
        ([[Image.new("RGB", (4, 3))] * 3], 1.0),
    ],
    ids=["images", "array", "with fps", "list of arrays", "list of lists"],
)
def test_a_video_is_its_frames(video: Any, fps: float) -> None:
    (found,) = media_files({"video": video}, "m")
    assert (found.modality, found.fps) == ("video", fps)
    assert [Image.open(io.BytesIO(data)).size for data in found.files] == [(4, 3)] * 3


def test_several_videos_are_told_from_one() -> None:
    found = media_files({"video": np.zeros((2, 5, 3, 4, 3), np.uint8)}, "m")
    assert [len(one.files) for one in found] == [5, 5]
    assert media_files({"video": file(1)}, "m") == [MediaFiles((file(1),), "video")]


@pytest.mark.parametrize(
    ("data", "said"),
    [
        ({"image": 7}, r"m\.image\[0\] must be an image of PIL"),
        ({"image": [b"", "/no/such.png"]}, r"m\.image\[1\]: /no/such.png cannot be read"),
        ({"video": [[]]}, r"m\.video\[0\] has no frames"),
        ({"video": (np.zeros((3, 3, 4, 3), np.uint8), {"fps": 0})}, r"m\.video\[0\]: fps must be"),
        ({"video": np.zeros((3, 3, 4, 3))}, r"m\.video\[0\]\[0\] must be an image of PIL"),
        ({"audio": ("a", 1)}, r"m\.audio is not supported"),
    ],
)
def test_what_is_no_image_is_refused(data: dict[str, Any], said: str) -> None:
    with pytest.raises(InvalidRequestError, match=said):
        media_files(data, "m")


def test_a_prompts_images_take_the_places_of_its_placeholders(prompts: Prompts) -> None:
    prompt = {"prompt": "a<image>b<image>c", "multi_modal_data": {"image": [file(2), picture()]}, "cache_salt": "s"}
    found = encoded(prompts, prompt)
    assert found.text == "a<img><pad></img>b<img><pad></img>c"
    assert [(span.start, span.length) for span in found.media] == [(7, 2), (21, 3)]  # behind a token for the beginning
    assert found.token_ids.count(PAD) == 5
    assert found.cache_salt == "s"
    alone = encoded(prompts, {"prompt": "<image>", "multi_modal_data": {"image": picture()}, "multi_modal_uuids": None})
    assert len(alone.media) == 1


def test_a_prompts_videos_take_the_places_of_theirs(prompts: Prompts) -> None:
    data = {"video": ([file(2), file(3)], {"fps": 2}), "image": [file(1), file(4)]}
    prompt = {"prompt": "<image><video>?<image>", "multi_modal_data": data, "mm_processor_kwargs": {"max_pixels": 9}}
    found = encoded(prompts, prompt)
    assert found.text == "<img><pad></img><0><video><0.5><video>?<img><pad></img>"
    assert [(span.media.modality, span.length) for span in found.media] == [
        ("image", 1),
        ("video", 2),
        ("video", 3),
        ("image", 4),
    ]
    assert [found.token_ids.count(token) for token in (PAD, PAD + 2)] == [5, 5]


@pytest.mark.parametrize(
    ("prompt", "said"),
    [
        ({"prompt": "a", "multi_modal_data": {"image": b""}}, "has 0 times '<image>'.* and 1 images"),
        ({"prompt": "<image><image>", "multi_modal_data": {"image": b""}}, "has 2 times"),
        ({"prompt_token_ids": [1], "multi_modal_data": {"image": b""}}, "must be a text"),
        ({"prompt": "<image>", "multi_modal_data": {"image": [b""] * 3}}, "3 images; this server takes at most 2"),
        ({"prompt": "<video>", "multi_modal_data": {"video": [[b""], [b""]]}}, "2 videos; this server takes at most 1"),
        ({"prompt": "<image>", "multi_modal_data": {"video": b""}}, "has 1 times '<image>'.* and 0 images"),
        ({"prompt": "a", "mm_processor_kwargs": {"max_pixels": 9}}, "this prompt has no multi_modal_data"),
    ],
)
def test_a_prompt_that_does_not_go_with_its_images(prompts: Prompts, prompt: Any, said: str) -> None:
    with pytest.raises(InvalidRequestError, match=said):
        encoded(prompts, prompt)


def test_a_prompt_with_images_is_not_cut(prompts: Prompts) -> None:
    prompt = {"prompt": "<image> what is it?", "multi_modal_data": {"image": file(40)}}
    assert len(encoded(prompts, prompt, truncate_to=100).media) == 1
    with pytest.raises(InvalidRequestError, match="truncate_prompt_tokens would cut"):
        encoded(prompts, prompt, truncate_to=20)


def test_a_template_writes_placeholders_for_prompts(prompts: Prompts) -> None:
    """As people write prompts with images for vLLM: by the tokenizer's template, with the images beside them."""
    text = {"type": "text", "text": "what <image>?"}
    said = [{"role": "user", "content": [{"type": "image"}, text, {"type": "image_pil", "image_pil": picture()}]}]
    assert prompts.rendered(said).text == "<image>what <image>?<image>"
    said[0]["content"] = [{"type": "image"}, {"type": "text", "text": "what?"}]
    prompt = prompts.rendered(said).text
    assert encoded(prompts, {"prompt": prompt, "multi_modal_data": {"image": picture()}}).media[0].length == 3


def test_a_conversation_has_images_of_programs_and_of_clients(prompts: Prompts) -> None:
    text = {"type": "text", "text": "a"}
    found = chatted(prompts, {"type": "image_pil", "image_pil": picture()}, text, part(2))
    assert found.text == "<img><pad></img>a<img><pad></img>"
    assert [span.length for span in found.media] == [3, 2]
    assert len(chatted(prompts, {"type": "image", "image": file(4)}).media) == 1
    video = {"type": "video", "video": [picture(), "data:image/png;base64," + sent(4)], "fps": 4}
    assert chatted(prompts, video).text == "<0><video><0.25><video>"
    with pytest.raises(InvalidRequestError, match=r"messages\[0\]\.content\[1\]\.image_pil must be an image of PIL"):
        chatted(prompts, text, {"type": "image_pil", "image_pil": 7})
