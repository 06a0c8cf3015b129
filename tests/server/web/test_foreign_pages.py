"""A page of another origin, in a real browser: it cannot use the server without permission, whatever it tries."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest
from playwright.sync_api import Browser
from server.conftest import RunningServer, StartServer
from server.waiting import eventually

ATTEMPTS = """
async ([base, prompt]) => {
  const body = JSON.stringify({ prompt });
  const completions = `${base}/v1/completions`;
  const tries = [
    { body },
    { body: new Blob([body]) },
    { body: new Blob([body], { type: "text/plain" }) },
    { body: new TextEncoder().encode(body) },
    { body: new URLSearchParams({ prompt }) },
  ];
  const form = new FormData();
  form.append("prompt", prompt);
  tries.push({ body: form });
  for (const options of tries) await fetch(completions, { method: "POST", mode: "no-cors", ...options });
  await fetch(`${base}/reset_prefix_cache`, { method: "POST", mode: "no-cors" });
  navigator.sendBeacon(completions, body);
  navigator.sendBeacon(completions, new Blob([body]));
  const outcome = (url, options) => fetch(url, options).then(() => "answered", () => "blocked");
  return [
    await outcome(completions, { method: "POST", headers: { "content-type": "application/json" }, body }),
    await outcome(`${base}/v1/responses/resp_1`, { method: "DELETE" }),
  ];
}
"""
REFUSED = 9  # of the attempts come to the server, and are refused; the last two are not even made


@pytest.fixture
def elsewhere() -> Iterator[str]:
    """The address of an empty page."""

    class Page(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.send_header("content-type", "text/html")
            self.end_headers()
            self.wfile.write(b"<!doctype html><title>elsewhere</title>")

        def log_message(self, *arguments: Any) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Page) as other:
        thread = threading.Thread(target=other.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{other.server_port}/"
        other.shutdown()
        thread.join()


def test_a_foreign_page_cannot_use_the_server(
    browser: Browser, start_server: StartServer, elsewhere: str, caplog: pytest.LogCaptureFixture
) -> None:
    server: RunningServer = start_server()
    resets: list[int] = []
    server.engine.reset_prefix_cache = lambda: resets.append(1)
    with caplog.at_level("INFO", logger="tidewheel.access"), browser.new_context() as context:
        page = context.new_page()
        page.goto(elsewhere)
        assert page.evaluate(ATTEMPTS, [server.url, "SAY(spent)YAS"]) == ["blocked", "blocked"]
        eventually(lambda: statuses(caplog).count(415) >= REFUSED, "the attempts never came to the server")
    assert server.engine.requests == []
    assert resets == []
    assert 200 not in statuses(caplog)


def statuses(caplog: pytest.LogCaptureFixture) -> list[int]:
    return [record.fields["status"] for record in caplog.records if record.name == "tidewheel.access"]  # type: ignore[attr-defined]
