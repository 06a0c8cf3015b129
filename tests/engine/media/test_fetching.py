"""MediaFetcher: only what the operator allows is fetched, from where it was checked to be, within bounds."""

from __future__ import annotations

import asyncio
import base64
import os
import ssl
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from tidewheel.engine.errors import InvalidRequestError
from tidewheel.engine.media.addresses import is_public_address
from tidewheel.engine.media.fetching import MediaFetcher

WHERE = "messages[0].content[0].image_url"
OK = b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\nimage"


def fetched(fetcher: MediaFetcher, url: str) -> bytes:
    try:
        return asyncio.run(fetcher.fetch(url, WHERE))
    finally:
        fetcher.close()


def refusal(fetcher: MediaFetcher, url: str) -> str:
    with pytest.raises(InvalidRequestError) as refused:
        fetched(fetcher, url)
    assert refused.value.param == WHERE
    said = str(refused.value)
    assert said.startswith(f"{WHERE} cannot be fetched: ")
    return said.removeprefix(f"{WHERE} cannot be fetched: ")


# The addresses that may be connected to.


@pytest.mark.parametrize("address", ["1.1.1.1", "93.184.216.34", "172.32.0.1", "2606:4700:4700::1111", "2a00:1450::1"])
def test_addresses_of_the_internet_are_public(address: str) -> None:
    assert is_public_address(address)


@pytest.mark.parametrize(
    "address",
    """
    nothing 127.0.0.1 127.255.255.255 0.0.0.0 0.1.2.3 10.0.0.1 172.16.0.1 172.31.255.255 192.168.1.1 100.64.0.1
    169.254.169.254 192.0.0.192 192.0.2.1 198.18.0.1 198.51.100.1 203.0.113.1 192.88.99.1 224.0.0.1 239.1.1.1 240.0.0.1
    255.255.255.255 100.100.100.200 168.63.129.16
    :: ::1 ::127.0.0.1 ::ffff:127.0.0.1 ::ffff:1.1.1.1 ::ffff:0:1.1.1.1 64:ff9b::7f00:1 64:ff9b::101:101 64:ff9b:1::1
    fe80::1 fe80::1%eth0 fec0::1 fc00::1 fd00:ec2::254 ff02::1 ff0e::1 100::1 2001::1 2001:db8::1 2001:20::1
    2002:7f00:1:: 2002:101:101:: 3fff::1 2606:4700::1111%1 5f00::1
    localhost 127.1 2130706433 0x7f000001 017700000001 1.1.1.1:80 example.com
    """.split(),
)
def test_other_addresses_are_not(address: str) -> None:
    assert not is_public_address(address)


# What is asked of a server.


class Server:
    """A server on this machine that gives each connection the next of `answers`, and then closes it."""

    def __init__(self, answers: list[bytes]) -> None:
        self.answers = answers
        self.requests: list[bytes] = []
        self.port = 0

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.requests.append(await reader.readuntil(b"\r\n\r\n"))
        answer = self.answers.pop(0)
        if answer == b"wait":
            await asyncio.sleep(30)
        for at in range(0, len(answer), 2**16):
            writer.write(answer[at : at + 2**16])
            await writer.drain()
        writer.close()


@asynccontextmanager
async def serving(*answers: bytes, tls: ssl.SSLContext | None = None) -> AsyncIterator[Server]:
    made = Server(list(answers))
    listener = await asyncio.start_server(made.serve, "127.0.0.1", 0, ssl=tls)
    made.port = listener.sockets[0].getsockname()[1]
    try:
        yield made
    finally:
        listener.close()


class Names:
    """Resolves every name to addresses of this machine, or as told, and remembers what it was asked."""

    def __init__(self, *addresses: str) -> None:
        self.addresses = list(addresses) or ["127.0.0.1"]
        self.asked: list[tuple[str, int]] = []

    def __call__(self, host: str, port: int) -> list[str]:
        self.asked.append((host, port))
        return self.addresses


