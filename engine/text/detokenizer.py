"""Incremental detokenization: tokens in, text out as soon as it is certain."""

from __future__ import annotations

import codecs
from collections.abc import Callable, Mapping, Sequence
from copy import copy
from typing import Protocol

_LONGEST_HOLD = 128  # tokens after which text is released even if it is still uncertain
_REPLACEMENT = "\ufffd"


class Detokenizer(Protocol):
    """Turns one sequence's tokens into text. The joined pieces are the text of all tokens.

    While `is_whole`, tokens in `known` need not be pushed: they are whole characters themselves.
    """

    @property
    def known(self) -> Mapping[int, str]:
        """Tokens whose text does not depend on the tokens before and after, as far as they have been seen."""
        ...

    @property
    def is_whole(self) -> bool:
        """Whether no character is incomplete."""
        ...

    def push(self, token: int) -> str:
        """The text that `token` makes certain; empty while a character is incomplete."""
        ...

    def flush(self) -> str:
        """The text that is still held back, after the last token."""
        ...

    def copied(self) -> Detokenizer:
        """Another one that has had the same tokens."""
        ...


class BytesDetokenizer:
    """For tokenizers whose tokens are plain byte strings, as in byte-level BPE: an incremental UTF-8 decoder.

    `known` collects tokens that are whole characters. Detokenizers that skip the same tokens may share it.
    """

    def __init__(
        self, token_bytes: Callable[[int], bytes], is_skipped: Callable[[int], bool], known: dict[int, str]
    ) -> None:
        self._token_bytes = token_bytes
        self._is_skipped = is_skipped
        self.known = known
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self.is_whole = True

    def push(self, token: int) -> str:
        """See Detokenizer."""
        was_whole = self.is_whole
        if was_whole and (text := self.known.get(token)) is not None:
            return text
        if self._is_skipped(token):
            return ""
        text = self._decoder.decode(self._token_bytes(token))
        self.is_whole = not self._decoder.getstate()[0]
        if was_whole and self.is_whole:
            self.known[token] = text
        return text

    def flush(self) -> str:
        """See Detokenizer."""
        return self._decoder.decode(b"", True)

    def copied(self) -> BytesDetokenizer:
        """See Detokenizer."""
        other = BytesDetokenizer(self._token_bytes, self._is_skipped, self.known)
        other._decoder.setstate(self._decoder.getstate())
        other.is_whole = self.is_whole
        return other


class WindowDetokenizer:
    """For any tokenizer: decodes a short window of tokens, and returns what the newest tokens have added to its text.

    The window starts with the tokens shown last, because a token's text may depend on its left neighbour (a leading
    space is dropped only at the start). Text that ends with a replacement character or a byte token is held back,
    because the next token may change it.
    """

    known: Mapping[int, str] = {}
    is_whole = False

    def __init__(
        self,
        decode: Callable[[list[int]], str],
        is_skipped: Callable[[int], bool],
        is_byte: Callable[[int], bool],
        context: Sequence[int] = (),
        special_text: Callable[[int], str | None] | None = None,
    ) -> None:
        """`context` are the tokens before the first one. `is_skipped` tells which tokens never have text.

        `special_text`, if given, spells special tokens. Nothing is then put between them.
        """
        self._decode = decode
        self._is_skipped = is_skipped
        self._is_byte = is_byte
        self._window = [token for token in context if not is_skipped(token)]
        self._num_shown = len(self._window)
        self._shown_text = decode(self._window) if self._window else ""
        self._special_text = special_text
        self._follows_special = False

    def push(self, token: int) -> str:
        """See Detokenizer."""
        if self._is_skipped(token):
            return ""
        self._window.append(token)
        if self._special_text is not None:
            special, follows = self._special_text(token), self._follows_special
            self._follows_special = special is not None
            if special is not None and follows:
                self._show_window()
                return special
        if self._is_byte(token) and len(self._window) - self._num_shown < _LONGEST_HOLD:
            return ""
        text = self._decode(self._window)
        piece = text[len(self._shown_text) :]
        if not piece or (piece.endswith(_REPLACEMENT) and len(self._window) - self._num_shown < _LONGEST_HOLD):
            return ""
        self._show_window()
        return piece

    def flush(self) -> str:
        """See Detokenizer."""
        piece = self._decode(self._window)[len(self._shown_text) :]
        self._num_shown, self._shown_text = len(self._window), self._shown_text + piece
        return piece

    def copied(self) -> WindowDetokenizer:
        """See Detokenizer."""
        other = copy(self)
        other._window = self._window.copy()
        return other

    def _show_window(self) -> None:
        del self._window[: self._num_shown]
        self._num_shown = len(self._window)
        self._shown_text = self._decode(self._window)
