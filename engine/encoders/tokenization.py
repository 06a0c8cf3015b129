"""EncoderTokenizer: texts and pairs of texts to an encoder's inputs."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import tokenizers
from msgspec import Struct

from ..errors import InvalidRequestError, ModelError
from ..files.folder import read_json_if_there
from ..files.reading import MAX_TOKENIZER_BYTES, is_there, require_file
from ..text.added_tokens import special_tokens, text_of
from ..text.long_texts import MARGIN, encode_at_most, encode_part
from ..text.tokenizer_backends import encoding_of, reading_tokenizer

MOST_QUERY_TOKENS = 2**22
"""Of a request that scores documents, of which each has a copy of its query's tokens."""


class EncoderInput(Struct, frozen=True):
    """One sequence. `type_ids` None means all 0. The first `prompt_length` tokens are not pooled.

    Tokens see the first `num_seen` tokens, or all. Vectors of tokens are given of those that are `kept`, by their
    places, or of all. If it `is_too_long` for its model, it has no tokens, because its text was not encoded.
    `adapter` is the number of the graph's adapter for it; -1: none. If it `is_static`, each token has a weight of its
    own, and no graph is run.
    """

    token_ids: Sequence[int]
    type_ids: Sequence[int] | None = None
    prompt_length: int = 0
    is_too_long: bool = False
    num_seen: int | None = None
    kept: Sequence[int] | None = None
    adapter: int = -1
    is_static: bool = False

    def __len__(self) -> int:
        return len(self.token_ids)


class Part(NamedTuple):
    """A text's tokens without special ones. The end may be missing; the number counts it."""

    encoding: tokenizers.Encoding
    num_tokens: int


