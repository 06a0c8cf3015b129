"""The page by keyboard, on a phone, for a screen reader, in both schemes, and against what a model may write."""

from __future__ import annotations

import json
from typing import Any

import pytest
from playwright.sync_api import Page, expect
from samples import swept
from server.conftest import RunningServer, StartServer
from server.waiting import eventually
from server.web.conftest import OpenPage, last_answer, send, until_idle

PHONE: dict[str, Any] = {
    "viewport": {"width": 360, "height": 740}, "has_touch": True, "is_mobile": True, "reduced_motion": "reduce",
}  # fmt: skip
WIDE: dict[str, Any] = {"viewport": {"width": 1400, "height": 900}}
CHAT = "**/v1/chat/completions"
LONG = "pneumono" * 40
RICH = (
    f"{LONG}\n\n```\n{LONG}\n```\n\n| {'wide | ' * 30}\n| {'--- | ' * 30}\n| {LONG} | {'cell | ' * 29}\n\n- {LONG}\n\n"
    f"https://a.b/{LONG}"
)

NO_STORAGE = """for (const name of ["localStorage", "sessionStorage"]) {
  Object.defineProperty(window, name, { get() { throw new DOMException("not here", "SecurityError"); } });
}"""
FROM_THE_TOP = "document.body.tabIndex = -1; document.body.focus(); document.body.removeAttribute('tabindex')"
FOCUSED = """() => {
  const element = document.activeElement;
  const { outlineStyle, outlineWidth } = getComputedStyle(element);
  const box = element.getBoundingClientRect();
  const ring = outlineStyle !== "none" && parseFloat(outlineWidth) > 0;
  return {
    name: element.getAttribute("aria-label") || element.id || element.name || element.textContent,
    body: element === document.body,
    visible: element.checkVisibility({ opacityProperty: true }) && box.width > 0 && box.bottom > 0
      && box.top < innerHeight,
    marked: ring || getComputedStyle(element.closest(".box") ?? element).boxShadow !== "none",
  };
}"""


def no_sideways_scroll(page: Page) -> bool:
    widths = "[document.scrollingElement.scrollWidth, innerWidth, scroller.scrollWidth, scroller.clientWidth]"
    page_width, window_width, turns_width, column_width = page.evaluate(widths)
    return bool(page_width <= window_width and turns_width <= column_width)


def test_everything_is_reached_by_keyboard_and_seen_to_be(server: RunningServer, open_page: OpenPage) -> None:
    page = open_page(server.url, **WIDE)
    expect(page.get_by_label("Message", exact=True)).to_be_focused()
    page.keyboard.type("SAY(one")
    page.keyboard.press("Shift+Enter")
    page.keyboard.type("two)YAS")
    page.keyboard.press("Enter")
    until_idle(page)
    expect(last_answer(page)).to_have_text("onetwo")  # with a line break between
    expect(page.get_by_label("Message", exact=True)).to_be_focused()
    page.evaluate(FROM_THE_TOP)
    seen = []
    for _ in range(60):
        page.keyboard.press("Tab")
        focused = page.evaluate(FOCUSED)
        if focused["body"]:
            break
        assert focused["visible"], focused
        assert focused["marked"], focused
        seen.append(focused["name"])
    order = ["new", "search", "import", "delete-all", "theme", "Conversations", "model", "Conversation", "Edit message"]
    order += ["Copy answer", "Retry", "Add text files", "prompt", "Send"]
    assert [name for name in seen if name in order] == order


def test_the_first_stop_leads_to_the_message_box(server: RunningServer, open_page: OpenPage) -> None:
    page = open_page(server.url, **WIDE)
    page.evaluate(FROM_THE_TOP)
    page.keyboard.press("Tab")
    expect(page.get_by_role("link", name="Skip to the message box")).to_be_focused()
    page.keyboard.press("Enter")
    expect(page.get_by_label("Message", exact=True)).to_be_focused()


