"""DiskTier: KV blocks go to a folder and come back on separate threads, so that the engine never waits for the disk."""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence

import numpy as np
from msgspec import Struct
from numpy.typing import NDArray

from ..identity import Digest
from .block_file import BadFileError
from .folder import BlockFolder

logger = logging.getLogger(__name__)

_QUEUED_BYTES = 64 << 20  # of blocks that wait to be written; as much again of blocks that were read and not yet taken
_PIECE_BYTES = 8 << 20  # read at once
_MAX_TOUCHES = 64  # of sequences whose blocks were of use, that wait to be noted
_TOUCHES_TOGETHER = 32  # are noted at once, and the last ones at the end: to wake the writer for each takes too long
_RATE_MEMORY = 0.8  # of the last piece's speed, in the speed that is expected


class TierStats(Struct, frozen=True):
    """What the tier has done since the start, and what it holds, in blocks and bytes. `is_on`: it has not failed."""

    blocks_written: int
    blocks_read: int
    blocks_bad: int
    blocks_dropped: int
    bytes_written: int
    bytes_read: int
    blocks_held: int
    bytes_held: int
    space: int
    is_on: bool


class Reading:
    """Blocks of a sequence that are being read, in its order."""

    def __init__(self, digests: Sequence[Digest]) -> None:
        self.digests = digests
        self.pieces: deque[NDArray[np.uint8]] = deque()  # each [N, bytes of a block]
        self.has_ended = False  # no piece will follow
        self.is_cancelled = False

    @property
    def is_over(self) -> bool:
        """Whether all of it was taken."""
        return self.has_ended and not self.pieces


