"""StageProcesses: the processes of a pipeline, from their start to their end."""

from __future__ import annotations

import logging
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection, wait

from msgspec import Struct

from ...errors import DeviceError
from ...models.spec import StageSpec
from ...pipeline.stages import stage_name
from .process import StageStart

logger = logging.getLogger(__name__)

# The current folder may hold a file of any name.
_COMMAND = """
import sys
sys.path[:] = [folder for folder in sys.path if folder]
from tidewheel.engine.loading.stages.process import main
main()
"""
_END_S = 10.0  # that a stage has to end by itself
_DEATH_S = 2.0  # until the end of a process is known after its socket was closed


class LoadedStage(Struct):
    """A stage, its process with its groups of processors, and what it takes in memory."""

    stage: StageSpec
    groups: Sequence[Sequence[int]]
    process: subprocess.Popen[bytes]
    weight_bytes: int = 0
    cache_bytes: int = 0


class StageProcesses:
    """Starts a process for each stage. They end when this process ends, in any way.

    `has_ended` says whether one of the watched processes has ended.
    """

    def __init__(self, starts: Sequence[StageStart]) -> None:
        """Begin to load. Descriptors that `starts` name are inherited. Raises DeviceError if the system refuses."""
        self.stages: list[LoadedStage] = []
        self._connections: list[Connection] = []
        self.has_ended = False
        self._watch: tuple[socket.socket, threading.Thread] | None = None
        environment = {**os.environ, "HF_HUB_OFFLINE": "1"}  # the files are there, and stay the same
        try:
            for start in starts:
                ours, theirs = socket.socketpair()
                with theirs:
                    inherited = {start.upstream, start.downstream, start.masks, *start.slots, start.adapters} - {-1}
                    command = [sys.executable, "-c", _COMMAND, str(theirs.fileno())]
                    self._connections.append(Connection(ours.detach()))
                    process = subprocess.Popen(
                        command, stdin=subprocess.DEVNULL, pass_fds=(*inherited, theirs.fileno()), env=environment
                    )
                self.stages.append(LoadedStage(start.plan.stage, start.groups, process))
            for connection, start in zip(self._connections, starts, strict=True):
                connection.send(start)
        except OSError as error:
            self.close()
            raise DeviceError(f"a pipeline stage cannot be started: {error.strerror}") from error

    def load(self, report: Callable[[float], None]) -> None:
        """Wait until all have loaded. `report(fraction)` hears how far they are. What they log is logged here.

        Raises DeviceError for one that cannot load.
        """
        waiting = dict(zip(self._connections, range(len(self.stages)), strict=True))
        fractions = [0.0] * len(self.stages)
        while waiting:
            for ready in wait(list(waiting)):
                connection = ready
                assert isinstance(connection, Connection)
                index = waiting[connection]
                try:
                    kind, *said = connection.recv()
                except (EOFError, ConnectionResetError):
                    raise DeviceError(f"{self.name(index)} {self._end_of(index)} while it loaded its weights") from None
                if kind == "error":
                    raise DeviceError(f"{self.name(index)}: {said[0]}")
                if kind == "log":
                    logger.log(said[0], "%s: %s", self.name(index), said[1])
                elif kind == "progress":
                    fractions[index] = said[0]
                    report(min(sum(fractions), 1.0))
                else:
                    self.stages[index].weight_bytes, self.stages[index].cache_bytes = said
                    del waiting[connection]

    def watch(self, on_end: Callable[[], None]) -> None:
        """Once they have loaded, have `on_end` called on a thread when one of them ends before `stop_watching`."""
        ours, theirs = socket.socketpair()
        waited: list[Connection | socket.socket] = [*self._connections, theirs]

        def run() -> None:
            with theirs:
                if theirs not in wait(waited):  # stages that have loaded say nothing more
                    self.has_ended = True
                    on_end()

        thread = threading.Thread(target=run, name="stages", daemon=True)
        thread.start()
        self._watch = ours, thread

    def stop_watching(self) -> None:
        """Let them end without a word."""
        if self._watch is not None:
            (stop, thread), self._watch = self._watch, None
            stop.close()
            thread.join()

    def name(self, index: int) -> str:
        """A stage in words."""
        return stage_name(index, len(self.stages), self.stages[index].stage)

    def failure(self) -> str:
        """In words, which stage has ended, when one of them has."""
        deadline = time.monotonic() + _DEATH_S
        # Those behind it end in order, because nothing can come any more.
        while time.monotonic() < deadline:
            codes = [stage.process.poll() for stage in self.stages]
            for index, code in enumerate(codes):
                if code:
                    return f"{self.name(index)} {self._end_of(index)}"
            if None not in codes:
                break
            time.sleep(0.01)
        gone = next((i for i, stage in enumerate(self.stages) if stage.process.poll() is not None), 0)
        return f"{self.name(gone)} has ended"

    def stop_loading(self) -> None:
        """End all of them at once, from any thread."""
        for stage in self.stages:
            stage.process.kill()

    def close(self) -> None:
        """Wait for the end of all processes, whose links were closed before, and kill those that do not end."""
        self.stop_watching()
        deadline = time.monotonic() + _END_S
        for stage in self.stages:
            try:
                stage.process.wait(max(deadline - time.monotonic(), 0.0))
            except subprocess.TimeoutExpired:
                stage.process.kill()
                stage.process.wait()
        for connection in self._connections:
            connection.close()
        self._connections.clear()

    def _end_of(self, index: int) -> str:
        process = self.stages[index].process
        try:
            code = process.wait(_DEATH_S)
        except subprocess.TimeoutExpired:
            return "has closed its connections"
        if code >= 0:
            return f"has ended with status {code}"
        hint = "; the system kills a process when memory runs out" if code == -signal.SIGKILL else ""
        return f"was killed by {signal.Signals(-code).name}{hint}"