@pytest.mark.sweep
def test_a_conversation_by_keyboard_alone(server: RunningServer, open_page: OpenPage) -> None:
    page = open_page(server.url, **WIDE)
    page.keyboard.type("LOOP(")
    page.keyboard.press("Enter")
    expect(last_answer(page)).to_contain_text("xx")
    page.keyboard.press("Escape")
    until_idle(page)
    page.get_by_role("button", name="Edit message").focus()
    page.keyboard.press("Enter")
    page.keyboard.press("Control+A")
    page.keyboard.type("SAY(edited)YAS")
    page.keyboard.press("Enter")
    until_idle(page)
    expect(last_answer(page)).to_have_text("edited")
    expect(page.get_by_label("Message", exact=True)).to_be_focused()
    page.get_by_role("button", name="New conversation").focus()
    page.keyboard.press("Enter")
    expect(page.locator(".turn")).to_have_count(0)
    expect(page.get_by_label("Message", exact=True)).to_be_focused()


# The answer comes in hundreds of pieces, the first of them slowly.
@pytest.mark.sweep
def test_a_screen_reader_hears_the_answer_a_block_at_a_time(start_server: StartServer, open_page: OpenPage) -> None:
    server = start_server(engine={"step_s": 0.02})
    page = open_page(server.url)
    heard = page.locator("#announcer")
    expect(heard).to_have_attribute("aria-live", "polite")
    send(page, "SAY(The *first* block.\n\n" + "The second one. " * 30 + ")YAS")
    expect(heard.locator("p")).to_have_text(["The first block."])
    assert page.locator("body.busy").count() == 1
    server.engine.executor.step_s = 0
    until_idle(page)
    expect(heard.locator("p").last).to_contain_text("The second one. The second one.")
    send(page, "SAY(Next.)YAS")
    until_idle(page)
    expect(heard.locator("p")).to_have_text(["Next."])
    page.reload()
    expect(heard).to_be_empty()


# A page for touch is a new one, which takes the browser a second.
@pytest.mark.sweep
def test_nothing_is_wider_than_a_phone(server: RunningServer, open_page: OpenPage) -> None:
    page = open_page(server.url, **PHONE)
    assert no_sideways_scroll(page)
    page.get_by_label("Message", exact=True).fill(f"SAY({RICH})YAS")
    page.get_by_role("button", name="Send").tap()
    expect(last_answer(page).locator("table")).to_be_visible()
    until_idle(page)
    assert no_sideways_scroll(page)
    page.get_by_role("button", name="Edit message").tap()
    assert no_sideways_scroll(page)
    page.get_by_role("button", name="Cancel").tap()
    for toggle, column in (("Conversations", "#history"), ("Parameters", "#panel")):
        page.get_by_role("button", name=toggle, exact=True).tap()
        expect(page.locator(column)).to_be_visible()
        assert no_sideways_scroll(page)
        box = page.locator(column).bounding_box()
        assert box is not None
        assert box["x"] >= 0
        assert box["x"] + box["width"] <= 360
        beside = 350 if column == "#history" else 10
        page.touchscreen.tap(beside, 400)
        expect(page.locator(column)).to_be_hidden()
    assert page.evaluate("Math.min(...[...document.querySelectorAll('main button')].filter((b) => b.checkVisibility())"
                         ".map((b) => b.getBoundingClientRect().height))") >= 32  # fmt: skip


@pytest.mark.sweep
def test_a_conversation_that_is_chosen_on_a_phone_comes_into_view(server: RunningServer, open_page: OpenPage) -> None:
    page = open_page(server.url, **PHONE)
    column = page.locator("#history")
    send(page, "SAY(one)YAS")
    until_idle(page)
    page.get_by_role("button", name="Conversations", exact=True).tap()
    page.get_by_role("button", name="New conversation").tap()
    expect(column).to_be_hidden()
    expect(page.locator(".turn")).to_have_count(0)
    page.get_by_role("button", name="Conversations", exact=True).tap()
    page.get_by_role("button", name="SAY(one)YAS", exact=True).tap()
    expect(column).to_be_hidden()
    expect(last_answer(page)).to_have_text("one")


@pytest.mark.sweep
def test_a_column_over_the_conversation_holds_the_focus(server: RunningServer, open_page: OpenPage) -> None:
    page = open_page(server.url, viewport={"width": 700, "height": 900})
    toggle = page.get_by_role("button", name="Conversations", exact=True)
    expect(toggle).to_have_attribute("aria-expanded", "false")
    toggle.focus()
    page.keyboard.press("Enter")
    expect(toggle).to_have_attribute("aria-expanded", "true")
    expect(page.get_by_role("button", name="Close the conversations")).to_be_focused()
    for _ in range(6):
        page.keyboard.press("Tab")
        assert page.evaluate("document.activeElement.matches('body, #history *')")
    page.get_by_role("button", name="New conversation").focus()
    page.keyboard.press("Escape")
    expect(toggle).to_be_focused()
    expect(page.locator("#history")).to_be_hidden()


