"""Token log-probabilities in the shapes that clients know."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import lru_cache
from itertools import accumulate, pairwise
from typing import TypeAlias

from msgspec import structs

from tidewheel.engine.outputs import FinishReason, PromptLogprobs, RequestOutput
from tidewheel.engine.text.tokenizer import Tokenizer

from ..protocol.chat import ChatLogprobs, TokenLogprobEntry, TopLogprob
from ..protocol.completions import CompletionLogprobs
from ..protocol.logprobs import PromptTokenLogprob
from ..protocol.sampling import GenerationBody

_FLOOR = -9999.0  # JSON has no -inf
_REMEMBERED_TOKENS = 65536
_ENTRIES_AT_ONCE = 1344  # made in about a millisecond

# A token, its log-probability, and the most likely ones with theirs; no log-probability for a prompt's first token.
Entry: TypeAlias = tuple[int, float | None, Iterable[tuple[int, float]]]


class LogprobsFormatter:
    """Writes log-probabilities of one model's tokens. Safe to use from several threads."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._text: Callable[[int], str] = lambda token: ""
        if tokenizer.has_text:
            self._text = lru_cache(_REMEMBERED_TOKENS)(lambda token: tokenizer.decode([token], False))
        self._bytes = lru_cache(_REMEMBERED_TOKENS)(lambda token: list(tokenizer.token_bytes(token)))

    def chat(self, body: GenerationBody, output: RequestOutput) -> ChatLogprobs | None:
        """The chat shape; None where none were asked for.

        The bytes of an answer's tokens, joined, are its text. So special tokens that are skipped have no bytes, and
        tokens that the answer stopped at have none either. Only a stop string ends a text before its tokens do.
        """
        if output.logprobs is None:
            return None
        as_ids = bool(body.return_tokens_as_token_ids)
        bytes_of = self._bytes if body.skip_special_tokens is False else self._unskipped_bytes
        entries = []
        for token_id, logprob in zip(output.token_ids, output.logprobs, strict=True):
            top = [TopLogprob(self._name(t, as_ids), _finite(value), bytes_of(t)) for t, value in logprob.top]
            name = self._name(token_id, as_ids)
            entries.append(TokenLogprobEntry(name, _finite(logprob.logprob), bytes_of(token_id), top))
        if entries and output.finish_reason is FinishReason.STOP and not body.include_stop_str_in_output:
            token_id = output.token_ids[-1]
            if token_id == output.stop_reason or self._tokenizer.is_special(token_id):
                entries[-1].bytes = []
        return ChatLogprobs(entries)

    def chat_entries(self, body: GenerationBody, outputs: Iterable[RequestOutput]) -> Iterator[TokenLogprobEntry]:
        """The entries of the chat shape for all tokens of a choice."""
        for output in outputs:
            # A beam's output has all of its tokens.
            at_once = places_at_once(len(output.logprobs[0].top) if output.logprobs else 0)
            for start in range(0, len(output.token_ids), at_once):
                end = start + at_once
                part = structs.replace(
                    output,
                    token_ids=output.token_ids[start:end],
                    logprobs=None if output.logprobs is None else output.logprobs[start:end],
                    finish_reason=output.finish_reason if end >= len(output.token_ids) else None,
                )
                if (shape := self.chat(body, part)) is not None:
                    yield from shape.content

    def completion(self, entries: Iterable[Entry], offset: int, as_token_ids: bool) -> tuple[CompletionLogprobs, int]:
        """The legacy shape of consecutive tokens of one choice. `offset` is the first one's `text_offset`, and what is
        returned the next one's.
        """
        shape = CompletionLogprobs([], [], [], [])
        for entry in entries:
            token_id, logprob, _ = entry
            shape.tokens.append(self._name(token_id, as_token_ids))
            shape.text_offset.append(offset)
            shape.token_logprobs.append(None if logprob is None else _finite(logprob))
            shape.top_logprobs.append(self._top(entry, as_token_ids))
            offset += len(self._text(token_id))
        return shape, offset

    def completion_columns(
        self, entries: Callable[[], Iterable[Entry]], as_token_ids: bool
    ) -> tuple[Iterator[object], ...]:
        """The contents of the lists in `completion`'s shape, in the order of its fields; each calls for `entries`."""
        lengths = (len(self._text(token_id)) for token_id, _, _ in entries())
        return (
            (start for start, _ in pairwise(accumulate(lengths, initial=0))),
            (None if logprob is None else _finite(logprob) for _, logprob, _ in entries()),
            (self._name(token_id, as_token_ids) for token_id, _, _ in entries()),
            (self._top(entry, as_token_ids) for entry in entries()),
        )

    def prompt(
        self, token_ids: Sequence[int], logprobs: PromptLogprobs | None, count: int
    ) -> Iterator[dict[int, PromptTokenLogprob] | None]:
        """vLLM's shape of a prompt's log-probabilities, with the `count` most likely tokens of each place.

        `logprobs` are None for a prompt of one token.
        """
        yield None
        for token_id, (logprob, rank, top) in zip(token_ids[1:], _rows(logprobs, count), strict=True):
            place = {token_id: PromptTokenLogprob(_finite(logprob), rank, self._text(token_id))}
            for top_rank, (t, value) in enumerate(top, 1):
                place.setdefault(t, PromptTokenLogprob(_finite(value), top_rank, self._text(t)))
            yield place

    def _top(self, entry: Entry, as_token_ids: bool) -> dict[str, float] | None:
        token_id, logprob, top = entry
        if logprob is None:
            return None
        # The token itself is always among them, as OpenAI has it.
        own = {self._name(token_id, as_token_ids): _finite(logprob)}
        return own | {self._name(t, as_token_ids): _finite(value) for t, value in top}

    def _unskipped_bytes(self, token_id: int) -> list[int]:
        return [] if self._tokenizer.is_special(token_id) else self._bytes(token_id)

    def _name(self, token_id: int, as_token_id: bool) -> str:
        return f"token_id:{token_id}" if as_token_id else self._text(token_id)


