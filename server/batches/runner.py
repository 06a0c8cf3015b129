"""BatchRunner: works on the batches of a store, one after the other, behind all other requests."""

from __future__ import annotations

import asyncio
import contextlib
import io
import logging
import os
import stat
import time
from collections.abc import Callable
from pathlib import Path

import msgspec

from tidewheel.engine.errors import EngineDeadError, TidewheelError

from ..errors import ApiError
from ..http.api_keys import Tenant, act_as
from ..pace import BatchPace
from ..protocol.batches import BatchFault, BatchFaults
from ..rests import Rests
from .claims import Claim, Claims
from .rows import BatchRow, check_file, finished_rows, rows_in
from .run import Post, run_rows
from .store import BatchStore, KeptBatch

logger = logging.getLogger(__name__)

MAX_ROWS = 50_000
_MAX_OUTPUT_BYTES = 2 * 2**30
_LAST = 2**30  # the priority of a batch's requests: all others go first
_GENERATES = ("/v1/chat/completions", "/v1/completions")
_OUTPUTS = ("output_file_id", "error_file_id")
_WRITE_EVERY_S = 0.2
_SAVE_EVERY_S = 1.0
_LOOK_EVERY_S = 2.0  # for batches of other servers, and for those whose server has died


class _LostError(Exception):
    """Another server may have the batch: nothing more may be written."""


class BatchRunner:
    """Runs `concurrency` requests of a batch at a time. After a restart, interrupted batches go on.

    If several servers share a folder, one server runs each batch. If it ends, another goes on with the batch. A batch
    with a request that has more than `max_values` values in its JSON is refused. `tenant_of` gives the tenant of a
    batch's owner.
    """

    def __init__(
        self,
        store: BatchStore,
        post: Post,
        concurrency: int,
        max_values: int,
        tenant_of: Callable[[str], Tenant],
    ) -> None:
        self._store = store
        self._claims = Claims(store.folder)
        self._post = post
        self._concurrency = concurrency
        self._max_values = max_values
        self._tenant_of = tenant_of
        self._pace = BatchPace()
        self._news = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Work on what is unfinished, and on what comes."""
        self._task = asyncio.create_task(self._work())

    async def stop(self) -> None:
        """Leave everything as it is."""
        if self._task is not None:
            self._task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._task

    def notify(self) -> None:
        """Say that there is a new batch."""
        self._news.set()

    async def cancel(self, batch: KeptBatch) -> None:
        """End a batch, whichever server runs it; its answers so far are kept."""
        if batch in self._store.unfinished and batch.status != "cancelling":
            await self._store.ask_to_cancel(batch.id)
            self.notify()

    async def _work(self) -> None:
        while True:
            self._news.clear()
            try:
                if await self._run_one():
                    continue
            except EngineDeadError as error:
                logger.warning("Batches are paused until the server is restarted: %s", error)
                return
            except (ApiError, OSError) as error:
                logger.warning("Batches cannot be processed: %s", error)
            with contextlib.suppress(asyncio.TimeoutError, TimeoutError):
                await asyncio.wait_for(self._news.wait(), _LOOK_EVERY_S)

    async def _run_one(self) -> bool:
        """Runs the oldest batch that no server has claimed; whether there was one."""
        await self._store.refresh()
        for batch in self._store.unfinished:
            claim = await asyncio.to_thread(self._claims.take, batch.id)
            if claim is None:
                continue
            try:
                await self._run_claimed(batch.id, claim)
            finally:
                await asyncio.to_thread(claim.release)
            return True
        return False

    async def _run_claimed(self, batch_id: str, claim: Claim) -> None:
        try:
            batch = await asyncio.to_thread(self._store.read, batch_id)
        except msgspec.DecodeError:  # which is logged when the folder is looked through
            return
        if batch is None or batch.status not in ("validating", "in_progress", "cancelling"):
            return  # another server was quicker
        run = _Run(self._store, batch, claim)
        try:
            if batch.status != "cancelling":
                await self._answer_while_claimed(run)
        except EngineDeadError:
            raise
        except _LostError:
            logger.warning(
                "The batch %s is left to another server, because this one was stalled for too long", batch_id
            )
            return
        except TidewheelError as error:
            run.fail(str(error))
        except Exception as error:
            logger.exception("The batch %s has failed", batch_id)
            run.fail(str(error))
        else:
            run.end()
        await self._store.save(batch)

    async def _answer_while_claimed(self, run: _Run) -> None:
        """Answers until all is answered or the batch is to be cancelled. Raises what ends the batch."""
        task = asyncio.create_task(self._answer(run))
        saved = beaten = time.monotonic()
        try:
            while not (await asyncio.wait([task], timeout=_WRITE_EVERY_S))[0]:
                await run.write()
                now = time.monotonic()
                if now - beaten > run.claim.beat_every_s:
                    beaten = now
                    if not await asyncio.to_thread(run.claim.beat):
                        raise _LostError
                if now - saved > _SAVE_EVERY_S or self._news.is_set():
                    saved = now
                    self._news.clear()
                    await self._store.save(run.batch)
                    known = await asyncio.to_thread(self._store.read, run.batch.id)
                    if known is None or known.status == "cancelling":
                        run.batch.status = "cancelling"
                        run.batch.cancelling_at = int(time.time()) if known is None else known.cancelling_at
                        break
        finally:
            task.cancel()
            await asyncio.wait([task])
            if run.claim.is_held and run.has_outputs:
                await run.write()
                await run.keep()
        if not task.cancelled() and (error := task.exception()) is not None:
            raise error

    async def _answer(self, run: _Run) -> None:
        act_as(self._tenant_of(run.batch.owner))  # in a task of its own
        batch, store = run.batch, self._store
        source, counts = store.content_path(batch.input_file_id), batch.request_counts
        try:
            await asyncio.to_thread(_require_file, source)
            counts.total = await asyncio.to_thread(self._check, source)
            content = await asyncio.to_thread(source.read_bytes)
        except FileNotFoundError:
            raise TidewheelError(f"the file {batch.input_file_id} was deleted") from None
        await run.open_outputs()
        done, failed = [set(await asyncio.to_thread(finished_rows, path)) for path in run.paths]
        counts.completed, counts.failed = len(done), len(failed)
        if batch.in_progress_at is None:
            batch.status, batch.in_progress_at = "in_progress", int(time.time())
        await store.save(batch)
        answered = done | failed
        rows = (row for row in rows_in(io.BytesIO(content)) if row.custom_id not in answered)
        await run_rows(
            rows,
            self._post,
            run.add,
            concurrency=self._concurrency,
            url=batch.endpoint,
            body_of=_last_of_all,
            pace=self._pace,
        )

    def _check(self, source: Path) -> int:
        """See `check_file`. For a worker thread."""
        return check_file(source, MAX_ROWS, self._max_values, rests=Rests())


def _last_of_all(row: BatchRow) -> bytes:
    """The row's body, with a lower priority than all other requests. Its own priority is only checked."""
    body = bytes(row.body)
    if row.url in _GENERATES:
        with contextlib.suppress(msgspec.DecodeError, RecursionError):  # the endpoint has a better message
            fields = msgspec.json.decode(body, type=dict[str, msgspec.Raw])
            msgspec.json.decode(fields.get("priority", b"0"), type=int | None)
            return msgspec.json.encode({**fields, "priority": _LAST})
    return body


