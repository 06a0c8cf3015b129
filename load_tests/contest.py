"""Peers that are measured in turn: each peer's description, its runner's process, and its figures."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from ctypes.util import find_library
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import IO, Any

from peer_runners.job import Arrivals, Job, Scenario
from peer_runners.pictures_job import Look, PicturesJob
from process_tree import memory_mib

from tidewheel.server.commands.bench.engine_runs import common_rate
from tidewheel.server.commands.bench.spread import Spread

READY = "start to ready"
RESIDENT = "resident MiB"
LESS_IS_BETTER = (READY, RESIDENT)
RUNNERS = Path(__file__).with_name("peer_runners")


class RunError(Exception):
    """A runner could not do its job; the message is the last thing that it wrote."""


@dataclass(frozen=True)
class Peer:
    """A program to measure. `formats` are the weights that it is measured with by default.

    It reads Hugging Face folders, GGUF files, or both. `preload` are libraries that its makers recommend for
    LD_PRELOAD. Those that are found are put there. `verb` is what its runner does: run prompts, or see pictures. A peer
    that `serves` is a server of that name in servers.py, asked over HTTP.
    """

    name: str
    formats: tuple[str, ...]
    reads_folders: bool = False
    reads_gguf: bool = False
    preload: tuple[str, ...] = ()
    verb: str = "run"
    serves: bool = False

    def command(self, program: Path) -> list[str]:
        """What runs it. `program` is the server, or the interpreter of its own environment, which runs a script."""
        if self.serves:
            return [sys.executable, str(RUNNERS.with_name("over_http.py")), self.name, str(program)]
        return [str(program), str(RUNNERS / f"{self.verb}_{self.name.replace('-', '_')}.py")]

    def reads(self, weights: str) -> bool:
        """Whether it can read weights in this format. Names in capitals are types of GGUF files."""
        return self.reads_gguf if weights.isupper() else self.reads_folders


@dataclass
class Contestant:
    """A peer with one format of weights, and its measurements: the figures of all rounds for each scenario.

    Those of a Scenario are tokens a second, one a round; that of READY is in seconds, and that of RESIDENT the memory
    after the last scenario. `program` is a server, or the Python of the peer's environment; None for a peer that is
    not installed.
    """

    peer: Peer
    weights: str
    program: Path | None
    version: str | None = None
    figures: dict[str, list[float]] = field(default_factory=dict)
    failures: list[str] = field(default_factory=list)

    @property
    def name(self) -> str:
        """As in the table."""
        return f"{self.peer.name} {self.weights}"

    @property
    def reads_file(self) -> bool:
        """Whether the weights are those of a GGUF file."""
        return self.peer.reads_gguf and self.weights.isupper()

    def add(self, scenario: str, figure: float) -> None:
        """Take a round's figure."""
        self.figures.setdefault(scenario, []).append(figure)

    def fail(self, why: str) -> None:
        """Remember a failure, once if it repeats in other rounds."""
        if why not in self.failures:
            self.failures.append(why)

    def spread(self, scenario: str) -> Spread | None:
        """The figures of all rounds; None where there are none."""
        figures = self.figures.get(scenario)
        return Spread.of(figures) if figures else None


def run_rounds(
    contestants: Sequence[Contestant],
    job_for: Callable[[Contestant], Job | PicturesJob],
    rounds: int,
    timeout_s: float,
    say: Callable[[str], None],
) -> None:
    """Let all contestants run in turn, in `rounds` rounds. `job_for` may raise RunError."""
    for turn in range(1, rounds + 1):
        for contestant in contestants:
            if contestant.program is None:
                what = "server" if contestant.peer.serves else "virtual environment"
                contestant.fail(f"not run: --{contestant.peer.name} names no {what}")
                continue
            say(f"round {turn}: {contestant.name}")
            try:
                _run(contestant, contestant.program, job_for(contestant), timeout_s)
            except RunError as error:
                contestant.fail(str(error))


def run_script(command: Sequence[str], environment: Mapping[str, str], timeout_s: float) -> None:
    """Run a command whose output is not needed. Raises RunError if it fails."""
    with _process(command, "", environment, timeout_s) as process:
        assert process.stdout is not None
        for _ in process.stdout:
            pass


