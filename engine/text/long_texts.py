"""Encoding of long texts, only as far as their tokens can be used.

Encoding takes about 200 ns and 150 to 450 bytes of memory a character. So a text is encoded whole only if it is known
to have about as many tokens as wanted.
"""

from __future__ import annotations

from collections.abc import Callable, Sized
from typing import TypeVar

# The most characters of a text for each token of its limit. Prose has 4 to 5 characters a token, a long run of spaces
# 16 or more. Some tokenizers drop spaces, or make one token of any number of unknown characters.
CHARACTERS_PER_TOKEN = 16
SHORT_TEXT = 2**18  # characters that any text may have; encoding them takes 50 ms
_WHOLE = 2**16  # characters; a text up to this length is always encoded in one piece
_LIKELY = 4  # characters a token
MARGIN = 1024  # tokens next to a cut that are not used, because they differ from those of the whole text

Tokens = TypeVar("Tokens", bound=Sized)


def max_characters(num_tokens: int) -> int:
    """The most characters of a text that may have `num_tokens`. Longer texts are refused without encoding."""
    return max(SHORT_TEXT, CHARACTERS_PER_TOKEN * num_tokens)


def encode_at_most(encode: Callable[[str], Tokens], text: str, num_tokens: int) -> Tokens | None:
    """The tokens of `text`, maybe a few more than `num_tokens`; None if it is too long or has many more."""
    if len(text) > max_characters(num_tokens):
        return None
    length = max(_WHOLE, _LIKELY * num_tokens)
    while length < len(text):
        if len(encode(text[:length])) > num_tokens + MARGIN:
            return None
        length *= 2
    return encode(text)


def encode_part(encode: Callable[[str], Tokens], text: str, num_tokens: int, *, end: bool) -> Tokens:
    """The tokens of the beginning or `end` of `text`: at least `num_tokens`, if the text has that many.

    They are the same as in the whole text. The exception is a run that the tokenizer does not divide, such as a number
    of a thousand digits, which reaches from the cut over more than MARGIN tokens.
    """
    length = max(_WHOLE, _LIKELY * (num_tokens + MARGIN))
    longest = max(length, max_characters(num_tokens))
    while length < min(len(text), longest):
        tokens = encode(text[-length:] if end else text[:length])
        if len(tokens) >= num_tokens + MARGIN:
            return tokens
        length *= 2
    return encode(text[-longest:] if end else text[:longest])
