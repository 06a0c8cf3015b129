"""LentEncoderTokenizer: an EncoderTokenizer that another process has made, because making it here would stop streams.

The tokenizers library makes one of 250,000 tokens in a call that holds the interpreter's lock for more than half a
second. The process is needed until the tokenizer can be made here while nothing streams.
"""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple, cast

import msgspec
import tokenizers

from ..errors import ModelError
from ..hosting.kept_tokenizers import files_version
from ..text.tokenizer_backends import encoding_of, state_of, without_vocabulary
from ..text.tokenizer_helper import TokenizerHelper, answer_of
from .tokenization import EncoderTokenizer

_PLAIN, _FRAMED, _WITH_OFFSETS, _TOKEN = (bytes([kind]) for kind in range(4))  # what a request begins with


class _Which(NamedTuple):
    """What EncoderTokenizer.load is to load."""

    path: str
    lower_case: bool
    pairs: bool

    def load(self) -> EncoderTokenizer:
        return EncoderTokenizer.load(Path(self.path), lower_case=self.lower_case, pairs=self.pairs)


class _Contents(msgspec.Struct, frozen=True):
    """What an EncoderTokenizer knows, and the JSON of what puts special tokens around texts."""

    pad_token_id: int | None
    has_type_ids: bool
    end: list[int]
    vocab_size: int
    special: set[int]
    post_processor: str


class LentEncoderTokenizer(EncoderTokenizer):
    """The tokenizer of a folder or a GGUF file, of which only the post-processor is here."""

    is_lent = True

    def __init__(self, path: Path, *, lower_case: bool = False, pairs: bool = False) -> None:
        """Raises ModelError if there is no such tokenizer, or the process does not start."""
        self._which = _Which(os.path.abspath(path), lower_case, pairs)
        self._version = files_version(path)
        self._lock = threading.Lock()
        process = TokenizerHelper(__name__, msgspec.json.encode(self._which).decode())
        try:
            contents = msgspec.msgpack.decode(process.receive(), type=_Contents)
        except BaseException:
            process.close()
            raise
        self.pad_token_id, self.has_type_ids, self.end = contents.pad_token_id, contents.has_type_ids, contents.end
        self.vocab_size, self.special = contents.vocab_size, contents.special
        self._lent = _LentLibrary(process, contents.post_processor, self._settled)
        self.library = cast(tokenizers.Tokenizer, self._lent)  # all of it that is used

    def settle(self) -> None:
        """Make it here, and end the process. Other threads may have to wait for a second.

        Raises ModelError if its files are not what they were.
        """
        self._settled()

    def _settled(self) -> tokenizers.Tokenizer:
        with self._lock:
            if self.is_lent:
                if files_version(Path(self._which.path)) != self._version:
                    raise ModelError(f"{self._which.path} is not what it was when it was loaded: unload the model")
                self.library, self.is_lent = self._which.load().library, False
                self._lent.close()
                del self._lent
        return self.library


class _LentLibrary:
    """What EncoderTokenizer needs of the library's tokenizer: the process encodes texts. Once it is gone, what is
    `settled` here does.
    """

    def __init__(
        self, process: TokenizerHelper, post_processor: str, settled: Callable[[], tokenizers.Tokenizer]
    ) -> None:
        self._process, self._settled = process, settled
        self._framing = without_vocabulary("post_processor", post_processor)
        weakref.finalize(self, process.close)

    def close(self) -> None:
        self._process.close()

    def encode(self, text: str, add_special_tokens: bool = True) -> tokenizers.Encoding:
        return self._encoding(_FRAMED if add_special_tokens else _PLAIN, text)

    def encode_batch_fast(self, texts: list[str], add_special_tokens: bool = True) -> list[tokenizers.Encoding]:
        return [self.encode(text, add_special_tokens) for text in texts]

    def encode_batch(self, texts: list[str], add_special_tokens: bool = True) -> list[tokenizers.Encoding]:
        assert not add_special_tokens
        return [self._encoding(_WITH_OFFSETS, text) for text in texts]

    def token_to_id(self, token: str) -> int | None:
        return msgspec.msgpack.decode(self._ask(_TOKEN, token), type=int | None)

    def post_process(
        self, encoding: tokenizers.Encoding, pair: tokenizers.Encoding | None, add_special_tokens: bool
    ) -> tokenizers.Encoding:
        return self._framing.post_process(encoding, pair, add_special_tokens)

    def num_special_tokens_to_add(self, is_pair: bool) -> int:
        return int(self._framing.num_special_tokens_to_add(is_pair))

    def _encoding(self, kind: bytes, text: str) -> tokenizers.Encoding:
        encoding = tokenizers.Encoding()
        encoding.__setstate__(self._ask(kind, text))
        return encoding

    def _ask(self, kind: bytes, text: str) -> bytes:
        answer = self._process.ask(kind, text)
        return _answer(self._settled(), kind, text) if answer is None else answer


def _answer(library: tokenizers.Tokenizer, kind: bytes, text: str) -> bytes:
    if kind == _TOKEN:
        return msgspec.msgpack.encode(library.token_to_id(text))
    if kind == _WITH_OFFSETS:
        encoding = library.encode_batch([text], add_special_tokens=False)[0]
    else:
        encoding = encoding_of(library, text, add_special_tokens=kind == _FRAMED)
    return bytes(encoding.__getstate__())


def make(argument: str) -> EncoderTokenizer:
    """In the process, what it makes. Raises ModelError."""
    return msgspec.json.decode(argument, type=_Which).load()


def tell(made: EncoderTokenizer) -> Iterator[bytes]:
    """What is in it."""
    post_processor = state_of(made.library.post_processor)
    facts = made.pad_token_id, made.has_type_ids, made.end, made.vocab_size, made.special, post_processor
    yield msgspec.msgpack.encode(_Contents(*facts))


def answer(made: EncoderTokenizer, request: bytes) -> bytes:
    """The answer of the library. See answer_of."""
    return answer_of(request, lambda kind, text: _answer(made.library, kind, text))