CONTRAST = """() => {
  const parse = (color) => {
    const [r, g, b, a = 1] = color.match(/[\\d.]+/g).map(Number);
    return [r, g, b, a];
  };
  const over = ([r, g, b, a], below) => [r, g, b].map((part, i) => part * a + below[i] * (1 - a));
  const light = (color) => {
    const [r, g, b] = color.map((value) => value / 255)
      .map((share) => (share <= 0.04045 ? share / 12.92 : ((share + 0.055) / 1.055) ** 2.4));
    return 0.2126 * r + 0.7152 * g + 0.0722 * b;
  };
  const ground = (element) => {
    if (!element) return [255, 255, 255];
    return over(parse(getComputedStyle(element).backgroundColor), ground(element.parentElement));
  };
  const ratio = (ink, paper) => {
    const [low, high] = [light(over(ink, paper)), light(paper)].sort((a, b) => a - b);
    return (high + 0.05) / (low + 0.05);
  };
  const faint = [];
  const opacity = (element) => element ? getComputedStyle(element).opacity * opacity(element.parentElement) : 1;
  const look = (element, [r, g, b, a], what, share = 1) => {
    const contrast = ratio([r, g, b, a * share * opacity(element)], ground(element));
    if (contrast < 4.5) faint.push([what, contrast]);
  };
  const words = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  let seen = 0;
  while (words.nextNode()) {
    const element = words.currentNode.parentElement;
    if (!words.currentNode.data.trim() || !element.checkVisibility({ visibilityProperty: true })) continue;
    if (element.closest("svg, .sr, .katex-mathml, :disabled")) continue;
    look(element, parse(getComputedStyle(element).color), words.currentNode.data);
    seen += 1;
  }
  for (const field of document.querySelectorAll("[placeholder]")) {
    const style = getComputedStyle(field, "::placeholder");
    look(field, parse(style.color), field.placeholder, style.opacity);
  }
  const code = document.querySelector("pre code");
  for (const [name] of code ? CSS.highlights : []) {
    look(code, parse(getComputedStyle(code, `::highlight(${name})`).color), name);
  }
  return { faint, seen, kinds: CSS.highlights.size };
}"""
COLOURFUL = (
    "# Head\n\n> said [a](https://a.b) `x` $x^2$\n\n| a |\n|---|\n| b |\n\n"
    "```py\n# note\nclass A(B):\n    def f(self): return len('s') + 7\n```\n\n```diff\n-a\n+b\n```\n\nend"
)


@pytest.mark.parametrize("theme", [swept("Light"), "Dark"])
def test_all_words_stand_out_in_both_themes(server: RunningServer, open_page: OpenPage, theme: str) -> None:
    # WCAG AA: 4.5 to 1 for text. The system has the other theme, so that it is the choice that counts.
    page = open_page(server.url, **WIDE, color_scheme="dark" if theme == "Light" else "light", reduced_motion="reduce")
    page.get_by_label("Theme").select_option(theme)
    send(page, f"SAY({COLOURFUL})YAS")
    until_idle(page)
    expect(last_answer(page).locator(".formula")).to_be_visible()
    eventually(lambda: page.evaluate("CSS.highlights.size >= 7"), "no colours")
    page.get_by_role("button", name="Actions for").click()
    page.get_by_label("tools", exact=True).evaluate("(field) => field.closest('details').open = true")
    page.route(CHAT, lambda route: route.abort(), times=1)
    send(page, "SAY(fails)YAS")
    expect(page.locator(".failure")).to_be_visible()
    chat = page.evaluate(CONTRAST)
    assert (chat["faint"], chat["kinds"]) == ([], 7)
    assert chat["seen"] > 40
    page.get_by_role("link", name="Server").click()
    expect(page.locator("#facts dt").first).to_be_visible()
    server_view = page.evaluate(CONTRAST)
    assert server_view["faint"] == []
    page.reload()
    background = page.evaluate("getComputedStyle(document.body).backgroundColor.match(/\\d+/g).map(Number)")
    assert (max(background) < 60) if theme == "Dark" else (min(background) > 200)


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_the_system_has_its_way_unless_a_theme_is_chosen(
    server: RunningServer, open_page: OpenPage, scheme: Any
) -> None:
    page = open_page(server.url, color_scheme=scheme)
    background = page.evaluate("getComputedStyle(document.body).backgroundColor.match(/\\d+/g).map(Number)")
    assert (max(background) < 60) if scheme == "dark" else (min(background) > 200)


