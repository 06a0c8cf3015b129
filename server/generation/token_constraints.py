"""A body's constraints on the tokens of its answers: allowed tokens, bad words and structured output."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from functools import partial
from http import HTTPStatus
from typing import NamedTuple, TypeAlias

from tidewheel.engine.constraints.constraint import Preface, TokenConstraints
from tidewheel.engine.constraints.filters import bad_word_tokens
from tidewheel.engine.constraints.grammar import Grammar, GrammarsBusyError, GrammarsUnavailableError, StructuredOutput
from tidewheel.engine.constraints.structural_tag import Alternatives, Format
from tidewheel.engine.constraints.thinking_budget import ThinkingBudget, ThinkingLimit
from tidewheel.engine.core.engine import Engine
from tidewheel.engine.errors import InvalidRequestError

from ..errors import ApiError, bad_request
from ..protocol.sampling import GenerationBody
from .structured_output import as_format, tag_output

MAX_BAD_WORDS = 1024
MAX_BAD_WORD_LENGTH = 256  # characters
_RETRY_AFTER_S = 1


class Calls(NamedTuple):
    """Calls of the tools on offer: a structural tag of what they look like.

    `arguments` is for errors: what each tool's schema alone demands.
    """

    format: Format
    arguments: Sequence[StructuredOutput]


Frame: TypeAlias = Callable[[Format | None, Format | None], Format]
"""The whole of an answer that has this content or consists of these calls. One of the two may be None."""


async def token_constraints(
    engine: Engine,
    body: GenerationBody,
    wanted: StructuredOutput | None,
    output: StructuredOutput | Calls | None = None,
    *,
    calls: Calls | None = None,
    preface: Preface | None = None,
    frame: Frame | None = None,
    thinking: ThinkingBudget | None = None,
) -> TokenConstraints | None:
    """The body's constraints for the engine, None if it has none. Slow work is done in threads.

    `wanted` is the body's `structured_output`. `output` is what the answers have to match instead: demanded tool calls,
    as JSON or in the model's own format. They may match `calls` instead. They have to match from their start, or from
    behind their `preface`. That is reasoning, which `thinking` limits. If there is a `frame`, they have to match it,
    with one of these in it. Raises ApiError and InvalidRequestError (400) naming the field at fault.
    """
    if isinstance(output, Calls):
        wanted, calls = None, output
    elif output is not None:
        wanted, calls = output, None
    _check(body)
    field = _field(body, wanted, thinking, demands_calls=output is not None)
    if field is None:
        return None
    if body.use_beam_search:
        raise bad_request(f"{field} must be left out with beam search", field)
    grammar: Grammar | None = None
    if wanted is not None and calls is None and frame is None:
        grammar = await _compile(engine, wanted)
    elif wanted is not None or output is not None:
        grammar = await _compile_framed(engine, wanted, calls, frame or _either)
    runs: tuple[tuple[int, ...], ...] = ()
    if body.bad_words:
        engine.tokenizer.require_text("bad_words")
        tokenize = partial(bad_word_tokens, engine.tokenizer, body.bad_words)
        runs = await asyncio.get_running_loop().run_in_executor(None, tokenize)
    allowed = None if body.allowed_token_ids is None else tuple(body.allowed_token_ids)
    return TokenConstraints(allowed, runs, grammar, preface, thinking)


async def _compile(engine: Engine, output: StructuredOutput) -> Grammar:
    """Raises ApiError: 429 if too many grammars wait, 503 if none can be compiled."""
    try:
        return await engine.grammars.compile(output)
    except GrammarsBusyError as error:
        headers = {"retry-after": str(_RETRY_AFTER_S)}
        raise ApiError(
            HTTPStatus.TOO_MANY_REQUESTS, str(error), param=output.param, code="queue_full", headers=headers
        ) from None
    except GrammarsUnavailableError as error:
        raise ApiError(HTTPStatus.SERVICE_UNAVAILABLE, str(error), param=output.param) from None


def _either(content: Format | None, calls: Format | None) -> Format:
    return Alternatives([part for part in (content, calls) if part is not None])


async def _compile_framed(
    engine: Engine, answer: StructuredOutput | None, calls: Calls | None, frame: Frame
) -> Grammar:
    """The grammar of answers that match `answer` or are calls."""
    try:
        content = None if answer is None else as_format(answer)
        whole = frame(content, None if calls is None else calls.format)
        return await _compile(engine, tag_output(whole, "tools" if answer is None else answer.param))
    except InvalidRequestError:
        for part in (answer, *(() if calls is None else calls.arguments)):  # the one at fault has a better message
            if part is not None:
                await _compile(engine, part)
        raise


def _field(
    body: GenerationBody, wanted: StructuredOutput | None, thinking: ThinkingBudget | None, *, demands_calls: bool
) -> str | None:
    """The name of a field that constrains the answers, None if there is none."""
    if demands_calls:
        return "tool_choice"
    if wanted is not None:
        return wanted.param
    if body.allowed_token_ids is not None:
        return "allowed_token_ids"
    if body.bad_words:
        return "bad_words"
    return None if thinking is None else ThinkingLimit.field


def _check(body: GenerationBody) -> None:
    if body.allowed_token_ids is not None and not body.allowed_token_ids:
        raise bad_request("allowed_token_ids is empty: nothing could be answered", "allowed_token_ids")
    words = body.bad_words or []
    if len(words) > MAX_BAD_WORDS:
        raise bad_request(f"bad_words must have at most {MAX_BAD_WORDS} words, got {len(words)}", "bad_words")
    if not all(0 < len(word) <= MAX_BAD_WORD_LENGTH for word in words):
        raise bad_request(f"bad_words must be strings of 1 to {MAX_BAD_WORD_LENGTH} characters", "bad_words")
