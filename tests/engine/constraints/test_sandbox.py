"""The grammar sandbox: whatever a grammar does to its process, its request gets an error, and the next one works."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from engine.constraints.grammars import EOS, VOCAB_SIZE
from engine.tiny_tokenizers import tiny
from waiting import wait_until

from tidewheel.engine.constraints.grammar import (
    Grammar,
    GrammarCompiler,
    GrammarsBusyError,
    GrammarsUnavailableError,
    StructuredOutput,
)
from tidewheel.engine.constraints.sandbox_process import COMMAND
from tidewheel.engine.errors import EngineDeadError, InvalidRequestError

pytest.importorskip("llguidance")  # not there on every machine

# Grammars that no look at their text tells from others: a schema inside a rule, endless alternatives, intersections.
CHAIN = {f"d{i}": {"properties": {"a": {"$ref": f"#/$defs/d{i + 1}"}}} for i in range(1500)}
DEEP = "start: %json " + json.dumps({"$ref": "#/$defs/d0", "$defs": {**CHAIN, "d1500": {}}})
SLOW = "start: " + "|".join(['"a"'] * 60_000)
LARGE = "start: T\nT: " + " & ".join(f"/(.*a.{{{i}}}b.*)/" for i in range(400, 440))


@pytest.fixture
def one() -> Iterator[GrammarCompiler]:
    made = GrammarCompiler(tiny("byte-level"), VOCAB_SIZE, EOS)
    yield made
    made.close()


def compile_(one: GrammarCompiler, text: str, kind: Any = "grammar") -> Grammar:
    return asyncio.run(one.compile(StructuredOutput(kind, text, "field")))


def sandboxes(command: str = COMMAND) -> set[int]:
    """The processes of this one that try grammars. What else may start meanwhile is not among them."""
    mine = set()
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # it has ended
            parent = int((process / "stat").read_text().rpartition(")")[2].split()[1])
            if parent == os.getpid() and command.encode() in (process / "cmdline").read_bytes():
                mine.add(int(process.name))
    return mine


@pytest.mark.parametrize(
    ("grammar", "lower", "reason"),
    [
        (DEEP, "MAX_CPU_S = 2", "4 MiB of stack"),
        pytest.param(SLOW, "MAX_CPU_S = 1", "2 s of processor time", marks=pytest.mark.sweep),
        (LARGE, "MAX_MEMORY_BYTES = 2**25", "256 MiB|2 s of"),
    ],
    ids=["deep", "slow", "large"],
)
@pytest.mark.parametrize("limits", ["lower", pytest.param("real", marks=pytest.mark.sweep)])
def test_what_ends_the_process_is_refused_saying_what_it_took(
    one: GrammarCompiler, grammar: str, lower: str, reason: str, limits: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A process with a lower limit reaches it sooner. Errors state the real ones."""
    if limits == "lower":
        changed = COMMAND.replace("main()", f"main.__globals__.update({lower}); main()")
        monkeypatch.setattr("tidewheel.engine.constraints.sandbox.COMMAND", changed)
    with pytest.raises(InvalidRequestError, match=f"field cannot be compiled: compiling it takes .*({reason})"):
        compile_(one, grammar)
    assert isinstance(compile_(one, "[a-z]+", "regex"), Grammar)


