"""The process of a LentTokenizer: it makes a tokenizer, tells what is in it, and encodes texts with it.

It runs as `python -I -c COMMAND SOCKET SOCKET FILE PATH...`. On each socket, a thread of its own answers requests until
the other end is closed. What the tokenizer has comes first, on the first of them.
"""

from __future__ import annotations

import contextlib
import signal
import socket
import sys
import threading
from array import array
from itertools import islice
from pathlib import Path

import msgspec

from ..machine.priority import lower_thread_priority
from ..sandboxing.process import receive_message
from ..sandboxing.sandbox import send_message
from ..text.piece_texts import PieceTexts
from ..text.tokenizer import ChatTemplate, SpecialTokens, Tokenizer
from ..text.tokenizer_backends import SentencePieceBackend, TokenizersBackend

COMMAND = "import sys; sys.path[:] = sys.argv[4:]; from tidewheel.engine.loading.tokenizer_process import main; main()"
IDS = "I"  # the type of the token ids in an answer: at least 32 bits
PLAIN, WITH_SPECIAL = b"\0", b"\1"  # what a request begins with, before the text
ENCODED, FAILED = b"\0", b"\1"  # what an answer begins with, before the ids, or what went wrong
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


def main() -> None:
    """Make the tokenizer, and serve on both sockets."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the server handles Ctrl-C, and then ends this process
    connections = [socket.socket(fileno=int(number)) for number in sys.argv[1:3]]
    made = threading.Event()
    tokenizer: Tokenizer

    def serve(connection: socket.socket) -> None:
        made.wait()
        with contextlib.suppress(EOFError, OSError):
            while True:
                send_message(connection, _answer(tokenizer, receive_message(connection)))

    # They have the priority of what answers. To make the tokenizer has less.
    threads = [threading.Thread(target=serve, args=(connection,), daemon=True) for connection in connections]
    for thread in threads:
        thread.start()
    lower_thread_priority()
    tokenizer = tokenizer_at(Path(sys.argv[3]))
    _tell(connections[0], tokenizer)
    made.set()
    for thread in threads:
        thread.join()


def tokenizer_at(path: Path) -> Tokenizer:
    """The tokenizer of a folder or a GGUF file. Raises ModelError."""
    if path.is_dir():
        return Tokenizer.load(path)
    from ..weights.gguf.source import GgufSource

    return GgufSource(path).tokenizer()


def _tell(connection: socket.socket, tokenizer: Tokenizer) -> None:
    size, backend = tokenizer.vocab_size, tokenizer.backend
    tokens = [tokenizer.id_to_token(token_id) for token_id in range(size)]
    decoder: str | PieceTexts | None = None
    if isinstance(backend, TokenizersBackend):
        decoder = backend.decoder
    elif isinstance(backend, SentencePieceBackend):
        decoder = backend.texts
    if decoder is None or None in tokens or len({*tokens}) < size:
        send_message(connection, msgspec.msgpack.encode(Contents(0)))
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
    send_message(connection, msgspec.msgpack.encode(contents))
    left = iter(tokens)
    while some := [*islice(left, _AT_ONCE)]:
        send_message(connection, msgspec.msgpack.encode(some))


def _answer(tokenizer: Tokenizer, request: bytes) -> bytes:
    try:
        ids = tokenizer.encode(request[1:].decode(), add_special_tokens=request[:1] == WITH_SPECIAL)
        return ENCODED + array(IDS, ids).tobytes()
    except Exception as error:
        return FAILED + str(error).encode(errors="replace")
