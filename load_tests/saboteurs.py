"""Attacks from the server's own machine: files in its KV folder are damaged, and its child processes are killed."""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import signal
from collections.abc import Callable, Sequence
from pathlib import Path

from process_tree import processes

Harm = Callable[[Path, random.Random], None]

_SIGNALS = (signal.SIGKILL, signal.SIGKILL, signal.SIGSTOP)
_FILES_PAUSE_S, _PROCESSES_PAUSE_S = 0.05, 2.0
# In the command lines of processes that may be killed at any time.
_CHILDREN = ("sandbox_process", "decoding_process", "template_worker")


async def sabotage(pid: int, kv_folder: Path, rng: random.Random, stopped: asyncio.Event) -> None:
    """Do damage repeatedly, until the event."""

    async def repeat(harm: Callable[[], object], pause_s: float) -> None:
        while not stopped.is_set():
            harm()
            with contextlib.suppress(asyncio.TimeoutError):
                await asyncio.wait_for(stopped.wait(), pause_s)

    await asyncio.gather(
        repeat(lambda: spoil_a_block(kv_folder, rng, rng.choice(HARMS)), _FILES_PAUSE_S),
        repeat(lambda: end_a_child(pid, rng, rng.choice(_SIGNALS)), _PROCESSES_PAUSE_S),
    )


def spoil_a_block(folder: Path, rng: random.Random, harm: Harm) -> None:
    """Damage a file of the KV cache, or create a bad one."""
    models = [path for path in folder.glob("tidewheel-kv-*") if path.is_dir()]
    if not models:
        return
    files = [*models[0].glob("*.kv")]
    strange = [models[0] / name for name in (f"{rng.getrandbits(128):032x}.kv", "partial.tmp")]
    path = rng.choice((*files, *strange))
    with contextlib.suppress(OSError):  # the server deletes files too
        harm(path, rng)


def _cut(path: Path, rng: random.Random) -> None:
    os.truncate(path, rng.randrange(path.stat().st_size + 1))


def _scribble(path: Path, rng: random.Random) -> None:
    with path.open("r+b") as file:
        file.seek(rng.randrange(path.stat().st_size + 1))
        file.write(rng.randbytes(rng.choice((1, 4096))))


def _swell(path: Path, rng: random.Random) -> None:
    os.truncate(path, rng.choice((2**20, 2**40)))  # sparse


def _replace(path: Path, put: Callable[[Path], object]) -> None:
    path.unlink(missing_ok=True)
    put(path)


HARMS: Sequence[Harm] = (
    _cut,
    _scribble,
    _swell,
    lambda path, rng: path.unlink(),
    lambda path, rng: path.chmod(0),
    lambda path, rng: _replace(path, os.mkfifo),
    lambda path, rng: _replace(path, os.mkdir),
    lambda path, rng: _replace(path, lambda at: at.write_bytes(rng.randbytes(9000))),
    lambda path, rng: _replace(path, lambda at: at.symlink_to(rng.choice(("/dev/zero", "/dev/full", "nowhere", at)))),
)


def end_a_child(pid: int, rng: random.Random, number: signal.Signals) -> bool:
    """Kill or pause one of the processes in which the server handles clients' input. Returns whether there was one."""
    children = [child for child in processes(pid) if child != pid and _is_expendable(child)]
    if children:
        with contextlib.suppress(ProcessLookupError):
            os.kill(rng.choice(children), number)
    return bool(children)


def _is_expendable(pid: int) -> bool:
    try:
        command = Path(f"/proc/{pid}/cmdline").read_text()
    except OSError:  # it has just ended
        return False
    return any(name in command for name in _CHILDREN)