@pytest.mark.parametrize("end", [signal.SIGKILL, signal.SIGALRM, signal.SIGTERM], ids=lambda end: end.name)
def test_a_trial_that_is_ended_from_outside_is_repeated(
    one: GrammarCompiler, end: signal.Signals, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """It says nothing of the grammar, so that is refused for now at most."""
    ends = [tmp_path / str(i) for i in range(3)]
    for path in ends:  # each ends one trial
        path.touch()
    bound = (
        f"lambda: next(((os.unlink(p), os.kill(os.getpid(), {int(end)})) "
        f"for p in {[str(path) for path in ends]} if os.path.exists(p)), None)"
    )
    changed = COMMAND.replace("main()", f"import os; main.__globals__['_bound_process'] = {bound}; main()")
    monkeypatch.setattr("tidewheel.engine.constraints.sandbox.COMMAND", changed)
    with pytest.raises(GrammarsUnavailableError, match=r"field cannot be compiled now: .*try again later"):
        compile_(one, "[a-z]+", "regex")
    assert isinstance(compile_(one, "[a-z]+", "regex"), Grammar)
    assert not any(path.exists() for path in ends)


@pytest.mark.skipif(not Path("/proc/self/task").is_dir(), reason="there is no /proc to see processes in")
@pytest.mark.parametrize("signal_sent", [signal.SIGKILL, signal.SIGSTOP], ids=lambda sent: sent.name)
def test_the_process_is_started_again_if_it_is_lost(one: GrammarCompiler, signal_sent: signal.Signals) -> None:
    before = sandboxes()
    compile_(one, "a", "regex")
    (process,) = sandboxes() - before
    os.kill(process, signal_sent)
    os.waitid(os.P_PID, process, os.WEXITED | os.WSTOPPED | os.WNOWAIT)  # signals take a moment
    compile_(one, "b", "regex")
    (other,) = sandboxes() - before - {process}
    assert other != process


@pytest.mark.skipif(not Path("/proc/self/task").is_dir(), reason="there is no /proc to see processes in")
def test_nothing_is_left_of_a_process_that_is_lost(
    one: GrammarCompiler, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Not even a paused process, which cannot end by itself."""
    first = tmp_path / "first"
    first.touch()
    bound = f"lambda: os.path.exists({str(first)!r}) and (os.unlink({str(first)!r}), time.sleep(60))"
    changed = COMMAND.replace("main()", f"import os, time; main.__globals__['_bound_process'] = {bound}; main()")
    monkeypatch.setattr("tidewheel.engine.constraints.sandbox.COMMAND", changed)
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(compile_, one, "a", "regex")
        wait_until(lambda: not first.exists())
        (lost,) = sandboxes(changed)
        for process in in_session(lost) - {lost}:
            os.kill(process, signal.SIGSTOP)
        os.kill(lost, signal.SIGKILL)
        assert isinstance(compile_(one, "b", "regex"), Grammar)
        assert isinstance(waiting.result(), Grammar)
    wait_until(lambda: not in_session(lost))


def in_session(leader: int) -> set[int]:
    """The processes of a session that live."""
    found = set()
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # it has ended
            state, _, _, session = (process / "stat").read_text().rpartition(")")[2].split()[:4]
            if int(session) == leader and state != "Z":
                found.add(int(process.name))
    return found


@pytest.mark.skipif(not Path("/proc/self/task").is_dir(), reason="there is no /proc to see processes in")
def test_a_refusal_is_kept(one: GrammarCompiler) -> None:
    def refusal() -> str:
        with pytest.raises(InvalidRequestError) as refused:
            compile_(one, "(", "regex")
        return str(refused.value)

    said = refusal()
    assert sandboxes()
    while left := sandboxes():
        for process in left:
            with contextlib.suppress(ProcessLookupError):
                os.kill(process, signal.SIGKILL)
        time.sleep(0.01)
    assert refusal() == said
    assert not sandboxes(), "a process has tried it again"
    with pytest.raises(InvalidRequestError):
        compile_(one, "((", "regex")
    assert sandboxes(), "a process would have been seen"


# Eight grammars take as much time as they get, until they are ended.
def test_slow_grammars_leave_places_to_others_and_closing_ends_them(one: GrammarCompiler) -> None:
    async def crowd() -> None:
        def slow(name: str) -> asyncio.Task[Grammar]:
            return asyncio.create_task(one.compile(StructuredOutput("grammar", f'{SLOW}|"{name}"', "field")))

        tasks = [slow(f"few {i}") for i in range(8)]
        await asyncio.sleep(0)
        assert isinstance(await one.compile(StructuredOutput("regex", "first")), Grammar)
        tasks += [slow(f"many {i}") for i in range(200)]
        await asyncio.sleep(0)
        refused = [task.exception() for task in tasks if task.done()]
        assert len(refused) > 100, "only so many may wait"
        one.close()
        results = await asyncio.gather(*tasks, return_exceptions=True)
        allowed = (GrammarsBusyError, EngineDeadError, InvalidRequestError)
        assert all(isinstance(result, allowed) for result in results), results
        with pytest.raises(EngineDeadError):
            await one.compile(StructuredOutput("regex", "late"))

    asyncio.run(crowd())
