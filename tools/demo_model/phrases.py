"""A tiny phrase grammar and the rule that keeps training and held-out prompts apart.

A pattern is plain text with choices in braces, ``{start|launch|} the server``, and slots in square brackets,
``the weather in [city]``. Choices are expanded first; the expanded text, slots still unfilled, is the key that a
hash sends to one split or the other, so a held-out wording never occurs in training, whatever is put around it.
"""

from __future__ import annotations

import random
import re
import zlib
from collections.abc import Callable, Mapping, Sequence

TRAIN = "train"
HELD_OUT = "held_out"

_CHOICE = re.compile(r"\{([^{}]*)\}")
_SLOT = re.compile(r"\[([a-z0-9_]+)\]")
_PREFIXES = (
    "please ",
    "hey, ",
    "hi, ",
    "hello, ",
    "ok, ",
    "so ",
    "now ",
    "and ",
    "quick question: ",
    "can you help? ",
    "tell me, ",
    "well, ",
)
_QUESTION_WORDS = frozenset("how what which who where when why is are do does can could will would did".split())
_QUESTION_ENDS = ("?", "?", "?", "?", "", "", "??", " please?", " ?", "!", ".")
_OTHER_ENDS = ("", "", "", ".", ".", "!", " please", " please.", ", thanks")


class NoSuchPhraseError(LookupError):
    """The source of a draw has nothing, or next to nothing, in the wanted split."""


def split_of(key: str, held_out_percent: int = 15) -> str:
    """Return the split that owns ``key``; the same key always lands in the same split."""
    bucket = zlib.crc32(b"tidewheel:" + key.encode()) % 100
    return HELD_OUT if bucket < held_out_percent else TRAIN


def draw_in_split(make: Callable[[], str], split: str, held_out_percent: int = 15) -> str:
    """Draw from ``make`` until the drawn text belongs to ``split``."""
    for _ in range(500):
        value = make()
        if split_of(value.lower(), held_out_percent) == split:
            return value
    raise NoSuchPhraseError(f"no value of split {split!r} found")


def expand(rng: random.Random, pattern: str) -> str:
    """Resolve every choice of ``pattern``, innermost first."""
    while True:
        pattern, count = _CHOICE.subn(lambda match: rng.choice(match.group(1).split("|")), pattern)
        if not count:
            return re.sub(r"  +", " ", pattern).strip()


def fill(text: str, slots: Mapping[str, str]) -> str:
    """Put slot values into an expanded pattern."""
    return _SLOT.sub(lambda match: slots[match.group(1)], text)


def _misspell(rng: random.Random, text: str) -> str:
    """Swap or drop one letter in one of the longer plain words."""
    words = text.split(" ")
    places = [i for i, word in enumerate(words) if re.fullmatch(r"[a-z]{5,}", word)]
    if not places:
        return text
    place = rng.choice(places)
    word = words[place]
    at = rng.randrange(1, len(word) - 1)
    if rng.random() < 0.5:
        words[place] = word[:at] + word[at + 1] + word[at] + word[at + 2 :]
    else:
        words[place] = word[:at] + word[at + 1 :]
    return " ".join(words)


def is_question(text: str) -> bool:
    """Say whether an expanded pattern reads as a question."""
    return text.lower().split()[0] in _QUESTION_WORDS


def ask(
    rng: random.Random,
    patterns: Sequence[str],
    split: str,
    slots: Mapping[str, str] | None = None,
    *,
    prefix: bool = True,
) -> str:
    """Make one user message of ``split`` from ``patterns``, dressed as people type: casing, courtesy, small typos."""
    core = draw_in_split(lambda: expand(rng, rng.choice(patterns)), split)
    question = is_question(core)
    if rng.random() < 0.07:
        core = _misspell(rng, core)
    if prefix and rng.random() < 0.3:
        core = rng.choice(_PREFIXES) + core
    if core[-1] not in "?!.":
        core += rng.choice(_QUESTION_ENDS if question else _OTHER_ENDS)
    casing = rng.random()
    if casing < 0.35:
        core = core.lower()
    elif core[0].islower():
        core = core[0].upper() + core[1:]
    return fill(core, slots or {})
