"""Images that go along with messages: chosen, pasted or dropped, kept, exported, and only where the model sees them."""

from __future__ import annotations

import base64
import io
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image, ImageDraw
from playwright.sync_api import Page, expect
from server.conftest import RunningServer, ServerProcess, StartServer
from server.images import CountingReader, file, seeing
from server.web.conftest import OpenPage, last_answer, send, until_idle

from tidewheel.engine.media.media import MediaFiles

ROOM: dict[str, Any] = {"viewport": {"width": 1000, "height": 800}}
TEMPLATE = (
    "{% for m in messages %}<{{ m.role }}>{% if m.content is string %}{{ m.content }}{% else %}"
    "{% for c in m.content %}{{ '<image>' if c.type == 'image' else c.text }}{% endfor %}{% endif %}{% endfor %}"
)
GIVE = """([kind, base64]) => {
  const bytes = Uint8Array.from(atob(base64), (character) => character.charCodeAt(0));
  const data = new DataTransfer();
  data.items.add(new File([bytes], `${kind}.png`, { type: "image/png" }));
  const options = { dataTransfer: data, clipboardData: data, bubbles: true, cancelable: true };
  const event = kind === "paste" ? new ClipboardEvent(kind, options) : new DragEvent(kind, options);
  document.getElementById("prompt").dispatchEvent(event);
}"""


class KeepingReader(CountingReader):
    """Keeps what it is given, whatever it is; each image has three tokens."""

    def __init__(self) -> None:
        super().__init__(260)
        self.files: list[bytes] = []

    async def read(self, sent: MediaFiles, param: str, *settings: Any) -> Any:
        self.files += sent.files
        return await super().read(MediaFiles((file(3),)), param, *settings)


@pytest.fixture(scope="module")
def sighted(start_server: StartServer) -> RunningServer:
    return start_server(engine={**seeing(TEMPLATE), "media": KeepingReader()})


def png(width: int, height: int, *, noise: bool = False) -> bytes:
    shape = (height, width, 3)
    pixels = np.random.default_rng(0).integers(0, 256, shape, np.uint8) if noise else np.full(shape, 200, np.uint8)
    buffer = io.BytesIO()
    Image.fromarray(pixels).save(buffer, "PNG")
    return buffer.getvalue()


def choose(page: Page, data: bytes, name: str = "photo.png", kind: str = "image/png") -> None:
    page.get_by_label("Text files", exact=True).set_input_files({"name": name, "mimeType": kind, "buffer": data})


def prompt_of(server: RunningServer) -> str:
    return server.engine.tokenizer.decode(list(server.engine.requests[-1].prompt_token_ids), skip_special_tokens=False)


def test_images_go_along_with_a_message_and_are_kept(
    sighted: RunningServer, open_page: OpenPage, tmp_path: Path
) -> None:
    page = open_page(sighted.url, **ROOM)
    expect(page.get_by_role("button", name="Add images or text files")).to_be_visible()
    reader = sighted.engine.media
    small = png(8, 6)
    choose(page, small)
    choose(page, png(9, 9), "other.png")
    expect(page.locator("#attachments img")).to_have_count(2)
    page.get_by_role("button", name="Remove other.png").click()
    reader.files.clear()
    send(page, "SAY(seen)YAS")
    until_idle(page)
    assert reader.files == [small]
    shown = "<user><img><pad><pad><pad></img>SAY(seen)YAS"
    assert prompt_of(sighted) == shown
    picture = page.locator("#turns .said img")
    expect(picture).to_have_attribute("alt", "photo.png")
    assert picture.evaluate("(image) => [image.naturalWidth, image.naturalHeight]") == [8, 6]
    page.reload()
    page.locator("#conversations li > button:first-child").click()
    expect(picture).to_be_visible()
    send(page, "and SAY(again)YAS")
    until_idle(page)
    assert prompt_of(sighted) == f"{shown}<assistant>seen<user>and SAY(again)YAS"
    with page.expect_download() as download:
        page.get_by_role("button", name="Export all").click()
    kept = tmp_path / "kept.json"
    download.value.save_as(kept)
    page.get_by_role("button", name="Delete all").click()
    page.get_by_label("File of conversations", exact=True).set_input_files(kept)
    page.locator("#conversations li > button:first-child").click()
    expect(picture).to_be_visible()
    expect(last_answer(page)).to_have_text("again")


