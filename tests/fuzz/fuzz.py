"""Fuzz one harness with atheris, which looks for inputs that reach new code.

    pip install atheris
    cd tests && python -m fuzz.fuzz HARNESS [-runs=100000] [-max_total_time=600] [CORPUS_FOLDER]

Harnesses are those of harnesses.py. What follows the name goes to libFuzzer; a corpus folder keeps what was found for
the next time. An input that makes a harness raise is written to ./crash-*; give that file instead of a folder to try it
again. `pytest tests/fuzz` runs every harness for a fixed number of inputs, from a fixed seed.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

import atheris

with atheris.instrument_imports(include=["tidewheel"]):
    from fuzz.harnesses import HARNESSES


def main() -> None:
    name, *arguments = sys.argv[1:]
    harness = HARNESSES[name]
    with tempfile.TemporaryDirectory() as seeds:
        for i, seed in enumerate(harness.seeds):
            (Path(seeds) / str(i)).write_bytes(seed)
        atheris.Setup([sys.argv[0], *arguments, seeds], lambda data: harness.run(bytes(data)))
        atheris.Fuzz()


if __name__ == "__main__":
    main()