class DiskTier:
    """Blocks of `block_bytes` in a folder. Methods are called on one thread. None of them waits, except `close`.

    One thread writes and one reads. What they cannot do in time is left out: blocks that find no room in the queue are
    not written. When the folder cannot be used any more, the tier logs that once and turns itself off.
    """

    def __init__(self, folder: BlockFolder, block_bytes: int, on_progress: Callable[[], None]) -> None:
        """`on_progress` is called from the threads when there is room again, or a piece has been read."""
        self._folder = folder
        self._block_bytes = block_bytes
        self._on_progress = on_progress
        self._max_queued = max(_QUEUED_BYTES // block_bytes, 1)
        self._piece_blocks = max(_PIECE_BYTES // block_bytes, 1)
        self._writing: dict[Digest, NDArray[np.uint8]] = {}  # in order; also the one that is being written
        self._touched: deque[list[Digest]] = deque(maxlen=_MAX_TOUCHES)
        self._readings: deque[Reading] = deque()
        self._num_untaken = 0  # pieces
        self._changed = threading.Condition()
        self._clearing = False
        self._stopping = False
        self._is_on = True
        self._bytes_per_second: float | None = None
        self._written = self._read = self._bad = self._dropped = 0
        self._threads = [
            threading.Thread(target=self._guarded, args=(run,), name=name, daemon=True)
            for run, name in ((self._write_blocks, "kv-offload-writer"), (self._read_blocks, "kv-offload-reader"))
        ]
        for thread in self._threads:
            thread.start()

    @property
    def is_on(self) -> bool:
        """Whether the folder can be used."""
        return self._is_on

    @property
    def room(self) -> int:
        """How many blocks may be given to be written now."""
        return self._max_queued - len(self._writing) if self._is_on else 0

    def knows(self, digest: Digest) -> bool:
        """Whether a block is on disk, or on its way there."""
        return digest in self._writing or (self._folder.has(digest) and not self._clearing)

    def num_held(self, digests: Iterable[Digest]) -> int:
        """How many blocks at the beginning of a sequence can be read."""
        count = 0
        for digest in digests:
            if not (self._is_on and self.knows(digest)):
                break
            count += 1
        return count

    def write(self, digests: Sequence[Digest], data: NDArray[np.uint8]) -> None:
        """Have blocks written, no more than there is `room` for. `data` [N, bytes of a block] is the tier's own now."""
        with self._changed:
            if self._is_on:
                self._writing.update(zip(digests, data, strict=True))
                self._changed.notify_all()

    def drop(self, count: int) -> None:
        """Count blocks that are not written for want of time or room."""
        self._dropped += count

    def touch(self, digests: list[Digest]) -> None:
        """Note that blocks of a sequence, in its order, were of use."""
        with self._changed:
            self._touched.append(digests)
            if len(self._touched) == _TOUCHES_TOGETHER:
                self._changed.notify_all()

    def seconds_to_read(self, count: int) -> float | None:
        """How long `count` blocks would take, behind those that are being read; None if nothing was read so far."""
        speed = self._bytes_per_second
        ahead = sum(len(reading.digests) for reading in tuple(self._readings))
        return None if speed is None else (ahead + count) * self._block_bytes / speed

    def read(self, digests: Sequence[Digest]) -> Reading:
        """Begin to read blocks. The reading ends early where one is not there, or not what it should be."""
        reading = Reading(digests)
        with self._changed:
            if self._is_on:
                self._readings.append(reading)
                self._changed.notify_all()
            else:
                reading.has_ended = True
        return reading

    def take(self, reading: Reading) -> NDArray[np.uint8] | None:
        """The next piece [N, bytes of a block] of a reading, if it was read by now."""
        if not reading.pieces:
            return None
        with self._changed:
            self._num_untaken -= 1
            self._changed.notify_all()
        return reading.pieces.popleft()

    def cancel(self, reading: Reading) -> None:
        """Read no more of it, and forget what was read."""
        with self._changed:
            reading.is_cancelled = True
            self._num_untaken -= len(reading.pieces)
            reading.pieces.clear()
            self._changed.notify_all()

    def clear(self) -> None:
        """Forget all blocks, also of other models, and delete their files soon."""
        with self._changed:
            self._writing.clear()
            self._touched.clear()
            self._clearing = self._is_on
            self._changed.notify_all()

    def wait_for_room(self, timeout_s: float) -> bool:
        """Wait until there is room to write a block; False if there is none in that time, or never will be."""
        with self._changed:
            self._changed.wait_for(lambda: self.room > 0 or not self._is_on, timeout_s)
        return self.room > 0

    def stats(self) -> TierStats:
        """Figures for metrics; may be called from any thread."""
        return TierStats(
            blocks_written=self._written,
            blocks_read=self._read,
            blocks_bad=self._bad,
            blocks_dropped=self._dropped,
            bytes_written=self._written * self._block_bytes,
            bytes_read=self._read * self._block_bytes,
            blocks_held=len(self._folder),
            bytes_held=self._folder.num_bytes,
            space=self._folder.space,
            is_on=self._is_on,
        )

    def close(self, timeout_s: float) -> None:
        """Write what waits to be written, for so long, and leave the folder to others. Calling it twice is allowed."""
        deadline = time.monotonic() + timeout_s
        with self._changed:
            self._changed.wait_for(lambda: not (self._writing or self._clearing), timeout_s)
            self._dropped += len(self._writing)
            self._writing.clear()
            self._stopping = True
            self._changed.notify_all()
        for thread in self._threads:
            thread.join(max(deadline - time.monotonic(), 0.1))
        if any(thread.is_alive() for thread in self._threads):
            logger.warning("--kv-offload: the disk did not answer in time; the last blocks may be lost")
        else:
            self._folder.close()

    def _guarded(self, run: Callable[[], None]) -> None:
        try:
            run()
        except OSError as error:
            self._turn_off(error)

    def _turn_off(self, error: OSError) -> None:
        with self._changed:
            if self._is_on:
                logger.error(
                    "--kv-offload is off from now on, and requests go on without it: %s in %s; free disk space or "
                    "repair the folder, and restart the server",
                    error.strerror or error,
                    self._folder.path,
                )
            self._is_on = False
            self._writing.clear()
            self._touched.clear()
            self._clearing = False
            for reading in self._readings:
                reading.has_ended = True
            self._readings.clear()
            self._changed.notify_all()
        self._on_progress()

    def _write_blocks(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(
                    lambda: (
                        self._writing
                        or len(self._touched) >= _TOUCHES_TOGETHER
                        or self._clearing
                        or self._stopping
                        or not self._is_on
                    )
                )
                digest, data = next(iter(self._writing.items()), (None, None))
                touched = [] if digest is not None else [*self._touched]
                if not self._is_on or (self._stopping and not touched):
                    return
                if touched:
                    self._touched.clear()
                clearing = self._clearing
            if clearing:
                self._folder.clear()
                with self._changed:
                    self._clearing = False
                    self._changed.notify_all()
            elif digest is None or data is None:
                for digests in touched:
                    self._folder.touch(digests)
            else:
                self._folder.write(digest, data)
                self._written += 1
                with self._changed:
                    self._writing.pop(digest, None)
                    self._changed.notify_all()
                    is_half_empty = len(self._writing) == self._max_queued // 2
                if is_half_empty:
                    self._on_progress()

    def _read_blocks(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._readings or self._stopping or not self._is_on)
                if self._stopping or not self._is_on:
                    return
                reading = self._readings[0]
            self._fill(reading)
            self._folder.touch(list(reading.digests))
            with self._changed:
                reading.has_ended = True
                if self._readings and self._readings[0] is reading:
                    self._readings.popleft()
            self._on_progress()

    def _fill(self, reading: Reading) -> None:
        for first in range(0, len(reading.digests), self._piece_blocks):
            digests = reading.digests[first : first + self._piece_blocks]
            with self._changed:
                self._changed.wait_for(lambda: self._may_go_on(reading))
            if reading.is_cancelled or self._stopping or not self._is_on:
                return
            started = time.perf_counter()
            piece = np.empty((len(digests), self._block_bytes), np.uint8)
            count = self._read_piece(digests, piece)
            if count:
                speed = count * self._block_bytes / max(time.perf_counter() - started, 1e-6)
                known = self._bytes_per_second or speed
                self._bytes_per_second = known + _RATE_MEMORY * (speed - known)
                self._read += count
                self._hand_over(reading, piece[:count])
            if count < len(digests):
                return

    def _hand_over(self, reading: Reading, piece: NDArray[np.uint8]) -> None:
        with self._changed:
            if not reading.is_cancelled:
                self._num_untaken += 1
                reading.pieces.append(piece)
        self._on_progress()

    def _read_piece(self, digests: Sequence[Digest], piece: NDArray[np.uint8]) -> int:
        """How many blocks were read before the first that is not there or is bad."""
        for index, digest in enumerate(digests):
            if (unwritten := self._writing.get(digest)) is not None:  # before the folder: it may just be moving there
                piece[index] = unwritten
                continue
            try:
                if not self._folder.read(digest, piece[index]):
                    return index
            except BadFileError as error:
                self._bad += 1
                logger.warning("--kv-offload: deleted %s.kv, which cannot be used: %s", digest.hex(), error)
                return index
        return len(digests)

    def _may_go_on(self, reading: Reading) -> bool:
        untaken = self._num_untaken * self._piece_blocks
        room = untaken == 0 or untaken + self._piece_blocks <= self._max_queued
        return room or reading.is_cancelled or self._stopping or not self._is_on
