"""The page's files over HTTP: their headers, who may get them, and the option that turns them off."""

from __future__ import annotations

import re
from pathlib import Path

import httpx
import pytest
from server.conftest import RunningServer, ServerProcess, StartServer

import tidewheel.server
from tidewheel.server.options.serve import parse_options

FOLDER = Path(tidewheel.server.__file__).with_name("web")
FILES = {
    "/" if path.name == "index.html" else f"/web/{path.relative_to(FOLDER).as_posix()}": path
    for path in sorted(FOLDER.rglob("*"))
    if path.is_file()
}
KINDS = {
    ".html": "text/html", ".css": "text/css", ".js": "text/javascript", ".svg": "image/svg+xml", ".txt": "text/plain",
    ".woff2": "font/woff2",
}  # fmt: skip


def directives(response: httpx.Response) -> dict[str, list[str]]:
    policy = response.headers["content-security-policy"]
    return {name: sources for name, *sources in (part.split() for part in policy.split(";"))}


@pytest.mark.parametrize("address", FILES)
def test_every_file_is_served_as_what_it_is(server: RunningServer, address: str) -> None:
    response = server.http.get(address)
    assert response.status_code == 200
    assert response.content == FILES[address].read_bytes()
    assert response.headers["content-type"].partition(";")[0] == KINDS[FILES[address].suffix]
    assert response.headers["x-content-type-options"] == "nosniff"
    assert response.headers["referrer-policy"] == "no-referrer"
    assert response.headers["x-frame-options"] == "DENY"
    policy = directives(response)
    assert policy["default-src"] == ["'none'"]
    for name in ("script-src", "style-src", "font-src", "connect-src"):
        assert policy[name] == ["'self'"]
    assert policy["img-src"] == ["'self'", "data:"]
    for name in ("base-uri", "form-action", "frame-ancestors"):
        assert policy[name] == ["'none'"]


@pytest.mark.parametrize("address", FILES)
def test_a_file_that_is_known_is_not_sent_again(server: RunningServer, address: str) -> None:
    first = server.http.get(address)
    assert first.headers["cache-control"] == "no-cache"
    for known in (first.headers["etag"], f'"other", W/{first.headers["etag"]}', "*"):
        again = server.http.get(address, headers={"if-none-match": known})
        assert (again.status_code, again.content, again.headers["etag"]) == (304, b"", first.headers["etag"])
    assert server.http.get(address, headers={"if-none-match": '"other"'}).status_code == 200


def test_head_is_get_without_a_body(server: RunningServer) -> None:
    head, get = server.http.head("/"), server.http.get("/")
    assert (head.status_code, head.content, head.headers["etag"]) == (200, b"", get.headers["etag"])
    assert head.headers["content-length"] == get.headers["content-length"]


@pytest.mark.parametrize("address", ["/web", "/web/", "/web/no.js", "/web/../server/app.py", "/web/%2e%2e/api/web.py"])
def test_nothing_else_is_served(server: RunningServer, address: str) -> None:
    response = server.http.send(httpx.Request("GET", f"{server.url}{address}"))
    assert response.status_code == 404
    assert response.json()["error"]["type"] == "not_found_error"


def test_the_page_takes_nothing_but_get(server: RunningServer) -> None:
    assert server.http.put("/").status_code == 405


def test_the_page_needs_no_key_where_the_api_does(start_server: StartServer) -> None:
    server = start_server(api_keys=["secret"])
    assert {server.http.get(address).status_code for address in FILES} == {200}
    assert server.http.get("/v1/models").status_code == 401
    assert server.http.get("/web/nothing.js").status_code == 401


def test_the_page_can_be_switched_off(start_server: StartServer) -> None:
    server = start_server(web_ui=False)
    # Embedding models take what is posted to the root.
    assert {address: server.http.get(address).status_code for address in FILES} == {
        **dict.fromkeys(FILES, 404),
        "/": 405,
    }
    assert server.http.get("/v1/models").status_code == 200
    closed = start_server(web_ui=False, api_keys=["secret"])
    assert {closed.http.get(address).status_code for address in FILES} == {401}


def test_the_command_has_the_page_and_a_switch_for_it(demo_server: ServerProcess) -> None:
    assert httpx.get(demo_server.url, trust_env=False).text == FILES["/"].read_text()
    given, switched = parse_options([], {}), parse_options(["--disable-web-ui"], {})
    assert (given.app.web_ui, switched.app.web_ui) == (True, False)


def test_the_page_has_no_script_or_style_in_its_markup_and_names_only_its_own_files() -> None:
    markup = FILES["/"].read_text()
    assert re.findall(r"<style|<script(?![^>]* src=)|\sstyle=|\son\w+=|https?:", markup) == []
    linked = set(re.findall(r'(?:src|href)="(?!#)([^"]+)"', markup))
    assert {f"/{link}" for link in linked} <= set(FILES)


def test_the_libraries_are_small_and_come_with_their_licences() -> None:
    libraries = [folder for folder in (FOLDER / "vendor").iterdir() if folder.is_dir()]
    assert {folder.name for folder in libraries} == {"highlight", "katex"}
    assert all("Copyright" in (folder / "LICENSE.txt").read_text() for folder in libraries)
    assert sum(path.stat().st_size for path in (FOLDER / "vendor").rglob("*") if path.is_file()) < 800_000
    css = (FOLDER / "vendor/katex/katex.css").read_text()
    fonts = set(re.findall(r"url\(([^)]+)\)", css))
    assert fonts == {f"fonts/{path.name}" for path in (FOLDER / "vendor/katex/fonts").iterdir()}