SHIFTS = """() => new Promise((resolve) => {
  new PerformanceObserver((list) => resolve(list.getEntries().filter((entry) => !entry.hadRecentInput)
    .map((entry) => [entry.value, entry.sources.map((source) => source.node?.outerHTML?.slice(0, 80))])))
    .observe({ type: "layout-shift", buffered: true });
  setTimeout(() => resolve([]), 100);
})"""


# The answer comes in hundreds of pieces, twice. Each piece may move what is on the screen.
@pytest.mark.sweep
def test_nothing_jumps_while_an_answer_comes(start_server: StartServer, open_page: OpenPage) -> None:
    page = open_page(start_server(engine={"step_s": 0.001}).url, viewport={"width": 1000, "height": 500})
    answer = "A **first** paragraph that runs over the end of its line, as most of them do in the end.\n\n1. one\n"
    answer += "2. two\n   - three\n\n```py\nx = 1\ny = 2\n```\n\n| a | b |\n|---|---|\n| 1 | 2 |\n\nAnd the end."
    parameters = json.dumps({"system": f"SAY({answer})YAS"})  # so that the message is short
    page.evaluate("(parameters) => localStorage.setItem('tidewheel.parameters', parameters)", parameters)
    page.reload()
    for _ in range(2):
        send(page, "Go on.")
        until_idle(page)
    expect(last_answer(page)).to_contain_text("And the end.")
    assert page.evaluate(SHIFTS) == []
    assert page.evaluate("scroller.scrollHeight - scroller.scrollTop - scroller.clientHeight < 2")


@pytest.mark.sweep
def test_a_reader_who_went_up_is_left_there(start_server: StartServer, open_page: OpenPage) -> None:
    server = start_server()
    page = open_page(server.url, viewport={"width": 1000, "height": 500})
    send(page, "SAY(" + "line\n\n" * 60 + ")YAS")
    latest = page.get_by_role("button", name="Latest")
    until_idle(page)
    server.engine.executor.step_s = 0.002
    expect(latest).to_be_hidden()
    send(page, "LOOP(")
    expect(last_answer(page)).to_contain_text("x")
    page.locator("#scroller").hover()
    page.mouse.wheel(0, -600)
    expect(latest).to_be_visible()
    top = page.evaluate("scroller.scrollTop")
    seen = len(last_answer(page).inner_text())
    expect(last_answer(page)).to_contain_text("x" * (seen + 50))
    assert page.evaluate("scroller.scrollTop") == pytest.approx(top, abs=2)
    latest.click()
    expect(latest).to_be_hidden()
    page.keyboard.press("Escape")
    until_idle(page)


LONG_CONVERSATION = """() => {
  const messages = [];
  for (let i = 0; i < 100; i += 1) {
    messages.push({ role: "user", content: `question ${i}` });
    messages.push({ role: "assistant", content: `answer ${i}\\n\\n${"- a point\\n".repeat(i % 9)}`, ended: "stop" });
  }
  localStorage.setItem("tidewheel.conversation.long", JSON.stringify({ updated: 1, messages }));
  const index = [{ id: "long", title: "long", updated: 1, size: 10000 }];
  localStorage.setItem("tidewheel.conversations", JSON.stringify(index));
}"""


