"""Reads the media of requests, before their prompts are rendered: fetched, decoded and resized for the model."""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from collections.abc import Collection, Coroutine, Iterator, Mapping, Sequence
from http import HTTPStatus
from typing import TYPE_CHECKING, Any, NamedTuple

from starlette.types import Receive

from tidewheel.engine.core.engine import Engine
from tidewheel.engine.media.decode_settings import LEAST_FPS, MAX_FRAMES, MOST_FPS
from tidewheel.engine.media.media import Media, MediaFiles, Modality
from tidewheel.engine.media.options import MediaOptions

from ..client_watch import client_watch
from ..errors import ApiError, ClientGone, bad_request
from ..http.api_keys import current_tenant
from ..protocol.chat import ContentPart, ImageUrl, Message, check_parts
from ..protocol.decode import ParameterNotes, unsupported
from .image_placeholders import ReadImage, images_of

if TYPE_CHECKING:
    from tidewheel.engine.media.fetching import MediaFetcher
    from tidewheel.engine.media.reader import MediaReader

IMAGE_PARTS = ("image_url", "input_image")
VIDEO_PARTS = ("video_url", "video")
# How many frames are shown in a second if each is sent as an image, and nothing says it: in vLLM, and in qwen-vl-utils.
_USUAL_FPS = {"video_url": 1.0, "video": 2.0}
_FIELDS = {**dict.fromkeys(IMAGE_PARTS, "image_url"), **{kind: kind for kind in VIDEO_PARTS}}
_MAX_HELD = 2**29  # bytes of all bodies together whose images are being read
_MAX_REDIRECTS = 4
_RETRY_AFTER_S = 5


class _Found(NamedTuple):
    parts: list[ContentPart]
    at: int
    param: str


class RequestImages:
    """Reads images and videos with the model's `reader`, from where `fetcher` finds them; `most` of a request are read.

    Without a reader the model sees none, and parts that are images stay as they are. Frames that are sent one by one
    are shown `fps` in a second, if the request does not say it.
    """

    def __init__(
        self,
        reader: MediaReader | None,
        fetcher: MediaFetcher | None,
        *,
        most: Mapping[Modality, int],
        fps: float | None = None,
        notes: ParameterNotes | None = None,
    ) -> None:
        self.reader = reader
        self._fetcher = fetcher
        self._most = most
        self._fps = fps
        self._notes = notes
        self._held = 0

    async def read(
        self,
        messages: Sequence[Message],
        raw_size: int,
        context: int | None = None,
        receive: Receive | None = None,
        *,
        settings: Mapping[str, Any] | None = None,
        fps: float | None = None,
        salt: str | None = None,
    ) -> None:
        """Puts a ReadImage in place of each part that is an image or a video. Those of a request are read one by one.

        `settings` are those of the model's processor that the request changes, and `fps` is how many frames of a video
        are shown in a second, if its part does not say it. Images are found by their `uuid` only with the same `salt`,
        and by the same tenant. `raw_size` is the size of the request's body in bytes. With
        a `context`, its images may not have more tokens. With `receive`, reading ends, and ClientGone is raised, if the
        client hangs up. Raises ApiError or InvalidRequestError (400) for what cannot be read, and ApiError (503) while
        too many bytes of others' images are in memory.
        """
        if self.reader is None:
            if settings:
                raise unsupported("mm_processor_kwargs", ": this model reads text")
            return
        if settings:
            self.reader.check(settings, "mm_processor_kwargs")
        check_parts(sum(len(_parts(message)) for message in messages), "messages")
        found = [*_found(messages, self.reader.marks)]
        if not found:
            return
        kinds = [_kind(one.parts[one.at]) for one in found]
        self._check_counts([*kinds, *(media.modality for media in images_of(messages))], "messages")
        held = 2 * raw_size  # the body, and its texts
        if self._held and self._held + held > _MAX_HELD:
            raise _too_many_images()
        self._held += held
        try:
            reading = self._read(self.reader, found, context, settings, fps, current_tenant().salt(salt))
            await (reading if receive is None else _unless_gone(reading, receive))
        finally:
            self._held -= held

    def close(self) -> None:
        """End the threads that fetch images."""
        if self._fetcher is not None:
            self._fetcher.close()

    async def read_files(
        self, files: Sequence[MediaFiles], param: str, settings: Mapping[str, Any] | None = None
    ) -> list[Media]:
        """The media in the bytes of files, which a program gives. Raises as `read` does."""
        reader = self.reader
        if reader is None or not {sent.modality for sent in files} <= reader.marks.keys():
            raise unsupported(param, f": this model reads {'text' if reader is None else 'text and images'}")
        self._check_counts([sent.modality for sent in files], param)
        read, numbers = [], Counter[Modality]()
        for sent in files:
            at = f"{param}.{sent.modality}[{numbers[sent.modality]}]"
            numbers[sent.modality] += 1
            read.append(await reader.read(sent, at, settings, "mm_processor_kwargs"))
        return read

    def _check_counts(self, kinds: Sequence[Modality], param: str) -> None:
        for kind, count in Counter(kinds).items():
            most = self._most.get(kind, 0)
            if count > most:
                raise bad_request(
                    f"{param} has {count} {kind}s; this server takes at most {most} in a request "
                    "(--limit-mm-per-prompt)",
                    param,
                )

    async def _read(
        self,
        reader: MediaReader,
        found: Sequence[_Found],
        context: int | None,
        settings: Mapping[str, Any] | None,
        fps: float | None,
        salt: str | None,
    ) -> None:
        num_tokens = 0
        for parts, at, param in found:
            part = parts[at]
            name = None if part.uuid is None else json.dumps([salt, part.uuid])
            if name is not None and part.file_id is None and _sent(part) == [None]:
                media = _recalled(reader, name, part, param, settings)
            else:
                files = await self._files(part, param, fps)
                media = await reader.read(files, param, settings, "mm_processor_kwargs", name)
            num_tokens += media.num_tokens
            if context is not None and num_tokens > context:
                raise bad_request(
                    f"{param}: the {_kind(part)}s up to this one have {num_tokens} tokens; this model's context is "
                    f"{context} tokens",
                    param,
                    "context_length_exceeded",
                )
            parts[at] = ReadImage(part.type, media=media)

    async def _files(self, part: ContentPart, param: str, fps: float | None) -> MediaFiles:
        """What a part names. Raises ApiError or InvalidRequestError."""
        fetcher = self._fetcher
        assert fetcher is not None
        if _kind(part) == "image":
            return MediaFiles((await fetcher.fetch(self._url(part, param), param),))
        urls = _sent(part)
        if not urls or not all(urls):
            raise bad_request(f"{param} is required", param, "missing_required_parameter")
        if len(urls) > MAX_FRAMES:
            raise bad_request(f"{param} has {len(urls)} frames; {MAX_FRAMES} are the most", param)
        said = (part.fps, fps, self._fps, _USUAL_FPS[part.type])
        fps = next(one for one in said if one is not None)
        if not LEAST_FPS <= fps <= MOST_FPS:
            raise bad_request(f"fps must be from {LEAST_FPS:g} to {MOST_FPS:g}, got {fps:g}", param)
        named = [url for url in urls if url]
        frames = await (fetcher.fetch_frames(named, param) if len(named) > 1 else fetcher.fetch_video(named[0], param))
        return MediaFiles(tuple(frames), "video", fps)

    def _url(self, part: ContentPart, param: str) -> str:
        (url,) = _sent(part)
        detail = part.image_url.detail if isinstance(part.image_url, ImageUrl) else part.detail
        if part.file_id is not None and url is None:
            raise unsupported(
                param.removesuffix("image_url") + "file_id", ": no images are stored; send the image in image_url"
            )
        if not url:
            raise bad_request(f"{param} is required", param, "missing_required_parameter")
        if detail not in (None, "auto", "high") and self._notes is not None:
            self._notes.unheeded("image_url.detail", "images are resized as the model's processor does it")
        return url


