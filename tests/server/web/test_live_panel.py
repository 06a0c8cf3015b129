"""The operator's view: figures from /metrics, under any prefix, while the view is visible, and what is served."""

from __future__ import annotations

import json
import re
from types import SimpleNamespace
from typing import Any

import pytest
from playwright.sync_api import Page, Request, Route, expect
from prometheus_client import CollectorRegistry, generate_latest
from server.conftest import RunningServer, ServerProcess, StartServer
from server.scripted_engine import ScriptedEngine
from server.web.conftest import OpenPage, last_answer, send, until_idle

from tidewheel.engine.outputs import FinishReason, RequestOutput
from tidewheel.server.telemetry import metrics as telemetry
from tidewheel.server.telemetry.metrics import ServerMetrics

WIDE: dict[str, Any] = {"viewport": {"width": 1400, "height": 900}}
METRICS = "**/metrics"
UNKNOWN = "\N{EN DASH}"
HIDE = """(hidden) => {
  Object.defineProperty(document, "visibilityState", { configurable: true, value: hidden ? "hidden" : "visible" });
  document.dispatchEvent(new Event("visibilitychange"));
}"""

# Only `later` moves the time, and answers are what `say` gets.
BY_HAND = """
let now = 1000;
performance.now = () => now;
window.later = (ms) => { now += ms; };
const ask = window.fetch;
window.fetch = (url, options) => {
  if (!String(url).endsWith("/chat/completions")) return ask(url, options);
  const start = (controller) => {
    window.say = (data) => controller.enqueue(new TextEncoder().encode(`data: ${data}\\n\\n`));
  };
  return Promise.resolve(new Response(new ReadableStream({ start })));
};
"""


def metrics(prefix: str, **samples: float) -> str:
    """A scrape of `samples`, with labels that are hard to read."""
    lines = ["# HELP x y", "# TYPE x gauge", "python_info 1"]
    for name, value in samples.items():
        lines.append(f'{prefix}{name}{{model_name="a {{b}} \\"c\\" d",engine="0"}} {value}')
    return "\n".join(lines) + "\n"


def open_on(open_page: OpenPage, server: RunningServer, scrapes: list[str]) -> Page:
    """The page as it reads these one after the other, a second apart, and then the last one for ever."""

    def scrape(route: Route) -> None:
        route.fulfill(content_type="text/plain", body=scrapes.pop(0) if len(scrapes) > 1 else scrapes[0])

    return open_page(f"{server.url}/#server", clock="paused", routes={METRICS: scrape}, **WIDE)


def figure(page: Page, name: str) -> Any:
    return page.locator(f"#{name}")


# A page with a clock of its own is a new one, which takes the browser a second.
def test_the_panel_shows_what_the_server_does(start_server: StartServer, open_page: OpenPage) -> None:
    server = start_server(engine={"step_s": 0.005, "num_blocks": 64})
    page = open_page(f"{server.url}/#server", clock="flowing", **WIDE)
    expect(page.locator("#live-state")).to_have_text("at rest")
    expect(figure(page, "running")).to_have_text("0")
    page.get_by_role("link", name="Chat").click()
    send(page, "LOOP(")
    expect(last_answer(page)).to_contain_text("xx")
    page.get_by_role("link", name="Server").click()
    expect(page.locator("#scroller")).to_be_hidden()
    page.clock.run_for(1000)
    expect(page.locator("#live-state")).to_have_text("at work")
    expect(figure(page, "running")).to_have_text("1")
    expect(figure(page, "first-token")).to_contain_text("ms")
    expect(figure(page, "between-tokens")).to_contain_text("ms")
    expect(figure(page, "tokens-per-second")).not_to_have_text("0")
    expect(figure(page, "kv-use")).not_to_have_text("0 %")
    page.keyboard.press("Escape")
    until_idle(page)
    page.clock.run_for(1000)
    expect(page.locator("#live-state")).to_have_text("at rest")
    expect(figure(page, "running")).to_have_text("0")
    page.clock.run_for(3000)
    expect(figure(page, "tokens-per-second")).to_have_text("0")