def _require_file(path: Path) -> None:
    """Raises TidewheelError for a link, a pipe or the like. With these, others who may write to the folder could make
    the server wait, or change other files.
    """
    if not stat.S_ISREG(path.lstat().st_mode):
        raise TidewheelError(f"{path.name} is not a regular file")


class _Run:
    """A batch that this server runs, and its answers and errors on their way to the files."""

    def __init__(self, store: BatchStore, batch: KeptBatch, claim: Claim) -> None:
        self.batch = batch
        self.claim = claim
        self.paths: tuple[Path, ...] = ()
        self._store = store
        self._lines: tuple[list[bytes], list[bytes]] = ([], [])  # to be written

    @property
    def has_outputs(self) -> bool:
        """Whether there are files to write to."""
        return bool(self.paths)

    async def open_outputs(self) -> None:
        """Makes the files of answers and errors; a batch that was interrupted has them."""
        paths = []
        for field, what in zip(_OUTPUTS, ("output", "errors"), strict=True):
            if getattr(self.batch, field) is None:
                file = self._store.new_file(f"{self.batch.id}_{what}.jsonl", "batch_output", 0, self.batch.owner)
                await asyncio.to_thread(self._store.content_path(file.id).touch)
                await self._store.add_file(file)
                setattr(self.batch, field, file.id)
            paths.append(self._store.content_path(getattr(self.batch, field)))
            await asyncio.to_thread(_require_file, paths[-1])
        self.paths = tuple(paths)

    def add(self, line: bytes, is_answer: bool) -> None:
        """See run.Write."""
        self._lines[not is_answer].append(line)
        counts = self.batch.request_counts
        if is_answer:
            counts.completed += 1
        else:
            counts.failed += 1

    async def write(self) -> None:
        """Writes what was added. Raises TidewheelError for more than a file may have, and _LostError."""
        for path, lines in zip(self.paths, self._lines, strict=False):
            if lines:
                content = b"".join(lines)
                lines.clear()
                size = await asyncio.to_thread(self._append, path, content)
                if size > _MAX_OUTPUT_BYTES:
                    raise TidewheelError(f"the output is larger than {_MAX_OUTPUT_BYTES} bytes")

    def _append(self, path: Path, content: bytes) -> int:
        if not self.claim.is_held:
            raise _LostError
        # No link is followed: others who may write to the folder cannot make the server write elsewhere.
        with open(path, "ab", opener=lambda name, flags: os.open(name, flags | os.O_NOFOLLOW, 0o666)) as file:
            file.write(content)
            return file.tell()

    async def keep(self) -> None:
        """Notes how large the files are, and how far the batch is. Files without a line are taken away: in OpenAI's API
        a batch without errors has no file of them.
        """
        empty = []
        for field, path in zip(_OUTPUTS, self.paths, strict=True):
            file = self._store.file(getattr(self.batch, field))
            size = (await asyncio.to_thread(path.stat)).st_size
            if size:
                await self._store.add_file(msgspec.structs.replace(file, bytes=size))
            else:
                setattr(self.batch, field, None)
                empty.append(file.id)
        await self._store.save(self.batch)
        for file_id in empty:
            await self._store.delete_file(file_id)

    def end(self) -> None:
        """Note that all is answered, or that the batch is to be cancelled."""
        now = int(time.time())
        if self.batch.status == "cancelling":
            self.batch.status, self.batch.cancelled_at = "cancelled", now
        else:
            self.batch.status, self.batch.completed_at = "completed", now

    def fail(self, message: str) -> None:
        """The batch cannot be run."""
        self.batch.status, self.batch.failed_at = "failed", int(time.time())
        self.batch.errors = BatchFaults([BatchFault(message, "invalid_batch")])
