"""Texts of any length, encoded only as far as their tokens can be used.

Encoding takes some 200 ns and 150 to 450 bytes of memory a character. So a text is not encoded whole before it is known
to have about as many tokens as are wanted.
"""

from __future__ import annotations

from collections.abc import Callable, Sized
from typing import TypeVar

# A text may have so many characters for each token that it may have. Prose has 4 to 5, a long run of spaces up to 16 or
# more; some tokenizers drop spaces, or make one token of any number of unknown characters.
CHARACTERS_PER_TOKEN = 16
SHORT_TEXT = 2**18  # characters that any text may have: 50 ms of work
_WHOLE = 2**16  # characters that are always encoded in one piece
_LIKELY = 4  # characters a token
# Where a text is cut, the tokens next to the cut are not those of the whole text. These many are not relied on.
MARGIN = 1024

Tokens = TypeVar("Tokens", bound=Sized)


def most_characters(num_tokens: int) -> int:
    """How long a text may be that has to have at most so many tokens. Longer ones are refused without encoding."""
    return max(SHORT_TEXT, CHARACTERS_PER_TOKEN * num_tokens)


def encode_at_most(encode: Callable[[str], Tokens], text: str, num_tokens: int) -> Tokens | None:
    """The tokens of `text`, which may be a few more than `num_tokens`; None if it is longer or has many more."""
    if len(text) > most_characters(num_tokens):
        return None
    length = max(_WHOLE, _LIKELY * num_tokens)
    while length < len(text):
        if len(encode(text[:length])) > num_tokens + MARGIN:
            return None
        length *= 2
    return encode(text)


def encode_part(encode: Callable[[str], Tokens], text: str, num_tokens: int, *, end: bool) -> Tokens:
    """The tokens of a part of `text`, its beginning or its `end`, from which `num_tokens` may be cut.

    They are those of the whole text, except where one run that the tokenizer does not divide (as a number of a thousand
    digits) reaches from the cut over MARGIN tokens.
    """
    length = max(_WHOLE, _LIKELY * (num_tokens + MARGIN))
    longest = max(length, most_characters(num_tokens))
    while length < min(len(text), longest):
        tokens = encode(text[-length:] if end else text[:length])
        if len(tokens) >= num_tokens + MARGIN:
            return tokens
        length *= 2
    return encode(text[-longest:] if end else text[:longest])
