"""Prompts to token ids, off the event loop when they are long enough to delay others' tokens."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from tidewheel.engine.text import Tokenizer
from tidewheel.server.errors import bad_request

T = TypeVar("T")

_INLINE_BYTES = 4096  # some hundred microseconds of work


class PromptEncoder:
    """Encodes and checks prompts for one tokenizer and context."""

    def __init__(self, tokenizer: Tokenizer, max_model_len: int) -> None:
        self.tokenizer = tokenizer
        self.max_model_len = max_model_len
        self._vocab_size = tokenizer.vocab_size
        # Two, so that a huge prompt does not hold up all other long ones; no more, for the engine needs the cores.
        self._threads = ThreadPoolExecutor(2, "prompt-encoder")

    async def run(self, size_bytes: int, work: Callable[[], T]) -> T:
        """The result of `work`: computed here if its input is small, in a thread otherwise."""
        if size_bytes <= _INLINE_BYTES:
            return work()
        return await asyncio.get_running_loop().run_in_executor(self._threads, work)

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        """The token ids of `text`."""
        return self.tokenizer.encode(text, add_special_tokens=add_special_tokens)

    def truncated(self, token_ids: list[int], limit: int | None, side: str | None, room: int = 1) -> list[int]:
        """The last `limit` of the tokens, or the first if `side` is right; -1 is as many as leave `room` for others.

        Raises ApiError (400) for a limit that is none, or beyond the context.
        """
        if limit is None:
            return token_ids
        if not (limit == -1 or 1 <= limit <= self.max_model_len):
            raise bad_request(
                f"truncate_prompt_tokens must be between 1 and this model's context of {self.max_model_len} tokens, "
                f"or -1 for as many as fit, got {limit}",
                "truncate_prompt_tokens",
            )
        kept = self.max_model_len - room if limit == -1 else limit
        return token_ids[:kept] if side == "right" else token_ids[max(len(token_ids) - kept, 0) :]

    def check_prompt(self, token_ids: Sequence[int], param: str, room: int = 1) -> None:
        """Raises ApiError (400) for a prompt that is empty or too long for a context with `room` for more."""
        if not token_ids:
            raise bad_request(f"{param} has no tokens", param)
        if len(token_ids) > self.max_model_len - room:
            raise bad_request(
                f"{param} has {len(token_ids)} tokens; this model's context is {self.max_model_len} tokens"
                f"{' and must have room for at least one more' if room else ''}",
                param,
                "context_length_exceeded",
            )

    def check_vocabulary(self, token_ids: Sequence[int], param: str) -> None:
        """Raises ApiError (400) for a token id that the tokenizer cannot decode."""
        if token_ids and not (min(token_ids) >= 0 and max(token_ids) < self._vocab_size):
            raise bad_request(f"{param}: token ids must be between 0 and {self._vocab_size - 1}", param)

    def close(self) -> None:
        """Ends the threads."""
        self._threads.shutdown(wait=False, cancel_futures=True)