def request_images(engine: Engine, options: MediaOptions, notes: ParameterNotes | None = None) -> RequestImages:
    """What reads images for an engine, as far as the options allow; nothing for a model that sees none."""
    if engine.media is None:
        return RequestImages(None, None, most={})
    from tidewheel.engine.media.fetching import MediaFetcher

    fetcher = MediaFetcher(
        allowed_domains=options.allowed_media_domains,
        allowed_local_path=options.allowed_local_media_path,
        timeout_s=options.image_fetch_timeout,
        max_bytes=options.max_image_bytes,
        max_redirects=_MAX_REDIRECTS if options.media_url_allow_redirects else 0,
    )
    return RequestImages(engine.media, fetcher, most=options.limits, fps=options.frames_per_second, notes=notes)


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


def _found(messages: Sequence[Message], kinds: Collection[Modality]) -> Iterator[_Found]:
    for i, message in enumerate(messages):
        parts = _parts(message)
        for j, part in enumerate(parts):
            field = _FIELDS.get(part.type)
            if field is not None and _kind(part) in kinds and not isinstance(part, ReadImage):
                yield _Found(parts, j, f"messages[{i}].content[{j}].{field}")


def _kind(part: ContentPart) -> Modality:
    return "video" if part.type in VIDEO_PARTS else "image"


def _sent(part: ContentPart) -> list[str | None]:
    """The URLs that a part has: one, which may be missing, or those of a video's frames."""
    given = part.video if part.type == "video" else part.video_url if part.type == "video_url" else part.image_url
    return [*given] if isinstance(given, list) else [given.url if isinstance(given, ImageUrl) else given]


def _recalled(
    reader: MediaReader, name: str, part: ContentPart, param: str, settings: Mapping[str, Any] | None
) -> Media:
    media = reader.recall(name, _kind(part), settings, "mm_processor_kwargs")
    if media is None:
        raise bad_request(
            f"{param} is null, and no {_kind(part)} is kept for this uuid: send the {_kind(part)} again, with its uuid",
            param,
        )
    return media


def _parts(message: Message) -> list[ContentPart]:
    return message.content if isinstance(message.content, list) else []


def _too_many_images() -> ApiError:
    return ApiError(
        HTTPStatus.SERVICE_UNAVAILABLE,
        "too many images are being read at the same time: try again in a few seconds",
        code="too_many_images",
        headers={"retry-after": str(_RETRY_AFTER_S)},
    )
