"""The commands `chat` and `complete`: one question or many, to a server that runs or one that they start."""

from __future__ import annotations

import argparse
import contextlib
import os
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TextIO

from .client import DEFAULT_URL, ChatClient, ChatError, CompletionClient, UnreachableError
from .local_server import local_server
from .terminal import Screen, reader

_HELP = """\
/reset  forget the conversation
/help   show this
/exit   leave
Ctrl-C stops an answer. A line that ends with \\ goes on in the next one."""
_HUB_ID = re.compile(r"[\w.-]+/[\w.-]+")
_PATH = re.compile(r"(/|\.{1,2}/|~)\S*|\S+\.gguf")  # a model's, whether it is there or not


def chat(arguments: Sequence[str]) -> int:
    """The `chat` command. Raises ChatError."""
    parser = _parser("chat", "MESSAGE", "Talk to a model", "ask this and leave; else a conversation")
    parser.epilog = f"In the conversation:\n{_HELP}"
    parser.add_argument("--system", "--system-prompt", metavar="TEXT", help="a system message to begin with")
    return _run(
        parser,
        arguments,
        lambda url, given: ChatClient(url, model=given.model, system=given.system, api_key=given.api_key),
    )


def complete(arguments: Sequence[str]) -> int:
    """The `complete` command. Raises ChatError."""
    parser = _parser(
        "complete", "TEXT", "Let a model go on with a text", "go on with this and leave; else ask for texts"
    )
    parser.add_argument("--max-tokens", type=int, metavar="N", help="the most tokens of an answer [the server's]")
    return _run(
        parser,
        arguments,
        lambda url, given: CompletionClient(url, model=given.model, api_key=given.api_key, max_tokens=given.max_tokens),
    )


def _parser(name: str, what: str, description: str, use: str) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog=f"tidewheel {name}",
        usage=f"tidewheel {name} [MODEL] [{what} ...] [options]",
        description=f"{description}. Without a server at --url's default, one is started for as long as this takes.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "text",
        nargs="*",
        metavar=what,
        help=f"{use}. A first word that is a path, a GGUF file or OWNER/NAME is the MODEL",
    )
    parser.add_argument("-q", "--quick", metavar=what, help=f"the same as {what}, none of whose words is a MODEL")
    parser.add_argument("--stats", action="store_true", help="show the speed of answers, as a terminal always does")
    parser.add_argument("--url", help=f"the server [{DEFAULT_URL} if one runs there, else one is started]")
    parser.add_argument("--model", "--model-name", metavar="NAME", help="the model's name [the server's first]")
    parser.add_argument(
        "--api-key",
        default=os.environ.get("TIDEWHEEL_API_KEY", "").partition(" ")[0],
        metavar="KEY",
        help="[$TIDEWHEEL_API_KEY]",
    )
    return parser


def _run(
    parser: argparse.ArgumentParser,
    arguments: Sequence[str],
    client_of: Callable[[str, argparse.Namespace], ChatClient],
) -> int:
    given = parser.parse_args(list(arguments))
    words: list[str] = given.text
    source = words.pop(0) if words and given.url is None and _is_model(words[0]) else None
    if given.quick is not None:
        if words:
            parser.error(f"two texts: {' '.join(words)!r} and --quick {given.quick!r}")
        words = [given.quick]
    screen = Screen(sys.stdout, shows_speed=given.stats)
    with _server(given.url, source, given.api_key, screen) as url:
        client = client_of(url, given)
        if words:
            _say(client, " ".join(words), screen)
        else:
            _converse(client, sys.stdin, screen)
    return 0


def _is_model(word: str) -> bool:
    return Path(word).exists() or any(pattern.fullmatch(word) for pattern in (_HUB_ID, _PATH))


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
    if screen.shows_speed and client.tokens_per_second is not None:
        screen.note(f"{client.tokens_per_second:.1f} tokens/s")


def _converse(client: ChatClient, source: TextIO, screen: Screen) -> None:
    """Questions from `source` until it ends or says /exit. On a terminal they are asked for, else each line is one."""
    terminal = source.isatty()
    if terminal:
        screen.note(_HELP)
        read = reader(_is_command)
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
        elif terminal and _is_command(text):
            screen.note(f"there is no {text}; /help lists the commands")
        elif text:
            _answer(client, text, screen, terminal)


def _is_command(line: str) -> bool:
    """Whether a line that was typed is for this program: it need not be one that there is."""
    text = line.strip()
    return text.startswith("/") and " " not in text


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