def places_at_once(count: int) -> int:
    """For how many places log-probabilities are made together, each with the `count` most likely tokens."""
    return max(_ENTRIES_AT_ONCE // (1 + count), 1)


def output_entries(outputs: Iterable[RequestOutput]) -> Iterator[Entry]:
    """The sampled tokens of consecutive outputs."""
    for output in outputs:
        for token_id, logprob in zip(output.token_ids, output.logprobs or (), strict=True):
            yield token_id, logprob.logprob, logprob.top


def prompt_entries(token_ids: Sequence[int], logprobs: PromptLogprobs | None, count: int) -> Iterator[Entry]:
    """The tokens of a prompt, with the `count` most likely ones of each place."""
    yield token_ids[0], None, ()
    for token_id, (logprob, _, top) in zip(token_ids[1:], _rows(logprobs, count), strict=True):
        yield token_id, logprob, top


def _rows(logprobs: PromptLogprobs | None, count: int) -> Iterator[tuple[float, int, list[tuple[int, float]]]]:
    if logprobs is None:
        return
    # Python's numbers take many times the memory of numpy's, so that they are made for some places at a time.
    at_once = places_at_once(count)
    for start in range(0, len(logprobs.ranks), at_once):
        some = slice(start, start + at_once)
        top_ids, top_logprobs = logprobs.top_ids[some, :count].tolist(), logprobs.top_logprobs[some, :count].tolist()
        for logprob, rank, ids, values in zip(
            logprobs.logprobs[some].tolist(), logprobs.ranks[some].tolist(), top_ids, top_logprobs, strict=True
        ):
            yield logprob, rank, list(zip(ids, values, strict=True))


def _finite(value: float) -> float:
    return max(float(value), _FLOOR)