def test_images_are_pasted_and_dropped(sighted: RunningServer, open_page: OpenPage) -> None:
    page = open_page(sighted.url, **ROOM)
    expect(page.get_by_role("button", name="Add images or text files")).to_be_visible()
    sent = base64.b64encode(png(5, 5)).decode()
    for kind in ("paste", "drop"):
        page.evaluate(GIVE, [kind, sent])
    expect(page.locator("#attachments li")).to_have_text(["paste.png", "drop.png"])
    page.get_by_role("button", name="Send").click()
    until_idle(page)
    assert prompt_of(sighted) == "<user>" + "<img><pad><pad><pad></img>" * 2


def test_the_built_in_model_says_what_was_pasted(demo_server: ServerProcess, open_page: OpenPage) -> None:
    page = open_page(demo_server.url, **ROOM)
    expect(page.get_by_role("button", name="Add images or text files")).to_be_visible()
    picture = Image.new("RGB", (300, 300), (250, 250, 250))
    ImageDraw.Draw(picture).ellipse((80, 80, 220, 220), fill=(220, 20, 30))
    buffer = io.BytesIO()
    picture.save(buffer, "PNG")
    page.evaluate(GIVE, ["paste", base64.b64encode(buffer.getvalue()).decode()])
    expect(page.locator("#attachments img")).to_have_count(1)
    send(page, "What is in this picture?")
    until_idle(page)
    expect(last_answer(page)).to_have_text("I see a red circle.")


@pytest.mark.sweep
def test_a_large_image_is_shrunk(sighted: RunningServer, open_page: OpenPage) -> None:
    page = open_page(sighted.url, **ROOM)
    expect(page.get_by_role("button", name="Add images or text files")).to_be_visible()
    reader = sighted.engine.media
    reader.files.clear()
    choose(page, png(2400, 1200, noise=True))
    expect(page.locator("#attachments img")).to_have_count(1)
    send(page, "SAY(seen)YAS")
    until_idle(page)
    (sent,) = reader.files
    assert len(sent) < 450_000
    with Image.open(io.BytesIO(sent)) as image:
        assert image.format == "JPEG"
        assert image.width == 2 * image.height
        assert max(image.size) in (1536, 768)
    choose(page, b"no image", "broken.png")
    expect(page.get_by_role("status")).to_contain_text("broken.png is not an image that this browser can read")


def test_a_model_without_eyes_gets_no_images(server: RunningServer, open_page: OpenPage) -> None:
    page = open_page(server.url, **ROOM)
    expect(page.get_by_role("button", name="Add text files")).to_be_visible()
    choose(page, png(8, 6))
    expect(page.get_by_role("status")).to_contain_text("photo.png was not added: this model does not see images")
    expect(page.locator("#attachments li")).to_have_count(0)


@pytest.mark.parametrize(
    "url",
    [
        "https://example.org/a.png",
        "data:image/svg+xml;base64,PHN2Zz4=",
        "data:text/html;base64,AAAA",
        "javascript:1",
        7,
    ],
)
def test_an_image_that_is_imported_is_one_of_this_page(server: RunningServer, open_page: OpenPage, url: Any) -> None:
    page = open_page(server.url, **ROOM)
    said = {"role": "user", "content": "x", "parent": -1, "images": [{"name": "a", "url": url}]}
    kept = {"name": "", "updated": 1, "all": [said], "leaf": 0}
    text = json.dumps({"format": "tidewheel.conversations", "version": 1, "conversations": [kept]}).encode()
    page.get_by_label("File of conversations", exact=True).set_input_files(
        {"name": "a.json", "mimeType": "application/json", "buffer": text}
    )
    expect(page.get_by_role("status")).to_contain_text("cannot be read")
