"""Talking to a model through the page."""

from __future__ import annotations

import json
from typing import Any

import pytest
from playwright.sync_api import Page, Route, expect
from server.conftest import RunningServer, ServerProcess, StartServer
from server.web.conftest import OpenPage, last_answer, send, until_idle

CHAT = "**/v1/chat/completions"
TOOLS = [{"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {}}}}]
CALL = '<tool_call>{"name": "add", "arguments": {"a": 1, "b": "ü"}}</tool_call>'


@pytest.fixture(scope="module")
def slow_server(start_server: StartServer) -> RunningServer:
    """A server that takes ten milliseconds a token."""
    return start_server(engine={"step_s": 0.01})


def prompt_of(server: RunningServer) -> str:
    return server.engine.tokenizer.decode(list(server.engine.requests[-1].prompt_token_ids))


def recite(page: Page, *deltas: dict[str, Any], finish: str = "stop") -> None:
    """Lets the server answer the next request with these deltas."""
    chunks: list[dict[str, Any]] = [{"choices": [{"index": 0, "delta": delta}]} for delta in deltas]
    chunks.append({"choices": [{"index": 0, "delta": {}, "finish_reason": finish}]})
    chunks.append({"choices": [], "usage": {"prompt_tokens": 3, "completion_tokens": len(deltas), "total_tokens": 9}})
    body = "".join(f"data: {json.dumps(chunk)}\n\n" for chunk in chunks) + "data: [DONE]\n\n"

    def fulfill(route: Route) -> None:
        route.fulfill(status=200, content_type="text/event-stream", body=body)

    page.route(CHAT, fulfill, times=1)


# The browser starts, and a server: 1 s each.
def test_the_embedded_model_answers(demo_server: ServerProcess, open_page: OpenPage) -> None:
    page = open_page(demo_server.url)
    expect(page.get_by_role("heading", name="The wheel is ready.")).to_be_visible()
    page.get_by_role("button", name="What is 47 + 38?").click()
    expect(last_answer(page)).to_contain_text("85")
    until_idle(page)
    expect(page.locator(".stats")).to_contain_text("tokens")
    assert " of 2,048 tokens" in page.locator("#context").inner_text()
    send(page, "Who are you?")
    expect(last_answer(page)).to_contain_text("Tidewheel")
    assert page.locator(".turn").count() == 4


@pytest.mark.sweep
def test_the_embedded_model_calls_a_tool_and_reads_its_result(demo_server: ServerProcess, open_page: OpenPage) -> None:
    page = open_page(demo_server.url, viewport={"width": 1400, "height": 900})
    weather = {
        "name": "get_weather", "description": "Get the current weather in a city",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    }  # fmt: skip
    page.get_by_text("Tools and more, as JSON").click()
    page.get_by_label("tools", exact=True).fill(json.dumps([{"type": "function", "function": weather}]))
    page.get_by_label("temperature").fill("0")
    send(page, "What is the weather in Paris?")
    expect(page.locator(".call summary")).to_have_text("Calls get_weather")
    expect(page.locator(".call pre")).to_contain_text("Paris")
    page.get_by_label("Result of get_weather").fill('{"temperature": 21, "sky": "clear"}')
    page.get_by_role("button", name="Send the result").click()
    until_idle(page)
    expect(last_answer(page)).to_contain_text("21")


def test_an_answer_is_shown_as_it_comes_and_can_be_stopped(slow_server: RunningServer, open_page: OpenPage) -> None:
    page = open_page(slow_server.url)
    send(page, f"SAY({'x' * 5000})YAS")
    expect(last_answer(page)).to_contain_text("xxxxx")
    seen = len(last_answer(page).inner_text())
    expect(last_answer(page)).to_contain_text("x" * (seen + 20))
    assert page.locator("body.busy").count() == 1
    page.get_by_role("button", name="Stop").click()
    until_idle(page)
    expect(page.locator(".stats")).to_contain_text("stopped")
    expect(page.get_by_role("button", name="Send")).to_be_visible()
    stopped = last_answer(page).inner_text()
    send(page, "SAY(go on)YAS")
    until_idle(page)
    expect(last_answer(page)).to_have_text("go on")
    assert f"<assistant>{stopped}<user>" in prompt_of(slow_server)
    assert slow_server.engine.stats().num_running == 0


def test_enter_during_an_answer_sends_nothing(slow_server: RunningServer, open_page: OpenPage) -> None:
    page = open_page(slow_server.url)
    send(page, "LOOP(")
    expect(last_answer(page)).to_contain_text("x")
    send(page, "later")
    assert page.locator(".user").count() == 1
    assert page.get_by_label("Message", exact=True).input_value() == "later"
    page.keyboard.press("Escape")
    until_idle(page)


@pytest.mark.sweep
def test_regenerate_asks_the_same_again(server: RunningServer, open_page: OpenPage) -> None:
    page = open_page(server.url)
    send(page, "SAY(first)YAS")
    expect(last_answer(page)).to_have_text("first")
    until_idle(page)
    asked, prompt = len(server.engine.requests), prompt_of(server)
    page.get_by_role("button", name="Retry").click()
    until_idle(page)
    expect(last_answer(page)).to_have_text("first")
    assert (len(server.engine.requests), prompt_of(server)) == (asked + 1, prompt)
    assert page.locator(".turn").count() == 2


def test_edited_messages_and_retried_answers_are_branches(server: RunningServer, open_page: OpenPage) -> None:
    page = open_page(server.url, viewport={"width": 1000, "height": 800})
    for text in ("SAY(one)YAS", "SAY(two)YAS"):
        send(page, text)
        until_idle(page)
    page.get_by_role("button", name="Edit message").first.click()
    box = page.get_by_role("textbox", name="Edit message")
    expect(box).to_be_focused()
    box.press("Escape")
    expect(page.get_by_role("button", name="Edit message").first).to_be_focused()
    page.keyboard.press("Enter")
    box.fill("SAY(three)YAS")
    box.press("Enter")
    until_idle(page)
    expect(last_answer(page)).to_have_text("three")
    assert page.locator(".turn").count() == 2
    assert prompt_of(server) == "<user>SAY(three)YAS<assistant>"
    page.get_by_role("button", name="Retry").click()
    until_idle(page)
    expect(page.locator(".branches")).to_have_text(["2 of 2", "2 of 2"])
    page.get_by_role("button", name="Previous branch").first.click()
    expect(page.locator(".answer .markdown")).to_have_text(["one", "two"])
    page.reload()
    page.locator("#conversations li > button").first.click()
    expect(page.locator(".answer .markdown")).to_have_text(["one", "two"])
    expect(page.locator(".branches")).to_have_text(["1 of 2"])
    page.get_by_role("button", name="Next branch").click()
    expect(last_answer(page)).to_have_text("three")
    expect(page.locator(".branches")).to_have_text(["2 of 2", "2 of 2"])


@pytest.mark.sweep
def test_conversations_of_before_there_were_branches_open(server: RunningServer, open_page: OpenPage) -> None:
    page = open_page(server.url, viewport={"width": 1000, "height": 800})
    page.evaluate("""() => {
      const messages = [{ role: "user", content: "SAY(old)YAS" }, { role: "assistant", content: "old" }];
      localStorage.setItem("tidewheel.conversation.a", JSON.stringify({ updated: 1, messages }));
      localStorage.setItem("tidewheel.conversations", JSON.stringify([{ id: "a", title: "o", updated: 1, size: 90 }]));
    }""")
    page.reload()
    page.get_by_role("button", name="o", exact=True).click()
    page.get_by_role("button", name="Retry").click()
    until_idle(page)
    expect(page.locator(".branches")).to_have_text(["2 of 2"])


# A page with other permissions is a new one, which takes the browser a second.
@pytest.mark.sweep
def test_what_is_copied_is_what_was_written(server: RunningServer, open_page: OpenPage) -> None:
    page = open_page(server.url, permissions=["clipboard-read", "clipboard-write"])
    send(page, "SAY(**bold**\n\n```py\nprint(1)\n```)YAS")
    until_idle(page)
    clipboard = "navigator.clipboard.readText()"
    page.get_by_role("button", name="Copy answer").click()
    expect(page.get_by_role("button", name="Copied")).to_be_visible()
    assert page.evaluate(clipboard) == "**bold**\n\n```py\nprint(1)\n```"
    page.get_by_role("button", name="Copy code").click()
    expect(page.locator(".code").get_by_role("button", name="Copied")).to_be_visible()
    assert page.evaluate(clipboard) == "print(1)"
    page.evaluate("Object.defineProperty(navigator, 'clipboard', {value: undefined})")  # as over plain http
    page.get_by_role("article", name="You").hover()
    page.get_by_role("button", name="Copy message").click()
    page.get_by_label("Message", exact=True).focus()
    page.keyboard.press("Control+V")
    assert page.get_by_label("Message", exact=True).input_value().startswith("SAY(**bold**")


def test_parameters_go_into_the_request_and_are_kept(server: RunningServer, open_page: OpenPage) -> None:
    page = open_page(server.url, viewport={"width": 1400, "height": 900})
    values = {
        "temperature": "0.25", "top_p": "0.5", "top_k": "7", "min_p": "0.1", "max_tokens": "9", "seed": "42",
        "repetition_penalty": "1.1", "presence_penalty": "-1", "frequency_penalty": "0.5",
    }  # fmt: skip
    for name, value in values.items():
        page.get_by_label(name, exact=True).fill(value)
    page.get_by_label("System prompt").fill("Be brief.")
    page.get_by_label("stop one string").fill("END\na\\nb")
    page.get_by_label("thinking").select_option("off")
    page.get_by_text("Tools and more, as JSON").click()
    page.get_by_label("other fields").fill('{"min_tokens": 1, "chat_template_kwargs": {"shout": "loud"}}')
    page.reload()
    send(page, "SAY(a b c)YAS")
    until_idle(page)
    sampling = server.engine.requests[-1].sampling
    assert {name: getattr(sampling, name) for name in values} == {name: float(value) for name, value in values.items()}
    assert (sampling.stop, sampling.min_tokens) == (("END", "a\nb"), 1)
    assert prompt_of(server) == "<system>Be brief.<user>SAY(a b c)YASLOUD<assistant>"
    page.get_by_role("button", name="Reset").click()
    page.reload()
    send(page, "SAY(again)YAS")
    until_idle(page)
    assert server.engine.requests[-1].sampling.top_k == 0
    assert "Be brief" not in prompt_of(server)


@pytest.mark.sweep
def test_a_parameter_that_cannot_be_used_is_shown(server: RunningServer, open_page: OpenPage) -> None:
    page = open_page(server.url, viewport={"width": 700, "height": 900})
    asked = len(server.engine.requests)
    page.get_by_role("button", name="Parameters", exact=True).click()
    page.get_by_text("Tools and more, as JSON").click()
    page.get_by_label("tools", exact=True).fill("[{]")
    page.get_by_role("button", name="Close the parameters").click()
    send(page, "SAY(hello)YAS")
    box = page.get_by_label("tools", exact=False).first
    expect(box).to_be_focused()
    expect(page.get_by_role("alert")).to_contain_text("not JSON")
    assert len(server.engine.requests) == asked
    box.fill("")
    page.get_by_label("top_p").fill("0")
    page.keyboard.press("Escape")
    expect(page.get_by_label("Message", exact=True)).to_have_value("SAY(hello)YAS")
    send(page, "SAY(hello)YAS")
    expect(page.locator(".complaint")).to_contain_text("top_p")  # in the server's words
    expect(page.get_by_label("top_p")).to_be_focused()
    page.get_by_label("top_p").fill("1")
    page.keyboard.press("Escape")
    page.get_by_role("button", name="Retry").click()
    until_idle(page)
    expect(last_answer(page)).to_have_text("hello")
    assert page.locator(".failure").count() == 0


def test_reasoning_is_folded_away_and_sent_back(start_server: StartServer, open_page: OpenPage) -> None:
    page = open_page(start_server(reasoning_parser="qwen3").url)
    send(page, "SAY(<think>\nLet me *think*.\n</think>\n\nSo it **is**.)YAS")
    until_idle(page)
    expect(last_answer(page)).to_have_text("So it is.")
    thoughts = page.locator(".thoughts")
    expect(thoughts).to_be_hidden()
    page.get_by_text("Thought").click()
    expect(thoughts).to_have_text("Let me *think*.")
    with page.expect_request(CHAT) as request:
        send(page, "SAY(fine)YAS")
    answer = request.value.post_data_json["messages"][1]
    assert answer == {"role": "assistant", "content": "So it **is**.", "reasoning_content": "Let me *think*."}
    until_idle(page)


@pytest.mark.sweep
def test_streamed_tool_calls_grow_and_all_results_go_back(open_page: OpenPage, server: RunningServer) -> None:
    page = open_page(server.url)

    def part(index: int, arguments: str, **first: Any) -> dict[str, Any]:
        name = {"name": first.pop("name")} if first else {}
        return {"tool_calls": [{"index": index, **first, "function": {**name, "arguments": arguments}}]}

    recite(page, part(0, "", id="c1", type="function", name="add"), part(0, '{"a":'), part(0, " 1}"),
           part(1, "{}", id="c2", type="function", name="now"), finish="tool_calls")  # fmt: skip
    send(page, "What is it?")
    until_idle(page)
    assert page.locator(".call summary").all_inner_texts() == ["Calls add", "Calls now"]
    assert page.locator(".call pre").all_inner_texts() == ['{\n  "a": 1\n}', "{}"]
    page.reload()
    page.get_by_role("button", name="What is it?", exact=True).click()
    page.get_by_label("Result of add").fill("SAY(two)YAS")
    page.get_by_label("Result of now").fill("noon")
    page.evaluate("document.querySelector('[name=extra]').value = '[]'")  # unusable, so that nothing is sent
    page.get_by_role("button", name="Send the results").click()
    page.get_by_label("other fields").fill("")
    expect(page.get_by_label("Result of now")).to_have_value("noon")
    page.get_by_role("button", name="Send the results").click()
    until_idle(page)
    assert page.locator(".results").count() == 0
    assert prompt_of(server) == (
        '<user>What is it?<assistant>[add {"a": 1}][now {}][tool c1]<tool>SAY(two)YAS[tool c2]<tool>noon<assistant>'
    )
    expect(page.locator(".tool summary").first).to_have_text("Result of add")


def test_a_call_that_was_cut_is_shown_but_asks_for_nothing(open_page: OpenPage, server: RunningServer) -> None:
    page = open_page(server.url)
    call = {"index": 0, "id": "c1", "function": {"name": "add", "arguments": '{"a": '}}
    recite(page, {"content": "Wait."}, {"tool_calls": [call]}, finish="length")
    send(page, "What is it?")
    until_idle(page)
    expect(page.locator(".call pre")).to_have_text('{"a":')
    expect(page.locator(".stats")).to_contain_text("cut at the limit of tokens")
    assert page.locator(".results").count() == 0
    send(page, "SAY(on)YAS")
    until_idle(page)
    assert prompt_of(server) == "<user>What is it?<assistant>Wait.<user>SAY(on)YAS<assistant>"


def test_a_tool_call_of_a_parser_is_shown(start_server: StartServer, open_page: OpenPage) -> None:
    server = start_server(tool_call_parser="hermes")
    page = open_page(server.url, viewport={"width": 1400, "height": 900})
    page.get_by_text("Tools and more, as JSON").click()
    page.get_by_label("tools", exact=True).fill(json.dumps(TOOLS))
    send(page, f"SAY(Let me see. {CALL})YAS")
    until_idle(page)
    expect(last_answer(page)).to_have_text("Let me see.")
    assert json.loads(page.locator(".call pre").inner_text()) == {"a": 1, "b": "ü"}
    page.get_by_label("Result of add").fill("SAY(It is 3.)YAS")
    page.get_by_role("button", name="Send the result").click()
    expect(last_answer(page)).to_have_text("It is 3.")


@pytest.mark.sweep
def test_a_request_that_fails_in_the_middle_says_so(server: RunningServer, open_page: OpenPage) -> None:
    page = open_page(server.url)
    send(page, "BREAK(")
    expect(page.locator(".failure")).to_be_visible()
    expect(last_answer(page)).to_have_text("o")
    until_idle(page)
    expect(page.get_by_role("button", name="Retry")).to_be_visible()


def test_a_broken_connection_says_so(server: RunningServer, open_page: OpenPage) -> None:
    page = open_page(server.url)
    cut = 'data: {"choices": [{"index": 0, "delta": {"content": "half"}}]}\n\n'
    page.route(CHAT, lambda route: route.fulfill(content_type="text/event-stream", body=cut), times=1)
    send(page, "SAY(whole)YAS")
    expect(page.locator(".failure")).to_have_text("The connection ended before the answer did.")
    expect(last_answer(page)).to_have_text("half")
    page.route(CHAT, lambda route: route.abort(), times=1)
    page.get_by_role("button", name="Retry").click()
    expect(page.locator(".failure")).to_have_text("The server cannot be reached.")
    page.get_by_role("button", name="Retry").click()
    expect(last_answer(page)).to_have_text("whole")
    assert page.locator(".failure").count() == 0


def test_a_busy_server_says_when_to_come_again(server: RunningServer, open_page: OpenPage) -> None:
    page = open_page(server.url)
    body = json.dumps({"error": {"message": "The queue is full.", "type": "x", "param": None, "code": None}})
    page.route(CHAT, lambda route: route.fulfill(status=429, headers={"retry-after": "7"}, body=body), times=1)
    send(page, "hello")
    expect(page.locator(".failure")).to_have_text("The queue is full. Try again in 7 s.")


def test_conversations_are_kept_opened_deleted_and_brought_back(server: RunningServer, open_page: OpenPage) -> None:
    page = open_page(server.url, viewport={"width": 1000, "height": 800})
    for text in ("SAY(first answer)YAS", "SAY(second answer)YAS"):
        page.get_by_role("button", name="New conversation").click()
        send(page, text)
        until_idle(page)
    page.reload()
    titles = page.locator("#conversations li > button:first-child")
    expect(titles).to_have_text(["SAY(second answer)YAS", "SAY(first answer)YAS"])
    titles.nth(1).click()
    expect(last_answer(page)).to_have_text("first answer")
    expect(titles.nth(1)).to_have_attribute("aria-current", "true")
    page.get_by_role("button", name="Actions for “SAY(first").click()
    page.get_by_role("button", name="Delete", exact=True).click()
    expect(titles).to_have_count(1)
    expect(page.locator(".turn")).to_have_count(0)
    page.get_by_role("button", name="Undo").click()
    expect(titles).to_have_count(2)
    page.get_by_role("button", name="Delete all").click()
    expect(titles).to_have_count(0)
    page.reload()
    expect(titles).to_have_count(0)
    assert page.evaluate("Object.keys(localStorage).filter((key) => key.startsWith('tidewheel.conversation.'))") == []


@pytest.mark.sweep
def test_a_conversation_that_is_deleted_while_it_is_answered_stays_deleted(
    slow_server: RunningServer, open_page: OpenPage
) -> None:
    page = open_page(slow_server.url, viewport={"width": 1000, "height": 800})
    send(page, "LOOP(")
    expect(last_answer(page)).to_contain_text("x")
    page.get_by_role("button", name="Actions for “LOOP(").click()
    page.get_by_role("button", name="Delete", exact=True).click()
    until_idle(page)
    expect(page.locator("#conversations li")).to_have_count(0)
    page.reload()
    expect(page.locator("#conversations li")).to_have_count(0)


@pytest.mark.sweep
def test_an_answer_is_kept_when_the_page_goes(slow_server: RunningServer, open_page: OpenPage) -> None:
    page = open_page(slow_server.url, viewport={"width": 1000, "height": 800})
    send(page, "LOOP(")
    expect(last_answer(page)).to_contain_text("xxx")
    page.reload()
    page.get_by_role("button", name="LOOP(", exact=True).click()
    expect(last_answer(page)).to_contain_text("xxx")


KEEP_MANY = """async ([count, length]) => {
  const { History } = await import("/web/history.js");
  const { Conversation } = await import("/web/conversation.js");
  localStorage.clear();
  const history = new History(localStorage);
  const kept = [];
  for (let i = 0; i < count; i += 1) {
    const all = [{ role: "user", content: `${i} ${"x".repeat(length)}` }];
    kept.push(history.save(new Conversation({ id: `c${i}`, updated: i, all })));
  }
  const size = Object.values(localStorage).join("").length;
  return { kept: kept.every(Boolean), ids: history.list().map((entry) => entry.id), size,
           items: Object.keys(localStorage).length };
}"""


@pytest.mark.sweep
def test_what_is_kept_is_bounded(server: RunningServer, open_page: OpenPage) -> None:
    page = open_page(server.url)
    many = page.evaluate(KEEP_MANY, [130, 10])
    assert (many["kept"], many["ids"]) == (True, [f"c{i}" for i in range(129, 29, -1)])
    assert many["items"] == len(many["ids"]) + 1
    large = page.evaluate(KEEP_MANY, [14, 400_000])
    assert (large["kept"], large["ids"]) == (True, [f"c{i}" for i in range(13, 4, -1)])
    assert large["size"] < 4_100_000
    assert page.evaluate(KEEP_MANY, [1, 4_100_000]) == {"kept": False, "ids": [], "size": 2, "items": 1}
