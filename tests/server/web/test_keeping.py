"""Conversations that are named, found, saved as files and read back, and text files that go along with messages."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import Page, expect
from server.conftest import RunningServer
from server.web.conftest import OpenPage, last_answer, send, until_idle

ROOM: dict[str, Any] = {"viewport": {"width": 1000, "height": 800}}
FORGET_TOAST = "for (const box of document.querySelectorAll('#toast')) box.replaceChildren()"
ATTACK = "<img src=x onerror=window.pwned=1>"


def titles(page: Page) -> Any:
    return page.locator("#conversations li > button:first-child")


def conversation(**changes: Any) -> dict[str, Any]:
    said = {"role": "user", "content": "SAY(in)YAS", "parent": -1}
    answer = {
        "role": "assistant",
        "content": "in",
        "parent": 0,
        "ended": "stop",
        "stats": {"tokens": 2, "firstToken": 1, "seconds": 1},
    }
    return {"name": "brought", "updated": 1, "all": [said, answer], "leaf": 1, **changes}


def exported(*conversations: Any, **changes: Any) -> str:
    return json.dumps({"format": "tidewheel.conversations", "version": 1, "conversations": conversations, **changes})


def choose(page: Page, text: str | bytes, name: str = "a.json", label: str = "File of conversations") -> None:
    data = text if isinstance(text, bytes) else text.encode()
    page.get_by_label(label, exact=True).set_input_files({"name": name, "mimeType": "text/plain", "buffer": data})


def test_conversations_are_renamed_found_and_taken_along(
    server: RunningServer, open_page: OpenPage, tmp_path: Path
) -> None:
    page = open_page(server.url, **ROOM)
    for text in ("SAY(first tide)YAS", "SAY(second wheel)YAS"):
        page.get_by_role("button", name="New conversation").click()
        send(page, text)
        until_idle(page)
    page.get_by_role("button", name="Actions for “SAY(first").click()
    page.get_by_role("button", name="Rename").click()
    name = page.get_by_label("Name of the conversation")
    expect(name).to_be_focused()
    name.fill(ATTACK)
    name.press("Enter")
    expect(titles(page)).to_have_text(["SAY(second wheel)YAS", ATTACK])
    search = page.get_by_label("Search the conversations")
    search.fill("TIDE first")
    expect(titles(page)).to_have_text([ATTACK])
    search.fill("nowhere")
    expect(page.get_by_text("Nothing found")).to_be_visible()
    search.fill("")
    with page.expect_download() as download:
        page.get_by_role("button", name="Export all").click()
    file = tmp_path / "kept.json"
    download.value.save_as(file)
    page.get_by_role("button", name="Delete all").click()
    choose(page, file.read_bytes())
    expect(page.get_by_role("status")).to_have_text("2 of 2 conversations were imported.")
    expect(titles(page)).to_have_text(["SAY(second wheel)YAS", ATTACK])
    titles(page).nth(1).click()
    expect(last_answer(page)).to_have_text("first tide")
    assert page.evaluate("window.pwned") is None


REFUSED = [
    ("{", "not JSON"),
    ("[]", "no conversations of this page"),
    (exported(version=2), "no conversations of this page"),
    (exported(*[conversation()] * 101), "more than 100"),
    (exported(conversation(leaf=2)), "cannot be read"),
    (exported(conversation(model=1)), "cannot be read"),
    (exported(conversation(leaf=0.5)), "cannot be read"),
    (exported(conversation(all=[{"role": "system", "content": "x", "parent": -1}], leaf=0)), "cannot be read"),
    (exported(conversation(all=[{"role": "user", "content": {}, "parent": -1}], leaf=0)), "cannot be read"),
    (exported(conversation(all=[{"role": "user", "content": "x", "parent": 0}], leaf=0)), "cannot be read"),
    (
        exported(conversation(all=[{"role": "assistant", "content": "", "parent": -1, "stats": {}}], leaf=0)),
        "cannot",
    ),
    (exported(None), "cannot be read"),
]


def test_files_that_are_no_conversations_are_refused(
    server: RunningServer, open_page: OpenPage, tmp_path: Path
) -> None:
    page = open_page(server.url, **ROOM)
    toast = page.get_by_role("status")
    for text, said in REFUSED:
        choose(page, text)
        expect(toast).to_contain_text(said)
        page.evaluate(FORGET_TOAST)
    file = tmp_path / "large.json"
    file.write_text(" " * 8_000_001)
    page.get_by_label("File of conversations", exact=True).set_input_files(file)
    expect(toast).to_contain_text("larger than 8 MB")
    expect(titles(page)).to_have_count(0)


def test_what_is_imported_cannot_act(server: RunningServer, open_page: OpenPage) -> None:
    page = open_page(server.url, **ROOM)
    call = {"id": ATTACK, "name": ATTACK, "arguments": "{}", "__proto__": {"x": 1}, "innerHTML": ATTACK}
    answer = {"role": "assistant", "content": ATTACK, "parent": 0, "reasoning": ATTACK, "calls": [call],
              "error": ATTACK, "ended": ATTACK, "onclick": ATTACK}  # fmt: skip
    said = {"role": "user", "content": ATTACK, "parent": -1, "files": [{"name": ATTACK, "text": ATTACK}]}
    choose(page, exported(conversation(name=ATTACK, all=[said, answer])))
    titles(page).click()
    expect(page.locator(".failure")).to_have_text(ATTACK)
    assert page.evaluate("window.pwned") is None
    assert page.locator("#turns :is(img, script, [onclick], [onerror])").count() == 0


def test_text_files_go_along_with_a_message(server: RunningServer, open_page: OpenPage) -> None:
    page = open_page(server.url, **ROOM)
    choose(page, "say ``` here", f"notes\n{ATTACK}.md", label="Text files")
    choose(page, "gone", "other.txt", label="Text files")
    page.get_by_role("button", name="Remove other.txt").click()
    expect(page.locator("#attachments li")).to_have_count(1)
    send(page, "SAY(read)YAS")
    until_idle(page)
    prompt = server.engine.tokenizer.decode(list(server.engine.requests[-1].prompt_token_ids))
    assert "````\nsay ``` here\n````\n\nSAY(read)YAS" in prompt
    expect(page.locator("#attachments li")).to_have_count(0)
    page.locator(".file summary").click()
    expect(page.locator(".file pre")).to_have_text("say ``` here")
    assert page.evaluate("window.pwned") is None


DROP = """([name, text]) => {
  const data = new DataTransfer();
  data.items.add(new File([text], name));
  document.body.dispatchEvent(new DragEvent("drop", { dataTransfer: data, bubbles: true, cancelable: true }));
}"""


@pytest.mark.sweep
def test_files_are_dropped_and_what_is_no_text_or_too_much_is_refused(
    server: RunningServer, open_page: OpenPage
) -> None:
    page = open_page(server.url, **ROOM)
    page.evaluate(DROP, ["dropped.txt", "words"])
    expect(page.locator("#attachments li")).to_have_text(["dropped.txt"])
    for data, said in (
        (b"\xff\xfe", "not a text file in UTF-8"),
        (b"a\0b", "not a text file"),
        (b"x" * 262_145, "256 KiB"),
    ):
        choose(page, data, "bad.bin", label="Text files")
        expect(page.get_by_role("status")).to_contain_text(said)
    page.evaluate(FORGET_TOAST)
    for i in range(9):
        page.evaluate(DROP, [f"{i}.txt", "x"])
    several = [{"name": name, "mimeType": "", "buffer": b"x"} for name in ("late.txt", "later.txt")]
    page.get_by_label("Text files", exact=True).set_input_files(several)
    expect(page.get_by_role("status")).to_have_text(
        "late.txt was not added: a message can have 10 files; later.txt was not added: a message can have 10 files"
    )
    expect(page.locator("#attachments li")).to_have_count(10)