class EncoderTokenizer:
    """A model folder's `tokenizer.json`. Safe to use from several threads."""

    is_lent = False
    """Whether another process has made it: see LentEncoderTokenizer."""

    def __init__(
        self,
        tokenizer: tokenizers.Tokenizer,
        *,
        lower_case: bool = False,
        has_type_ids: bool = True,
        end: int | None = None,
    ) -> None:
        """`lower_case` is for tokenizers that expect lower case. Without `has_type_ids`, all type ids are 0. `end` is a
        special token that inputs end in, although tokenizer.json does not say so.
        """
        self.pad_token_id: int | None = (tokenizer.padding or {}).get("pad_id")
        tokenizer.no_truncation()
        tokenizer.no_padding()
        if lower_case:
            own = [] if tokenizer.normalizer is None else [tokenizer.normalizer]
            tokenizer.normalizer = tokenizers.normalizers.Sequence([tokenizers.normalizers.Lowercase(), *own])
        self.library = tokenizer
        self.has_type_ids = has_type_ids
        self.end = [] if end is None or tokenizer.encode("a").ids[-1:] == [end] else [end]
        self.vocab_size: int = tokenizer.get_vocab_size(with_added_tokens=True)
        self.special = {i for i, token in tokenizer.get_added_tokens_decoder().items() if token.special}

    def settle(self) -> None:
        """Make it in this process, if it is lent."""

    @classmethod
    def load(cls, folder: Path, *, lower_case: bool = False, pairs: bool = False) -> EncoderTokenizer:
        """A model folder's tokenizer, or a GGUF file's, also for `pairs` of texts. Raises ModelError if there is none
        or it is broken.
        """
        if folder.is_file():
            return cls._of_gguf(folder)
        path = folder / "tokenizer.json"
        if not is_there(path):
            raise ModelError(
                f"{folder} has no tokenizer.json: transformers writes one with "
                "AutoTokenizer.from_pretrained(MODEL).save_pretrained(FOLDER)"
            )
        require_file(path, MAX_TOKENIZER_BYTES)
        config = read_json_if_there(folder / "tokenizer_config.json")
        names = config.get("model_input_names")
        has_type_ids = not isinstance(names, list) or "token_type_ids" in names
        with reading_tokenizer(path):
            tokenizer = tokenizers.Tokenizer.from_file(str(path))
            eos = text_of(special_tokens(folder, config).get("eos_token"))
            end = tokenizer.token_to_id(eos) if eos is not None and config.get("add_eos_token") is True else None
            made = cls(tokenizer, lower_case=lower_case, has_type_ids=has_type_ids, end=end)
            made.encode("a", "a" if pairs else None)
            return made

    @classmethod
    def _of_gguf(cls, path: Path) -> EncoderTokenizer:
        from ..weights.gguf.source import GgufSource
        from .gguf.tokenizer import tokenizer_in

        with reading_tokenizer(path):
            made = cls(tokenizer_in(GgufSource(path).file))
            made.encode("a", "a")
            return made

    def encode(
        self,
        text: str,
        pair: str | None = None,
        *,
        add_special_tokens: bool = True,
        truncate_to: int | None = None,
        at_most: int | None = None,
        room: int = 0,
    ) -> EncoderInput:
        """A text, or two texts in one sequence.

        `truncate_to` cuts tokens at the end, of the longer text first, and leaves `room` for as many special tokens
        that the caller adds. Without it, a text that is far longer than `at_most` tokens is not encoded. Raises
        InvalidRequestError if `truncate_to` leaves no room for text.
        """
        parts = [self.part(one, truncate_to, at_most) for one in (text, pair) if one is not None]
        return self.join(parts, add_special_tokens=add_special_tokens, truncate_to=truncate_to, room=room)

    def cut(self, text: str, most: int) -> str:
        """The beginning of a text, up to its last one of `most` tokens."""
        encoding = encode_part(self._with_offsets, text, most, end=False)
        return text if len(encoding) <= most else text[: encoding.offsets[most - 1][1]]

    def part(self, text: str, truncate_to: int | None, at_most: int | None) -> Part | None:
        """A part for `join`: the text's own tokens, as many as are useful. None if there are far too many."""
        if truncate_to is not None:
            encoding = encode_part(self._tokens, text, truncate_to, end=False)
            part = Part(encoding, len(encoding))
            encoding.truncate(truncate_to)
            return part
        most = sys.maxsize if at_most is None else at_most
        found = encode_at_most(self._tokens, text, most)
        return None if found is None or len(found) > most + MARGIN else Part(found, len(found))

    def join(
        self,
        parts: Sequence[Part | None],
        *,
        add_special_tokens: bool = True,
        truncate_to: int | None = None,
        room: int = 0,
    ) -> EncoderInput:
        """The input of one or two parts, as `encode` makes it. Parts may be reused."""
        given = [part for part in parts if part is not None]
        if len(given) < len(parts):
            return EncoderInput((), is_too_long=True)
        encodings = [part.encoding for part in given]
        end = self.end if add_special_tokens else []
        special = len(end) + room
        if add_special_tokens:
            special += self.library.num_special_tokens_to_add(len(parts) > 1)
        if truncate_to is not None and sum(part.num_tokens for part in given) + special > truncate_to:
            encodings = _cut(given, truncate_to, special)
        second = encodings[1] if len(encodings) > 1 else None
        encoding = self.library.post_process(encodings[0], second, add_special_tokens)
        ids, types = encoding.ids + end, encoding.type_ids + [0] * len(end)
        return EncoderInput(ids, types if self.has_type_ids else None)

    def token_id(self, token: str | None) -> int | None:
        """The id of a token; None if there is no such token."""
        found: int | None = None if token is None else self.library.token_to_id(token)
        return found

    def prompt_length(self, prompt: str) -> int:
        """How many tokens a prompt takes at the beginning of a text, including special ones."""
        ids = self.library.encode(prompt).ids
        return len(ids) - (1 if ids and ids[-1] in self.special else 0)

    def _with_offsets(self, text: str) -> tokenizers.Encoding:
        return self.library.encode_batch([text], add_special_tokens=False)[0]

    def _tokens(self, text: str) -> tokenizers.Encoding:
        return encoding_of(self.library, text, add_special_tokens=False)


def check_query_size(size: int, most: int) -> None:
    """Raises InvalidRequestError if queries are too large, as often as they are copied."""
    if size > most:
        raise InvalidRequestError("the query is too long for so many documents: send fewer in a request", "query")


def special_texts(folder: Path) -> dict[str, str | None]:
    """What a model folder's files call its special tokens: `bos_token` and the others, and their texts."""
    named = special_tokens(folder, read_json_if_there(folder / "tokenizer_config.json"))
    return {name: text_of(token) for name, token in named.items() if name.endswith("_token")}


def _cut(parts: Sequence[Part], truncate_to: int, special: int) -> list[tokenizers.Encoding]:
    room = truncate_to - special
    if room < 1:
        raise InvalidRequestError(
            f"truncate_prompt_tokens must leave room for text beside {special} special tokens, got {truncate_to}",
            "truncate_prompt_tokens",
        )
    lengths = [room] if len(parts) == 1 else _fitting(parts[0].num_tokens, parts[1].num_tokens, room)
    copies = [tokenizers.Encoding.merge([part.encoding]) for part in parts]
    for copy, length in zip(copies, lengths, strict=True):
        copy.truncate(length)
    return copies


def _fitting(first: int, second: int, room: int) -> tuple[int, int]:
    """The lengths of a pair after cutting its longer part, token by token, until both fit into `room`."""
    shorter = min(first, second, room // 2)
    if first <= second:
        return shorter, min(second, room - shorter)
    return min(first, room - shorter), shorter
