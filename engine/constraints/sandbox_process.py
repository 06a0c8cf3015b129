"""The process that tries grammars. A grammar may crash it without harm to the server.

It prepares by reading the vocabulary. For each grammar a process is forked that does everything that the server will
do with the grammar, under limits of time, memory and stack, and answers with llguidance's source of it, and the bytes
that it takes when compiled.

The server's threads have more stack than this. So a grammar that passes here is safe there.
"""

from __future__ import annotations

import os
import pickle
import random
import socket
import threading
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, TypeVar

from ..machine.memory import heap_bytes
from ..sandboxing.process import ANSWER, Outcome, bound_process, receive_message, serve
from .source import grammar_source, located, matcher_error
from .vocabulary import make_vocabulary

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLParserLimits, LLTokenizer

    Prepared = tuple[LLTokenizer, Mapping[str, int]]

T = TypeVar("T")

MAX_CPU_S = 2
MAX_WALL_S = 10
MAX_MEMORY_BYTES = 256 * 2**20  # while it is compiled
MAX_COMPILED_BYTES = 64 * 2**20
COMPILE_STACK_BYTES = 4 * 2**20
_USE_STACK_BYTES = 512 * 2**10  # stack for making masks, and for copying and freeing matchers
SLOW_CPU_S = 0.1
_WALKS = 3
_STEPS = 12
_FIRST_STEPS = 2  # a failure within the first two tokens is the grammar's fault, even if other tokens would work

NOT_TRIED = 2  # the exit status of a trial that could not begin
COMMAND = (
    "import sys; sys.path[:] = sys.argv[2:]; from tidewheel.engine.constraints.sandbox_process import main; main()"
)


def parser_limits() -> LLParserLimits:
    """llguidance's limits for a grammar, here and in the server."""
    from llguidance import LLParserLimits

    # Where a grammar is ambiguous, the time of a mask grows with the square of its items: to over a second for the
    # 50,000 that llguidance allows. A schema of 400 optional properties takes less than 10,000.
    return LLParserLimits(step_max_items=20_000, verbose_errors=False)


def main() -> None:
    """Serve on the socket that the command line names, until its other end is closed."""
    serve(_prepared, _try, wall_s=MAX_WALL_S, slow_cpu_s=SLOW_CPU_S)


def _prepared(state: bytes) -> Prepared:
    texts, special_ids = pickle.loads(state)
    return make_vocabulary(texts).llguidance, special_ids


def _try(connection: socket.socket, prepared: Prepared) -> None:
    kind, text = pickle.loads(receive_message(connection))
    _bound_process()
    outcome, size, answer = _tried(kind, text, *prepared)
    encoded = answer.encode(errors="replace")
    connection.sendall(ANSWER.pack(outcome, size, len(encoded)) + encoded)


def _bound_process() -> None:
    bound_process(MAX_CPU_S, MAX_MEMORY_BYTES, MAX_WALL_S)


def _tried(kind: str, text: str, vocabulary: LLTokenizer, special_ids: Mapping[str, int]) -> tuple[Outcome, int, str]:
    before = heap_bytes()
    matchers: list[LLMatcher] = []

    def compiled() -> tuple[Outcome, str]:
        from llguidance import LLMatcher

        try:
            source = grammar_source(kind, text, special_ids)
        except (ValueError, RecursionError) as error:
            return Outcome.REFUSED, str(error)
        matchers.append(LLMatcher(vocabulary, source, log_level=0, limits=parser_limits()))
        message = matcher_error(matchers[0])
        return (Outcome.RESULT, source) if message is None else (Outcome.REFUSED, located(kind, text, message))

    def used() -> tuple[str | None, int]:
        message = _walk(matchers[0])
        size = max(heap_bytes() - before, 0)
        matchers.clear()
        return message, size

    outcome, answer = _on_stack(COMPILE_STACK_BYTES, compiled)
    if outcome == Outcome.REFUSED:
        return outcome, 0, answer
    message, size = _on_stack(_USE_STACK_BYTES, used)
    if message is None and size > MAX_COMPILED_BYTES:
        message = f"its compiled form takes {size >> 20} MiB; the limit is {MAX_COMPILED_BYTES >> 20} MiB"
    return (outcome, size, answer) if message is None else (Outcome.REFUSED, 0, message)


def _walk(matcher: LLMatcher) -> str | None:
    """Use a matcher as sequences will. Returns the error if it fails at once, or soon with any choice of tokens."""
    matcher.compute_bitmask()
    if (message := matcher_error(matcher)) is not None:
        return message
    messages: list[str | None] = []
    for seed in range(_WALKS):
        steps, message = _walked(matcher.deep_copy(), random.Random(seed))
        messages.append(message)
        if steps <= _FIRST_STEPS and message is not None:
            return message
    return messages[0] if all(messages) else None


def _walked(matcher: LLMatcher, chosen: random.Random) -> tuple[int, str | None]:
    """How many allowed tokens the matcher accepted in a row, and the error that then stopped it, if any."""
    for step in range(_STEPS):
        forced = matcher.compute_ff_tokens()
        matcher.deep_copy().validate_tokens(forced)
        mask = int.from_bytes(matcher.compute_bitmask(), "little")
        if matcher.is_error() or matcher.is_stopped() or not mask:
            return step, matcher_error(matcher)
        start = chosen.randrange(mask.bit_length())
        rest = mask >> start  # the first token that is allowed from there on
        matcher.consume_token(start + (rest & -rest).bit_length() - 1)
    return _STEPS, matcher_error(matcher)


def _on_stack(size: int, work: Callable[[], T]) -> T:
    """The result of `work`, run on a stack of `size` bytes. If that is too small, the process crashes."""
    results: list[T] = []
    failures: list[BaseException] = []

    def run() -> None:
        try:
            results.append(work())
        except BaseException as failure:
            failures.append(failure)

    threading.stack_size(size)
    thread = threading.Thread(target=run)
    try:
        thread.start()
    except RuntimeError:  # the machine has no more threads, which says nothing of the grammar
        os._exit(NOT_TRIED)
    thread.join()
    if failures:
        raise failures[0]
    return results[0]
