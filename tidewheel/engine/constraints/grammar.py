"""Grammars: what structured output has to match, compiled by llguidance on threads of their own, and kept."""

from __future__ import annotations

import asyncio
import json
import re
import threading
from collections import OrderedDict
from collections.abc import Collection
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

from tidewheel.engine.constraints.json_schema import failing_part
from tidewheel.engine.constraints.structural_tag import compose, decode_format, schemas_in
from tidewheel.engine.constraints.vocabulary import make_vocabulary
from tidewheel.engine.errors import InvalidRequestError
from tidewheel.engine.text import Tokenizer

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

MAX_GRAMMAR_BYTES = 256 * 1024
_MOST_KEPT = 64
_MOST_KEPT_BYTES = 4 * MAX_GRAMMAR_BYTES  # of text; compiled it takes up to a hundred times as much
_LONGEST_MESSAGE = 600

# JSON as people and models lay it out: a space, or a line break and an indentation. Without a bound, a weak model may
# write nothing else.
_JSON_WHITESPACE = r" |\r?\n[ \t]{0,32}"

_JSON_KINDS = ("json_schema", "choice")
_EBNF_RULE = re.compile(r"^\s*[\w-]+\s*::=", re.MULTILINE)


@dataclass(frozen=True, slots=True)
class StructuredOutput:
    """What an answer has to match, as text of a kind.

    `json_schema`: a JSON schema. `regex`: a regular expression in Rust's syntax, for the whole answer. `choice`: a
    JSON list of strings, of which the answer is one. `grammar`: llguidance's dialect of Lark, or EBNF as llama.cpp and
    xgrammar have it, told by its `::=`. `structural_tag`: JSON of a structural_tag.Format. `param` is the request's
    field that it comes from.
    """

    kind: Literal["json_schema", "regex", "choice", "grammar", "structural_tag"]
    text: str
    param: str = field(default="structured_outputs", compare=False)


class _GrammarError(Exception):
    """What is wrong with a grammar."""


class Grammar:
    """A compiled grammar, shared by all sequences that must match it."""

    def __init__(self, prototype: LLMatcher) -> None:
        self._prototype = prototype

    def new_matcher(self) -> LLMatcher:
        """A matcher at the grammar's beginning, which shares no state with others. For the engine thread only."""
        return self._prototype.deep_copy()


class GrammarCompiler:
    """Compiles grammars for one vocabulary. llguidance is imported, and the vocabulary made, for the first of them."""

    def __init__(self, tokenizer: Tokenizer, vocab_size: int, eos_ids: Collection[int]) -> None:
        """`vocab_size` is the model's, which may differ from the tokenizer's; `eos_ids` end an answer."""
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._eos_ids = eos_ids
        # Two, so that a huge schema does not hold up all others; no more, for the engine needs the cores.
        self._threads = ThreadPoolExecutor(2, "grammar-compiler")
        self._kept: OrderedDict[StructuredOutput, Future[Grammar]] = OrderedDict()  # least recently used first
        self._is_warm = False
        self._vocabulary: LLTokenizer | None = None
        self._vocabulary_lock = threading.Lock()

    async def compile(self, output: StructuredOutput) -> Grammar:
        """The grammar of `output`, compiled or kept. For the event loop's thread only.

        Raises InvalidRequestError saying what is wrong with it, and where.
        """
        size = len(output.text.encode())
        if size > MAX_GRAMMAR_BYTES:
            raise InvalidRequestError(
                f"{output.param} has {size} bytes; at most {MAX_GRAMMAR_BYTES} can be compiled", output.param
            )
        future = self._kept.get(output)
        if future is None or (future.done() and (future.cancelled() or future.exception() is not None)):
            future = self._kept[output] = self._threads.submit(self._compile, output)
            self._forget_oldest()
        self._kept.move_to_end(output)
        try:
            # Shielded: whoever else waits for the same grammar still wants it when this client has gone.
            return await asyncio.shield(asyncio.wrap_future(future))
        except _GrammarError as error:
            raise InvalidRequestError(f"{output.param} {error}", output.param) from None

    def warm_up(self) -> None:
        """Import llguidance and make the vocabulary in a thread, before the first grammar is asked for.

        Calls after the first do nothing. What goes wrong is said to those who want grammars.
        """
        if not self._is_warm:
            self._is_warm = True
            self._threads.submit(self._made_vocabulary)

    def close(self) -> None:
        """End the threads."""
        self._threads.shutdown(wait=False, cancel_futures=True)

    def _forget_oldest(self) -> None:
        while (
            len(self._kept) > _MOST_KEPT or sum(len(output.text) for output in self._kept) > _MOST_KEPT_BYTES
        ) and len(self._kept) > 1:
            self._kept.popitem(last=False)

    def _made_vocabulary(self) -> LLTokenizer:
        with self._vocabulary_lock:
            if self._vocabulary is None:
                self._vocabulary = make_vocabulary(self._tokenizer, self._vocab_size, self._eos_ids)
            return self._vocabulary

    def _source(self, output: StructuredOutput) -> str:
        """llguidance's form of a grammar. Raises ValueError."""
        if output.kind == "structural_tag":
            return compose(decode_format(output.text), self._tokenizer.special_ids(), _source)
        return _source(output.kind, json.loads(output.text) if output.kind in _JSON_KINDS else output.text)

    def _compile(self, output: StructuredOutput) -> Grammar:
        try:
            import llguidance
        except ModuleNotFoundError as error:
            if error.name != "llguidance":
                raise
            raise _GrammarError(
                "needs the llguidance package, which is not installed: pip install llguidance "
                "(there are wheels for x86-64 and ARM)"
            ) from error
        vocabulary = self._made_vocabulary()
        try:
            source = self._source(output)
        except (ValueError, RecursionError) as error:
            raise _cannot(str(error)) from error
        limits = llguidance.LLParserLimits(verbose_errors=False)
        matcher = llguidance.LLMatcher(vocabulary, source, log_level=0, limits=limits)
        if matcher.is_error():
            raise _cannot(_located(output, matcher_error(matcher) or ""))
        # The first mask is the one that takes long, for it makes most of the lexer; copies find it made.
        matcher.compute_bitmask()
        if (message := matcher_error(matcher)) is not None:
            raise _cannot(message)
        return Grammar(matcher)


