"""MediaFetcher: the bytes of images that a request names by a URL."""

from __future__ import annotations

import asyncio
import base64
import binascii
import re
import socket
import ssl
from collections.abc import Callable, Collection, Coroutine, Sequence
from concurrent.futures import ThreadPoolExecutor
from importlib.util import find_spec
from typing import Any, TypeVar
from urllib.parse import unquote, urljoin

from ..errors import InvalidRequestError
from .addresses import is_public_address
from .decode_settings import DEFAULT_MAX_BYTES, MAX_FRAMES
from .errors import FetchError
from .http_client import Response, Target, get
from .local_files import read_below

T = TypeVar("T")

_MAX_URL = 8192
_MAX_ADDRESSES = 4
_AT_A_TIME = 16
_PIECE = 2**18  # characters of base64, which are decoded under Python's lock
_SHORT = 2**16  # characters of base64 that are decoded on the event loop

# Nothing that two parsers could read differently: no user, backslash, space or other alphabet.
_HTTP = re.compile(r"(https?)://([a-z0-9._-]+|\[[0-9a-f:.]+\])(?::([0-9]{1,5}))?(?:([/?][!-\[\]-~]*))?", re.IGNORECASE)
_DATA = re.compile(r"data:(?:image|video)/[\w.+-]+(?:;[\w.+-]+=[\w.+-]+)*;base64,", re.IGNORECASE | re.ASCII)
_FRAMES = re.compile(r"data:video/jpe?g;base64,", re.IGNORECASE)
_FILE = re.compile(r"file://(?:localhost)?(/[^?#\0]*)", re.IGNORECASE)
_NO_ADDRESS = "its host has no public address"


def resolve(host: str, port: int) -> list[str]:
    """The addresses of a host's name. Raises OSError."""
    return [str(found[4][0]) for found in socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)]


