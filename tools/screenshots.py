"""Takes the screenshots of the web page in docs/: a conversation, and the operator's view under some load.

Usage, where the built-in model is served: python tools/screenshots.py URL FOLDER
It needs playwright and chromium, like the page's tests.
"""

from __future__ import annotations

import shutil
import sys
import threading
import urllib.request
from collections.abc import Sequence
from pathlib import Path

from playwright.sync_api import Page, ViewportSize, expect, sync_playwright

SIZE: ViewportSize = {"width": 1280, "height": 760}
QUESTIONS = ("What is 47 + 38?", "Tell me a story about a lamp")
STREAMS = 3
LOAD_S = 8


def main(arguments: Sequence[str]) -> int:
    """Runs a command line and returns its exit code."""
    if len(arguments) != 2:
        print("usage: python tools/screenshots.py URL FOLDER", file=sys.stderr)
        return 2
    url, folder = arguments[0].rstrip("/"), Path(arguments[1])
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(
            executable_path=shutil.which("chromium"), args=["--headless", "--no-sandbox", "--disable-gpu"]
        )
        page = browser.new_page(viewport=SIZE)
        page.goto(url)
        converse(page)
        page.screenshot(path=folder / "web-page.png")
        watch(page, url)
        page.screenshot(path=folder / "operator-view.png")
        browser.close()
    return 0


def converse(page: Page) -> None:
    """Two questions with their answers."""
    for question in QUESTIONS:
        page.get_by_label("Message", exact=True).fill(question)
        page.keyboard.press("Enter")
        page.wait_for_timeout(500)
        expect(page.get_by_role("button", name="Retry").last).to_be_visible(timeout=60_000)
        page.wait_for_timeout(1500)


def watch(page: Page, url: str) -> None:
    """The operator's view, while a few clients send requests for some seconds."""
    ended = threading.Event()
    clients = [threading.Thread(target=ask, args=(url, ended)) for _ in range(STREAMS)]
    for client in clients:
        client.start()
    page.get_by_role("link", name="Server").click()
    page.wait_for_timeout(1000 * LOAD_S)
    ended.set()
    for client in clients:
        client.join()


def ask(url: str, ended: threading.Event) -> None:
    """Requests one story after the other."""
    body = b'{"messages": [{"role": "user", "content": "Tell me a story about a lamp"}], "max_tokens": 200}'
    while not ended.is_set():
        request = urllib.request.Request(f"{url}/v1/chat/completions", body, {"content-type": "application/json"})
        with urllib.request.urlopen(request, timeout=60) as answer:
            answer.read()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