def test_rates_come_from_differences_under_any_prefix(server: RunningServer, open_page: OpenPage) -> None:
    scrapes = [
        metrics("vllm:", num_requests_running=3, num_requests_waiting=2, kv_cache_usage_perc=0.625,
                inter_token_latency_seconds_count=tokens, time_to_first_token_seconds_sum=first / 2 - 1.75,
                time_to_first_token_seconds_count=first, prefix_cache_queries_total=tokens,
                prefix_cache_hits_total=tokens / 4, decode_seconds_total=decoded,
                spec_decode_num_draft_tokens_total=tokens, spec_decode_num_accepted_tokens_total=tokens / 2)
        for tokens, first, decoded in ((1000, 7, 2), (1090, 9, 2.5), (30, 0, 1))
    ]  # fmt: skip

    page = open_on(open_page, server, scrapes)
    expect(figure(page, "running")).to_have_text("3")
    expect(figure(page, "waiting")).to_have_text("2")
    expect(figure(page, "kv-use")).to_have_text("63 %")
    expect(figure(page, "tokens-per-second")).to_have_text(UNKNOWN)
    expect(figure(page, "first-token")).to_have_text("250 ms")  # on average, since the server's start
    page.clock.run_for(1000)
    expect(figure(page, "tokens-per-second")).to_have_text("180")  # while it decoded, which was half of the time
    expect(figure(page, "first-token")).to_have_text("500 ms")
    expect(figure(page, "prefix-hits")).to_have_text("25 %")
    expect(figure(page, "acceptance-rate")).to_have_text("50 %")
    page.clock.run_for(1000)  # the server was started again: its counters began anew
    expect(figure(page, "tokens-per-second")).to_have_text("30")


@pytest.mark.sweep
def test_stages_of_a_pipeline_and_adapters_have_tiles(server: RunningServer, open_page: OpenPage) -> None:
    def scrape_of(*stages: tuple[int, float, int, float]) -> str:
        names = ("steps", "computing_seconds", "hops", "hop_seconds")
        lines = [
            f'x:pipeline_stage_{name}_total{{model_name="a {{b}}",stage="{index + 1}"}} {value}'
            for index, stage in enumerate(stages)
            for name, value in zip(names, stage, strict=True)
        ]
        return metrics("x:", num_requests_running=1) + "\n".join(lines) + "\n"

    scrapes = [
        scrape_of((100, 7.0, 10, 1.0), (100, 9.0, 0, 0.0)),
        scrape_of((110, 7.5, 20, 1.002), (110, 10.0, 0, 0.0)),
        metrics("x:", num_requests_running=1)
        + r'x:lora_requests_info{max_lora="2",running_lora_adapters="a\"b,sql",waiting_lora_adapters="c"} 1.7e9',
    ]

    page = open_on(open_page, server, scrapes)
    rows = page.locator("#stages tbody tr")
    expect(rows).to_have_text([f"Stage 1{UNKNOWN * 3}", f"Stage 2{UNKNOWN * 3}"])
    expect(page.locator("#adapters")).to_be_hidden()
    page.clock.run_for(1000)
    expect(rows).to_have_text([f"Stage 150 %50 ms{0.2} ms", f"Stage 2100 %100 ms{UNKNOWN}"])
    page.clock.run_for(1000)
    expect(page.locator("#stages")).to_be_hidden()
    expect(page.locator("#adapters p")).to_have_text('a"b, sql; waiting: c')


@pytest.mark.sweep
def test_replicas_have_a_tile_and_figures_of_all(server: RunningServer, open_page: OpenPage) -> None:
    def scrape_of(**replicas: tuple[int, float, float, float]) -> str:
        """For each replica: running requests, the share of the cache, and tokens and seconds of decoding."""
        running, cache, tokens = "num_requests_running", "kv_cache_usage_perc", "inter_token_latency_seconds_count"
        names = (running, cache, tokens, "decode_seconds_total")
        lines = [
            f'x:{name}{{replica="{replica}",model_name="a {{b}}"}} {value}'
            for replica, samples in replicas.items()
            for name, value in zip(names, samples, strict=True)
        ]
        counts = {"replicas": 3, "replicas_silent": 3 - len(replicas)}
        return "\n".join([*lines, *(f"x:{name} {count}" for name, count in counts.items())]) + "\n"

    scrapes = [
        scrape_of(b=(2, 0.5, 100, 10), a=(1, 0.1, 900, 30)),
        scrape_of(b=(2, 0.5, 140, 11), a=(1, 0.3, 960, 32), new=(4, 0.4, 500, 2)),
        metrics("x:", num_requests_running=1),
    ]

    page = open_on(open_page, server, scrapes)
    tile = page.locator("#replicas")
    expect(tile.locator("caption")).to_have_text("Replicas: 3, 1 silent")
    expect(tile.locator("tbody tr")).to_have_text([f"a1{UNKNOWN}10 %{UNKNOWN}", f"b2{UNKNOWN}50 %{UNKNOWN}"])
    expect(figure(page, "running")).to_have_text("3")
    expect(figure(page, "kv-use")).to_have_text("30 %")
    page.clock.run_for(1000)
    expect(tile.locator("caption")).to_have_text("Replicas: 3")
    expect(tile.locator("tbody tr")).to_have_text(
        [f"a1{UNKNOWN}30 %30", f"b2{UNKNOWN}50 %40", f"new4{UNKNOWN}40 %{UNKNOWN}"]
    )
    expect(figure(page, "running")).to_have_text("7")
    expect(figure(page, "kv-use")).to_have_text("40 %")
    expect(figure(page, "tokens-per-second")).to_have_text("70")
    page.clock.run_for(1000)
    expect(tile).to_be_hidden()


