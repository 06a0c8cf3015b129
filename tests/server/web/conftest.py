"""A browser for the tests of the page, and a watch over what it says and asks for."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any
from urllib.parse import urlsplit

import pytest
from playwright.sync_api import Browser, ConsoleMessage, Page, Request, expect, sync_playwright
from system_tools import require

FLAGS = (
    "--headless --no-sandbox --disable-gpu --disable-dev-shm-usage --disable-background-networking"
    " --disable-component-update --disable-sync --no-first-run"
).split()
REPORT_VIOLATIONS = (
    "document.addEventListener('securitypolicyviolation',"
    " (event) => console.error(`policy violated: ${event.violatedDirective} ${event.blockedURI}`))"
)

OpenPage = Callable[..., Page]

expect.set_options(timeout=20_000)  # ms, for machines that are busy with other things


# Not for the whole session: while Playwright lives, no other test of this thread can have an event loop.
@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    """Headless Chromium. Without one the tests are skipped."""
    path = require("chromium")
    with sync_playwright() as playwright:
        chromium = playwright.chromium.launch(executable_path=path, args=FLAGS)
        yield chromium
        chromium.close()


@pytest.fixture
def open_page(browser: Browser) -> Iterator[OpenPage]:
    """Opens pages, each with a storage of its own, by the options of `Browser.new_context`; `prepare` comes before.

    A test fails if a page of it logs an error or a warning, breaks its policy, throws, or asks another server for
    anything.
    """
    contexts = []
    problems: list[str] = []

    def on_console(message: ConsoleMessage) -> None:
        # The browser's own line about a status that is no 2xx; the page says what it makes of it.
        if message.type in ("error", "warning") and not message.text.startswith("Failed to load resource"):
            problems.append(f"{message.type}: {message.text}")

    def open_page(url: str, prepare: Callable[[Page], object] = lambda page: None, **options: Any) -> Page:
        context = browser.new_context(**options)
        contexts.append(context)
        context.set_default_timeout(20_000)
        context.add_init_script(REPORT_VIOLATIONS)
        page = context.new_page()
        page.on("console", on_console)
        page.on("pageerror", lambda error: problems.append(f"thrown: {error}"))

        def on_request(request: Request) -> None:
            if urlsplit(request.url).netloc != urlsplit(url).netloc:
                problems.append(f"asked elsewhere: {request.url}")

        page.on("request", on_request)
        prepare(page)
        page.goto(url)
        return page

    yield open_page
    for context in contexts:
        context.close()
    assert problems == []


def send(page: Page, text: str) -> None:
    """Writes a message and sends it, as a person does."""
    page.get_by_label("Message", exact=True).fill(text)
    page.keyboard.press("Enter")


def until_idle(page: Page) -> None:
    """Waits until the answer is there."""
    page.wait_for_selector("body:not(.busy)")


def last_answer(page: Page) -> Any:
    """The locator of the last answer's text."""
    return page.locator(".answer .markdown").last
