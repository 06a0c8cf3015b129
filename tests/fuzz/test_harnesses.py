"""Every parser, on inputs that are nearly right: by hypothesis, which knows JSON, and by atheris, which knows the code.

See fuzz.py for how to fuzz longer.
"""

from __future__ import annotations

import importlib.util
import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from fuzz.harnesses import HARNESSES
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

# Of each kind, for each harness; `make fuzz` has more.
EXAMPLES = int(os.environ.get("TIDEWHEEL_FUZZ_EXAMPLES", "20"))
RUNS = 500
PARSER_RUNS = 100  # each reads its input a few dozen times, or loads what takes a while
SLOW = ("tools-", "encoder-", "sentencepiece", "connection", "quantized", "gguf-described")
QUICK = settings(max_examples=EXAMPLES, deadline=None, suppress_health_check=list(HealthCheck))
JSON_HARNESSES = [name for name, harness in HARNESSES.items() if harness.seeds[0].startswith((b'{"', b'[{"'))]
# What takes long, as each has atheris look for new code; so similar ones share one harness.
UNCOVERED = ("detokenize", "score", "json-counts", "image")  # the last two are numpy's and Pillow's work
COVERED = [name for name in HARNESSES if not name.startswith("reasoning-") and name not in UNCOVERED]

values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8)
    | st.sampled_from([0, -1, 1, 2**31, 2**63, 2**64, 10**30, 1e308, "", "\0", "a" * 300, [], {}]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=5,
)  # fmt: skip


def places(value: Any) -> list[list[Any]]:
    """The paths of all values within a JSON value."""
    inside = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return [[], *([key, *path] for key, item in inside for path in places(item))]


def replaced(value: Any, path: list[Any], new: Any) -> Any:
    """A copy of a JSON value with another value, or none at all for `...`, at a path."""
    if not path:
        return None if new is ... else new
    key, rest = path[0], path[1:]
    copy = dict(value) if isinstance(value, dict) else list(value)
    if not rest and new is ...:
        del copy[key]
    else:
        copy[key] = replaced(copy[key], rest, new)
    return copy


@st.composite
def nearly_json(draw: st.DrawFn, seeds: list[bytes]) -> bytes:
    value = json.loads(draw(st.sampled_from(seeds)))
    known = [json.loads(seed) for seed in seeds]
    for _ in range(draw(st.integers(1, 3))):
        path = draw(st.sampled_from(places(value)))
        moved = st.sampled_from(known).flatmap(lambda one: st.sampled_from(places(one)).map(lambda at: dug(one, at)))
        value = replaced(value, path, draw(values | st.just(...) | moved))
    return json.dumps(value).encode("utf-8", "replace")


def dug(value: Any, path: list[Any]) -> Any:
    for key in path:
        value = value[key]
    return value


@st.composite
def nearly_bytes(draw: st.DrawFn, seeds: list[bytes]) -> bytes:
    data = bytearray(draw(st.sampled_from(seeds)))
    for _ in range(draw(st.integers(1, 4))):
        at = draw(st.integers(0, len(data)))
        gone = draw(st.integers(0, 12))
        data[at : at + gone] = draw(st.binary(max_size=12) | st.sampled_from([seed[at : at + 20] for seed in seeds]))
    return bytes(data)


@pytest.mark.parametrize("name", HARNESSES)
def test_seeds_get_through(name: str) -> None:
    for seed in HARNESSES[name].seeds:
        HARNESSES[name].run(seed)


@pytest.mark.parametrize("name", HARNESSES)
def test_garbled_bytes(name: str) -> None:
    @QUICK
    @given(nearly_bytes(HARNESSES[name].seeds))
    def check(data: bytes) -> None:
        HARNESSES[name].run(data)

    check()


@pytest.mark.parametrize("name", JSON_HARNESSES)
def test_other_json(name: str) -> None:
    @QUICK
    @given(nearly_json(HARNESSES[name].seeds))
    def check(data: bytes) -> None:
        HARNESSES[name].run(data)

    check()


@pytest.fixture(scope="module")
def fuzzing() -> Iterator[subprocess.Popen[str]]:
    """A process that fuzzes with atheris: see `fuzz.serve`."""
    tests = str(Path(__file__).parents[1])
    with subprocess.Popen(
        [sys.executable, "-m", "fuzz.fuzz", "-"],
        env={**os.environ, "PYTHONPATH": os.pathsep.join([tests, os.environ.get("PYTHONPATH", "")])},
        cwd=tests,  # above it, `engine` is another package
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        yield process
        process.kill()  # also when it is stuck


@pytest.mark.sweep
@pytest.mark.skipif(
    importlib.util.find_spec("atheris") is None, reason="atheris has no wheel for this Python or machine"
)
@pytest.mark.parametrize("name", COVERED)
def test_with_coverage(name: str, fuzzing: subprocess.Popen[str], tmp_path: Path) -> None:
    runs = PARSER_RUNS if name.startswith(SLOW) else RUNS
    limits = ["-max_len=4096", "-rss_limit_mb=1500", "-timeout=20"]
    arguments = [f"-runs={runs}", "-seed=1", *limits, f"-artifact_prefix={tmp_path}/"]
    assert fuzzing.stdin
    assert fuzzing.stdout
    print(json.dumps([name, str(tmp_path), arguments]), file=fuzzing.stdin, flush=True)
    status = fuzzing.stdout.readline()
    output = (tmp_path / "output").read_text(errors="replace")
    found = [path.read_bytes() for path in tmp_path.glob("*-*")]
    assert status == "0\n", f"{found}\n{output[-3000:]}"
    done = re.search(r"^Done (\d+) runs", output, re.MULTILINE)
    assert done, output[-3000:]
    assert int(done[1]) >= runs  # libFuzzer may end a run later, as it tries some inputs twice
    assert "NEW" in output, "no input reached new code"