# A page with scripts of its own is a new one, which takes the browser a second.
@pytest.mark.sweep
def test_an_answer_that_is_alone_has_one_speed(
    server: RunningServer, open_page: OpenPage, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Tokens come at times that are set. The panel gets the server's measurements of them again and again."""
    gaps_ms, now_s = (400, 30, 50, 70, 45, 55), 0.0
    measured = ServerMetrics(ScriptedEngine(), "m", "x:")
    registry = CollectorRegistry()
    registry.register(measured)
    monkeypatch.setattr(telemetry, "time", SimpleNamespace(perf_counter=lambda: now_s))

    def play() -> None:
        nonlocal now_s
        timer = measured.start_timer()
        choice: Any = SimpleNamespace(times=None, index=0)
        for i, gap in enumerate(gaps_ms):
            now_s += gap / 1000
            ends = FinishReason.LENGTH if i == len(gaps_ms) - 1 else None
            timer.on_output(RequestOutput(0, "x", (1,), finish_reason=ends), choice)
        now_s += 700

    def tell(route: Route) -> None:
        route.fulfill(content_type="text/plain", body=generate_latest(registry))

    def say(**chunk: Any) -> None:
        page.evaluate("say", json.dumps({"choices": [], **chunk}))

    page = open_page(server.url, lambda page: page.add_init_script(BY_HAND), routes={METRICS: tell}, **WIDE)
    send(page, "How fast are you?")
    page.get_by_role("link", name="Server").click()
    expect(figure(page, "running")).to_have_text("0")
    for i, gap in enumerate(gaps_ms):
        page.evaluate("later", gap)
        say(choices=[{"index": 0, "delta": {"content": "x"}}])
        expect(last_answer(page)).to_have_text("x" * (i + 1))
    page.evaluate("later(700)")
    say(usage={"completion_tokens": len(gaps_ms), "total_tokens": len(gaps_ms)})
    page.evaluate("say('[DONE]')")
    until_idle(page)

    def tell_again(route: Route) -> None:
        play()  # as many again at each reading, so that the figure stays
        tell(route)

    page.route(METRICS, tell_again)
    expect(figure(page, "tokens-per-second")).not_to_have_text(re.compile(f"^(0|{UNKNOWN})$"))
    of_server = float(figure(page, "tokens-per-second").inner_text())
    of_answer = float(page.locator(".stats").inner_text().partition(" a second")[0].rpartition(" ")[2])
    assert of_answer == pytest.approx(20, rel=0.01)  # 5 tokens after the first, in 250 ms
    assert of_server == pytest.approx(of_answer, rel=0.01)


@pytest.mark.sweep
def test_nothing_is_read_while_nobody_looks(server: RunningServer, open_page: OpenPage) -> None:
    page = open_page(f"{server.url}/#server", clock="flowing", **WIDE)
    reads: list[str] = []

    def note(request: Request) -> None:
        if request.url.endswith("/metrics"):
            reads.append(request.url)

    page.on("request", note)
    expect(figure(page, "running")).to_have_text("0")

    def reads_in_half_a_minute() -> int:
        page.evaluate("fetch('health')")  # once this has been seen, all earlier requests have been too
        before = len(reads)
        for _ in range(10):
            page.clock.run_for(3000)
            page.evaluate("fetch('health').then((response) => response.text())")
        return len(reads) - before

    assert reads_in_half_a_minute() > 5
    page.evaluate(HIDE, True)
    assert reads_in_half_a_minute() == 0
    page.evaluate(HIDE, False)
    assert reads_in_half_a_minute() > 5
    page.get_by_role("link", name="Chat").click()
    assert reads_in_half_a_minute() == 0
    page.remove_listener("request", note)


def test_a_server_that_is_gone_is_said_to_be(server: RunningServer, open_page: OpenPage) -> None:
    page = open_page(f"{server.url}/#server", clock="flowing", **WIDE)
    expect(page.locator("#live-state")).to_have_text("at rest")
    page.route(METRICS, lambda route: route.abort())
    page.clock.run_for(3000)
    expect(page.locator("#live-state")).to_have_text("no answer")
    for name in ("running", "waiting", "kv-use", "tokens-per-second", "first-token", "prefix-hits"):
        expect(figure(page, name)).to_have_text(UNKNOWN)  # what it did before is no news
    page.unroute(METRICS)
    page.clock.run_for(3000)
    expect(page.locator("#live-state")).to_have_text("at rest")


@pytest.mark.sweep
def test_figures_that_are_missing_are_dashes(server: RunningServer, open_page: OpenPage) -> None:
    def scrape(route: Route) -> None:
        route.fulfill(content_type="text/plain", body=metrics("", up=1))

    page = open_page(f"{server.url}/#server", routes={METRICS: scrape}, **WIDE)
    expect(page.locator("#live-state")).to_have_text("at rest")
    for name in ("running", "waiting", "kv-use", "tokens-per-second", "first-token"):
        expect(figure(page, name)).to_have_text(UNKNOWN)
    expect(figure(page, "acceptance-rate")).to_be_hidden()


@pytest.mark.sweep
def test_the_charts_have_axes_and_tell_what_was_read(server: RunningServer, open_page: OpenPage) -> None:
    body = metrics("x:", num_requests_running=3, num_requests_waiting=2)

    def scrape(route: Route) -> None:
        route.fulfill(content_type="text/plain", body=body)

    page = open_page(f"{server.url}/#server", routes={METRICS: scrape}, **WIDE)
    chart = page.locator("#requests-chart")
    expect(chart.locator(".x-axis")).to_have_text("2 min ago1 min agonow")
    expect(chart.locator(".y-axis")).to_have_text("30")  # 3 at the top, 0 at the bottom
    chart.locator("svg").hover()
    expect(chart.locator(".tip")).to_contain_text("3 running · 2 waiting")
    page.mouse.move(0, 0)
    expect(chart.locator(".tip")).to_be_hidden()


def test_a_charts_scale_holds_the_figure_above_it(server: RunningServer, open_page: OpenPage) -> None:
    """The time to the first token is the last answers', which may be older than the chart."""
    scrape = metrics(
        "x:", num_requests_running=0, time_to_first_token_seconds_sum=84, time_to_first_token_seconds_count=7
    )
    page = open_on(open_page, server, [scrape])
    top = page.locator("#first-token-chart .top")
    for _ in range(2):
        expect(figure(page, "first-token")).to_have_text("12.0 s")
        expect(top).to_have_text("12.0 s")
        page.clock.run_for(1000)


def test_what_is_served_is_said(demo_server: ServerProcess, open_page: OpenPage) -> None:
    page = open_page(f"{demo_server.url}/#server", **WIDE)
    facts = page.locator("#facts")
    for words in ("llava", "int8-channel", "cpu", "2,048 tokens", "MiB", "prefix caching is on", "hermes"):
        expect(facts).to_contain_text(words)


@pytest.mark.sweep
def test_the_facts_name_the_replica_that_told_them(demo_server: ServerProcess, open_page: OpenPage) -> None:
    sessions = []

    def sign(route: Route) -> None:
        sessions.append(route.request.headers["x-session-id"])
        response = route.fetch()
        route.fulfill(response=response, headers={**response.headers, "x-tidewheel-replica": "replica-7"})

    page = open_page(f"{demo_server.url}/#server", routes={"**/server_info": sign, METRICS: sign}, **WIDE)
    expect(page.locator("#facts")).to_contain_text("Replicareplica-7")
    expect(figure(page, "running")).to_have_text("0")
    assert len(sessions) >= 2
    assert len({*sessions}) == 1  # so all figures are of one replica


def test_the_facts_need_the_key_that_the_api_needs(start_server: StartServer, open_page: OpenPage) -> None:
    page = open_page(f"{start_server(api_keys=['secret']).url}/#server", **WIDE)
    expect(page.locator("#facts")).to_contain_text("API key")