def matcher_error(matcher: LLMatcher) -> str | None:
    """What has gone wrong with a matcher for good; None if nothing has."""
    if not matcher.is_error():
        return None
    message = matcher.get_error().replace("<non-verbose/>", "").strip()
    return "no token of this model's can follow" if message == "NoExtensionBias" else message


def _cannot(message: str) -> _GrammarError:
    if len(message) > _LONGEST_MESSAGE:
        message = message[:_LONGEST_MESSAGE] + "..."
    return _GrammarError(f"cannot be compiled: {message}")


def _source(kind: str, value: Any) -> str:
    """The same, for all kinds but structural tags; `value` is the schema, the text, or the list of choices."""
    from llguidance import LLMatcher

    if kind == "json_schema":
        return _json_source(value)
    if kind == "regex":
        return LLMatcher.grammar_from_regex(value)
    if kind == "choice":
        # JSON's escapes are Lark's.
        return LLMatcher.grammar_from_lark("start: " + " | ".join(map(json.dumps, value)))
    return LLMatcher.grammar_from_lark(_from_ebnf(value) if _EBNF_RULE.search(value) else value)


def _json_source(schema: Any) -> str:
    from llguidance import LLMatcher

    options = schema.get("x-guidance", {}) if isinstance(schema, dict) else None
    if not isinstance(options, dict):
        raise ValueError("a JSON schema, and its x-guidance if it has one, must be objects")
    bounded = "whitespace_flexible" not in options
    return LLMatcher.grammar_from_json_schema(
        schema, defaults={"whitespace_pattern": _JSON_WHITESPACE} if bounded else {}
    )


def _from_ebnf(text: str) -> str:
    from llguidance.gbnf_to_lark import gbnf_to_lark

    try:
        return gbnf_to_lark(text)
    except Exception as error:  # the converter raises nothing narrower
        raise ValueError(f"it is not EBNF that can be read: {error}") from error


def _located(output: StructuredOutput, message: str) -> str:
    """The message, with the place in the schema where it says none."""
    if output.kind not in ("json_schema", "structural_tag"):
        return message
    from llguidance import LLMatcher

    def error_of(part: dict[str, Any]) -> str:
        try:
            return LLMatcher.validate_grammar(_json_source(part))
        except ValueError as error:
            return str(error)

    whole = json.loads(output.text)
    schemas = [("", whole)] if output.kind == "json_schema" else schemas_in(whole)
    for pointer, schema in schemas:
        if error_of(schema):
            pointer += failing_part(schema, error_of)
            return f"{message} (at {pointer})" if pointer else message
    return message
