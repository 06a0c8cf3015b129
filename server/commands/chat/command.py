"""The commands `chat` and `complete`: one question or many, to a server that runs or one that they start. And `run`,
to a model of a server that runs.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import stat
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TextIO

from ..server_client import DEFAULT_URL, ClientError, UnreachableError
from ..server_models import add_address, download_there
from .client import ChatClient, CompletionClient
from .local_server import download, local_server
from .terminal import Screen, reader

_HELP = """\
/reset            forget the conversation
/image FILE       send an image with the next message
/set NAME VALUE   set a parameter, such as temperature 0.5; no value restores the default, /set shows all
/set system TEXT  set the system message, and begin a new conversation
/help             show this
/exit, /bye       exit, as Ctrl-D does
Ctrl-C stops an answer, or clears what was typed. A line that ends with \\ continues on the next."""
_EXAMPLES = """\
examples:
  tidewheel chat                             a conversation; /help lists the commands
  tidewheel chat Who are you?                one question
  tidewheel chat ./my-model                  a conversation with this model
  cat FILE | tidewheel chat "Summarize this" a question about a file
  tidewheel chat --image FILE "What is this?" a question about an image
"""
_COMMAND = re.compile(r"/[a-z?]\w*(?=\s|$)", re.IGNORECASE)  # and no path
_OURS = ("messages", "prompt", "model", "stream", "stream_options", "n")
_MAX_PIPED = 1 << 24  # characters
_HUB_ID = re.compile(r"[\w.-]+/[\w.-]+")
_PATH = re.compile(r"(/|\.{1,2}/|~)\S*|\S+\.gguf")  # a model's, whether it is there or not


def chat(arguments: Sequence[str]) -> int:
    """The `chat` command. Raises ClientError."""
    parser = _parser("chat", "MESSAGE", "Talk to a model", "ask this and exit; without it, start a conversation")
    parser.description = f"{parser.description}\n\n{_EXAMPLES}"
    parser.epilog = f"In the conversation:\n{_HELP}"
    _add_chat_options(parser)
    return _run(parser, arguments, _chat_client)


def run(arguments: Sequence[str]) -> int:
    """The `run` command. Raises ClientError."""
    parser = argparse.ArgumentParser(
        prog="tidewheel run",
        usage="tidewheel run NAME [MESSAGE ...] [options]",
        description="Talk to a model of a server that runs. A model of the hub that it does not serve is downloaded "
        "there first, if the server has --allow-model-management.",
        epilog=f"In the conversation:\n{_HELP}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("model", metavar="NAME", help="a name that the server serves, or OWNER/NAME of the hub")
    parser.add_argument(
        "text", nargs="*", metavar="MESSAGE", help="ask this and exit; without it, start a conversation"
    )
    _add_chat_options(parser)
    _add_server_options(parser, DEFAULT_URL)
    given = parser.parse_args(list(arguments))
    client = _chat_client(given.url or DEFAULT_URL, given)
    if not client.serves(given.model):
        download_there(client, given.model)
    _talk(client, given.text, Screen(sys.stdout, shows_speed=given.stats))
    return 0


def _chat_client(url: str, given: argparse.Namespace) -> ChatClient:
    client = ChatClient(url, model=given.model, system=given.system, api_key=given.api_key)
    for path in given.image:
        client.attach(Path(path))
    return client


def complete(arguments: Sequence[str]) -> int:
    """The `complete` command. Raises ClientError."""
    parser = _parser(
        "complete", "TEXT", "Let a model continue a text", "continue this text and exit; without it, ask for texts"
    )
    parser.add_argument(
        "--max-tokens", type=int, metavar="N", help="the longest answer, in tokens [the server's limit]"
    )
    return _run(
        parser,
        arguments,
        lambda url, given: CompletionClient(url, model=given.model, api_key=given.api_key, max_tokens=given.max_tokens),
    )


def _parser(name: str, what: str, description: str, use: str) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog=f"tidewheel {name}",
        usage=f"tidewheel {name} [MODEL] [{what} ...] [options]",
        description=f"{description}. Without a server at --url's default, one is started until this command ends.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "text",
        nargs="*",
        metavar=what,
        help=f"{use}. A first word that is a path, a GGUF file or OWNER/NAME is the MODEL",
    )
    parser.add_argument(
        "-q", "--quick", metavar=what, help=f"the same as {what}, but none of its words is taken as a MODEL"
    )
    parser.add_argument("--model", "--model-name", metavar="NAME", help="the model's name [the server's first]")
    _add_server_options(parser, f"{DEFAULT_URL} if one runs there, else one is started")
    return parser


def _add_chat_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--image",
        action="append",
        default=[],
        metavar="FILE",
        help="an image for the first message, if the model sees images; may be given several times",
    )
    parser.add_argument("--system", "--system-prompt", metavar="TEXT", help="a system message to begin with")


def _add_server_options(parser: argparse.ArgumentParser, default: str) -> None:
    parser.add_argument("--stats", action="store_true", help="show the speed of answers, which a terminal always shows")
    add_address(parser, default)


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
        _talk(client_of(url, given), words, screen)
    return 0


def _talk(client: ChatClient, words: Sequence[str], screen: Screen) -> None:
    """Asks one question, of these words and what is piped in; or has a conversation."""
    client.on_wait = screen.status
    if words or sys.stdin is None or not sys.stdin.isatty():
        piped = "" if sys.stdin is None else _piped(sys.stdin, waits=not words)
        if text := "\n\n".join(part for part in (" ".join(words), piped.strip("\n")) if part.strip()):
            _say(client, text, screen)
    else:
        screen.note(f"{client.model()} at {client.url}")
        _converse(client, screen)


def _piped(source: TextIO, *, waits: bool) -> str:
    """The text from a pipe or a file. Other sources may never end; they are read only if it `waits`."""
    if not waits:
        try:
            mode = os.fstat(source.fileno()).st_mode
        except (OSError, ValueError):
            return ""
        if not stat.S_ISFIFO(mode) and not stat.S_ISREG(mode):
            return ""
    text = source.read(_MAX_PIPED + 1)
    if len(text) > _MAX_PIPED:
        raise ClientError(f"the piped text has more than {_MAX_PIPED} characters: shorten it")
    return text


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
        if source is not None and not _is_here(source):
            download(source)
        screen.note(f"Starting a server of {source or 'the built-in model'} ...")
    with local_server(source) as started:
        yield started


def _is_here(source: str) -> bool:
    return Path(source).expanduser().exists() or _PATH.fullmatch(source) is not None


def _serves(source: str | None, api_key: str | None) -> bool:
    """Whether a server runs at the default address, with the model `source` if that is named."""
    client = ChatClient(DEFAULT_URL, model=None, system=None, api_key=api_key)
    try:
        if source is not None:
            return client.serves(source)
        client.models()
    except UnreachableError:
        return False
    return True


def _say(client: ChatClient, text: str, screen: Screen) -> None:
    for piece in client.ask(text, screen.reasoning):
        screen.answer(piece)
    screen.end()
    if screen.shows_speed and client.tokens_per_second is not None:
        screen.note(f"{client.tokens_per_second:.1f} tokens/s")


def _converse(client: ChatClient, screen: Screen) -> None:
    """Questions from the terminal, until it ends or says /exit."""
    screen.note(_HELP)
    read = reader(_is_command)
    while True:
        try:
            text = read().strip()
        except EOFError:
            return
        except KeyboardInterrupt:
            screen.note("(Ctrl-D or /exit leaves)")
            continue
        command, _, rest = text.partition(" ")
        if command in ("/exit", "/quit", "/bye"):
            return
        if command == "/reset":
            client.reset()
        elif command == "/image":
            screen.note(_attach(client, rest.strip()))
        elif command in ("/help", "/?"):
            screen.note(_HELP)
        elif command == "/set":
            screen.note(_set(client, rest.strip()))
        elif _is_command(text):
            screen.note(f"there is no {command}; /help lists the commands")
        elif text:
            _answer(client, text, screen)


def _set(client: ChatClient, given: str) -> str:
    """Sets a parameter, and says what is set. Ollama's word `parameter` may stand before its name."""
    name, _, value = given.removeprefix("parameter ").strip().partition(" ")
    value = value.strip()
    if name == "system":
        client.instruct(value.strip('"'))
        return "a new conversation begins" + (", with this system message" if value else "")
    if name in _OURS:
        return f"{name} cannot be set, because this program sets it"
    if name and value:
        try:
            client.parameters[name] = json.loads(value)
        except ValueError:
            client.parameters[name] = value
    elif name:
        client.parameters.pop(name, None)
    values = ", ".join(f"{key} {json.dumps(one, ensure_ascii=False)}" for key, one in client.parameters.items())
    return values or "nothing is set: the model's defaults apply"


def _attach(client: ChatClient, path: str) -> str:
    """Attaches an image, and says so, or why not. A path that was dropped into the terminal may have quotes."""
    if not path:
        return "/image needs a file, such as /image photo.jpg"
    try:
        client.attach(Path(path.strip("'\"")))
    except ClientError as error:
        return str(error)
    return "the image goes with the next message"


def _is_command(line: str) -> bool:
    """Whether a line that was typed is for this program: it need not be one that there is."""
    return _COMMAND.match(line.strip()) is not None


def _answer(client: ChatClient, text: str, screen: Screen) -> None:
    try:
        _say(client, text, screen)
    except KeyboardInterrupt:
        screen.end()
        screen.note("(stopped)")
    except ClientError as error:
        print(f"error: {error}", file=sys.stderr)
