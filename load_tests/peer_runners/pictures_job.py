"""What the runners of pictures share: the job that pictures.py hands in, and how a peer answers it.

As with job.py, a runner is a script for the interpreter of its peer's own environment, so this needs only the standard
library.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

FIRST = "first token, s"
SECOND = "second question, s"
AGAIN = "second / first"
TOWER = "tower, s"
SHARE = "tower / ceiling"
LARGE = "12 Mpx / Pillow"
FIGURES = (FIRST, SECOND, AGAIN, TOWER, SHARE, LARGE)

Figures = list[float]


@dataclass(frozen=True)
class Look:
    """Something that is measured of a peer, by its name in the table."""

    name: str


@dataclass(frozen=True)
class PicturesJob:
    """`weights` is the peer's name of the format. Of peers that do not read `model`, a Hugging Face folder, `file` is
    the GGUF file or folder that they read, and `projector` the GGUF file of the tower.

    Each of the `pictures`, paths of JPEG files, gets both `questions`, one after the other. A prompt is `before`,
    `placeholder` and a question. `large` has twelve million pixels, which the model's processor brings to the sizes
    `resized` (width, height) with Pillow's filter number `resample`. `options` are further ones of Tidewheel's command
    line, `context` is the longest prompt in tokens, and `cache_gib` the KV cache of peers that want to know its size.
    """

    model: str
    weights: str
    options: str
    file: str | None
    projector: str | None
    context: int
    cache_gib: int
    cpus: list[int]
    pictures: list[str]
    large: str
    before: str
    placeholder: str
    questions: list[str]
    resized: list[list[int]]
    resample: int
    scenarios: list[Look]

    def prompt(self, question: str, placeholder: str | None = None) -> str:
        """The text around a picture, with the peer's own `placeholder` if it has one."""
        return self.before + (self.placeholder if placeholder is None else placeholder) + question


class Peer(Protocol):
    """A loaded model that sees pictures."""

    version: str

    def ask(self, picture: Path, question: str) -> float:
        """Seconds from a file and a question to the first token of the answer, decoded greedily."""
        ...

    def others(self) -> Iterator[tuple[str, Callable[[], Figures]]]:
        """What else can be measured of this peer, by the names above."""
        ...


def run(load: Callable[[PicturesJob], Peer], given: Mapping[str, Any], say: Callable[..., None]) -> None:
    """Run a job as job.begin gave it. `load` imports its peer's library, which may count its processors then."""
    pictures = PicturesJob(**{**given, "scenarios": [Look(**look) for look in given["scenarios"]]})
    os.sched_setaffinity(0, pictures.cpus)
    peer = load(pictures)
    say(ready=True, version=peer.version)
    warm_up, *others = map(Path, pictures.pictures)
    first, second = pictures.questions
    answers: list[tuple[float, float]] = []

    def ask() -> Figures:
        peer.ask(warm_up, first)
        answers.extend((peer.ask(picture, first), peer.ask(picture, second)) for picture in others)
        return [seconds for seconds, _ in answers]

    _try(say, FIRST, ask)
    if len(answers) == len(others):
        say(scenario=SECOND, figures=[seconds for _, seconds in answers])
        say(scenario=AGAIN, figures=[again / seconds for seconds, again in answers])
        for name, measure in peer.others():
            _try(say, name, measure)
    os._exit(0)  # see job.run


def _try(say: Callable[..., None], name: str, measure: Callable[[], Figures]) -> None:
    try:
        say(scenario=name, figures=measure())
    except Exception as error:  # other figures may still go well
        say(scenario=name, error=f"{type(error).__name__}: {error}")
