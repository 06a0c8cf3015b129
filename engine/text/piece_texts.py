"""PieceTexts: what sentencepiece makes of its pieces, without its library."""

from __future__ import annotations

import codecs
from collections.abc import Container, Iterable, Sequence
from typing import Literal

from msgspec import Struct

SPACE = "\u2581"
"""How sentencepiece writes a space."""

FirstSpaces = Literal["shown", "one dropped", "dropped"]
"""What becomes of the spaces that the pieces of a text begin with."""


def first_spaces(add_dummy_prefix: bool, remove_extra_whitespaces: bool) -> FirstSpaces:
    """By the settings of a model."""
    return "dropped" if remove_extra_whitespaces else "one dropped" if add_dummy_prefix else "shown"


class PieceTexts(Struct, frozen=True):
    """How texts are made. `apart` are the tokens that texts are searched for, among them all that are no text: what
    follows one begins anew.
    """

    apart: frozenset[int]
    first_spaces: FirstSpaces

    def text(self, tokens: Sequence[str], byte_ids: Container[int], ids: Iterable[int]) -> str:
        """The text of `ids`. `byte_ids` are those that are one byte, and named <0x00> to <0xFF>."""
        texts, of_bytes, begins = list[str](), bytearray(), self.first_spaces != "shown"
        for token_id in ids:
            token = tokens[token_id]
            if token_id in byte_ids:
                of_bytes.append(int(token[3:5], 16))
                begins = False
                continue
            if of_bytes:
                texts.append(of_bytes.decode(errors=_BYTE_BY_BYTE))
                of_bytes.clear()
            if token_id in self.apart:
                texts.append(token)
                begins = self.first_spaces != "shown"
                continue
            if begins:
                token = token.removeprefix(SPACE)
                begins = self.first_spaces == "dropped" and not token
            texts.append(token.replace(SPACE, " "))
        texts.append(of_bytes.decode(errors=_BYTE_BY_BYTE))
        return "".join(texts)


def _replaced(error: UnicodeError) -> tuple[str, int]:
    assert isinstance(error, UnicodeDecodeError)
    return "\ufffd", error.start + 1


_BYTE_BY_BYTE = "tidewheel.byte_by_byte"  # Python's own handler makes one sign of several bytes
codecs.register_error(_BYTE_BY_BYTE, _replaced)
