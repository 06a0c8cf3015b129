"""PairReader: the inputs of queries and documents in a PairTemplate."""

from __future__ import annotations

from collections.abc import Sequence

from ..errors import InvalidRequestError
from ..start_log import start_logger
from .pair_template import PairTemplate
from .tokenization import MOST_QUERY_TOKENS, EncoderInput, EncoderTokenizer, check_query_size

_MOST_QUERY_CHARACTERS = 2**24  # of a request, as often as a template is filled with them
_SHOWN = 64  # characters of a template beside a query or a document that are tried
# What a query may end in, and what a document may begin with, that tokens reach over to their neighbours.
_ENDS = ("", "a", "7", " ", "\n", "\r\n", "\t ", ".", "<", "'", "\u4e16", "\u0301", "\u200d", "\U0001f30a")
_BEGINNINGS = (*_ENDS, "Ab", " a", "  a", "\n\n", ">", ">>", "'s")


class PairReader:
    """Reads queries and documents in a template. A query's tokens are made once, for all documents.

    A text is read in two parts if that gives the tokens of the whole, as far as `_ENDS` and `_BEGINNINGS` can show:
    the first ends within `between`, where no token reaches over. Other tokenizers read the whole for each document.
    """

    def __init__(self, template: PairTemplate, tokenizer: EncoderTokenizer) -> None:
        self._template, self._tokenizer = template, tokenizer
        self._end = tokenizer.encode(template.after, add_special_tokens=False).token_ids
        self._cut = self._place_to_cut()

    def encode(
        self,
        queries: Sequence[str],
        documents: Sequence[str],
        *,
        truncate_to: int | None = None,
        at_most: int | None = None,
    ) -> list[EncoderInput]:
        """The inputs of pairs, or of a single query and each document.

        `truncate_to` cuts the document, then the query, and never what is behind them. Raises InvalidRequestError if it
        leaves no room, or if the tokens of a query would be too many because of the number of documents.
        """
        end, room = self._end, None if truncate_to is None else truncate_to - len(self._end)
        if room is not None and room < 1:
            raise InvalidRequestError(
                f"truncate_prompt_tokens must be more than the {len(end)} tokens behind a document, got {truncate_to}",
                "truncate_prompt_tokens",
            )
        times = len(documents) if len(queries) == 1 else 1
        starts = [f"{self._template.before}{query}{self._template.between}" for query in queries]
        rests = [""] * len(starts)
        if self._cut is None:
            check_query_size(times * sum(map(len, queries)), _MOST_QUERY_CHARACTERS)
            starts, rests = rests, starts
        elif self._cut:
            starts, rests = [text[: -self._cut] for text in starts], [text[-self._cut :] for text in starts]
        firsts = [self._tokenizer.part(text, room, at_most) for text in starts]
        check_query_size(times * sum(len(part.encoding) for part in firsts if part is not None), MOST_QUERY_TOKENS)
        inputs = []
        for first, rest, document in zip(firsts * times, rests * times, documents, strict=True):
            second = None if first is None else self._tokenizer.part(rest + document, room, at_most)
            if first is None or second is None:
                inputs.append(EncoderInput((), is_too_long=True))
            else:
                inputs.append(EncoderInput([*[*first.encoding.ids, *second.encoding.ids][:room], *end]))
        return inputs

    def _place_to_cut(self) -> int | None:
        """How many characters of `between` are read with a document: as few as possible. None: there is no place."""
        before, between = self._template.before[-_SHOWN:], self._template.between

        def tokens(text: str) -> list[int]:
            return [*self._tokenizer.encode(text, add_special_tokens=False).token_ids]

        whole = [[tokens(before + query + between + document) for document in _BEGINNINGS] for query in _ENDS]

        def is_safe(size: int) -> bool:
            near, far = between[: len(between) - size], between[len(between) - size :]
            firsts = [tokens(before + query + near) for query in _ENDS]
            seconds = [tokens(far + document) for document in _BEGINNINGS]
            return whole == [[first + second for second in seconds] for first in firsts]

        found = next((size for size in range(min(len(between), _SHOWN) + 1) if is_safe(size)), None)
        if found is None:
            start_logger.info("The reranker's tokenizer reads the query anew for each document, which takes longer")
        return found
