"""Prompts to token ids. Long prompts are encoded in threads, so that they do not delay the tokens of others."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from functools import partial

from tidewheel.engine.text.long_texts import encode_at_most, encode_part, max_characters
from tidewheel.engine.text.tokenizer import Tokenizer

from ..errors import ApiError, bad_request
from ..text_threads import TextThreads

_MIN_COUNTED = 2**17  # tokens of a text that `/tokenize` accepts, even if the context is shorter


class PromptEncoder(TextThreads):
    """Encodes and checks prompts for one tokenizer and context.

    `max_counted` is the limit in tokens for texts that need not fit into the context.
    """

    def __init__(self, tokenizer: Tokenizer, max_model_len: int) -> None:
        super().__init__()
        self.tokenizer = tokenizer
        self.max_model_len = max_model_len
        self.max_counted = max(2 * max_model_len, _MIN_COUNTED)
        self._vocab_size = tokenizer.vocab_size

    def within(self, context: int) -> PromptEncoder:
        """One for a context of `context` tokens, with the same tokenizer and threads."""
        if context == self.max_model_len:
            return self
        other = copy.copy(self)
        other.max_model_len = context
        return other

    def encode(
        self,
        text: str,
        param: str,
        *,
        add_special_tokens: bool,
        truncate_to: int | None = None,
        side: str | None = None,
        room: int = 1,
    ) -> list[int]:
        """The token ids of a prompt. `truncate_to`, `side` and `room` are as in `truncated`.

        Raises ApiError (400) if the text is not truncated and would not leave `room` tokens of the context free.
        """
        self.tokenizer.require_text(param)
        kept = self._kept(truncate_to, room)
        if kept is not None:
            token_ids = encode_part(self._encode(add_special_tokens), text, kept, end=side != "right")
            return self.truncated(token_ids, truncate_to, side, room)
        token_ids = self._at_most(text, param, self.max_model_len - room, add_special_tokens)
        self.check_prompt(token_ids, param, room)
        return token_ids

    def fits(self, text: str, *, add_special_tokens: bool) -> bool:
        """Whether the text fits into the context and leaves room for one token."""
        token_ids = encode_at_most(self._encode(add_special_tokens), text, self.max_model_len - 1)
        return token_ids is not None and len(token_ids) < self.max_model_len

    def check_size(self, characters: int, param: str) -> None:
        """Raises ApiError (400) for more characters than are encoded at all, as `count` does."""
        if characters > max_characters(self.max_counted):
            raise self._too_long(param, characters, self.max_counted)

    def count(self, text: str, param: str, *, add_special_tokens: bool) -> list[int]:
        """The token ids of a text for `/tokenize`, which may be longer than the context.

        Raises ApiError (400) for a text of far more than `max_counted` tokens.
        """
        self.tokenizer.require_text(param)
        return self._at_most(text, param, self.max_counted, add_special_tokens)

    def truncated(self, token_ids: list[int], limit: int | None, side: str | None, room: int = 1) -> list[int]:
        """The last `limit` tokens, or the first ones if `side` is right. -1 keeps as many as leave `room` free.

        Raises ApiError (400) for a limit that is not valid, or larger than the context.
        """
        kept = self._kept(limit, room)
        if kept is None:
            return token_ids
        return token_ids[:kept] if side == "right" else token_ids[max(len(token_ids) - kept, 0) :]

    def check_prompt(self, token_ids: Sequence[int], param: str, room: int = 1) -> None:
        """Raises ApiError (400) if the prompt is empty, or does not leave `room` tokens of the context free."""
        if not token_ids:
            raise bad_request(f"{param} has no tokens", param)
        if len(token_ids) > self.max_model_len - room:
            raise bad_request(
                f"{param} has {len(token_ids)} tokens; this model's context is {self.max_model_len} "
                f"tokens{' and one more token must fit in it' if room else ''}",
                param,
                "context_length_exceeded",
            )

    def check_vocabulary(self, token_ids: Sequence[int], param: str) -> None:
        """Raises ApiError (400) for a token id that the tokenizer cannot decode."""
        if token_ids and not (min(token_ids) >= 0 and max(token_ids) < self._vocab_size):
            raise bad_request(f"{param}: token ids must be between 0 and {self._vocab_size - 1}", param)

    def _kept(self, limit: int | None, room: int) -> int | None:
        if limit is None:
            return None
        if not (limit == -1 or 1 <= limit <= self.max_model_len):
            raise bad_request(
                f"truncate_prompt_tokens must be between 1 and this model's context of {self.max_model_len} tokens, "
                f"or -1 for as many as fit, got {limit}",
                "truncate_prompt_tokens",
            )
        return self.max_model_len - room if limit == -1 else limit

    def _encode(self, add_special_tokens: bool) -> Callable[[str], list[int]]:
        return partial(self.tokenizer.encode, add_special_tokens=add_special_tokens)

    def _at_most(self, text: str, param: str, num_tokens: int, add_special_tokens: bool) -> list[int]:
        token_ids = encode_at_most(self._encode(add_special_tokens), text, num_tokens)
        if token_ids is None:
            raise self._too_long(param, len(text), num_tokens)
        return token_ids

    def _too_long(self, param: str, length: int, num_tokens: int) -> ApiError:
        context = f"this model's context is {self.max_model_len} tokens (--max-model-len)"
        if num_tokens > self.max_model_len:
            context += f", and texts of up to {num_tokens} are counted"
        return bad_request(
            f"{param} is far too long, with {length} characters: {context}", param, "context_length_exceeded"
        )
