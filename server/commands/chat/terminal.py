"""What a person types and sees: with prompt_toolkit and rich if they are installed, else with readline and plain text.

The extra `chat` names both.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TextIO

from .wrapping import WordWrap

_PROMPT, _MORE = "> ", "... "
_HISTORY_LINES = 1000


def history_file() -> Path:
    """Where questions are kept, by the XDG convention; readable by this user alone."""
    state = os.environ.get("XDG_STATE_HOME") or Path.home() / ".local/state"
    path = Path(state) / "tidewheel" / "chat_history"
    with contextlib.suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        path.touch(mode=0o600)
    return path


def reader(is_command: Callable[[str], bool]) -> Callable[[], str]:
    """Reads a question. A line that ends with a backslash goes on. Commands are not kept in the history file.

    What it returns raises EOFError and KeyboardInterrupt.
    """
    try:
        from prompt_toolkit import PromptSession
        from prompt_toolkit.history import FileHistory
    except ImportError:
        ask = _readline(is_command)
    else:

        class Questions(FileHistory):
            def store_string(self, string: str) -> None:
                if not is_command(string):
                    super().store_string(string)

        session: PromptSession[str] = PromptSession(history=Questions(str(history_file())))
        ask = session.prompt

    def read() -> str:
        lines = [ask(_PROMPT)]
        while lines[-1].endswith("\\"):
            lines[-1] = lines[-1][:-1]
            lines.append(ask(_MORE))
        return "\n".join(lines)

    return read


def _readline(is_command: Callable[[str], bool]) -> Callable[[str], str]:
    import atexit
    import readline

    path = history_file()
    with contextlib.suppress(OSError):
        readline.read_history_file(path)
    readline.set_history_length(_HISTORY_LINES)
    readline.parse_and_bind("set enable-bracketed-paste on")  # pasted lines are one question

    def save() -> None:
        with contextlib.suppress(OSError):
            readline.write_history_file(path)

    atexit.register(save)

    def ask(prompt: str) -> str:
        line = input(prompt)
        count = readline.get_current_history_length()
        if is_command(line) and count and readline.get_history_item(count) == line:
            readline.remove_history_item(count - 1)
        return line

    return ask


class Screen:
    """Where answers go: as they come to a file, and wrapped at words and with dim reasoning to a terminal."""

    def __init__(self, out: TextIO, *, shows_speed: bool = False) -> None:
        """`shows_speed` says whether the speed of answers is shown; a terminal always shows it."""
        self._out = out
        self.is_terminal = out.isatty()
        self.shows_speed = shows_speed or self.is_terminal
        self._wrap = self._new_wrap()
        self._dim = _dimmer() if self.is_terminal else None
        self._reasoned = False
        self._has_status = False

    def status(self, text: str) -> None:
        """Shows what is waited for, on a terminal only, until something else is shown."""
        if self.is_terminal and text:
            self._write("")
            self._out.write(f"{self._dimmed(text)}")
            self._out.flush()
            self._has_status = True

    def answer(self, piece: str) -> None:
        """Shows a piece of the answer."""
        if self._reasoned:
            self.end()
            self._write("\n")
        self._write(self._wrap.feed(piece) if self._wrap else piece)

    def reasoning(self, piece: str) -> None:
        """Shows a piece of reasoning, to a terminal only: a pipe wants the answer."""
        if self._wrap:
            self._reasoned = True
            self._write(self._dimmed(self._wrap.feed(piece)))

    def end(self) -> None:
        """Ends the paragraph that is being shown."""
        if self._wrap:
            rest = self._wrap.end()
            self._write(self._dimmed(rest) if self._reasoned else rest)
        self._reasoned = False
        self._wrap = self._new_wrap()
        self._write("\n")

    def note(self, text: str) -> None:
        """Shows a remark about the conversation."""
        self._write(f"{self._dimmed(text)}\n")

    def _new_wrap(self) -> WordWrap | None:
        return WordWrap(shutil.get_terminal_size().columns) if self.is_terminal else None

    def _dimmed(self, text: str) -> str:
        return self._dim(text) if self._dim is not None else text

    def _write(self, text: str) -> None:
        if self._has_status:
            self._has_status = False
            self._out.write("\r\x1b[K")
        self._out.write(text)
        self._out.flush()


def _dimmer() -> Callable[[str], str] | None:
    """None without rich."""
    try:
        from rich.console import Console
        from rich.style import Style
    except ImportError:
        return None
    system = Console(file=sys.stdout)._color_system
    style = Style(dim=True)
    return lambda text: style.render(text, color_system=system) if text else ""