class MediaFetcher:
    """Gets images from data: URLs, and where the operator allows it from hosts and from a folder of this machine.

    A host is resolved once, and all of its addresses must be public. The connection is made to one of these. Nothing
    of the environment counts: no proxies, no credentials. To be used on one event loop.
    """

    def __init__(
        self,
        *,
        allowed_domains: Collection[str] = (),
        allowed_local_path: str | None = None,
        timeout_s: float = 5.0,
        max_bytes: int = DEFAULT_MAX_BYTES,
        max_redirects: int = 0,
        resolve: Callable[[str, int], list[str]] = resolve,
        is_allowed_address: Callable[[str], bool] = is_public_address,
    ) -> None:
        """`allowed_domains` are names of hosts, each of which may name a port: `images.example.org:8443`. Without one
        the usual ports of http and https are allowed. As in vLLM, a name does not stand for those below it.

        `timeout_s` is for all of it: resolving, redirects and reading.
        """
        self._allowed = {domain.lower() for domain in allowed_domains}
        self._local_path = allowed_local_path
        self._timeout_s = timeout_s
        self._max_bytes = max_bytes
        self._max_redirects = max_redirects
        self._resolve = resolve
        self._is_allowed_address = is_allowed_address
        self._room = asyncio.Semaphore(_AT_A_TIME)
        self._threads = ThreadPoolExecutor(2, "media-fetch")
        self._resolving = ThreadPoolExecutor(4, "media-resolve")  # which wait for servers of other people
        self._tls: ssl.SSLContext | None = None

    async def fetch(self, url: str, param: str) -> bytes:
        """The content that a URL names. Raises InvalidRequestError, which names `param` and neither address nor path.

        Nobody has looked at the content yet: it need not be an image.
        """
        return await self._fetched(self._content(url), param)

    async def fetch_video(self, url: str, param: str) -> list[bytes]:
        """The same of a video: one content, or that of each frame of a URL `data:video/jpeg;base64,FRAME,FRAME`."""
        start = _FRAMES.match(url)
        if start is None:
            return [await self.fetch(url, param)]
        return await self._fetched(self._in_thread(lambda: self._frames(url, start.end())), param)

    async def fetch_frames(self, urls: Sequence[str], param: str) -> list[bytes]:
        """The frames of a video that names each of them by a URL.

        All of them together may take as long, and be as large, as an image.
        """

        async def fetched() -> list[bytes]:
            frames: list[bytes] = []
            for i, url in enumerate(urls):
                frames.append(await self.fetch(url, f"{param}[{i}]"))
                if sum(map(len, frames)) > self._max_bytes:
                    raise FetchError(f"its frames have more than {self._max_bytes} bytes")
            return frames

        return await self._fetched(asyncio.wait_for(fetched(), self._timeout_s), param)

    async def _fetched(self, content: Coroutine[Any, Any, T], param: str) -> T:
        try:
            return await content
        except FetchError as error:
            raise InvalidRequestError(f"{param} cannot be fetched: {error}", param) from error
        except asyncio.TimeoutError as error:
            reason = f"it takes longer than {self._timeout_s:g} s (--image-fetch-timeout)"
            raise InvalidRequestError(f"{param} cannot be fetched: {reason}", param) from error

    async def _content(self, url: str) -> bytes:
        scheme = url[:8].partition(":")[0].lower()
        if scheme == "data":
            return await self._data(url)
        if scheme in ("http", "https"):
            async with self._room:
                return await asyncio.wait_for(self._http(url), self._timeout_s)
        if scheme == "file":
            return await self._file(url)
        raise FetchError("it is no data:, https: or http: URL")

    def close(self) -> None:
        """End the threads."""
        for threads in (self._threads, self._resolving):
            threads.shutdown(wait=False)

    async def _in_thread(self, work: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._threads, work)

    async def _data(self, url: str) -> bytes:
        start = _DATA.match(url, 0, _MAX_URL)
        if start is None:
            raise FetchError("a data: URL begins like data:image/jpeg;base64,")
        begin = start.end()
        if (len(url) - begin) // 2 > self._max_bytes:  # even if some of it are line ends
            raise FetchError(f"it has more than {self._max_bytes} bytes")
        if len(url) - begin <= _SHORT:
            return _decoded(url, begin, self._max_bytes)
        return await self._in_thread(lambda: _decoded(url, begin, self._max_bytes))

    def _frames(self, url: str, begin: int) -> list[bytes]:
        if (len(url) - begin) // 2 > self._max_bytes:
            raise FetchError(f"it has more than {self._max_bytes} bytes")
        if (count := url.count(",", begin) + 1) > MAX_FRAMES:
            raise FetchError(f"it has {count} frames, and {MAX_FRAMES} are the most")
        return [_decoded(frame, 0, self._max_bytes) for frame in url[begin:].split(",")]

    async def _file(self, url: str) -> bytes:
        folder = self._local_path
        if folder is None:
            raise FetchError("this server reads no files of its own (--allowed-local-media-path)")
        named = None if len(url) > _MAX_URL else _FILE.fullmatch(url)
        if named is None:
            raise FetchError("a file: URL has an absolute path and no host: file:///...")
        path = unquote(named[1], errors="surrogateescape")
        return await self._in_thread(lambda: read_below(folder, path, self._max_bytes))

    async def _http(self, url: str) -> bytes:
        for _ in range(1 + self._max_redirects):
            target = self._target(url)
            response = await self._response(target)
            if response.status == 200:
                return response.body
            if response.status not in (301, 302, 303, 307, 308) or response.location is None:
                raise FetchError(f"the server's answer has the status {response.status}")
            url = urljoin(url, response.location)
            if target.is_tls and not url.lower().startswith("https:"):
                raise FetchError("it is redirected from https to something else")
        raise FetchError("it is redirected" + (" too often" if self._max_redirects else ""))

    def _target(self, url: str) -> Target:
        parts = None if len(url) > _MAX_URL else _HTTP.fullmatch(url.partition("#")[0])
        if parts is None:
            raise FetchError("its URL is not one of a host and a path in ASCII: https://images.example.org/a.jpg")
        is_tls = parts[1].lower() == "https"
        usual = 443 if is_tls else 80
        host = parts[2].lower().strip("[]")
        target = Target(is_tls, host, int(parts[3] or usual), _path(parts[4] or "/"))
        named_port = f"{parts[2].lower()}:{target.port}" in self._allowed
        named = target.port == usual and (host in self._allowed or parts[2].lower() in self._allowed)
        if not named and not named_port:
            raise FetchError("its host is not among those that this server fetches from (--allowed-media-domains)")
        return target

    async def _response(self, target: Target) -> Response:
        try:
            resolving = asyncio.get_running_loop().run_in_executor
            addresses = await resolving(self._resolving, self._resolve, target.host, target.port)
        except (OSError, UnicodeError) as error:
            raise FetchError(_NO_ADDRESS) from error
        if not addresses or not all(map(self._is_allowed_address, addresses)):
            raise FetchError(_NO_ADDRESS)
        if target.is_tls and self._tls is None:
            self._tls = await self._in_thread(_tls_context)
        tried = list(dict.fromkeys(addresses))[:_MAX_ADDRESSES]
        connect_s = self._timeout_s / len(tried)  # the next one is tried before all time is over
        for address in tried:
            try:
                return await get(target, address, self._tls, connect_s=connect_s, max_bytes=self._max_bytes)
            except ssl.SSLCertVerificationError as error:
                raise FetchError("the server has no valid certificate for its name") from error
            except (OSError, asyncio.TimeoutError):
                continue
        raise FetchError("there is no connection to its host")


def _path(path: str) -> str:
    return path if path.startswith("/") else f"/{path}"


def _tls_context() -> ssl.SSLContext:
    context = ssl.create_default_context()
    if not context.cert_store_stats()["x509_ca"] and find_spec("certifi") is not None:
        import certifi

        context.load_verify_locations(certifi.where())  # a system without certificates
    context.set_alpn_protocols(["http/1.1"])
    return context


def _decoded(text: str, begin: int, max_bytes: int) -> bytes:
    """Piece by piece, so that other threads get Python's lock in between."""
    decoded = bytearray()
    rest = ""
    has_ended = False
    try:
        for at in range(begin, len(text), _PIECE):
            rest += "".join(text[at : at + _PIECE].split())
            end = len(rest) // 4 * 4
            if at + _PIECE >= len(text) and end < len(rest):
                rest += "=" * (-len(rest) % 4)  # some leave the padding out
                end = len(rest)
            if has_ended and end:
                raise FetchError("its base64 is not valid")
            decoded += base64.b64decode(rest[:end], validate=True)
            has_ended = has_ended or rest.endswith("=", 0, end)
            rest = rest[end:]
            if len(decoded) > max_bytes:
                raise FetchError(f"it has more than {max_bytes} bytes")
    except (binascii.Error, ValueError) as error:
        raise FetchError("its base64 is not valid") from error
    return bytes(decoded)
