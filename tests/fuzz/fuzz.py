"""Fuzz one harness with atheris, which looks for inputs that reach new code.

    pip install atheris
    cd tests && python -m fuzz.fuzz HARNESS [-runs=100000] [-max_total_time=600] [CORPUS_FOLDER]

Harnesses are in harnesses.py. Arguments after the name go to libFuzzer. A corpus folder keeps what was found for the
next time. An input that makes a harness raise is written to ./crash-*; give that file instead of a folder to try it
again. `pytest tests/fuzz` runs every harness for a fixed number of inputs, from a fixed seed.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
from pathlib import Path

import atheris

with atheris.instrument_imports(include=["tidewheel"]):
    from fuzz.harnesses import HARNESSES


def main() -> None:
    if sys.argv[1:] == ["-"]:
        serve()
    else:
        with tempfile.TemporaryDirectory() as seeds:
            fuzz(sys.argv[1], Path(seeds), sys.argv[2:])


def serve() -> None:
    """Fuzz what each line of stdin asks for, [name, folder, arguments], in a process forked from this one.

    Importing the code that atheris watches takes seconds, so all harnesses share it. A line of stdout is an exit
    status, and `output` in the folder has what was printed.
    """
    for line in sys.stdin:
        name, folder, arguments = json.loads(line)
        child = os.fork()
        if child == 0:
            output = os.open(Path(folder, "output"), os.O_WRONLY | os.O_CREAT)
            os.dup2(output, 1)
            os.dup2(output, 2)
            fuzz(name, Path(folder), arguments)
            return
        print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)


def fuzz(name: str, folder: Path, arguments: list[str]) -> None:
    """Run a harness, whose seeds are written to `seeds` in the folder. Ends the process."""
    harness = HARNESSES[name]
    seeds = folder / "seeds"
    seeds.mkdir()
    for i, seed in enumerate(harness.seeds):
        (seeds / str(i)).write_bytes(seed)
    atheris.Setup([sys.argv[0], *arguments, str(seeds)], lambda data: harness.run(bytes(data)))
    atheris.Fuzz()


if __name__ == "__main__":
    main()
