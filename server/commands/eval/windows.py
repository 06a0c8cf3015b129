"""Texts as windows of tokens."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from tidewheel.engine.errors import TidewheelError
from tidewheel.engine.files.reading import read_file
from tidewheel.engine.text.tokenizer import Tokenizer

DEFAULT_CONTEXT = 512
_FOLDER = Path(__file__).parent / "text"
_MAX_TEXT_BYTES = 64 << 20


@dataclass(frozen=True, slots=True)
class Windows:
    """A text in windows that do not overlap, `[N] int32` each. Each begins with `num_added` tokens that are not text.

    `num_tokens` are the text's own.
    """

    name: str
    windows: list[NDArray[np.int32]]
    num_added: int
    num_tokens: int

    @property
    def num_scored(self) -> int:
        """How many tokens have a token before them in their window, and are text."""
        return sum(len(window) - self.first_scored for window in self.windows)

    @property
    def first_scored(self) -> int:
        """The place in a window of the first token that is scored."""
        return max(self.num_added, 1)


def default_texts() -> list[Path]:
    """The texts of the package, in the order of their names."""
    return sorted(path for path in _FOLDER.iterdir() if path.suffix in (".txt", ".md"))


def read_text(path: Path, option: str = "--text") -> str:
    """A text. Raises ModelError for a file that cannot be read, and TidewheelError for one that is not UTF-8."""
    try:
        return read_file(path, _MAX_TEXT_BYTES).decode()
    except UnicodeDecodeError as error:
        raise TidewheelError(
            f"{option} {path} is not UTF-8: its byte {error.start} is not part of a character; convert it, for example "
            "with iconv -f LATIN1 -t UTF-8"
        ) from None


def split(path: Path, tokenizer: Tokenizer, context: int, vocab_size: int, option: str = "--text") -> Windows:
    """A text in windows of `context` tokens, the last of which may be shorter.

    Raises TidewheelError for a text with fewer than 2 tokens, a context that holds nothing to score, and tokens that
    the model does not have.
    """
    added = added_tokens(tokenizer)
    if context < max(len(added), 1) + 1:
        raise TidewheelError(f"--context {context} leaves no token to score in a window: raise it to 2 or, better, 512")
    text = read_text(path, option)
    token_ids = np.array(tokenizer.encode(text, add_special_tokens=False), np.int32)
    if len(token_ids) < 2:
        raise TidewheelError(
            f"{option} {path} has {len(token_ids)} token{'s' * (len(token_ids) != 1)}: at least 2 are needed, and some "
            "thousands for a meaningful figure"
        )
    if (largest := int(token_ids.max())) >= vocab_size:
        raise TidewheelError(
            f"{option} {path}: the tokenizer gives token {largest}, and the model has {vocab_size}: name the model's "
            "own with --tokenizer"
        )
    step = context - len(added)
    pieces = [token_ids[start : start + step] for start in range(0, len(token_ids), step)]
    windows = [np.concatenate([np.array(added, np.int32), piece]) for piece in pieces]
    return Windows(path.name, [window for window in windows if len(window) > 1], len(added), len(token_ids))


def added_tokens(tokenizer: Tokenizer) -> Sequence[int]:
    """What the tokenizer puts before a text: BOS in most cases, or nothing."""
    plain, whole = tokenizer.encode("a", add_special_tokens=False), tokenizer.encode("a")
    for start in range(len(whole) - len(plain) + 1):
        if whole[start : start + len(plain)] == plain:
            return whole[:start]
    return ()