def exchange(
    *answers: bytes,
    url: str = "http://images.test:PORT/a.png",
    names: Callable[[str, int], list[str]] | None = None,
    **options: Any,
) -> tuple[bytes | str, list[bytes]]:
    """What is fetched, or why it is not, and the requests that the server got.

    PORT in the URL, and :0/ in answers, stand for the server's port.
    """

    async def ask() -> tuple[bytes | str, list[bytes]]:
        async with serving(*answers) as server:
            server.answers = [answer.replace(b":0/", b":%d/" % server.port) for answer in server.answers]
            options.setdefault("allowed_domains", [f"images.test:{server.port}", f"other.test:{server.port}"])
            fetcher = MediaFetcher(
                resolve=names or Names(), is_allowed_address=lambda address: address.startswith("127."), **options
            )
            try:
                return await fetcher.fetch(url.replace("PORT", str(server.port)), WHERE), server.requests
            except InvalidRequestError as error:
                return str(error).removeprefix(f"{WHERE} cannot be fetched: "), server.requests
            finally:
                fetcher.close()

    return asyncio.run(ask())


def test_an_image_is_fetched_from_an_allowed_host(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing of the environment goes into the request."""
    for name in ("http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    names = Names()
    content, (request,) = exchange(OK, url="HTTP://Images.Test:PORT/a%20b.png?size=1&x=[]#part", names=names)
    assert content == b"image"
    ((host, port),) = names.asked
    assert host == "images.test"
    assert request.decode().split("\r\n") == [
        "GET /a%20b.png?size=1&x=[] HTTP/1.1",
        f"Host: images.test:{port}",
        "User-Agent: tidewheel",
        "Accept: image/*",
        "Accept-Encoding: identity",
        "Connection: close",
        "",
        "",
    ]


@pytest.mark.parametrize(
    "answer",
    [
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n3\r\nima\r\n2\r\nge\r\n0\r\n\r\n",
        b"HTTP/1.1 200 OK\r\n\r\nimage",
        b"HTTP/1.0 200 OK\r\nContent-Type: text/plain\r\n\r\nimage",
        b"HTTP/1.1 103 Early Hints\r\nLink: </a>\r\nContent-Length: 90\r\n\r\n" + OK,
    ],
    ids=["chunked", "until the end", "HTTP/1.0", "hints"],
)
def test_bodies_of_all_kinds_are_read(answer: bytes) -> None:
    assert exchange(answer)[0] == b"image"


@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        (b"HTTP/1.1 404 Not Found\r\nContent-Length: 0\r\n\r\n", "the server's answer has the status 404"),
        (b"HTTP/1.1 206 Partial Content\r\nContent-Length: 1\r\n\r\na", "the server's answer has the status 206"),
        (b"HTTP/1.1 304 Not Modified\r\n\r\n", "the server's answer has the status 304"),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 1001\r\n\r\n", "it has more than 1000 bytes"),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 1" + b"0" * 18 + b"\r\n\r\n", "it has more than 1000 bytes"),
        (b"HTTP/1.1 200 OK\r\n\r\n" + bytes(1001), "it has more than 1000 bytes"),
        (b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n3e9\r\n" + bytes(1001), "it has more than 1000 bytes"),
        (b"HTTP/1.1 200 OK\r\nContent-Encoding: gzip\r\nContent-Length: 5\r\n\r\nimage", "the server compresses it"),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 6\r\n\r\nimage", "closed the connection too early"),
        (b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n9\r\nimage", "closed the connection too early"),
        (b"HTTP/1.1 100 Continue\r\n\r\n", "closed the connection too early"),
        (b"", "closed the connection too early"),
        (b"SSH-2.0-OpenSSH_9.2\r\n", "the server does not speak HTTP"),
        (b"HTTP/1.1 200 OK\r\n" + b"A: b\r\n" * 30_000, "the server sends too many headers"),
        (
            b"HTTP/1.1 101 Switching Protocols\r\nUpgrade: x\r\nConnection: upgrade\r\n\r\n",
            "the server does not speak HTTP",
        ),
    ],
)
def test_other_answers_are_refused(answer: bytes, reason: str) -> None:
    content, _ = exchange(answer, max_bytes=1000)
    assert isinstance(content, str)
    assert reason in content


def test_as_many_bytes_as_are_allowed_are_read() -> None:
    body = bytes(2**18)
    answer = b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % len(body) + body
    assert exchange(answer, max_bytes=len(body))[0] == body


def test_a_slow_server_is_left() -> None:
    content, requests = exchange(b"wait", timeout_s=0.3)
    assert content == "it takes longer than 0.3 s (--image-fetch-timeout)"
    assert requests


def test_a_name_is_resolved_once_and_no_second_address_counts() -> None:
    """A name that first has a harmless address and then another one leads to the first."""

    class Rebinding(Names):
        def __call__(self, host: str, port: int) -> list[str]:
            super().__call__(host, port)
            return ["127.0.0.1"] if len(self.asked) == 1 else ["10.0.0.1"]

    names = Rebinding()
    content, (request,) = exchange(OK, names=names)
    assert content == b"image"
    assert len(names.asked) == 1
    assert b"\r\nHost: images.test:" in request


def test_the_next_address_is_tried_if_one_does_not_answer() -> None:
    assert exchange(OK, names=Names("127.0.0.9", "127.0.0.1"))[0] == b"image"


@pytest.mark.parametrize("addresses", [["10.0.0.1"], ["127.0.0.1", "10.0.0.1"], ["::1"], ["::ffff:127.0.0.1"]])
def test_a_name_with_an_address_that_is_not_public_is_refused(addresses: list[str]) -> None:
    """Even if another of its addresses is. Here those of this machine count as public."""
    assert exchange(OK, names=Names(*addresses)) == ("its host has no public address", [])


@pytest.mark.parametrize("address", ["127.0.0.1", "169.254.169.254", "::1", "::ffff:10.0.0.1", "64:ff9b::a00:1"])
def test_by_default_only_public_addresses_count(address: str) -> None:
    fetcher = MediaFetcher(allowed_domains=["images.test"], resolve=Names(address))
    assert refusal(fetcher, "http://images.test/a.png") == "its host has no public address"


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "[::1]", "2130706433", "0x7f.1", "127.1"])
def test_this_machine_is_never_asked_even_if_it_is_allowed(host: str) -> None:
    fetcher = MediaFetcher(allowed_domains=[host])
    assert refusal(fetcher, f"http://{host}/a.png") == "its host has no public address"


def test_a_name_that_does_not_exist_says_no_more_than_one_that_is_private() -> None:
    def unknown(host: str, port: int) -> list[str]:
        raise OSError(f"{host} is not known by 10.0.0.53")

    fetcher = MediaFetcher(allowed_domains=["images.test"], resolve=unknown)
    assert refusal(fetcher, "http://images.test/") == "its host has no public address"


def test_a_host_that_does_not_answer_says_no_address() -> None:
    content, _ = exchange(OK, names=Names("127.0.0.9"))
    assert content == "there is no connection to its host"


# Which URLs.

ALLOWED = "its host is not among those that this server fetches from (--allowed-media-domains)"


@pytest.mark.parametrize(
    ("allowed", "url", "is_allowed"),
    [
        ([], "https://example.com/a.png", False),
        (["example.com"], "https://example.com/a.png", True),
        (["Example.COM"], "https://eXample.com/a.png", True),
        (["example.com"], "https://example.com", True),
        (["example.com"], "http://example.com:80/a.png", True),
        (["example.com"], "https://example.com?a", True),
        (["example.com"], "https://www.example.com/a.png", False),
        (["example.com"], "https://notexample.com/a.png", False),
        (["example.com"], "https://example.com.evil.test/a.png", False),
        (["example.com"], "https://example.com./a.png", False),
        (["example.com"], "https://example.com:8443/a.png", False),
        (["example.com"], "https://example.com:80/a.png", False),
        (["example.com"], "http://example.com:443/a.png", False),
        (["example.com"], "http://example.com:22/a.png", False),
        (["example.com:8443"], "https://example.com:8443/a.png", True),
        (["example.com:8443"], "https://example.com/a.png", False),
        (["[2606:4700::1]"], "https://[2606:4700::1]/a.png", True),
        (["2606:4700::1"], "https://[2606:4700::1]/a.png", True),
    ],
)
def test_only_allowed_hosts_are_asked(allowed: list[str], url: str, is_allowed: bool) -> None:
    names = Names("10.0.0.1")
    said = refusal(MediaFetcher(allowed_domains=allowed, resolve=names), url)
    assert said == ("its host has no public address" if is_allowed else ALLOWED)
    assert len(names.asked) == is_allowed


@pytest.mark.parametrize(
    "url",
    [
        "http://user@example.com/",
        "http://user:password@example.com/",
        "http://evil.test@example.com/",
        "http://example.com\\@evil.test/",
        "http:\\\\example.com/",
        "http://example.com\\evil",
        "http://exa mple.com/",
        "http://example.com/a b",
        "http://example.com/\r\nHost: evil.test",
        "http://example.com\t/",
        "http://example.com/ä",
        "http://ex\u00e4mple.com/",
        "http://example\u3002com/",
        "http://example.com:/",
        "http://example.com:123456/",
        "http://[::1%25eth0]/",
        "http:///a.png",
        "http:example.com/",
        "http",
        "https://%65xample.com/",
        "http://example.com/" + "a" * 9000,
    ],
)
def test_urls_that_parsers_may_read_differently_are_refused(url: str) -> None:
    names = Names()
    said = refusal(MediaFetcher(allowed_domains=["example.com", "evil.test"], resolve=names), url)
    assert said.startswith("its URL is not one of a host and a path in ASCII")
    assert not names.asked


@pytest.mark.parametrize("url", ["ftp://example.com/a", "gopher://example.com", "", "a.png", "javascript:1"])
def test_other_urls_are_refused(url: str) -> None:
    assert refusal(MediaFetcher(allowed_domains=["example.com"]), url) == "it is no data:, https: or http: URL"


# Redirects.


def moved(to: str, status: int = 302) -> bytes:
    return f"HTTP/1.1 {status} Moved\r\nLocation: {to}\r\nContent-Length: 0\r\n\r\n".encode()


def test_redirects_are_refused_by_default() -> None:
    content, requests = exchange(moved("/b.png"), OK)
    assert content == "it is redirected"
    assert len(requests) == 1


@pytest.mark.parametrize("to", ["/b.png", "b.png", "http://other.test:0/b.png", "//other.test:0/b.png"])
@pytest.mark.parametrize("status", [301, 302, 303, 307, 308])
def test_allowed_redirects_are_followed(to: str, status: int) -> None:
    names = Names()
    content, requests = exchange(moved(to, status), OK, names=names, max_redirects=1)
    assert content == b"image"
    assert requests[1].startswith(b"GET /b.png ")
    assert len(names.asked) == 2


@pytest.mark.parametrize(
    ("to", "reason"),
    [
        ("http://evil.test/b.png", ALLOWED),
        ("http://169.254.169.254/latest/meta-data", ALLOWED),
        ("http://images.test:22/", ALLOWED),
        ("file:///etc/passwd", "its URL is not one of a host"),
        ("http://user@images.test/", "its URL is not one of a host"),
    ],
)
def test_a_redirect_is_checked_like_a_url(to: str, reason: str) -> None:
    content, requests = exchange(moved(to), OK, max_redirects=3)
    assert isinstance(content, str)
    assert content.startswith(reason)
    assert len(requests) == 1


def test_a_redirect_to_a_name_with_a_private_address_is_refused() -> None:
    class Private(Names):
        def __call__(self, host: str, port: int) -> list[str]:
            return ["127.0.0.1" if host == "images.test" else "10.0.0.1"]

    content, requests = exchange(moved("http://other.test:0/b.png"), OK, names=Private(), max_redirects=3)
    assert content == "its host has no public address"
    assert len(requests) == 1


def test_only_so_many_redirects_are_followed() -> None:
    content, requests = exchange(*[moved("/a.png")] * 9, max_redirects=3)
    assert content == "it is redirected too often"
    assert len(requests) == 4


# TLS.


def over_tls(
    certificate_for: str, folder: Path, monkeypatch: pytest.MonkeyPatch, answer: bytes = OK, silent: str | None = None
) -> bytes | str:
    """What is fetched, or why it is not. At the address `silent` is a server that says nothing."""
    trustme = pytest.importorskip("trustme")
    authority = trustme.CA()
    authority.cert_pem.write_to_path(str(folder / "ca.pem"))
    monkeypatch.setenv("SSL_CERT_FILE", str(folder / "ca.pem"))
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    authority.issue_cert(certificate_for).configure_cert(context)

    async def nothing(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read()
        writer.close()

    async def ask() -> bytes | str:
        async with serving(answer, tls=context) as server:
            listener = await asyncio.start_server(nothing, silent, server.port) if silent else None
            fetcher = MediaFetcher(
                allowed_domains=[f"images.test:{server.port}"],
                resolve=Names(*[silent] if silent else [], "127.0.0.1"),
                is_allowed_address=lambda _: True,
                max_redirects=1,
                timeout_s=2 if silent else 20,
            )
            try:
                return await fetcher.fetch(f"https://images.test:{server.port}/a.png", WHERE)
            except InvalidRequestError as error:
                return str(error).removeprefix(f"{WHERE} cannot be fetched: ")
            finally:
                fetcher.close()
                if listener is not None:
                    listener.close()

    return asyncio.run(ask())


def test_an_address_that_says_nothing_leaves_time_for_the_next(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert over_tls("images.test", tmp_path, monkeypatch, silent="127.0.0.2") == b"image"


def test_certificates_are_those_of_the_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Though the connection is made to an address."""
    assert over_tls("images.test", tmp_path, monkeypatch) == b"image"


@pytest.mark.parametrize("other", ["other.test", "127.0.0.1"])
def test_other_certificates_are_refused(other: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert over_tls(other, tmp_path, monkeypatch) == "the server has no valid certificate for its name"


def test_a_redirect_away_from_tls_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    said = over_tls("images.test", tmp_path, monkeypatch, moved("http://images.test/"))
    assert said == "it is redirected from https to something else"


# data: URLs and base64.


@pytest.mark.parametrize("size", [0, 1, 2, 3, 1000, 49_150, 196_607, 196_608, 196_609, 700_001])
@pytest.mark.parametrize("form", ["plain", "lines", "unpadded", "ends its line"])
def test_data_urls_are_decoded(size: int, form: str) -> None:
    content = os.urandom(size)
    text = base64.b64encode(content).decode()
    if form == "lines":
        text = base64.encodebytes(content).decode().replace("\n", "\r\n")
    elif form == "unpadded":
        text = text.rstrip("=")
    elif form == "ends its line":
        text += "\n"
    assert fetched(MediaFetcher(), f"data:image/png;base64,{text}") == content


@pytest.mark.parametrize("head", ["data:image/jpeg;base64,", "DATA:Image/svg+xml;Base64,", "data:image/x;a=b;base64,"])
def test_the_media_type_does_not_count(head: str) -> None:
    assert fetched(MediaFetcher(), f"{head}aW1hZ2U=") == b"image"


@pytest.mark.parametrize(
    "url",
    [
        "data:,image",
        "data:image/png,image",
        "data:text/html;base64,aW1hZ2U=",
        "data:;base64,aW1hZ2U=",
        "data:image/png;base64",
        "data:image/" + "p" * 100_000,
        "data:image/png" + ";a=b" * 100_000 + ";base64,aW1hZ2U=",
    ],
)
def test_other_data_urls_are_refused(url: str) -> None:
    assert refusal(MediaFetcher(), url) == "a data: URL begins like data:image/jpeg;base64,"


@pytest.mark.parametrize("text", ["a", "aW1h=Z2U", "aW1h!2U=", "aW1hZ2U-_", "aW1hä", "====", "aW1hZ2U=" * 3])
@pytest.mark.parametrize("before", ["", "A" * 2**18])
def test_damaged_base64_is_refused(text: str, before: str) -> None:
    assert refusal(MediaFetcher(), f"data:image/png;base64,{before}{text}") == "its base64 is not valid"


@pytest.mark.parametrize("characters", [1336, 1338, 10**6, 10**7])
def test_large_base64_is_refused(characters: int) -> None:
    text = "A" * (characters // 4 * 4)
    assert refusal(MediaFetcher(max_bytes=1000), f"data:image/png;base64,{text}") == "it has more than 1000 bytes"


# Files of this machine.

NO_FILE = "there is no such file below --allowed-local-media-path"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with images, next to which is a secret."""
    made = tmp_path / "images"
    (made / "below").mkdir(parents=True)
    (made / "below/a b.png").write_bytes(b"image")
    (made / "large.png").write_bytes(bytes(1001))
    (made / "link.png").symlink_to("below/a b.png")
    (made / "out.png").symlink_to("../secret")
    (made / "outside").symlink_to("..")
    (made / "loop").symlink_to("loop")
    (made / "null").symlink_to("/dev/zero")
    os.mkfifo(made / "pipe")
    (tmp_path / "secret").write_bytes(b"secret")
    (tmp_path / "images2").mkdir()
    (tmp_path / "images2/a.png").write_bytes(b"secret")
    return made


@pytest.mark.parametrize("name", ["below/a%20b.png", "link.png", "below/../link.png", "outside/images/link.png"])
def test_files_below_the_folder_are_read(folder: Path, name: str) -> None:
    for start in ("file://", "FILE://localhost"):
        assert fetched(MediaFetcher(allowed_local_path=str(folder)), f"{start}{folder}/{name}") == b"image"


@pytest.mark.parametrize(
    "name",
    [
        "out.png", "outside/secret", "../secret", "..%2fsecret", "%2e%2e/secret", "../images2/a.png", "nothing.png",
        "below", "", ".", "loop", "null", "pipe", "below/a b.png/c", "a%00.png", "a" * 300, "%ff",
    ],
)  # fmt: skip
def test_nothing_else_is_read(folder: Path, name: str) -> None:
    """And nothing is said of what else there is."""
    assert refusal(MediaFetcher(allowed_local_path=str(folder)), f"file://{folder}/{name}") == NO_FILE


@pytest.mark.parametrize("url", ["file:///etc/passwd", "file:///proc/self/environ", "file:///dev/stdin"])
def test_files_elsewhere_are_not_read(folder: Path, url: str) -> None:
    assert refusal(MediaFetcher(allowed_local_path=str(folder)), url) == NO_FILE


def test_a_large_file_is_not_read(folder: Path) -> None:
    fetcher = MediaFetcher(allowed_local_path=str(folder), max_bytes=1000)
    assert refusal(fetcher, f"file://{folder}/large.png") == "it has more than 1000 bytes"


def test_without_a_folder_no_file_is_read(folder: Path) -> None:
    said = refusal(MediaFetcher(), f"file://{folder}/link.png")
    assert said == "this server reads no files of its own (--allowed-local-media-path)"


@pytest.mark.parametrize("url", ["file://other.test/a.png", "file:a.png", "file://a.png", "file:///a?b", "file:///a#b"])
def test_other_file_urls_are_refused(folder: Path, url: str) -> None:
    assert "a file: URL has an absolute path" in refusal(MediaFetcher(allowed_local_path=str(folder)), url)


# Frames of videos.


def frames_of(*urls: str, answers: Sequence[bytes] = (), **options: Any) -> list[bytes] | str:
    """The frames that URLs name, or why they are not read; with a single one, what a video's URL names."""

    async def ask() -> list[bytes]:
        async with serving(*answers) as server:
            fetcher = MediaFetcher(
                allowed_domains=[f"images.test:{server.port}"],
                resolve=Names(),
                is_allowed_address=lambda address: True,
                **options,
            )
            named = [url.replace("PORT", str(server.port)) for url in urls]
            try:
                if len(named) > 1:
                    return await fetcher.fetch_frames(named, WHERE)
                return await fetcher.fetch_video(named[0], WHERE)
            finally:
                fetcher.close()

    try:
        return asyncio.run(ask())
    except InvalidRequestError as error:
        return str(error)


def data_of(content: bytes) -> str:
    return base64.b64encode(content).decode()


def test_the_frames_of_a_data_url_are_told_apart() -> None:
    frames = [b"one", b"", b"three" * 1000]
    url = "data:video/jpeg;base64," + ",".join(map(data_of, frames))
    assert frames_of(url) == frames
    assert frames_of(url.replace("jpeg", "JPG")) == frames
    assert frames_of(f"data:video/mp4;base64,{data_of(b'mp4')}") == [b"mp4"]
    assert frames_of(f"data:image/gif;base64,{data_of(b'gif')}") == [b"gif"]
    assert frames_of("data:video/jpeg;base64,YQ==,!!") == f"{WHERE} cannot be fetched: its base64 is not valid"
    assert "it has more than 3000 bytes" in frames_of(url, max_bytes=3000)
    assert "it has 769 frames, and 768 are the most" in frames_of("data:video/jpeg;base64," + "," * 768)


def test_frames_are_fetched_together() -> None:
    """Within the size and the time of one image."""
    answer = b"HTTP/1.1 200 OK\r\nContent-Length: 400\r\n\r\n" + bytes(400)
    urls = ["http://images.test:PORT/a.png"] * 2
    assert frames_of(*urls, f"data:image/png;base64,{data_of(b'c')}", answers=[answer] * 2) == [bytes(400)] * 2 + [b"c"]
    assert "its frames have more than 700 bytes" in frames_of(*urls, answers=[answer] * 2, max_bytes=700)
    assert "takes longer than 0.2 s" in frames_of(*urls, answers=[answer, b"wait"], timeout_s=0.2)
    assert frames_of(urls[0], "http://elsewhere.test/a.png", answers=[answer]) == (
        f"{WHERE}[1] cannot be fetched: its host is not among those that this server fetches from "
        "(--allowed-media-domains)"
    )
