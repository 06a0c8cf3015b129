"""MergedPieces: the merges of a sentencepiece model, from the scores of its pieces.

sentencepiece joins two neighbours wherever that makes a piece, the piece of the highest score first, the leftmost of
equal ones. The tokenizers library has a rank for each pair instead. The two agree as long as everything that is joined
is a piece itself, and no two pieces have equal scores. Runs of spaces may: they often have the lowest score together.
"""

from __future__ import annotations

from collections.abc import Container, Mapping
from math import isnan

from tokenizers import AddedToken

from .sentencepiece_model import BPE, BYTE, CONTROL, NORMAL, UNKNOWN, UNUSED, SentencePieceModel


def pairs_of(name: str, symbols: Container[str]) -> list[tuple[str, str]]:
    """The pairs of symbols that make a piece, the pair with the longest left part first."""
    cuts = range(len(name) - 1, 0, -1)
    return [(name[:cut], name[cut:]) for cut in cuts if name[cut:] in symbols and name[:cut] in symbols]


class MergedPieces:
    """The pieces' `names` by id, as far as `added` tokens leave them theirs, and the `merges`, first to last.

    `is_exact` tells whether texts are split into the same pieces with these merges as by sentencepiece.
    """

    def __init__(self, model: SentencePieceModel, added: Mapping[int, AddedToken]) -> None:
        self.names = model.pieces.copy()
        self._kinds = model.kinds.copy()
        self.merges: list[tuple[str, str]] = []
        self.is_exact = (
            model.model_type == BPE
            and not (model.charsmap or model.denormalizes or model.whitespace_is_suffix)
            and model.escape_whitespaces
            and self._renamed(added)
            and not any(kind == UNUSED and len(name) > 1 for name, kind in zip(self.names, self._kinds, strict=True))
            and self._spelled(model.byte_fallback)
            and self._ranked(model.scores)
        )

    def of_kind(self, *kinds: int) -> list[str]:
        """The names of the pieces of these kinds, in the order of their ids."""
        return [name for name, kind in zip(self.names, self._kinds, strict=True) if kind in kinds]

    def _renamed(self, added: Mapping[int, AddedToken]) -> bool:
        """Give pieces the names of added tokens. Whether each of these then has its id alone, and no byte is lost."""
        count = len(self.names)
        behind = sorted(i for i in added if i >= count)
        for i, token in added.items():
            if i < count and self.names[i] != token.content:
                if self._kinds[i] == BYTE:
                    return False
                self.names[i] = token.content
                self._kinds[i] = self._kinds[i] if self._kinds[i] == UNKNOWN else CONTROL
        names = {*self.names, *(added[i].content for i in behind)}
        return behind == [*range(count, count + len(behind))] and len(names) == count + len(behind)

    def _spelled(self, byte_fallback: bool) -> bool:
        """Make characters that are joined though they are no pieces the names of their bytes. Whether that was enough.

        An example is the tab of the first Gemma: two of them are a piece.
        """
        symbols = self._symbols()
        normal = self.of_kind(NORMAL)
        missing = {character for name in normal for character in (name[0], name[-1])}.difference(self.names)
        joined = {
            character
            for name in (normal if missing else ())
            for character, rest in ((name[0], name[1:]), (name[-1], name[:-1]))
            if character in missing and (rest in symbols or rest in missing)
        }
        for character in joined:
            if not byte_fallback or not character.isascii():
                return False
            i = self.names.index(f"<0x{ord(character):02X}>")
            self.names[i], self._kinds[i] = character, UNUSED
        return True

    def _ranked(self, scores: list[float]) -> bool:
        """Make the merges. Whether they join pieces in the order of sentencepiece.

        Of equal scores the longest piece is made first, and of one piece the longest left part is joined first.
        Then runs of one character are joined from the left.
        """
        names, symbols = self.names, self._symbols()
        normal = [i for i, kind in enumerate(self._kinds) if kind == NORMAL]
        last: tuple[float, str] | None = None
        tied = set[str]()
        for i in sorted(normal, key=lambda i: (-scores[i], -len(names[i]), i)):
            name, pairs = names[i], pairs_of(names[i], symbols)
            self.merges += pairs
            if pairs:
                if last is not None and last[0] == scores[i]:
                    tied |= {last[1], name}
                last = scores[i], name
        if any(len({*name}) > 1 for name in tied) or any(isnan(score) for score in scores):
            return False
        return not any(
            (left in tied or right in tied) and left + right not in tied
            for left, right in (self.merges if tied else ())
        )

    def _symbols(self) -> set[str]:
        return {*self.of_kind(NORMAL, UNUSED)}
