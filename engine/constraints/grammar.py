"""Grammars of structured output. Each is tried in the sandbox, then compiled by llguidance in a thread, and kept."""

from __future__ import annotations

import asyncio
import threading
from collections import OrderedDict
from collections.abc import Callable, Collection
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, TypeVar

from ..errors import EngineDeadError, InvalidRequestError, TidewheelError
from ..machine.memory import release_free_memory, resident_bytes
from ..sandboxing.sandbox import SandboxError
from ..text.tokenizer import Tokenizer
from .lookahead_costs import LookaheadCosts
from .sandbox import GrammarError, GrammarSandbox, SafeGrammar
from .sandbox_process import COMPILE_STACK_BYTES, parser_limits
from .source import matcher_error
from .vocabulary import TokenTexts, Vocabulary, make_vocabulary, token_texts

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

T = TypeVar("T")

MAX_GRAMMAR_BYTES = 256 * 1024
_MAX_KEPT = 64
_MAX_KEPT_TEXT = 4 * MAX_GRAMMAR_BYTES  # characters
_MAX_KEPT_BYTES = 64 * 2**20  # of compiled grammars
_MAX_KEPT_GROWTH = 8 * 2**20
_UNRELEASED_BYTES = 16 * 2**20  # growth of the process after which free memory goes back to the system
_LONGEST_MESSAGE = 600

_PLACES = 4  # grammars tried at once, with 256 MiB each; they get the processor time that the engine leaves
# One that takes long (SLOW_CPU_S) needs a slow place too. So the others are soon free again for any grammar.
_SLOW_PLACES = 2
_MAX_WAITING = 64
_MAX_COMPILED_AT_ONCE = 2  # in this process; no more, because the engine needs the cores
_STACK_BYTES = 4 * COMPILE_STACK_BYTES
_SHUTTING_DOWN = "the server is shutting down"


@dataclass(frozen=True, slots=True)
class StructuredOutput:
    """What an answer has to match: a `kind` and its text.

    `json_schema`: a JSON schema. `regex`: a regular expression in Rust's syntax, for the whole answer. `choice`: a
    JSON list of strings; the answer is one of them. `grammar`: llguidance's dialect of Lark, or EBNF as in llama.cpp
    and xgrammar, which is recognized by its `::=`. `structural_tag`: JSON of a structural_tag.Format. `param` is the
    request's field that it comes from.
    """

    kind: Literal["json_schema", "regex", "choice", "grammar", "structural_tag"]
    text: str
    param: str = field(default="structured_outputs", compare=False)


class GrammarsBusyError(TidewheelError):
    """Too many grammars wait to be compiled, or take long. A client may try again."""


class GrammarsUnavailableError(TidewheelError):
    """No grammar can be compiled at all."""


class Grammar:
    """A compiled grammar, shared by all sequences that must match it.

    `size` is about how many bytes it takes. llguidance stores the states of its regular expressions in the grammar, for
    all sequences. When they reach a limit, all sequences fail. So a grammar that has reached a limit, or has grown a
    lot (`grown_bytes`), `is_spent`: the next request gets a newly compiled one.
    """

    def __init__(self, prototype: LLMatcher, size: int = 0) -> None:
        self.size = size
        self.grown_bytes = 0
        self.is_spent = False
        self.lookahead = LookaheadCosts()
        self._prototype = prototype

    @property
    def is_fresh(self) -> bool:
        """Whether another request may use it."""
        return not self.is_spent and self.grown_bytes < _MAX_KEPT_GROWTH

    def new_matcher(self) -> LLMatcher:
        """A new matcher at the beginning of the grammar. For the engine thread only."""
        return self._prototype.deep_copy()


