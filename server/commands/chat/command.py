"""The `chat` command: one question or a conversation, with a server that runs or one that it starts."""

from __future__ import annotations

import argparse
import contextlib
import os
import re
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TextIO

from .client import DEFAULT_URL, ChatClient, ChatError, UnreachableError
from .local_server import local_server
from .terminal import Screen, reader

_HELP = """\
/reset  forget the conversation
/help   show this
/exit   leave
Ctrl-C stops an answer. A line that ends with \\ goes on in the next one."""
_HUB_ID = re.compile(r"[\w.-]+/[\w.-]+")


def run(arguments: Sequence[str]) -> int:
    """The `chat` command. Raises ChatError."""
    parser = argparse.ArgumentParser(
        prog="tidewheel chat",
        usage="tidewheel chat [MODEL] [MESSAGE ...] [options]",
        description="Talk to a model. Without a server at --url's default, one is started for as long as this takes.",
        epilog=f"In the conversation:\n{_HELP}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "message",
        nargs="*",
        metavar="MESSAGE",
        help="ask this and leave; else a conversation. A first word that is a folder, a GGUF file or OWNER/NAME is the "
        "MODEL",
    )
    parser.add_argument("--url", help=f"the server [{DEFAULT_URL} if one runs there, else one is started]")
    parser.add_argument("--model", help="the model's name [the server's first]")
    parser.add_argument("--system", help="a system message to begin with")
    parser.add_argument(
        "--api-key", default=os.environ.get("TIDEWHEEL_API_KEY", "").partition(" ")[0], help="[$TIDEWHEEL_API_KEY]"
    )
    options = parser.parse_args(list(arguments))
    words: list[str] = options.message
    source = words.pop(0) if words and options.url is None and _is_model(words[0]) else None
    screen = Screen(sys.stdout)
    with _server(options.url, source, options.api_key, screen) as url:
        client = ChatClient(url, model=options.model, system=options.system, api_key=options.api_key)
        if words:
            _say(client, " ".join(words), screen)
        else:
            _converse(client, sys.stdin, screen)
    return 0


def _is_model(word: str) -> bool:
    return Path(word).exists() or _HUB_ID.fullmatch(word) is not None


@contextlib.contextmanager
def _server(url: str | None, source: str | None, api_key: str | None, screen: Screen) -> Iterator[str]:
    """The server at `url`, or one that runs here and serves `source`, or one that is started for that."""
    if url is not None:
        yield url
        return
    if _serves(source, api_key):
        yield DEFAULT_URL
        return
    if screen.is_terminal:
        screen.note(f"Starting a server of {source or 'the built-in model'} ...")
    with local_server(source) as started:
        yield started


def _serves(source: str | None, api_key: str | None) -> bool:
    """Whether a server runs at the default address, with the model `source` if that is named."""
    try:
        models = ChatClient(DEFAULT_URL, model=None, system=None, api_key=api_key).models()
    except UnreachableError:
        return False
    return source is None or source in models


def _say(client: ChatClient, text: str, screen: Screen) -> None:
    for piece in client.ask(text, screen.reasoning):
        screen.answer(piece)
    screen.end()
    if screen.is_terminal and client.tokens_per_second is not None:
        screen.note(f"{client.tokens_per_second:.1f} tokens/s")


def _converse(client: ChatClient, source: TextIO, screen: Screen) -> None:
    """Questions from `source` until it ends or says /exit. On a terminal they are asked for, else each line is one."""
    terminal = source.isatty()
    if terminal:
        screen.note(_HELP)
        read = reader()
    while True:
        try:
            text = read() if terminal else source.readline()
        except EOFError:
            return
        except KeyboardInterrupt:
            screen.note("")
            return
        if not text and not terminal:
            return
        text = text.strip()
        if text in ("/exit", "/quit"):
            return
        if text == "/reset":
            client.reset()
        elif text == "/help":
            screen.note(_HELP)
        elif text.startswith("/") and terminal and " " not in text:
            screen.note(f"there is no {text}; /help lists the commands")
        elif text:
            _answer(client, text, screen, terminal)


def _answer(client: ChatClient, text: str, screen: Screen, terminal: bool) -> None:
    try:
        _say(client, text, screen)
    except KeyboardInterrupt:
        screen.end()
        screen.note("(stopped)")
    except ChatError as error:
        if not terminal:
            raise
        print(f"error: {error}", file=sys.stderr)
