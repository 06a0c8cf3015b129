"""The process of a LentTokenizer: it makes a tokenizer, tells what is in it, and encodes texts with it. See Helper."""

from __future__ import annotations

from array import array
from collections.abc import Iterator
from itertools import islice
from pathlib import Path

import msgspec

from ..text.piece_texts import PieceTexts
from ..text.tokenizer import ChatTemplate, SpecialTokens, Tokenizer
from ..text.tokenizer_backends import SentencePieceBackend, TokenizersBackend
from ..text.tokenizer_helper import answer_of

IDS = "I"  # the type of the token ids in an answer: at least 32 bits
PLAIN, WITH_SPECIAL = b"\0", b"\1"  # what a request begins with, before the text
_AT_ONCE = 8192  # tokens in a message: each is decoded in a millisecond or two


class Contents(msgspec.Struct, frozen=True):
    """What a tokenizer has but its tokens, whose texts follow in messages; `num_tokens` 0: it cannot be lent.

    `decoder` is as in TokenizersBackend, or else how sentencepiece makes texts.
    """

    num_tokens: int
    decoder: str | PieceTexts = "null"
    is_byte_level: bool = False
    special: frozenset[int] = frozenset()
    byte_ids: frozenset[int] = frozenset()
    special_tokens_map: SpecialTokens = {}
    chat_template: ChatTemplate | None = None
    class_name: str = ""


def make(path: str) -> Tokenizer:
    """The tokenizer. Raises ModelError."""
    return tokenizer_at(Path(path))


def tokenizer_at(path: Path) -> Tokenizer:
    """The tokenizer of a folder or a GGUF file. Raises ModelError."""
    if path.is_dir():
        return Tokenizer.load(path)
    from ..weights.gguf.source import GgufSource

    return GgufSource(path).tokenizer()


def tell(tokenizer: Tokenizer) -> Iterator[bytes]:
    """What is in it: Contents, then lists of its tokens."""
    size, backend = tokenizer.vocab_size, tokenizer.backend
    tokens = [tokenizer.id_to_token(token_id) for token_id in range(size)]
    decoder: str | PieceTexts | None = None
    if isinstance(backend, TokenizersBackend):
        decoder = backend.decoder
    elif isinstance(backend, SentencePieceBackend):
        decoder = backend.texts
    if decoder is None or None in tokens or len({*tokens}) < size:
        yield msgspec.msgpack.encode(Contents(0))
        return
    contents = Contents(
        size,
        decoder,
        backend.token_bytes is not None,
        frozenset(filter(backend.is_special, range(size))),
        frozenset(filter(backend.is_byte, range(size))),
        tokenizer.special_tokens_map,
        tokenizer.chat_template,
        tokenizer.class_name,
    )
    yield msgspec.msgpack.encode(contents)
    left = iter(tokens)
    while some := [*islice(left, _AT_ONCE)]:
        yield msgspec.msgpack.encode(some)


def answer(tokenizer: Tokenizer, request: bytes) -> bytes:
    """The ids of the text in a request. See answer_of."""

    def encoded(kind: bytes, text: str) -> bytes:
        return array(IDS, tokenizer.encode(text, add_special_tokens=kind == WITH_SPECIAL)).tobytes()

    return answer_of(request, encoded)
