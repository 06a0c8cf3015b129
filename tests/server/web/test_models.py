"""The page on a server that loads models on demand: which are loaded, what they take, and which answers."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import Page, Route, expect
from server.conftest import RunningServer, StartServer, dummy_model
from server.hosting.conftest import HostServer, StartHost, other_model, start_host
from server.web.conftest import OpenPage, last_answer, send, until_idle

__all__ = ["dummy_model", "other_model", "start_host"]  # fixtures

WIDE: dict[str, Any] = {"viewport": {"width": 1400, "height": 900}}
CHAT = "**/v1/chat/completions"
GIB = 2**30
UNKNOWN = "\N{EN DASH}"
KEPT = """() => {
  const key = Object.keys(localStorage).find((key) => key.startsWith("tidewheel.conversation."));
  return Object.keys(JSON.parse(localStorage.getItem(key)));
}"""


def card(name: str, value: str, **fields: Any) -> dict[str, Any]:
    """What /v1/models says of a model."""
    status = {"value": value, "progress": fields.pop("progress", None), "error": fields.pop("error", None)}
    return {"id": name, "object": "model", "max_model_len": 2048, "size": GIB, "status": status, **fields}


class Host:
    """What the page hears of models, and asks for. `answers` says what becomes of requests to load and unload."""

    def __init__(self, *cards: dict[str, Any]) -> None:
        self.cards = [*cards]
        self.asked: list[tuple[str, str]] = []
        self.chats: list[dict[str, Any]] = []
        self.refusal: str | None = None

    def routes(self) -> dict[str, Any]:
        return {
            "**/v1/models": lambda route: route.fulfill(json={"object": "list", "data": self.cards}),
            "**/models/load": self._change,
            "**/models/unload": self._change,
            CHAT: self._chat,
        }

    def set(self, name: str, value: str, **fields: Any) -> None:
        status = {"value": value, **fields}
        self.cards = [{**one, "status": status} if one["id"] == name else one for one in self.cards]

    def _change(self, route: Route) -> None:
        what, name = route.request.url.rpartition("/")[2], route.request.post_data_json["model"]
        self.asked.append((what, name))
        if self.refusal is not None:
            route.fulfill(status=403, json={"error": {"message": self.refusal}})
            return
        self.set(name, "loading", progress=0.4) if what == "load" else self.set(name, "unloaded")
        route.fulfill(json={"success": True})

    def _chat(self, route: Route) -> None:
        self.chats.append(route.request.post_data_json)
        route.continue_()


@pytest.fixture(scope="module")
def any_server(start_server: StartServer) -> RunningServer:
    """A server that answers whatever the model is called."""
    return start_server(skip_model_name_validation=True)


def switch(page: Page) -> Any:
    return page.locator("#models-button")


def rows(page: Page) -> Any:
    return page.locator("#models-list li")


@pytest.mark.sweep
def test_models_are_chosen_loaded_and_unloaded(any_server: RunningServer, open_page: OpenPage) -> None:
    host = Host(
        card("org/chat", "loaded"), card("coder", "unloaded", size=3 * GIB), card("old", "failed", error="no file")
    )
    page = open_page(any_server.url, clock="flowing", routes=host.routes(), **WIDE)
    expect(switch(page)).to_have_text("Model, loaded: chat")
    expect(page.get_by_role("combobox", name="Model")).to_be_hidden()
    switch(page).click()
    expect(rows(page)).to_have_text(
        ["chat loaded · 1.00 GiB Unload", "coder not loaded · 3.00 GiB Load", "old failed: no file · 1.00 GiB Load"],
        use_inner_text=True,
    )
    page.get_by_role("button", name="Load coder").click()
    expect(rows(page).nth(1)).to_contain_text("loading, 40 % · 3.00 GiB")
    expect(page.get_by_role("progressbar", name="Loading coder")).to_have_js_property("value", 0.4)
    host.set("coder", "loaded")
    page.clock.run_for(500)
    expect(rows(page).nth(1)).to_contain_text("loaded · 3.00 GiB")
    page.get_by_role("button", name="Unload org/chat").click()
    expect(switch(page)).to_have_text("Model, not loaded: chat")
    assert host.asked == [("load", "coder"), ("unload", "org/chat")]
    page.get_by_role("button", name="coder loaded").click()
    expect(switch(page)).to_have_text("Model, loaded: coder")
    expect(rows(page).first).to_be_hidden()
    send(page, "SAY(hello)YAS")
    expect(last_answer(page)).to_have_text("hello")
    until_idle(page)
    assert [chat["model"] for chat in host.chats] == ["coder"]


@pytest.mark.sweep
def test_who_may_not_unload_models_is_told_so_once(any_server: RunningServer, open_page: OpenPage) -> None:
    host = Host(card("chat", "loaded"), card("coder", "unloaded"))
    host.refusal = "this needs a key with the right admin"
    page = open_page(any_server.url, routes=host.routes(), **WIDE)
    switch(page).click()
    page.get_by_role("button", name="Unload chat").click()
    expect(page.locator("#toast")).to_have_text(host.refusal)
    expect(page.locator("#models .quiet").filter(visible=True)).to_have_text(["Load"])
    page.get_by_role("button", name="coder not loaded").click()
    expect(switch(page)).to_have_text("Model, not loaded: coder")


def test_a_conversation_remembers_its_model(any_server: RunningServer, open_page: OpenPage) -> None:
    host = Host(card("chat", "loaded"), card("coder", "unloaded"))
    page = open_page(any_server.url, routes=host.routes(), **WIDE)

    def choose(name: str) -> None:
        switch(page).click()
        page.locator("#models .choose", has_text=name).click()

    send(page, "SAY(one)YAS")
    expect(page.locator(".stats")).to_contain_text("chat · ")
    until_idle(page)
    choose("coder")
    send(page, "SAY(two)YAS")
    expect(page.locator(".stats").last).to_contain_text("coder · ")
    until_idle(page)
    page.get_by_role("button", name="New conversation").click()
    expect(switch(page)).to_have_text("Model, not loaded: coder")
    choose("chat")
    send(page, "SAY(three)YAS")
    until_idle(page)
    host.cards.append(card("another", "unloaded"))
    page.reload()
    expect(switch(page)).to_have_text("Model, loaded: chat")
    page.get_by_role("button", name="SAY(one)YAS", exact=True).click()
    expect(switch(page)).to_have_text("Model, not loaded: coder")
    send(page, "SAY(four)YAS")
    until_idle(page)
    assert [chat["model"] for chat in host.chats] == ["chat", "coder", "chat", "coder"]
    host.cards = [card("chat", "loaded"), card("another", "unloaded")]
    page.reload()
    page.get_by_role("button", name="SAY(one)YAS", exact=True).click()
    expect(page.locator("#toast")).to_have_text("coder is not served any more: chat answers here.")


SLOWLY = """
const ask = window.fetch;
window.fetch = (url, options) => {
  if (!String(url).endsWith("/chat/completions")) return ask(url, options);
  const start = (controller) => {
    window.say = (text) => controller.enqueue(new TextEncoder().encode(text));
  };
  return Promise.resolve(new Response(new ReadableStream({ start })));
};
"""


# A page with scripts of its own is a new one, which takes the browser a second.
@pytest.mark.sweep
def test_an_answer_says_that_its_model_is_being_loaded(any_server: RunningServer, open_page: OpenPage) -> None:
    host = Host(card("chat", "unloaded"), card("coder", "unloaded"))
    page = open_page(any_server.url, lambda page: page.add_init_script(SLOWLY), routes=host.routes(), **WIDE)
    expect(switch(page)).to_have_text("Model, not loaded: chat")
    send(page, "Hello")
    page.evaluate("say(': loading chat 40%\\n\\n')")
    expect(page.locator(".answer small")).to_have_text("loading chat 40%")
    host.set("chat", "loading", progress=0.4)
    expect(switch(page)).to_have_text("Model, loading, 40 %: chat")
    host.set("chat", "loaded")
    chunk = {"choices": [{"index": 0, "delta": {"content": "Hi"}}]}
    page.evaluate("say", f"data: {json.dumps(chunk)}\n\n")
    expect(last_answer(page)).to_have_text("Hi")
    expect(page.locator(".answer small")).to_have_count(0)
    page.evaluate("say('data: [DONE]\\n\\n')")
    until_idle(page)
    expect(switch(page)).to_have_text("Model, loaded: chat")


def test_the_operator_sees_the_memory_of_each_model(any_server: RunningServer, open_page: OpenPage) -> None:
    def scrape_of(**models: tuple[int, int, float, int, float]) -> str:
        """For each model: its memory, running requests, the share of its cache, tokens, and seconds of decoding."""
        names = ("model_memory_bytes", "num_requests_running", "kv_cache_usage_perc",
                 "inter_token_latency_seconds_count", "decode_seconds_total")  # fmt: skip
        lines = [
            f'x:{name}{{model_name="{model}"}} {value}\n'
            for model, values in models.items()
            for name, value in zip(names, values, strict=True)
        ]
        used = sum(values[0] for values in models.values())
        return "".join([*lines, f"x:memory_used_bytes {used}\nx:memory_budget_bytes {8 * GIB}\n"])

    scrapes = [
        scrape_of(chat=(GIB, 2, 0.5, 1000, 10), coder=(3 * GIB, 1, 0.1, 500, 5)),
        scrape_of(chat=(GIB, 2, 0.5, 1060, 11)),
        scrape_of(chat=(GIB, 2, 0.5, 1120, 12)),
    ]
    host = Host(card("chat", "loaded"), card("coder", "loaded"), *(card(f"m{i}", "unloaded") for i in range(100)))
    infos: list[str] = []

    def tell(route: Route) -> None:
        infos.append(route.request.url.partition("?")[2])
        route.fulfill(json={"model": "/files/chat", "version": "1"})

    routes = {
        "**/metrics": lambda route: route.fulfill(
            content_type="text/plain", body=scrapes.pop(0) if len(scrapes) > 1 else scrapes[0]
        ),
        re.compile(r"/server_info"): tell,
        **host.routes(),
    }
    page = open_page(f"{any_server.url}/#server", clock="paused", routes=routes, **WIDE)
    tile = page.locator("#models-tile")
    expect(tile.locator("caption")).to_have_text("Models: 2 of 102 loaded, 4.00 GiB of 8.00 GiB in use")
    expect(tile.locator("tbody tr")).to_have_text(
        [f"chatloaded1.00 GiB2{UNKNOWN}50 %{UNKNOWN}", f"coderloaded3.00 GiB1{UNKNOWN}10 %{UNKNOWN}"]
    )
    expect(page.locator("#running")).to_have_text("3")
    expect(page.locator("#kv-use")).to_have_text("30 %")
    expect(page.locator("#facts")).to_contain_text("/files/chat")
    host.set("coder", "unloaded")
    page.clock.run_for(3000)
    expect(tile.locator("caption")).to_have_text("Models: 1 of 102 loaded, 1.00 GiB of 8.00 GiB in use")
    expect(tile.locator("tbody tr")).to_have_text([f"chatloaded1.00 GiB2{UNKNOWN}50 %60"])
    expect(page.locator("#tokens-per-second")).to_have_text("60")  # and not also what the other had done before
    switch(page).click()
    page.get_by_label("Search the models").fill("M9 9")
    expect(rows(page).filter(visible=True).locator(".name")).to_have_text(["m9", *(f"m9{i}" for i in range(10))])
    page.locator("#models .choose", has_text="m99").click()
    expect(page.locator("#facts")).to_have_text("Modelm99")
    assert infos == ["model=chat"]


@pytest.fixture(scope="module")
def host(start_host: StartHost, dummy_model: Path, other_model: Path) -> HostServer:
    """A server of two models that loads them on demand."""
    models = ("--model", f"one={dummy_model}", "--model", f"two={other_model}")
    return start_host(*models, "--load-format", "dummy", "--kv-cache-space", "0.01", "--admin-api-key", "boss")


def test_a_server_of_two_models_loads_and_unloads_them(host: HostServer, open_page: OpenPage) -> None:
    page = open_page(host.url, **WIDE)
    page.get_by_label("API key", exact=True).fill("boss")
    page.keyboard.press("Enter")
    expect(switch(page)).to_have_text("Model, not loaded: one")
    send(page, "Hello")
    until_idle(page)
    expect(page.locator(".stats")).to_contain_text("one · ")
    expect(switch(page)).to_have_text("Model, loaded: one")
    switch(page).click()
    page.get_by_role("button", name="Load two").click()
    expect(rows(page).nth(1)).to_contain_text("twoloaded · ")
    page.get_by_role("button", name="Unload one").click()
    expect(switch(page)).to_have_text("Model, not loaded: one")
    page.keyboard.press("Escape")
    page.get_by_role("link", name="Server").click()
    expect(page.locator("#models-tile caption")).to_contain_text("1 of 2 loaded, ")
    expect(page.locator("#models-tile tbody tr")).to_contain_text(["twoloaded"])
    assert host.http.get("/health").json()["ready"] == ["two"]


def test_with_one_model_nothing_is_asked_again(server: RunningServer, open_page: OpenPage) -> None:
    page = open_page(server.url, clock="flowing", **WIDE)
    reads: list[str] = []
    page.on("request", lambda request: reads.append(request.url))
    expect(page.get_by_role("combobox", name="Model")).to_have_value("scripted")
    send(page, "SAY(hello)YAS")
    until_idle(page)
    expect(page.locator(".stats")).to_contain_text("tokens")
    assert "scripted" not in page.locator(".stats").inner_text()
    page.clock.run_for(10_000)
    page.evaluate("fetch('health').then((response) => response.text())")
    expect(switch(page)).to_be_hidden()
    assert [url for url in reads if url.endswith("/v1/models")] == []
    assert page.evaluate(KEPT) == ["name", "updated", "all", "leaf"]
