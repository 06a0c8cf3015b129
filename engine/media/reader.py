"""MediaReader: images of requests, from files to what the model's tower takes, and their places in prompts."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

from ..cancellation import Cancellation
from ..errors import BusyError, InvalidRequestError
from ..sandboxing.sandbox import SandboxError
from .decoding import ImageDecoder
from .errors import ImageError
from .media import Media, MediaSpan
from .media_cache import MediaCache
from .placeholders import ExpandedPrompt, expand, spread
from .vision import Vision

DEFAULT_MAX_PIXELS = 64 * 2**20  # a phone's photo has up to 50 million; decoding takes up to 16 bytes for each
DEFAULT_MAX_BYTES = 20_000_000
_MAX_WAITING_BYTES = 256 * 2**20
_LEAST_BYTES = 2**16  # that an image counts as among those that wait: it also takes a thread's turn


class MediaReader:
    """Reads images on the event loop of its first `read`; decoding is done by other processes.

    `placeholder` is what the chat template writes for an image, and `slot` the token of its embeddings.
    """

    def __init__(
        self,
        vision: Vision,
        slot_id: int,
        *,
        max_pixels: int = DEFAULT_MAX_PIXELS,
        max_bytes: int = DEFAULT_MAX_BYTES,
        cache_bytes: int = 0,
        max_decodes: int = 2,
    ) -> None:
        """`slot_id` is the token id of `vision.slot`. At most `max_decodes` images are decoded at a time, the others
        wait in the order of coming. Decoded images of `cache_bytes` together are kept.
        """
        self.placeholder = vision.placeholder
        self.slot = vision.slot
        self._vision = vision
        self._slot_id = slot_id
        self._max_bytes = max_bytes
        self._decoder = ImageDecoder(vision, max_pixels)
        self._cache = MediaCache(cache_bytes)
        self._waiting_bytes = 0
        self._hashing = ThreadPoolExecutor(1, "image-hash")
        self._decoding = ThreadPoolExecutor(max_decodes, "image-decode")

    async def read(self, data: bytes, param: str) -> Media:
        """The image in a file. If the caller is cancelled, decoding ends too.

        Raises InvalidRequestError, which names `param`, if it cannot be read, whatever happens to its decoder. Raises
        BusyError if too many other images wait, or if no image can be decoded at the moment.
        """
        if len(data) > self._max_bytes:
            raise InvalidRequestError(
                f"{param} is an image of {len(data)} bytes; {self._max_bytes} are the most", param
            )
        size = max(len(data), _LEAST_BYTES)
        if self._waiting_bytes and self._waiting_bytes + size > _MAX_WAITING_BYTES:
            raise BusyError("too many other images are being decoded; try again later")
        self._waiting_bytes += size
        try:
            return await self._read(data)
        except ImageError as error:
            raise InvalidRequestError(f"{param} cannot be read as an image: {error}", param) from error
        except SandboxError as error:
            raise BusyError(f"{param} cannot be decoded now: {error}") from error
        finally:
            self._waiting_bytes -= size

    async def _read(self, data: bytes) -> Media:
        self._decoder.require(data)
        loop = asyncio.get_running_loop()
        key = await loop.run_in_executor(self._hashing, lambda: hashlib.sha256(data).digest())
        if (known := self._cache.get(key)) is not None:
            return known
        cancellation = Cancellation()
        try:
            return await loop.run_in_executor(self._decoding, self._decoded, key, data, cancellation)
        except asyncio.CancelledError:
            cancellation.cancel()
            raise

    def _decoded(self, key: bytes, data: bytes, cancellation: Cancellation) -> Media:
        if (known := self._cache.get(key)) is None:  # it may have been decoded while this one waited
            known = self._decoder.decode(data, cancellation)
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
        return spread(self._vision, self._slot_id, token_ids, expanded)

    def close(self) -> None:
        """End the decoders. Those who wait get a BusyError."""
        self._decoder.close()
        self._hashing.shutdown(wait=False)
        self._decoding.shutdown(wait=False)
