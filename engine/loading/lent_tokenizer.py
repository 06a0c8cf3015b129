"""LentTokenizer: one that another process has made, because making it here would stop the streams of other models.

The tokenizers library makes one of 128,000 tokens in calls that hold the interpreter's lock for hundreds of
milliseconds. For sentencepiece, a GGUF file's tokens go through loops that want the lock just as long. The process is
needed until the tokenizer can be made here while nothing streams.
"""

from __future__ import annotations

import os
import struct
import threading
import weakref
from array import array
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import msgspec

from ..errors import ModelError
from ..files.reading import read_part
from ..text.piece_texts import PieceTexts
from ..text.tokenizer import Tokenizer
from ..text.tokenizer_backends import TokenizerBackend, byte_level_bytes, decoder_of
from ..text.tokenizer_helper import TokenizerHelper
from . import tokenizer_process
from .tokenizer_process import IDS, PLAIN, WITH_SPECIAL, Contents, tokenizer_at

_LOOK_BYTES = 16 << 20
# As the metadata has them: a string has type 8, and its length before it.
_GGUF_KINDS = [
    b"tokenizer.ggml.model" + struct.pack("<IQ", 8, len(kind)) + kind for kind in (b"gpt2", b"llama", b"gemma4")
]


def can_be_lent(path: Path) -> bool:
    """Whether the tokenizer of a folder or a GGUF file is of a kind that can be, as far as a quick look tells."""
    return path.is_dir() or any(kind in read_part(path, _LOOK_BYTES) for kind in _GGUF_KINDS)


class LentTokenizer(Tokenizer):
    """The tokenizer of a folder or a GGUF file, of which only the tokens and their decoder are here."""

    is_lent = True

    def __init__(self, path: Path) -> None:
        """Raises ModelError if there is no such tokenizer, or the process does not start."""
        process = TokenizerHelper(tokenizer_process.__name__, os.path.abspath(path))
        try:
            contents, tokens = _contents(process)
        except BaseException:
            process.close()
            raise
        self._path = path
        self._lock = threading.Lock()
        self._lent = _LentBackend(process, contents, tokens, self._settled)
        super().__init__(self._lent, contents.special_tokens_map, contents.chat_template, contents.class_name)

    def settle(self) -> None:
        """Make it here, and end the process. Other threads may have to wait for a second.

        Raises ModelError if its files are not what they were.
        """
        self._settled()

    def _settled(self) -> TokenizerBackend:
        with self._lock:
            if self.is_lent:
                made = tokenizer_at(self._path)
                if any(made.id_to_token(i) != self.id_to_token(i) for i in range(self.vocab_size)):
                    raise ModelError(f"{self._path} has another tokenizer than when it was loaded: unload the model")
                self.backend, self.is_lent = made.backend, False
                self._lent.close()
                del self._lent
        return self.backend


class _LentBackend:
    """A TokenizerBackend for which the process encodes texts; once it is gone, what is `settled` here does."""

    def __init__(
        self,
        process: TokenizerHelper,
        contents: Contents,
        tokens: Sequence[str],
        settled: Callable[[], TokenizerBackend],
    ) -> None:
        self._process, self._tokens, self._settled = process, tokens, settled
        self._special, self._byte_ids = contents.special, contents.byte_ids
        self._text = self._text_of(contents.decoder)
        self._ids = dict[str, int]()
        for token_id, token in enumerate(tokens):  # a loop, in which other threads may run
            self._ids[token] = token_id
        self.vocab_size = len(tokens)
        self.token_bytes: Callable[[int], bytes] | None = self._token_bytes if contents.is_byte_level else None
        weakref.finalize(self, process.close)

    def close(self) -> None:
        """End the process. Those who wait for it get what is settled."""
        self._process.close()

    def encode(self, text: str, add_special_tokens: bool) -> list[int]:
        """See TokenizerBackend."""
        answer = self._process.ask(WITH_SPECIAL if add_special_tokens else PLAIN, text)
        if answer is None:
            return self._settled().encode(text, add_special_tokens)
        return array(IDS, answer).tolist()

    def decode(self, ids: Sequence[int], skip_special_tokens: bool) -> str:
        """See TokenizerBackend."""
        hidden = self._special if skip_special_tokens else frozenset()
        return self._text([i for i in ids if 0 <= i < self.vocab_size and i not in hidden])

    def id_to_token(self, token_id: int) -> str | None:
        """See TokenizerBackend."""
        return self._tokens[token_id] if 0 <= token_id < self.vocab_size else None

    def token_to_id(self, token: str) -> int | None:
        """See TokenizerBackend."""
        return self._ids.get(token)

    def is_special(self, token_id: int) -> bool:
        """See TokenizerBackend."""
        return token_id in self._special

    def is_byte(self, token_id: int) -> bool:
        """See TokenizerBackend."""
        return token_id in self._byte_ids

    def _token_bytes(self, token_id: int) -> bytes:
        return byte_level_bytes(self.id_to_token(token_id) or "")

    def _text_of(self, decoder: str | PieceTexts) -> Callable[[list[int]], str]:
        tokens = self._tokens
        if isinstance(decoder, PieceTexts):
            return partial(decoder.text, tokens, self._byte_ids)
        library = decoder_of(decoder)
        if library is None:
            return lambda ids: " ".join([tokens[i] for i in ids])
        return lambda ids: str(library.decode([tokens[i] for i in ids]))


def _contents(process: TokenizerHelper) -> tuple[Contents, list[str]]:
    tokens = list[str]()
    contents = msgspec.msgpack.decode(process.receive(), type=Contents)
    while len(tokens) < contents.num_tokens:
        tokens += msgspec.msgpack.decode(process.receive(), type=list[str])
    if not tokens:
        raise ModelError("it is of a kind that cannot be lent")
    return contents, tokens
