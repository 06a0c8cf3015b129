"""Measure what the demo model sees on held-out pictures, as Tidewheel serves it: greedy answers, shares that are right.

The exit status is 1 when fewer sentences of a kind are right than wanted.
"""

from __future__ import annotations

import argparse
import random
import re
import sys
from itertools import zip_longest
from pathlib import Path
from typing import Any

from tidewheel.offline.llm import LLM
from tidewheel.offline.params import SamplingParams

from .phrases import HELD_OUT
from .pictures import KINDS, Picture, held_out_pictures
from .see import question
from .train import DEMO

_THING = re.compile(r"\ban? ([a-z]+) ([a-z]+)\b", re.IGNORECASE)


def judge(picture: Picture, answer: str) -> dict[str, list[bool]]:
    """Say of the sentence, and of each shape, colour, digit and letter, whether it is right."""
    right = {"sentences": [answer == picture.sentence]}
    if picture.kind in ("one_shape", "two_shapes"):
        said = [(colour.lower(), shape) for colour, shape in _THING.findall(answer)]
        wanted = [(part.colour, part.what) for part in picture.parts]
        pairs = list(zip_longest(wanted, said[: len(wanted)], fillvalue=("", "")))
        right["colours"] = [one[0] == other[0] for one, other in pairs]
        right["shapes"] = [one[1] == other[1] for one, other in pairs]
    elif picture.kind in ("digits", "word"):
        what = "digits" if picture.kind == "digits" else "letters"
        found = "".join(re.findall(r"\d", answer)) if what == "digits" else answer.removeprefix("It says ").rstrip(".")
        wanted_text = "".join(part.what for part in picture.parts)
        right[what] = [one == other for one, other in zip_longest(wanted_text, found[: len(wanted_text)])]
    return right


def answers(llm: LLM, pictures: list[Picture], seed: int) -> list[str]:
    """Return the greedy answer about each picture, to a question that training held out."""
    rng = random.Random(f"questions {seed}")
    conversations: list[Any] = []
    for picture in pictures:
        asked = question(rng, HELD_OUT)
        image = {"type": "image_pil", "image_pil": picture.image}
        content = [image, {"type": "text", "text": asked}] if asked else [image]
        conversations.append([{"role": "user", "content": content}])
    outputs = llm.chat(conversations, SamplingParams(temperature=0, max_tokens=60), use_tqdm=False)
    return [output.outputs[0].text for output in outputs]


def evaluate(options: argparse.Namespace) -> int:
    """Print the table; return the exit status."""
    low = []
    print("| Pictures | Asked | Sentences | Shapes | Colours | Digits | Letters |")
    print("| --- | ---: | ---: | ---: | ---: | ---: | ---: |")
    with LLM(str(options.model), quantization=options.quantization) as llm:
        for kind in options.kinds.split(","):
            pictures = held_out_pictures(options.seed, options.per_kind, (kind,))
            found: dict[str, list[bool]] = {}
            shown = 0
            for picture, answer in zip(pictures, answers(llm, pictures, options.seed), strict=True):
                judged = judge(picture, answer)
                for what, right in judged.items():
                    found.setdefault(what, []).extend(right)
                if not judged["sentences"][0] and shown < options.show:
                    shown += 1
                    print(f"  wanted {picture.sentence!r}, got {answer!r}", file=sys.stderr)
            shares = {what: sum(right) / len(right) for what, right in found.items()}
            cells = [
                f"{shares[what]:.1%}" if what in shares else ""
                for what in ("sentences", "shapes", "colours", "digits", "letters")
            ]
            print(f"| {kind} | {len(pictures)} | {' | '.join(cells)} |", flush=True)
            if shares["sentences"] < options.wanted:
                low.append(kind)
    if low:
        print(f"below {options.wanted:.0%}: {', '.join(low)}", file=sys.stderr)
    return 1 if low else 0


def main() -> int:
    """Read the command line and evaluate."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, default=DEMO)
    parser.add_argument("--quantization", default="int8-channel", help="none: bfloat16")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--kinds", default=",".join(KINDS))
    parser.add_argument("--per-kind", type=int, default=200)
    parser.add_argument("--wanted", type=float, default=0.0)
    parser.add_argument("--show", type=int, default=0, help="wrong answers to print per kind of picture")
    options = parser.parse_args()
    options.quantization = None if options.quantization == "none" else options.quantization
    return evaluate(options)


if __name__ == "__main__":
    sys.exit(main())
