"""`/docs` in a browser: endpoints with their parameters, and lines to try."""

from __future__ import annotations

import pytest
from playwright.sync_api import expect
from server.conftest import RunningServer, StartServer
from server.web.conftest import OpenPage


def test_endpoints_parameters_and_lines_to_try(server: RunningServer, open_page: OpenPage) -> None:
    page = open_page(f"{server.url}/docs")
    paths = page.request.get(f"{server.url}/openapi.json").json()["paths"]
    expect(page.locator("nav a")).to_have_text(list(paths))
    chat = page.locator("#post_v1_chat_completions")
    expect(chat.locator("pre")).to_contain_text(f"curl {server.url}/v1/chat/completions")
    expect(chat.locator("pre")).not_to_contain_text("Authorization")
    chat.get_by_text("Body", exact=True).click()
    field = chat.locator(".field", has=page.locator("code", has_text="messages"))
    expect(field).to_contain_text("list of chat.Message required")
    field.locator("summary").first.click()
    expect(field.get_by_text("tool_call_id")).to_be_visible()
    expect(chat.locator(".field", has_text="temperature")).to_contain_text("number at least 0, at most 100")
    expect(page.locator(".error")).to_have_count(0)


@pytest.mark.sweep
def test_keys_are_mentioned_where_they_are_needed(start_server: StartServer, open_page: OpenPage) -> None:
    page = open_page(f"{start_server(api_keys=['secret']).url}/docs")
    expect(page.locator("#post_v1_completions pre")).to_contain_text("Authorization: Bearer $API_KEY")
    expect(page.locator("#get_health pre")).not_to_contain_text("Authorization")
