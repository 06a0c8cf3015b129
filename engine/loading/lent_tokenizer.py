"""LentTokenizer: one that another process has made, because making it here would stop the streams of other models.

The tokenizers library makes one of 128,000 tokens in calls that hold the interpreter's lock for hundreds of
milliseconds. For sentencepiece, a GGUF file's tokens go through loops that want the lock just as long. The process is
needed until the tokenizer can be made here while nothing streams.
"""

from __future__ import annotations

import contextlib
import logging
import os
import socket
import struct
import subprocess
import sys
import threading
import weakref
from array import array
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import msgspec

from ..errors import ModelError
from ..files.reading import read_part
from ..sandboxing.process import receive_message
from ..sandboxing.sandbox import send_message
from ..text.piece_texts import PieceTexts
from ..text.tokenizer import Tokenizer
from ..text.tokenizer_backends import LONG_TEXT, TokenizerBackend, byte_level_bytes, decoder_of
from .tokenizer_process import COMMAND, ENCODED, IDS, PLAIN, WITH_SPECIAL, Contents, tokenizer_at

logger = logging.getLogger(__name__)

_LOOK_BYTES = 16 << 20
# As the metadata has them: a string has type 8, and its length before it.
_GGUF_KINDS = [
    b"tokenizer.ggml.model" + struct.pack("<IQ", 8, len(kind)) + kind for kind in (b"gpt2", b"llama", b"gemma4")
]
_LONGEST_MAKE_S = 60.0
_LONGEST_S, _LEAST_CHARACTERS_PER_S = 10.0, 50_000.0


def can_be_lent(path: Path) -> bool:
    """Whether the tokenizer of a folder or a GGUF file is of a kind that can be, as far as a quick look tells."""
    return path.is_dir() or any(kind in read_part(path, _LOOK_BYTES) for kind in _GGUF_KINDS)


class LentTokenizer(Tokenizer):
    """The tokenizer of a folder or a GGUF file, of which only the tokens and their decoder are here."""

    is_lent = True

    def __init__(self, path: Path) -> None:
        """Raises ModelError if there is no such tokenizer, or the process does not start."""
        process = _Process(path)
        try:
            contents, tokens = process.contents()
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
        self, process: _Process, contents: Contents, tokens: Sequence[str], settled: Callable[[], TokenizerBackend]
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
        try:
            return self._process.encode(text, add_special_tokens)
        except (OSError, EOFError) as error:
            if not self._process.is_closed:
                logger.warning("A tokenizer is made anew, because its process has ended: %s", error)
                self.close()  # an answer may still come, which would be taken for the next one
            return self._settled().encode(text, add_special_tokens)

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


class _Process:
    """The process, and a connection each for long texts and for short ones, which need not wait for the long ones."""

    def __init__(self, path: Path) -> None:
        """Raises ModelError if it does not start."""
        self.is_closed = False
        pairs = [socket.socketpair() for _ in range(2)]
        self._connections = [ours for ours, _ in pairs]
        self._locks = [threading.Lock() for _ in pairs]
        numbers = [theirs.fileno() for _, theirs in pairs]
        command = [*map(str, numbers), os.path.abspath(path), *map(os.path.abspath, sys.path)]
        try:
            self._process = subprocess.Popen(
                [sys.executable, "-I", "-c", COMMAND, *command],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,  # what is wrong with the files is said here
                pass_fds=numbers,
                start_new_session=True,  # the server alone gets the terminal's signals
            )
        except OSError as error:
            self._hang_up()
            raise ModelError(f"the process that makes a tokenizer does not start: {error}") from error
        finally:
            for _, theirs in pairs:
                theirs.close()

    def contents(self) -> tuple[Contents, list[str]]:
        """What the tokenizer has. Raises ModelError if there is none that can be lent."""
        connection, tokens = self._connections[0], list[str]()
        connection.settimeout(_LONGEST_MAKE_S)
        try:
            contents = msgspec.msgpack.decode(receive_message(connection), type=Contents)
            while len(tokens) < contents.num_tokens:
                tokens += msgspec.msgpack.decode(receive_message(connection), type=list[str])
        except (OSError, EOFError) as error:
            raise ModelError("the process that makes a tokenizer has ended") from error
        if not tokens:
            raise ModelError("it is of a kind that cannot be lent")
        return contents, tokens

    def encode(self, text: str, add_special_tokens: bool) -> list[int]:
        """The token ids of a text. Raises OSError and EOFError if the process is gone or does not answer, and
        RuntimeError for what the library fails at.
        """
        is_long = len(text) > LONG_TEXT
        connection = self._connections[is_long]
        with self._locks[is_long]:
            connection.settimeout(_LONGEST_S + len(text) / _LEAST_CHARACTERS_PER_S)
            send_message(connection, (WITH_SPECIAL if add_special_tokens else PLAIN) + text.encode())
            answer = receive_message(connection)
        if answer[:1] != ENCODED:
            raise RuntimeError(answer[1:].decode())
        return array(IDS, answer[1:]).tolist()

    def close(self) -> None:
        """End it. Those who wait for an answer get an error. Calling it twice is allowed."""
        self.is_closed = True
        self._process.kill()
        self._process.wait()
        self._hang_up()

    def _hang_up(self) -> None:
        for connection in self._connections:
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)  # wakes those that wait
            connection.close()
