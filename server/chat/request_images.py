"""Reads the images of requests, before their prompts are rendered: fetched, decoded and resized for the model."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Iterator, Sequence
from http import HTTPStatus
from typing import TYPE_CHECKING, Any, NamedTuple

from starlette.types import Receive

from tidewheel.engine.core.engine import Engine
from tidewheel.engine.media.media import Media
from tidewheel.engine.media.options import MediaOptions

from ..errors import ApiError, ClientGone, bad_request
from ..generation.streaming import client_watch
from ..protocol.chat import ContentPart, ImageUrl, Message, check_parts
from ..protocol.decode import ParameterNotes, unsupported
from .image_placeholders import ReadImage, images_of

if TYPE_CHECKING:
    from tidewheel.engine.media.fetching import MediaFetcher
    from tidewheel.engine.media.reader import MediaReader

IMAGE_PARTS = ("image_url", "input_image")
_MAX_HELD = 2**29  # bytes of all bodies together whose images are being read
_MAX_REDIRECTS = 4
_RETRY_AFTER_S = 5


class _Found(NamedTuple):
    parts: list[ContentPart]
    at: int
    param: str


class RequestImages:
    """Reads images with the model's `reader`, at most `most` of a request, from where `fetcher` finds them.

    Without a reader the model sees no images, and parts that are images stay as they are.
    """

    def __init__(
        self,
        reader: MediaReader | None,
        fetcher: MediaFetcher | None,
        *,
        most: int,
        notes: ParameterNotes | None = None,
    ) -> None:
        self.reader = reader
        self._fetcher = fetcher
        self._most = most
        self._notes = notes
        self._held = 0

    async def read(
        self,
        messages: Sequence[Message],
        raw_size: int,
        context: int | None = None,
        receive: Receive | None = None,
    ) -> None:
        """Puts a ReadImage in place of each part that is an image. Images of one request are read one by one.

        `raw_size` is the size of the request's body in bytes. With a `context`, its images may not have more tokens.
        With `receive`, reading ends, and ClientGone is raised, if the client hangs up. Raises ApiError or
        InvalidRequestError (400) for what cannot be read, and ApiError (503) while too many bytes of others' images are
        in memory.
        """
        if self.reader is None:
            return
        check_parts(sum(len(_parts(message)) for message in messages), "messages")
        found = [*_found(messages)]
        if not found:
            return
        self._check_count(len(found) + len(images_of(messages)), "messages")
        held = 2 * raw_size  # the body, and its texts
        if self._held and self._held + held > _MAX_HELD:
            raise _too_many_images()
        self._held += held
        try:
            reading = self._read(self.reader, found, context)
            await (reading if receive is None else _unless_gone(reading, receive))
        finally:
            self._held -= held

    def close(self) -> None:
        """End the threads that fetch images."""
        if self._fetcher is not None:
            self._fetcher.close()

    async def read_files(self, files: Sequence[bytes], param: str) -> list[Media]:
        """The images in the bytes of files, which a program gives. Raises as `read` does."""
        if self.reader is None:
            raise unsupported(param, ": this model reads text")
        self._check_count(len(files), param)
        return [await self.reader.read(file, f"{param}[{i}]") for i, file in enumerate(files)]

    def _check_count(self, count: int, param: str) -> None:
        if count > self._most:
            raise bad_request(
                f"{param} has {count} images; this server takes at most {self._most} in a request "
                "(--limit-mm-per-prompt)",
                param,
            )

    async def _read(self, reader: MediaReader, found: Sequence[_Found], context: int | None) -> None:
        assert self._fetcher is not None
        num_tokens = 0
        for parts, at, param in found:
            part = parts[at]
            media = await reader.read(await self._fetcher.fetch(self._url(part, param), param), param)
            num_tokens += media.num_tokens
            if context is not None and num_tokens > context:
                raise bad_request(
                    f"{param}: the images up to this one have {num_tokens} tokens; this model's context is {context} "
                    "tokens",
                    param,
                    "context_length_exceeded",
                )
            parts[at] = ReadImage(part.type, media=media)

    def _url(self, part: ContentPart, param: str) -> str:
        given = part.image_url
        url, detail = (given.url, given.detail) if isinstance(given, ImageUrl) else (given, part.detail)
        if part.file_id is not None and url is None:
            raise unsupported(
                param.removesuffix("image_url") + "file_id", ": no images are stored; send the image in image_url"
            )
        if url is None and part.uuid is not None:
            raise bad_request(
                f"{param} is null, and images are not found by uuid here: send the image each time; it is recognized "
                "by its content",
                param,
            )
        if not url:
            raise bad_request(f"{param} is required", param, "missing_required_parameter")
        if detail not in (None, "auto", "high") and self._notes is not None:
            self._notes.unheeded("image_url.detail", "images are resized as the model's processor does it")
        return url


def request_images(engine: Engine, options: MediaOptions, notes: ParameterNotes | None = None) -> RequestImages:
    """What reads images for an engine, as far as the options allow; nothing for a model that sees none."""
    if engine.media is None:
        return RequestImages(None, None, most=0)
    from tidewheel.engine.media.fetching import MediaFetcher

    fetcher = MediaFetcher(
        allowed_domains=options.allowed_media_domains,
        allowed_local_path=options.allowed_local_media_path,
        timeout_s=options.image_fetch_timeout,
        max_redirects=_MAX_REDIRECTS if options.media_url_allow_redirects else 0,
    )
    return RequestImages(engine.media, fetcher, most=options.max_images, notes=notes)


async def _unless_gone(work: Coroutine[Any, Any, None], receive: Receive) -> None:
    """Awaits `work`, which is cancelled if the client hangs up. Raises ClientGone then."""
    task = asyncio.ensure_future(work)
    has_gone = False

    def leave() -> None:
        nonlocal has_gone
        has_gone = True
        task.cancel()

    try:
        with client_watch(receive, leave):
            await task
    except asyncio.CancelledError:
        task.cancel()
        if has_gone:
            raise ClientGone from None
        raise


def _found(messages: Sequence[Message]) -> Iterator[_Found]:
    for i, message in enumerate(messages):
        parts = _parts(message)
        for j, part in enumerate(parts):
            if part.type in IMAGE_PARTS and not isinstance(part, ReadImage):
                yield _Found(parts, j, f"messages[{i}].content[{j}].image_url")


def _parts(message: Message) -> list[ContentPart]:
    return message.content if isinstance(message.content, list) else []


def _too_many_images() -> ApiError:
    return ApiError(
        HTTPStatus.SERVICE_UNAVAILABLE,
        "too many images are being read at the same time: try again in a few seconds",
        code="too_many_images",
        headers={"retry-after": str(_RETRY_AFTER_S)},
    )
