"""A browser for the tests of the page, and a watch over what it says and asks for."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Mapping
from types import MappingProxyType
from typing import Any
from urllib.parse import urljoin, urlsplit

import pytest
from playwright.sync_api import Browser, ConsoleMessage, Page, Playwright, Request, Route, expect, sync_playwright
from server.conftest import RunningServer
from system_tools import require

FLAGS = (
    "--headless --no-sandbox --disable-gpu --disable-dev-shm-usage --disable-background-networking"
    " --disable-component-update --disable-sync --no-first-run"
).split()
REPORT_VIOLATIONS = (
    "document.addEventListener('securitypolicyviolation',"
    " (event) => console.error(`policy violated: ${event.violatedDirective} ${event.blockedURI}`))"
)

# What the page shows for a while stays, for on a busy machine a test may look later than a person would: a message for
# 8 s, and that something was copied for 1.5 s.
PATIENCE = """{
  const soon = setTimeout;
  window.setTimeout = (call, ms, ...given) => soon(call, [1500, 8000].includes(ms) ? 60 * ms : ms, ...given);
}"""
DESKTOP = {"width": 1280, "height": 720}

OpenPage = Callable[..., Page]

expect.set_options(timeout=60_000)  # ms, for machines that are busy with other things


class WatchedPage:
    """A page, and what goes wrong in it: errors and warnings, broken policies, and requests to other servers.

    `clock` is the page's: "flowing", "paused" (at 1,000 s), or the real one. `options` are for `Browser.new_context`.
    """

    def __init__(self, browser: Browser, clock: str, options: dict[str, Any]) -> None:
        self.problems: list[str] = []
        self._url, self._clock = "", clock
        self._context = browser.new_context(**options)
        self._context.set_default_timeout(60_000)
        self._context.add_init_script(REPORT_VIOLATIONS)
        if not clock:
            self._context.add_init_script(PATIENCE)
        self.page = self._context.new_page()
        self.page.on("console", self._on_console)
        self.page.on("pageerror", lambda error: self.problems.append(f"thrown: {error}"))
        self.page.on("request", self._on_request)

    def open(
        self,
        url: str,
        viewport: Any = DESKTOP,
        media: Mapping[str, Any] = MappingProxyType({}),
        routes: Mapping[str, Callable[[Route], object]] = MappingProxyType({}),
    ) -> None:
        """Loads an address in a window of this size, with this media and these answers to requests."""
        self._url = url
        self.page.set_viewport_size(viewport)
        self.page.emulate_media(**{"color_scheme": "light", "reduced_motion": "no-preference", **media})
        if self._clock:
            self.page.clock.install(time=0)
            self.page.clock.pause_at(1000) if self._clock == "paused" else self.page.clock.resume()
        for pattern, answer in routes.items():
            self.page.route(pattern, answer)
        self.page.goto(url)

    def leave(self) -> None:
        """Ends what the page does, and forgets what it has stored. The page can be opened again."""
        self.page.unroute_all(behavior="wait")
        self.page.goto(urljoin(self._url, "/web/mark.svg"))  # of the same server, and without scripts
        self.page.evaluate("localStorage.clear(); sessionStorage.clear()")

    def close(self) -> None:
        self._context.close()

    def _on_console(self, message: ConsoleMessage) -> None:
        # The browser's own line about a status other than 2xx; the page itself shows the error.
        if message.type in ("error", "warning") and not message.text.startswith("Failed to load resource"):
            self.problems.append(f"{message.type}: {message.text}")

    def _on_request(self, request: Request) -> None:
        if urlsplit(request.url).netloc != urlsplit(self._url).netloc:
            self.problems.append(f"asked elsewhere: {request.url}")


class Pages:
    """Pages that tests have left, which others take: a new one costs a second of the browser's time."""

    def __init__(self, browser: Browser) -> None:
        self._browser = browser
        self._left: dict[str, WatchedPage] = {}

    def take(self, clock: str = "", **options: Any) -> WatchedPage:
        """A page with this clock and these options that no other test has."""
        return self._left.pop(_kind(clock, options), None) or WatchedPage(self._browser, clock, options)

    def give_back(self, watched: WatchedPage, clock: str = "", **options: Any) -> None:
        """Takes one that can be used again, unless something went wrong in it: then AssertionError."""
        watched.leave()
        if watched.problems:
            watched.close()
        assert watched.problems == []
        self._left[_kind(clock, options)] = watched


def _kind(clock: str, options: dict[str, Any]) -> str:
    return repr((clock, sorted(options.items())))


class Chromium:
    """Headless Chromium and its pages, which are there once `start` was called: that takes 2 s."""

    def __init__(self) -> None:
        self._playwright: Playwright | None = None

    def start(self) -> None:
        """Does nothing where it runs. Without Chromium the test that asks is skipped."""
        path = require("chromium")
        if self._playwright is None:
            self._playwright = sync_playwright().start()
            self.browser = self._playwright.chromium.launch(executable_path=path, args=FLAGS)
            self.pages = Pages(self.browser)

    def stop(self) -> None:
        if self._playwright is not None:
            self.browser.close()
            self._playwright.stop()
            self._playwright = None


_chromium = Chromium()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> Generator[None, None, None]:
    """The browser lives as long as tests of this folder run in a row.

    While Playwright lives, no other test of this thread can have an event loop.
    """
    try:
        yield
    finally:
        if nextitem is None or nextitem.path.parent != item.path.parent:
            _chromium.stop()


@pytest.fixture(scope="module")
def browser() -> Browser:
    _chromium.start()
    return _chromium.browser


@pytest.fixture(scope="module")
def pages(browser: Browser) -> Pages:
    return _chromium.pages


@pytest.fixture
def open_page(browser: Browser, pages: Pages) -> Iterator[OpenPage]:
    """Opens pages, each with an empty storage, by the options of `Browser.new_context`.

    `routes` are answers to requests, by their addresses, and `clock` is as in WatchedPage. `prepare` may change lasting
    things, so with it no other test has the same page. A test fails if its page logs an error or a warning, breaks its
    policy, throws, or asks another server for anything.
    """
    leave: list[Callable[[], None]] = []

    def open_page(
        url: str,
        prepare: Callable[[Page], object] | None = None,
        *,
        clock: str = "",
        routes: dict[str, Callable[[Route], object]] | None = None,
        **options: Any,
    ) -> Page:
        viewport = options.pop("viewport", DESKTOP)
        media = {name: options.pop(name) for name in ("color_scheme", "reduced_motion") if name in options}
        if prepare is None:
            watched = pages.take(clock, **options)
            leave.append(lambda: pages.give_back(watched, clock, **options))
        else:
            watched = WatchedPage(browser, clock, options)
            leave.append(watched.close)
            prepare(watched.page)
        opened.append(watched)
        watched.open(url, viewport, media, routes or {})
        return watched.page

    opened: list[WatchedPage] = []
    yield open_page
    for end in leave:
        end()
    assert [problem for watched in opened for problem in watched.problems] == []


@pytest.fixture(scope="module")
def scripts_page(pages: Pages, server: RunningServer) -> Iterator[Page]:
    """A page for tests that call its scripts, and leave the rest of it alone."""
    watched = pages.take()
    watched.open(server.url)
    yield watched.page
    pages.give_back(watched)


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
