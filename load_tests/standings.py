"""Prints every bar with its figure on this machine, and says which hold.

    python load_tests/standings.py --llama-cpp-python peers/llama --only "amx int8"

What was measured is kept in a file, so a run that was interrupted goes on where it ended.
"""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from bar_runs import Measurement, Setup, measurements
from bars import Figure
from contest import RunError
from peers import PEERS, say

from tidewheel import _native
from tidewheel.server.commands.bench import text
from tidewheel.server.commands.devices import cpu_model


class Kept:
    """The file of what was measured: by measurement, its figures or its failure, and when."""

    def __init__(self, file: Path, processor: str) -> None:
        """Ends the program if the file is of another processor."""
        self._file = file
        known = json.loads(file.read_text()) if file.exists() else {"processor": processor, "measured": {}}
        if known["processor"] != processor:
            raise SystemExit(f"{file} was measured on {known['processor']}, this is {processor}: name another --json")
        self._known: dict[str, Any] = known

    def add(self, name: str, figures: Mapping[str, Figure], failure: str | None) -> None:
        """Keep what a measurement gave, in place of an older one."""
        when = datetime.now(timezone.utc).isoformat(timespec="seconds")
        found = {figure: asdict(given) for figure, given in figures.items()}
        self._known["measured"][name] = {"when": when, "figures": found, "failure": failure}
        self._file.write_text(json.dumps(self._known, indent=2) + "\n")

    def figures(self, name: str) -> dict[str, Figure] | None:
        """What a measurement gave; None if it was not run, or failed."""
        known = self._known["measured"].get(name)
        if known is None or known["failure"] is not None:
            return None
        return {figure: Figure(**given) for figure, given in known["figures"].items()}

    def failure(self, name: str) -> str | None:
        """Why a measurement failed."""
        failure: str | None = self._known["measured"].get(name, {}).get("failure")
        return failure


def main(arguments: Sequence[str] | None = None) -> int:
    """Run from the command line; 1 if a bar does not hold or a measurement failed."""
    args = parse_args(arguments)
    processor = f"{cpu_model()}, {_native.chosen_isa_level()}"
    kept = Kept(args.json, processor)
    setup = Setup(
        keep=args.keep,
        levels=_native.available_isa_levels(),
        vendor=vendor(),
        peers={name: folder for peer in PEERS if (folder := vars(args)[(name := peer.name).replace("-", "_")])},
        file_8b=args.file_8b,
    )
    chosen = [each for each in measurements() if args.only is None or args.only.search(each.name)]
    for each in chosen if not args.show else ():
        if each.lacks(setup) is None and (args.again or kept.figures(each.name) is None):
            measure(each, setup, kept)
    shown, holds = standings(chosen, setup, kept)
    print(f"{processor}\n\n{shown}", end="")
    return 0 if holds else 1


def measure(measurement: Measurement, setup: Setup, kept: Kept) -> None:
    """Run a measurement and keep what it gives, also that it failed."""
    say(measurement.name)
    try:
        kept.add(measurement.name, measurement.run(setup), None)
    except RunError as error:
        kept.add(measurement.name, {}, str(error))


def standings(chosen: Sequence[Measurement], setup: Setup, kept: Kept) -> tuple[str, bool]:
    """A line for each bar, and what cannot be measured here and why; whether all that were measured hold."""
    rows = [["measurement", "figure", "goal", "here", "holds", ""]]
    verdicts: list[bool] = []
    elsewhere: dict[str, list[str]] = {}
    for each in chosen:
        figures, failure = kept.figures(each.name), kept.failure(each.name)
        if figures is None and (why := each.lacks(setup)) is not None:
            elsewhere.setdefault(why, []).append(each.name)
            continue
        for bar in each.bars:
            cells = ["-", "-", "not measured yet" if failure is None else f"failed: {failure}"]
            if figures is not None and (found := figures.get(bar.figure)) is not None:
                verdicts.append(bar.holds(found.value))
                cells = [text.figure(found.value), "yes" if verdicts[-1] else "no", found.detail]
            elif figures is not None or failure is not None:
                verdicts.append(False)
            rows.append([each.name, bar.figure, str(bar), *cells])
    lines = [text.table(rows), f"\n{sum(verdicts)} of {len(verdicts)} bars that were measured hold.\n"]
    lines += [f"\nCannot be measured here, because {why}:\n  {', '.join(names)}\n" for why, names in elsewhere.items()]
    return "".join(lines), all(verdicts)


def vendor() -> str:
    """The maker of the processor, as `/proc/cpuinfo` names x86's; empty elsewhere."""
    found = re.search(r"^vendor_id\s*: (\S+)", Path("/proc/cpuinfo").read_text(), re.MULTILINE)
    return found.group(1) if found else ""


def parse_args(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--only", type=re.compile, metavar="PATTERN", help="measurements whose name has this regular expression")
    add("--show", action="store_true", help="print what was measured before, and measure nothing")
    add("--again", action="store_true", help="also measure what was measured before")
    add("--json", type=Path, default=Path("standings.json"), metavar="FILE", help="keeps all figures")
    add("--keep", type=Path, default=Path("standings"), metavar="FOLDER", help="keeps the models that are made")
    add("--file-8b", type=Path, metavar="FILE", help="a GGUF file of 8 billion parameters, to be started")
    for peer in PEERS:
        what = "the server's program" if peer.serves else f"virtual environment that has {peer.name}"
        add(f"--{peer.name}", type=Path, metavar="PROGRAM" if peer.serves else "VENV", help=what)
    return parser.parse_args(arguments)


if __name__ == "__main__":
    raise SystemExit(main())