def environment_of(peer: Peer, python: Path, num_threads: int) -> dict[str, str]:
    """The environment of a peer's runner, without the variables that point to this interpreter's modules."""
    environment = {**os.environ, "OMP_NUM_THREADS": str(num_threads)}
    if found := [path for path in preloads(peer, python).values() if path is not None]:
        environment["LD_PRELOAD"] = ":".join(found)
    if python != Path(sys.executable):
        environment.pop("PYTHONPATH", None)
    return environment


def preloads(peer: Peer, python: Path) -> dict[str, str | None]:
    """The libraries that a peer wants in LD_PRELOAD, and where its environment or the system has them."""
    folder = python.parent.parent
    own = {name: next(iter(sorted(folder.glob(f"lib/**/lib{name}.so*"))), None) for name in peer.preload}
    return {name: find_library(name) if path is None else str(path) for name, path in own.items()}


def rate(scenario: Scenario, started: float, arrivals: list[Arrivals]) -> float:
    """Tokens a second: of the prompts, until each has its first new token; or, with several new tokens, of these.

    New tokens are counted over the time in which all sequences decode. Raises RunError if there is no such time.
    """
    for sequence in arrivals:
        if (came := sum(count for _, count in sequence)) != scenario.new_tokens:
            raise RunError(f"{scenario.name}: {came} tokens came and not {scenario.new_tokens}")
    if scenario.new_tokens == 1:
        return scenario.prompts * scenario.prompt_tokens / (max(sequence[0][0] for sequence in arrivals) - started)
    decoded = common_rate(arrivals)
    if decoded is None:
        raise RunError(f"{scenario.name}: the first sequence was done before the last had begun")
    return decoded


def _run(contestant: Contestant, program: Path, job: Job | PicturesJob, timeout_s: float) -> None:
    scenarios = {scenario.name: scenario for scenario in job.scenarios}
    command = contestant.peer.command(program)
    environment = environment_of(contestant.peer, program, len(job.cpus))
    started = time.perf_counter()
    with _process(command, json.dumps(asdict(job)) + "\n", environment, timeout_s) as process:
        assert process.stdout is not None
        while scenarios and (line := process.stdout.readline()):
            try:
                said: dict[str, Any] = json.loads(line)
            except ValueError as error:
                raise RunError(f"its runner said {line.strip()!r}") from error
            if "ready" in said:
                contestant.version = said["version"]
                contestant.add(READY, time.perf_counter() - started)
                continue
            scenario = scenarios.pop(said["scenario"])
            if "error" in said:
                contestant.fail(f"{scenario.name}: {_last_line(said['error'])}")
                continue
            try:
                for figure in _figures(scenario, said):
                    contestant.add(scenario.name, figure)
            except RunError as error:
                contestant.fail(str(error))
        if not scenarios and (resident := memory_mib(process.pid)):  # nothing of one that has ended
            contestant.add(RESIDENT, resident)


def _figures(scenario: Scenario | Look, said: Mapping[str, Any]) -> list[float]:
    if isinstance(scenario, Scenario):
        return [rate(scenario, said["started"], said["arrivals"])]
    figures: list[float] = said["figures"]
    return figures


@contextlib.contextmanager
def _process(
    command: Sequence[str], stdin: str, environment: Mapping[str, str], timeout_s: float
) -> Iterator[subprocess.Popen[str]]:
    """A process that was given `stdin`, whose end it sees after the context.

    Raises RunError if it does not start, end in time, or exit with 0.
    """
    with tempfile.TemporaryFile("w+", errors="replace") as log:
        try:
            process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                env=environment,
                start_new_session=True,
            )
        except OSError as error:
            raise RunError(f"{command[0]}: {error.strerror}") from error
        late = threading.Timer(timeout_s, _end_group, [process.pid])
        late.start()
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            with contextlib.suppress(BrokenPipeError):
                process.stdin.write(stdin)
                process.stdin.flush()
            yield process
            _close(process.stdin)
            status = process.wait()
        finally:
            timed_out = not late.is_alive()
            late.cancel()
            _end_group(process.pid)  # a runner may leave processes behind
            process.wait()
            _close(process.stdin)
            process.stdout.close()
        if timed_out:
            raise RunError(f"not done after {timeout_s:g} s")
        if status != 0:
            log.seek(0)
            raise RunError(_last_line(log.read()) or f"ended with status {status} and no word")


def _close(stdin: IO[str]) -> None:
    with contextlib.suppress(BrokenPipeError):  # what it never read is still in the buffer
        stdin.close()


def _end_group(pid: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(pid, signal.SIGKILL)


def _last_line(output: str) -> str:
    return (output.strip().splitlines() or [""])[-1].strip()