class GrammarCompiler:
    """Compiles grammars for one vocabulary. The first one imports llguidance and builds the vocabulary.

    A grammar is compiled here only after a separate process has done the same without harm (see sandbox.py). The thread
    here has more stack than that process had.
    """

    def __init__(self, tokenizer: Tokenizer, vocab_size: int, eos_ids: Collection[int]) -> None:
        """`vocab_size` is the model's, which may differ from the tokenizer's; `eos_ids` end an answer."""
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._eos_ids = eos_ids
        self._threads = ThreadPoolExecutor(_PLACES, "grammar-compiler")
        self._sandbox = GrammarSandbox(self._token_texts, tokenizer.special_ids)
        self._slow_places = threading.Semaphore(_SLOW_PLACES)
        self._compiling = threading.Semaphore(_MAX_COMPILED_AT_ONCE)
        self._kept: OrderedDict[StructuredOutput, Future[Grammar]] = OrderedDict()  # least recently used first
        self._unfinished = 0
        self._release_lock = threading.Lock()
        self._resident = resident_bytes()
        self._is_warm = False
        self._is_closed = False
        self._vocabulary: Vocabulary | None = None
        self._is_freed = False
        self._vocabulary_lock = threading.Lock()

    async def compile(self, output: StructuredOutput) -> Grammar:
        """The grammar of `output`, compiled or kept. For the event loop's thread only.

        Raises InvalidRequestError, which says what is wrong and where. Raises GrammarsBusyError if too many others
        wait, or if this one takes long while others do, GrammarsUnavailableError if no grammar can be compiled, and
        EngineDeadError after `close`.
        """
        self._tokenizer.require_text(output.param)
        size = len(output.text.encode())
        if size > MAX_GRAMMAR_BYTES:
            raise InvalidRequestError(
                f"{output.param} has {size} bytes; at most {MAX_GRAMMAR_BYTES} can be compiled", output.param
            )
        future = self._kept.get(output)
        if future is None or not _is_worth_keeping(future):
            if self._is_closed:
                raise EngineDeadError(_SHUTTING_DOWN)
            if self._unfinished >= _MAX_WAITING:
                raise GrammarsBusyError(f"the server is busy: {_MAX_WAITING} grammars wait already; try again later")
            future = self._kept[output] = self._submit(self._compile, output)
            self._unfinished += 1
            asyncio.wrap_future(future).add_done_callback(self._count_out)
        self._kept.move_to_end(output)
        self._forget_oldest()
        try:
            # Shielded: others that wait for the same grammar still want it when this client has gone.
            return await asyncio.shield(asyncio.wrap_future(future))
        except asyncio.CancelledError:
            if future.cancelled():  # by `close`, not by this client
                raise EngineDeadError(_SHUTTING_DOWN) from None
            raise
        except GrammarError as error:
            raise InvalidRequestError(f"{output.param} {error}", output.param) from None
        except SandboxError as error:
            if self._is_closed:
                raise EngineDeadError(_SHUTTING_DOWN) from None
            raise GrammarsUnavailableError(f"{output.param} cannot be compiled now: {error}") from error

    def warm_up(self) -> None:
        """Import llguidance, make the vocabulary and start the sandbox, in threads, before the first grammar is there.

        Calls after the first do nothing. Failures are reported to later requests for grammars.
        """
        if not self._is_warm and not self._is_closed and self._tokenizer.has_text:
            self._is_warm = True
            self._submit(self._start_sandbox)
            self._submit(self._made_vocabulary)

    def close(self) -> None:
        """End the threads, and the grammars that are being tried. Calling it twice is allowed."""
        self._is_closed = True
        self._threads.shutdown(wait=False, cancel_futures=True)
        self._sandbox.close()

    def free(self) -> None:
        """Close it, when no sequence needs a grammar any more, so that its memory can be freed."""
        self.close()
        self._is_freed = True
        # While it is being made, the thread that makes it sees to this.
        if self._vocabulary is not None:
            self._vocabulary.free()

    def _submit(self, work: Callable[..., T], *arguments: Any) -> Future[T]:
        # The size is for all threads that are started meanwhile; others that start get more address space, no memory.
        before = threading.stack_size(_STACK_BYTES)
        try:
            return self._threads.submit(work, *arguments)
        finally:
            threading.stack_size(before)

    def _count_out(self, ended: asyncio.Future[Grammar]) -> None:
        self._unfinished -= 1
        if not ended.cancelled():
            ended.exception()  # those who wait for the grammar get the exception

    def _forget_oldest(self) -> None:
        kept = self._kept
        texts = sum(len(output.text) for output in kept)
        size = sum(_size_of(future) for future in kept.values())
        while len(kept) > 1 and (len(kept) > _MAX_KEPT or texts > _MAX_KEPT_TEXT or size > _MAX_KEPT_BYTES):
            output, future = kept.popitem(last=False)
            texts -= len(output.text)
            size -= _size_of(future)

    def _token_texts(self) -> TokenTexts:
        return token_texts(self._tokenizer, self._vocab_size, self._eos_ids)

    def _made_vocabulary(self) -> LLTokenizer:
        with self._vocabulary_lock:
            if self._vocabulary is None:
                self._vocabulary = make_vocabulary(self._token_texts(), self._tokenizer)
                if self._is_freed:
                    self._vocabulary.free()
            return self._vocabulary.llguidance

    def _start_sandbox(self) -> None:
        _import_llguidance()
        self._sandbox.start()

    def _compile(self, output: StructuredOutput) -> Grammar:
        _import_llguidance()
        safe = self._tried(output)
        vocabulary = self._made_vocabulary()
        from llguidance import LLMatcher

        with self._compiling:
            matcher = LLMatcher(vocabulary, safe.source, log_level=0, limits=parser_limits())
            # The first mask is the one that takes long, for it makes most of the lexer; copies find it made.
            matcher.compute_bitmask()
        if (message := matcher_error(matcher)) is not None:
            raise _cannot(message)
        self._release_memory()
        return Grammar(matcher, safe.size)

    def _release_memory(self) -> None:
        """Return free memory to the system: compiling needs much more than its result, and the C library keeps it."""
        with self._release_lock:
            resident = resident_bytes()
            if resident > self._resident + _UNRELEASED_BYTES:
                release_free_memory()
                self._resident = resident_bytes()

    def _tried(self, output: StructuredOutput) -> SafeGrammar:
        held = False

        def take_slow_place() -> None:
            nonlocal held
            if held:  # for the first of two trials
                return
            held = self._slow_places.acquire(blocking=False)
            if not held:
                raise GrammarsBusyError(
                    f"the server is busy: {_SLOW_PLACES} slow grammars are being compiled already, and "
                    f"{output.param} is slow to compile too; try again later"
                )

        try:
            return self._sandbox.try_grammar(output.kind, output.text, take_slow_place)
        except GrammarError as error:
            raise _cannot(str(error)) from None
        finally:
            if held:
                self._slow_places.release()


def _import_llguidance() -> None:
    try:
        import llguidance  # noqa: F401
    except ModuleNotFoundError as error:
        if error.name != "llguidance":
            raise
        raise GrammarError(
            "needs the llguidance package, which is not installed: pip install llguidance "
            "(there are wheels for x86-64 and ARM)"
        ) from error


def _is_worth_keeping(future: Future[Grammar]) -> bool:
    """Whether another try would give the same result. A grammar that was refused is not tried again."""
    if not future.done():
        return True
    if future.cancelled() or not isinstance(error := future.exception(), GrammarError | None):
        return False
    return error is not None or future.result().is_fresh


def _size_of(future: Future[Grammar]) -> int:
    done = future.done() and not future.cancelled() and future.exception() is None
    return future.result().size + future.result().grown_bytes if done else 0


def _cannot(message: str) -> GrammarError:
    if len(message) > _LONGEST_MESSAGE:
        message = message[:_LONGEST_MESSAGE] + "..."
    return GrammarError(f"cannot be compiled: {message}")
