"""MediaReader: media of requests, from files to what the model's tower takes, and their places in prompts."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from ..cancellation import Cancellation
from ..errors import BusyError, InvalidRequestError
from ..sandboxing.sandbox import SandboxError
from .decode_settings import DEFAULT_MAX_BYTES, DecodeSettings
from .decoding import ImageDecoder
from .errors import ImageError
from .media import Media, MediaFiles, MediaSpan, Modality
from .media_cache import MediaCache
from .media_names import MediaNames
from .placeholders import ExpandedPrompt, expand, spread
from .request_settings import RequestSettings
from .vision import Vision

_MAX_WAITING_BYTES = 256 * 2**20
_LEAST_BYTES = 2**16  # that an image counts as among those that wait: it also takes a thread's turn


class MediaReader:
    """Reads images and videos on the event loop of its first `read`; decoding is done by other processes.

    `marks` are what stands for them in prompts, for each kind that the model takes.
    """

    def __init__(
        self,
        vision: Vision,
        slot_ids: Mapping[Modality, int],
        *,
        settings: DecodeSettings | None = None,
        for_requests: RequestSettings | None = None,
        max_bytes: int = DEFAULT_MAX_BYTES,
        cache_bytes: int = 0,
        max_decodes: int = 2,
    ) -> None:
        """`slot_ids` are the token ids of the slots of `vision.marks`, and `for_requests` what requests may change.

        At most `max_decodes` images are decoded at a time, the others wait in the order of coming. Decoded images of
        `cache_bytes` together are kept.
        """
        self.marks = vision.marks
        self._vision = vision
        self._slot_ids = slot_ids
        self._for_requests = for_requests or RequestSettings(vision)
        self._max_bytes = max_bytes
        self._decoder = ImageDecoder(vision, settings or DecodeSettings())
        self._cache = MediaCache(cache_bytes)
        self._names = MediaNames()
        self._waiting_bytes = 0
        self._hashing = ThreadPoolExecutor(1, "image-hash")
        self._decoding = ThreadPoolExecutor(max_decodes, "image-decode")

    def check(self, fields: Mapping[str, Any], param: str) -> None:
        """Raises InvalidRequestError, which names `param`, for settings of the processor that no request may have."""
        self._for_requests.vision(fields, param)

    def recall(
        self, name: str, modality: Modality, fields: Mapping[str, Any] | None = None, fields_param: str = ""
    ) -> Media | None:
        """What was read under this `name` with the same settings, if it is still kept. Raises as `check` does."""
        vision = self._for_requests.vision(fields, fields_param) if fields else None
        key = self._names.get(name, modality, vision)
        return None if key is None else self._cache.get(key)

    async def read(
        self,
        sent: MediaFiles,
        param: str,
        fields: Mapping[str, Any] | None = None,
        fields_param: str = "",
        name: str | None = None,
    ) -> Media:
        """The image or the video in files. If the caller is cancelled, decoding ends too.

        `fields` are settings of the processor that the request changes, in its field `fields_param`. With a `name`, it
        can be recalled. Raises InvalidRequestError, which names `param`, if it cannot be read, whatever happens to its
        decoder. Raises BusyError if too many other images wait, or if no image can be decoded at the moment.
        """
        vision = self._for_requests.vision(fields, fields_param) if fields else None
        kind = "an image" if sent.modality == "image" else "a video"
        if sent.num_bytes > self._max_bytes:
            raise InvalidRequestError(
                f"{param} is {kind} of {sent.num_bytes} bytes; {self._max_bytes} are the most (--max-image-bytes)",
                param,
            )
        size = max(sent.num_bytes, _LEAST_BYTES)
        if self._waiting_bytes and self._waiting_bytes + size > _MAX_WAITING_BYTES:
            raise BusyError("too many other images are being decoded; try again later")
        self._waiting_bytes += size
        try:
            return await self._read(sent, vision, name)
        except ImageError as error:
            raise InvalidRequestError(f"{param} cannot be read as {kind}: {error}", param) from error
        except SandboxError as error:
            raise BusyError(f"{param} cannot be decoded now: {error}") from error
        finally:
            self._waiting_bytes -= size

    async def _read(self, sent: MediaFiles, vision: Vision | None, name: str | None) -> Media:
        self._decoder.require(sent)
        loop = asyncio.get_running_loop()
        key = await loop.run_in_executor(self._hashing, _key, sent, vision)
        media = self._cache.get(key)
        if media is None:
            cancellation = Cancellation()
            try:
                media = await loop.run_in_executor(self._decoding, self._decoded, key, sent, cancellation, vision)
            except asyncio.CancelledError:
                cancellation.cancel()
                raise
        if name is not None:
            self._names.put(name, sent.modality, vision, key)
        return media

    def _decoded(self, key: bytes, sent: MediaFiles, cancellation: Cancellation, vision: Vision | None) -> Media:
        if (known := self._cache.get(key)) is None:  # it may have been decoded while this one waited
            known = self._decoder.decode(sent, cancellation, vision)
            self._cache.put(key, known)
        return known

    def expand(self, text: str, media: Sequence[Media], param: str) -> ExpandedPrompt:
        """A rendered prompt with the images in place of its placeholders, to be tokenized next.

        Raises InvalidRequestError if the text does not have a placeholder for each image.
        """
        return expand(self._vision, text, media, param)

    def spread(self, token_ids: Sequence[int], expanded: ExpandedPrompt) -> tuple[list[int], tuple[MediaSpan, ...]]:
        """The tokens of an expanded prompt with all slots of its images, and where their embeddings stand.

        Raises InvalidRequestError if a text of the prompt has slots of its own.
        """
        return spread(self._vision, self._slot_ids, token_ids, expanded)

    def close(self) -> None:
        """End the decoders. Those who wait get a BusyError."""
        self._decoder.close()
        self._hashing.shutdown(wait=False)
        self._decoding.shutdown(wait=False)


def _key(sent: MediaFiles, vision: Vision | None) -> bytes:
    """Names all that a decoded medium depends on."""
    settings = None if vision is None else vision.settings
    made = hashlib.sha256(repr((sent.modality, sent.fps, settings, [len(file) for file in sent.files])).encode())
    for file in sent.files:
        made.update(file)
    return made.digest()
