"""BatchRunner: works on the batches of a store, one after the other, behind all other requests."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from pathlib import Path

import msgspec

from tidewheel.engine.errors import EngineDeadError, TidewheelError

from ..protocol.batches import BatchFault, BatchFaults, BatchObject
from .rows import check_file, finished_ids, read_rows
from .run import Post, run_rows
from .store import BatchStore

logger = logging.getLogger(__name__)

MAX_ROWS = 50_000
_MAX_OUTPUT_BYTES = 2 * 2**30
_LAST = 2**30  # the priority of a batch's requests: whoever waits for an answer goes first
_GENERATES = ("/v1/chat/completions", "/v1/completions")
_SAVE_EVERY_S = 2.0


class BatchRunner:
    """Runs `concurrency` requests of a batch at a time. What a restart interrupts goes on after it.

    A batch with a request that has more than `max_values` values in its JSON is refused.
    """

    def __init__(self, store: BatchStore, post: Post, concurrency: int, max_values: int) -> None:
        self._store = store
        self._post = post
        self._concurrency = concurrency
        self._max_values = max_values
        self._news = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        self._running: tuple[BatchObject, asyncio.Task[None]] | None = None

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

    def cancel(self, batch: BatchObject) -> None:
        """End a batch; its answers so far are kept."""
        if batch not in self._store.unfinished or batch.status == "cancelling":
            return
        batch.status, batch.cancelling_at = "cancelling", int(time.time())
        self._store.save(batch)
        if self._running is not None and self._running[0] is batch:
            self._running[1].cancel()
        self.notify()

    async def _work(self) -> None:
        while True:
            self._news.clear()
            for batch in self._store.unfinished:
                try:
                    await self._run(batch)
                except EngineDeadError as error:
                    logger.warning("Batches stand still until the server is started again: %s", error)
                    return
                except Exception as error:
                    logger.exception("The batch %s has failed", batch.id)
                    self._fail(batch, str(error))
            if not self._store.unfinished:
                await self._news.wait()

    async def _run(self, batch: BatchObject) -> None:
        if batch.status != "cancelling":
            task = asyncio.create_task(self._answer(batch))
            self._running = (batch, task)
            try:
                await asyncio.wait([task])
            finally:
                self._running = None
                task.cancel()
                await asyncio.wait([task])
            if not task.cancelled() and (error := task.exception()) is not None:
                if isinstance(error, TidewheelError) and not isinstance(error, EngineDeadError):
                    self._fail(batch, str(error))
                    return
                raise error
        now = int(time.time())
        if batch.status == "cancelling":
            batch.status, batch.cancelled_at = "cancelled", now
        else:
            batch.status, batch.completed_at = "completed", now
        self._store.save(batch)

    async def _answer(self, batch: BatchObject) -> None:
        store, counts = self._store, batch.request_counts
        source = store.content_path(batch.input_file_id)
        counts.total = await asyncio.to_thread(check_file, source, MAX_ROWS, self._max_values)
        paths = self._outputs(batch)
        done, failed = [set(await asyncio.to_thread(finished_ids, path)) for path in paths]
        counts.completed, counts.failed = len(done), len(failed)
        if batch.in_progress_at is None:
            batch.status, batch.in_progress_at = "in_progress", int(time.time())
        store.save(batch)
        saved = time.monotonic()
        rows = (row for row in read_rows(source) if row.custom_id not in done and row.custom_id not in failed)
        with paths[0].open("ab") as answers, paths[1].open("ab") as errors:

            def write(line: bytes, is_answer: bool) -> None:
                nonlocal saved
                target = answers if is_answer else errors
                target.write(line)
                target.flush()
                if is_answer:
                    counts.completed += 1
                else:
                    counts.failed += 1
                if target.tell() > _MAX_OUTPUT_BYTES:
                    raise TidewheelError(f"the output is larger than {_MAX_OUTPUT_BYTES} bytes")
                if time.monotonic() - saved > _SAVE_EVERY_S:
                    saved = time.monotonic()
                    store.save(batch)

            try:
                await run_rows(rows, self._post_last, write, concurrency=self._concurrency, url=batch.endpoint)
            finally:
                self._keep(batch, paths)

    def _outputs(self, batch: BatchObject) -> tuple[Path, Path]:
        """Where answers and errors are written; a batch that was interrupted has such files."""
        store = self._store
        for field, what in (("output_file_id", "output"), ("error_file_id", "errors")):
            if getattr(batch, field) is None:
                file = store.new_file(f"{batch.id}_{what}.jsonl", "batch_output", 0)
                store.content_path(file.id).touch()
                store.add_file(file)
                setattr(batch, field, file.id)
        return store.content_path(batch.output_file_id or ""), store.content_path(batch.error_file_id or "")

    def _keep(self, batch: BatchObject, paths: tuple[Path, Path]) -> None:
        for file_id, path in zip((batch.output_file_id, batch.error_file_id), paths, strict=True):
            file = self._store.file(file_id or "")
            file.bytes = path.stat().st_size
            self._store.add_file(file)
        self._store.save(batch)

    def _fail(self, batch: BatchObject, message: str) -> None:
        batch.status, batch.failed_at = "failed", int(time.time())
        batch.errors = BatchFaults([BatchFault(message, "invalid_batch")])
        self._store.save(batch)

    async def _post_last(self, path: str, body: bytes) -> tuple[int, bytes]:
        if path in _GENERATES:
            with contextlib.suppress(msgspec.DecodeError):  # the endpoint has a better message
                fields = msgspec.json.decode(body, type=dict[str, msgspec.Raw])
                body = msgspec.json.encode({"priority": _LAST, **fields})
        return await self._post(path, body)