@pytest.mark.sweep
def test_a_long_conversation_opens_at_its_end_and_goes_on(start_server: StartServer, open_page: OpenPage) -> None:
    page = open_page(start_server(engine={"max_model_len": 30_000}).url, viewport={"width": 1000, "height": 700})
    page.evaluate(LONG_CONVERSATION)
    page.reload()
    page.get_by_role("button", name="long", exact=True).click()
    expect(page.locator(".turn")).to_have_count(200)
    expect(last_answer(page)).to_be_in_viewport()
    page.locator("#scroller").evaluate("(scroller) => scroller.scrollTo(0, 0)")
    expect(page.get_by_text("question 0", exact=True)).to_be_in_viewport()
    expect(page.get_by_role("button", name="Latest")).to_be_visible()
    page.get_by_label("System prompt").evaluate("(field) => field.value = 'SAY(the end)YAS'")
    send(page, "go on")
    expect(last_answer(page)).to_have_text("the end")
    expect(last_answer(page)).to_be_in_viewport()


def test_what_a_model_writes_cannot_act(server: RunningServer, open_page: OpenPage) -> None:
    page = open_page(server.url, **WIDE)
    attack = (
        "<img src=x onerror=window.pwned=1><svg onload=window.pwned=1><script>window.pwned=1</script>"
        "<iframe srcdoc='<script>parent.pwned=1</script>'></iframe> [x](javascript:window.pwned=1) "
        "[y](JaVaScRiPt:window.pwned=1) ![z](x\" onerror=\"window.pwned=1) <a href=javascript:pwned=1>w</a> "
        "```\"><script>window.pwned=1</script>\n</code></pre><script>window.pwned=1</script>\n```\n"
    )  # fmt: skip
    send(page, f"SAY({attack})YAS")
    until_idle(page)
    expect(last_answer(page)).to_contain_text("<img src=x onerror=window.pwned=1>")
    call = {"index": 0, "id": "<b>", "function": {"name": attack, "arguments": attack}}
    delta = {"content": attack, "reasoning_content": attack, "tool_calls": [call]}
    body = f"data: {json.dumps({'choices': [{'index': 0, 'delta': delta}]})}\n\ndata: [DONE]\n\n"
    page.route(CHAT, lambda route: route.fulfill(content_type="text/event-stream", body=body), times=1)
    send(page, attack)
    until_idle(page)
    error = json.dumps({"error": {"message": attack, "param": attack}})
    page.route(CHAT, lambda route: route.fulfill(status=400, body=error), times=1)
    send(page, attack)
    until_idle(page)
    page.reload()
    page.locator("#conversations button").first.click()
    expect(page.locator(".answer .markdown").first).to_contain_text("onerror")
    assert page.evaluate("window.pwned") is None
    assert page.locator("#turns :is(script, img, iframe, style, object, embed, form[action])").count() == 0
    assert page.locator("#turns :is([onerror], [onload], a:not([href^=http]))").count() == 0


def test_the_key_is_asked_for_and_kept_for_the_tab_only(start_server: StartServer, open_page: OpenPage) -> None:
    server = start_server(api_keys=["secret"])
    page = open_page(server.url, **WIDE)
    dialog = page.get_by_role("dialog")
    expect(dialog).to_be_visible()
    expect(page.get_by_role("textbox", name="API key")).to_be_focused()
    page.keyboard.type("wrong")
    page.keyboard.press("Enter")
    expect(dialog).to_contain_text("did not accept")
    page.get_by_role("button", name="Not now").click()
    send(page, "SAY(hello)YAS")
    expect(page.locator(".failure")).to_contain_text("API key")
    expect(dialog).to_be_visible()
    page.keyboard.type("secret")
    page.keyboard.press("Enter")
    expect(last_answer(page)).to_have_text("hello")
    assert page.locator(".failure").count() == 0
    assert "secret" not in page.evaluate("JSON.stringify(localStorage) + location.href")
    page.reload()
    expect(page.get_by_role("combobox", name="Model")).to_have_value("scripted")
    expect(dialog).to_be_hidden()
    page.get_by_role("button", name="Forget it").click()
    send(page, "SAY(more)YAS")
    expect(dialog).to_be_visible()
    assert page.evaluate("sessionStorage.length") == 0


@pytest.mark.sweep
def test_a_page_without_storage_still_talks(server: RunningServer, open_page: OpenPage) -> None:
    page = open_page(server.url, lambda page: page.add_init_script(NO_STORAGE))
    send(page, "SAY(hello)YAS")
    expect(last_answer(page)).to_have_text("hello")
    until_idle(page)
