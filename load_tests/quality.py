"""Compares what formats of weights cost in quality and give in speed, beside llama.cpp, on a model's real weights.

The model is a GGUF file of any type, which counts as exact. llama.cpp converts it to the other types. Each file is run
by both, and by OpenVINO GenAI if it is there. Tidewheel also quantizes the exact model, as --quantization says. With a
text to calibrate on, `tidewheel quantize` and llama.cpp write further files, with the same importance of inputs, and
`tidewheel quantize` writes folders, too.
"""

from __future__ import annotations

import argparse
import json
import math
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from html import escape
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
from contest import RUNNERS, Contestant, RunError, environment_of, run_rounds, run_script
from numpy.typing import NDArray
from peer_runners.job import Job, Scenario
from peers import LLAMA_CPP, OPENVINO, TIDEWHEEL, interpreter, one_per_core, say
from safetensors.numpy import save_file

from tidewheel.engine.declaring.values import positive_count
from tidewheel.engine.devices.executor import Executor
from tidewheel.engine.errors import TidewheelError
from tidewheel.engine.models.spec import tensor_shapes
from tidewheel.engine.models.tensor_ref import TensorRef
from tidewheel.engine.options import EngineOptions
from tidewheel.engine.quantizing.layouts import FOLDER_METHODS
from tidewheel.engine.weights.gguf.source import GgufSource
from tidewheel.engine.weights.tensor import to_float32
from tidewheel.server.commands.bench import text
from tidewheel.server.commands.eval.distributions import distributions
from tidewheel.server.commands.eval.model import FLOAT32, Subject, find, find_reference, tokenizer_of
from tidewheel.server.commands.eval.scores import Scores, score
from tidewheel.server.commands.eval.windows import default_texts, split
from tidewheel.server.commands.quantize.work import KINDS, Kind, calibration_on, quantize, windows_of
from tidewheel.server.options.model import engine_options
from tidewheel.server.options.parser import argument_type

CALIBRATED = ("Q4_K_M", "IQ4_XS", "Q4_0", "Q3_K_M")
TYPES = ("Q8_0", "Q6_K", "Q5_K_M", "Q5_1", "Q5_0", "Q4_K_M", "Q4_K_S", "IQ4_XS", "IQ4_NL", "Q4_1", "Q4_0", "Q3_K_M")
QUANTIZATIONS = ("int8", "q8_0", "q6_k", "q5_k_m", "q4_k_m", "int4", "int4-fast")
PREFILL, DECODE = Scenario("prefill 1x512", 1, 512, 1), Scenario("decode 1, 128", 1, 128, 64)
NOTES = (
    "ppl is exp of the mean negative log-likelihood of a token",
    "from the model: mean KL(the model in float32 || this) in nats, over the whole vocabulary",
    "from the file: the same from the file's own weights in float32, which is what rounded activations and the KV "
    "cache (bfloat16; llama.cpp's: float16) cost",
    "prefill and decode are in tokens a second, medians of all rounds",
)
_MAKE_GGUF = RUNNERS / "make_gguf.py"
_LOGITS = {LLAMA_CPP.name: RUNNERS / "llama_cpp_logits.py", OPENVINO.name: RUNNERS / "openvino_logits.py"}
# It has no reader for Q5_0 and Q5_1, which K-quants have where inputs are no multiple of 256.
_OPENVINO_TYPES = ("Q8_0", "Q6_K", "Q4_1", "Q4_0")
_PEERS = {peer.name: peer for peer in (TIDEWHEEL, LLAMA_CPP, OPENVINO)}
_FLOAT_BYTES = 4


@dataclass(frozen=True)
class Quality:
    """Of one format in one program: perplexities, divergences, and tokens a second.

    `model_perplexity` is that of the model in float32. `from_file` is None where no file has these weights.
    """

    program: str
    weights: str
    bits_per_weight: float
    perplexity: float
    model_perplexity: float
    from_model: float
    from_model_p99: float
    same_top: float
    from_file: float | None
    prefill: float | None = None
    decode: float | None = None


@dataclass(frozen=True)
class Comparison:
    """All results. The JSON is its `asdict`, so these fields are its schema."""

    model: str
    tokens: int
    formats: list[Quality]
    notes: list[str]


@dataclass(frozen=True)
class Measured:
    """What a program gave: scores from the model, and from the file's own weights where there is a file."""

    from_model: Scores
    from_file: Scores | None


class Texts:
    """A model's texts in windows, which programs are scored on against the model itself in float32."""

    def __init__(self, base: Path, texts: Sequence[Path], context: int, max_tokens: int) -> None:
        """`max_tokens` of each text count. Raises TidewheelError for a file or a text that cannot be used."""
        self._context = context
        self._model = find_reference(FLOAT32, find(engine_options({"model": str(base)}), base.name))
        self._vocab_size = self._model.opened.spec.vocab_size
        tokenizer = tokenizer_of(self._model)
        cuts = [split(path, tokenizer, context, self._vocab_size) for path in texts]
        num_windows = max(max_tokens // context, 1)
        self._windows = [(window, cut.first_scored) for cut in cuts for window in cut.windows[:num_windows]]

    @property
    def num_scored(self) -> int:
        """Tokens that are scored."""
        return sum(len(window) - first for window, first in self._windows)

    def measure(
        self, options: EngineOptions, file: Path | None = None, peers: Mapping[str, Path] = MappingProxyType({})
    ) -> tuple[float, list[Measured]]:
        """Bits a weight, and what Tidewheel gives, and on a file each of the peers, in their interpreter's environment.

        Raises TidewheelError and RunError.
        """
        served = find(options, options.model)
        references = [self._model, *([] if file is None else [find_reference(FLOAT32, served)])]
        scores: list[list[list[Scores]]] = []  # [windows, programs, references]
        with ExitStack() as stack:
            executors = [self._loaded(stack, subject) for subject in (served, *references)]
            asked = {} if file is None else {name: self._logits(name, python, file) for name, python in peers.items()}
            for window, first in self._windows:
                ours, *truths = (self._rows(executor, window, first) for executor in executors)
                programs = [ours, *(next(logits)[first - 1 : -1] for logits in asked.values())]
                scores.append([[score(window[first:], rows, truth) for truth in truths] for rows in programs])
        joined = [
            [Scores.joined(parts) for parts in zip(*program, strict=True)] for program in zip(*scores, strict=True)
        ]
        parameters = sum(math.prod(shape) for shape in tensor_shapes(served.opened.spec).values())
        found = [Measured(of[0], of[1] if len(of) > 1 else None) for of in joined]
        return served.weight_bytes * 8 / parameters, found

    def _logits(self, peer: str, python: Path, file: Path) -> Iterator[NDArray[np.float32]]:
        """A peer's for each window, `[tokens, vocab]`."""
        threads = len(one_per_core())
        command = [str(python), str(_LOGITS[peer]), str(file), str(threads)]
        with tempfile.TemporaryFile("w+") as asked, tempfile.TemporaryFile("w+", errors="replace") as log:
            json.dump([window.tolist() for window, _ in self._windows], asked)
            asked.seek(0)
            environment = environment_of(_PEERS[peer], python, threads)
            with subprocess.Popen(command, stdin=asked, stdout=subprocess.PIPE, stderr=log, env=environment) as process:
                assert process.stdout is not None
                for window, _ in self._windows:
                    wanted = len(window) * self._vocab_size * _FLOAT_BYTES
                    if len(data := process.stdout.read(wanted)) < wanted:
                        log.seek(0)
                        last = (log.read().strip().splitlines() or ["it wrote nothing"])[-1]
                        raise RunError(f"{peer} gave too few logits of {file}: {last}")
                    yield np.frombuffer(data, np.float32).reshape(len(window), self._vocab_size)

    def _loaded(self, stack: ExitStack, subject: Subject) -> Executor:
        executor = subject.load(self._context)
        stack.callback(executor.close)
        return executor

    def _rows(self, executor: Executor, window: NDArray[np.int32], first: int) -> NDArray[np.float32]:
        return np.concatenate([*distributions(executor, window, first, self._vocab_size)])


def main(arguments: Sequence[str] | None = None) -> int:
    """Run from the command line; 1 if something could not be measured."""
    args = parse_args(arguments)
    try:
        with tempfile.TemporaryDirectory() as temporary:
            comparison = compare(args, args.keep or Path(temporary))
    except (TidewheelError, RunError) as error:
        sys.stderr.write(f"quality: {error}\n")
        return 1
    sys.stdout.write(report(comparison))
    if args.json:
        args.json.write_text(json.dumps(asdict(comparison), indent=2) + "\n")
    if args.svg:
        args.svg.write_text(plot(comparison.formats))
    return 0


def compare(args: argparse.Namespace, keep: Path) -> Comparison:
    """Measure everything that the command line asks for. Raises TidewheelError and RunError."""
    python, openvino = interpreter(args.llama_cpp_python), interpreter(args.openvino_genai)
    assert python is not None
    pythons = {LLAMA_CPP.name: python, **({} if openvino is None else {OPENVINO.name: openvino})}
    keep.mkdir(parents=True, exist_ok=True)
    base = made(args.model, keep / "F32.gguf", python, args.timeout)
    files = {name: made(base, keep / f"{name}.gguf", python, args.timeout) for name in args.types}
    written: dict[str, Path] = {}
    if args.calibrate:
        files |= calibrated_files(args, base, keep, python)
        written = folders(args, base, keep)
    texts = Texts(base, args.text or default_texts(), args.context, args.max_tokens)
    formats: list[Quality] = []
    for name, file in files.items():
        say(f"scoring {name}")
        peers = {peer: own for peer, own in pythons.items() if peer != OPENVINO.name or name in _OPENVINO_TYPES}
        bits, measured = texts.measure(engine_options({"model": str(file)}), file, peers)
        formats += [quality(of, name, bits, one) for of, one in zip((TIDEWHEEL.name, *peers), measured, strict=True)]
    for name, folder in written.items():
        say(f"scoring {name}")
        bits, (one,) = texts.measure(engine_options({"model": str(folder), "tokenizer": str(base)}))
        formats.append(quality(TIDEWHEEL.name, name, bits, one))
    for name in args.quantizations:
        say(f"scoring {name}")
        bits, (one,) = texts.measure(engine_options({"model": str(base), "quantization": name}))
        formats.append(quality(TIDEWHEEL.name, name, bits, one))
    if args.rounds:
        formats = with_speeds(formats, args, base, files | written, {TIDEWHEEL.name: Path(sys.executable), **pythons})
    return Comparison(str(args.model), texts.num_scored, formats, [*NOTES])


def calibrated_files(args: argparse.Namespace, base: Path, keep: Path, python: Path) -> dict[str, Path]:
    """GGUF files of `args.calibrated`, each by Tidewheel and by llama.cpp. Raises TidewheelError and RunError."""
    importances = keep / "importances.npz"
    if not importances.exists():
        write_importances(importances, base, args.calibrate, args.context)
    files = {}
    for name in args.calibrated:
        files[f"{name} calibrated"] = keep / f"{name}-calibrated.gguf"
        if not files[f"{name} calibrated"].exists():
            say(f"writing {name} with tidewheel quantize")
            options = engine_options({"model": str(base)})
            quantize(options, files[f"{name} calibrated"], kind_of(name.lower()), args.calibrate, args.context)
        (keep / "imatrix").mkdir(exist_ok=True)
        files[f"{name} imatrix"] = made(base, keep / "imatrix" / f"{name}.gguf", python, args.timeout, importances)
    return files


def write_importances(path: Path, base: Path, calibrate: Sequence[Path], context: int) -> None:
    """The mean squares of the inputs of each tensor of `base` on texts, as llama.cpp takes them."""
    subject = find(engine_options({"model": str(base)}), base.name)
    source = subject.opened.source
    assert isinstance(source, GgufSource)
    weights = source.weights(subject.opened.description)
    uses = {tensor: [use.name for use in weights.uses(tensor) if use.whole_rows] for tensor in source.file.tensors}
    with calibration_on(subject, windows_of(subject, calibrate, context)) as calibration:
        found = calibration.gather([name for names in uses.values() for name in names])
    # The experts of a stack one after the other; else the weights of a tensor have the same inputs.
    seen = {tensor: [found[name].squares for name in names if name in found] for tensor, names in uses.items()}
    stacks = {tensor for tensor, names in uses.items() if ".experts." in "".join(names)}
    arrays: dict[str, Any] = {t: np.concatenate(of) if t in stacks else of[0] for t, of in seen.items() if of}
    np.savez(path, **arrays)


def folders(args: argparse.Namespace, base: Path, keep: Path) -> dict[str, Path]:
    """Folders of `args.methods` by Tidewheel, calibrated. Raises TidewheelError."""
    model, found = keep / "checkpoint", {}
    if args.methods and not model.exists():
        write_checkpoint(model, base)
    for name in args.methods:
        found[f"{name} folder"] = target = keep / name
        if not (target / "config.json").exists():
            say(f"writing {name} with tidewheel quantize")
            options = engine_options({"model": str(model), "tokenizer": str(base)})
            quantize(options, target, kind_of(name), args.calibrate, args.context)
    return found


def write_checkpoint(folder: Path, base: Path) -> None:
    """The model of a GGUF file as a Hugging Face folder in float32, without a tokenizer.

    Raises RunError for a family whose tensors lie otherwise in folders than one by one.
    """
    opened = find(engine_options({"model": str(base)}), base.name).opened
    say(f"writing {folder}")
    tensors = {}
    for name, ref in opened.description.tensors.items():
        if ref != TensorRef(ref.name):
            raise RunError(f"{base}: a folder of a {opened.spec.family} model cannot be written; leave --methods empty")
        tensors[ref.name] = to_float32(opened.weights[name])
    folder.mkdir()
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    (folder / "config.json").write_text(json.dumps(dict(opened.source.config)))


def kind_of(name: str) -> Kind:
    """A --type of tidewheel quantize. Raises RunError if there is none of that name."""
    for kind in KINDS:
        if kind == name:
            return kind
    raise RunError(f"tidewheel quantize has no type {name}; it has {', '.join(KINDS)}")


def made(source: Path, target: Path, python: Path, timeout_s: float, importances: Path | None = None) -> Path:
    """The file of the type in its name, which llama.cpp makes of `source` if it is not there. Raises RunError."""
    if not target.exists():
        say(f"writing {target}")
        given = [source, target] if importances is None else [source, target, importances]
        command = [str(python), str(_MAKE_GGUF), *map(str, given)]
        run_script(command, environment_of(LLAMA_CPP, python, len(one_per_core())), timeout_s)
    return target


def quality(program: str, weights: str, bits: float, measured: Measured) -> Quality:
    """The figures of what was measured."""
    model = measured.from_model.divergence
    file = None if measured.from_file is None else measured.from_file.divergence
    assert model is not None
    return Quality(
        program=program,
        weights=weights,
        bits_per_weight=bits,
        perplexity=measured.from_model.perplexity,
        model_perplexity=model.reference_perplexity,
        from_model=model.mean_kl,
        from_model_p99=model.p99_kl,
        same_top=model.same_top,
        from_file=None if file is None else file.mean_kl,
    )


def with_speeds(
    formats: Sequence[Quality],
    args: argparse.Namespace,
    base: Path,
    files: Mapping[str, Path],
    pythons: Mapping[str, Path],
) -> list[Quality]:
    """The same with prefill and decode, which the programs are measured in by turns. Raises RunError."""
    contestants = [Contestant(_PEERS[of.program], of.weights, pythons[of.program]) for of in formats]
    vocab_size = find(engine_options({"model": str(base)}), base.name).opened.spec.vocab_size

    def job_for(contestant: Contestant) -> Job:
        file = files.get(contestant.weights)
        return Job(
            model=str(base),
            vocab_size=vocab_size,
            weights=contestant.weights,
            options=f"--tokenizer {shlex.quote(str(base))}" if file is not None and file.is_dir() else "",
            file=None if file is None else str(file),
            cache_gib=1,
            cpus=one_per_core(),
            seed=0,
            scenarios=[PREFILL, DECODE],
        )

    run_rounds(contestants, job_for, args.rounds, args.timeout, say)
    found = []
    for of, contestant in zip(formats, contestants, strict=True):
        if contestant.failures:
            raise RunError(f"{contestant.name}: {contestant.failures[0]}")
        prefill, decode = (contestant.spread(scenario.name) for scenario in (PREFILL, DECODE))
        assert prefill is not None
        assert decode is not None
        found.append(replace(of, prefill=prefill.median, decode=decode.median))
    return found


def report(comparison: Comparison) -> str:
    """The comparison as text for a terminal."""
    heading = ["", "bits", "ppl", "from the model", "99 %", "same top", "from the file", "prefill", "decode"]
    exact = comparison.formats[0].model_perplexity if comparison.formats else math.nan
    head = f"{comparison.model}: {comparison.tokens} tokens, perplexity {exact:.2f} in float32\n\n"
    table = text.table([heading, *map(_row, comparison.formats)])
    return f"{head}{table}\n" + "".join(f"note: {note}\n" for note in comparison.notes)


def _row(of: Quality) -> list[str]:
    return [
        f"{of.program} {of.weights}",
        f"{of.bits_per_weight:.2f}",
        f"{of.perplexity:.2f}",
        f"{of.from_model:.4f}",
        f"{of.from_model_p99:.3f}",
        f"{100 * of.same_top:.1f} %",
        "-" if of.from_file is None else f"{of.from_file:.4f}",
        *("-" if figure is None else f"{figure:.0f}" for figure in (of.prefill, of.decode)),
    ]


_WIDTH, _HEIGHT, _MARGIN = 800, 480, 60
_COLORS = {TIDEWHEEL.name: "#0b7285", LLAMA_CPP.name: "#c2571a", OPENVINO.name: "#7048a8"}


def plot(formats: Sequence[Quality]) -> str:
    """The divergence from the model over the speed of a decode, as SVG: further down and to the right is better.

    Formats whose speed was not measured are left out.
    """
    points = [(of, of.decode, max(of.from_model, 1e-9)) for of in formats if of.decode is not None]
    fastest = max((decode for _, decode, _ in points), default=1.0)
    logs = [math.log10(kl) for _, _, kl in points] or [0.0]
    low, high = math.floor(min(logs)), max(math.ceil(max(logs)), math.floor(min(logs)) + 1)
    inner_width, inner_height = _WIDTH - 2 * _MARGIN, _HEIGHT - 2 * _MARGIN

    def y_of(log: float) -> float:
        return _MARGIN + (high - log) / (high - low) * inner_height

    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {_HEIGHT}" font-family="sans-serif" '
        f'font-size="12"><rect width="{_WIDTH}" height="{_HEIGHT}" fill="white"/>',
        f'<text x="{_WIDTH / 2}" y="{_HEIGHT - 15}" text-anchor="middle">decode, tokens a second</text>',
        f'<text x="{_MARGIN}" y="30">mean KL from the model in float32, nats</text>',
    ]
    for log in range(low, high + 1):
        y = y_of(log)
        parts.append(
            f'<path d="M{_MARGIN} {y:.1f}H{_WIDTH - _MARGIN}" stroke="#ddd"/>'
            f'<text x="{_MARGIN - 8}" y="{y + 4:.1f}" text-anchor="end">{10.0**log:g}</text>'
        )
    for share in (0.25, 0.5, 0.75, 1.0):
        x = _MARGIN + share * inner_width
        parts.append(
            f'<text x="{x:.1f}" y="{_HEIGHT - _MARGIN + 18}" text-anchor="middle">{share * fastest:.0f}</text>'
        )
    for of, decode, kl in points:
        x, y, color = _MARGIN + decode / fastest * inner_width, y_of(math.log10(kl)), _COLORS[of.program]
        parts.append(
            f'<circle cx="{x:.1f}" cy="{y:.1f}" r="4" fill="{color}"/>'
            f'<text x="{x - 7:.1f}" y="{y + 4:.1f}" text-anchor="end" fill="{color}">{escape(of.weights)}</text>'
        )
    for i, (name, color) in enumerate(_COLORS.items()):
        parts.append(f'<text x="{_WIDTH - _MARGIN}" y="{20 + 16 * i}" text-anchor="end" fill="{color}">{name}</text>')
    return "\n".join([*parts, "</svg>\n"])


def parse_args(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(
        description="Measure formats of weights on a real model, beside llama.cpp: quality and speed.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    add = parser.add_argument
    add("model", type=Path, metavar="MODEL.gguf", help="the model, in any type of GGUF")
    add("--llama-cpp-python", type=Path, required=True, metavar="VENV",
        help="virtual environment that has llama-cpp-python")  # fmt: skip
    add("--openvino-genai", type=Path, metavar="VENV",
        help="one that has openvino-genai, which runs the files that it has readers for")  # fmt: skip
    add("--types", type=_names, default=TYPES, metavar="NAME,...", help="llama.cpp's file types to make and to compare")
    add("--quantizations", type=_names, default=QUANTIZATIONS, metavar="NAME,...", help="values of --quantization")
    add("--calibrate", type=Path, nargs="+", default=(), metavar="FILE",
        help="texts to calibrate on, others than those to score")  # fmt: skip
    add("--calibrated", type=_names, default=CALIBRATED, metavar="NAME,...",
        help="types of GGUF files that are written with the text")  # fmt: skip
    add("--methods", type=_names, default=FOLDER_METHODS, metavar="NAME,...", help="the same of folders")
    add("--text", type=Path, nargs="+", metavar="FILE", help="texts to score; those of tidewheel eval if not given")
    add("--context", type=argument_type(positive_count), default=512, metavar="N", help="tokens of a window")
    add("--max-tokens", type=argument_type(positive_count), default=1024, metavar="N", help="of each text")
    add("--rounds", type=int, default=1, metavar="N", help="of measuring speed; 0 leaves speed out")
    add("--keep", type=Path, metavar="FOLDER", help="keeps the files that are made for the next time")
    add("--timeout", type=float, default=1800.0, metavar="SECONDS", help="for one turn of one program")
    add("--json", type=Path, metavar="FILE", help="file for the figures")
    add("--svg", type=Path, metavar="FILE", help="file for a plot of divergence over speed")
    return parser.parse_args(arguments)


def _names(listed: str) -> tuple[str, ...]:
    return tuple(name for name in listed.split(",") if name)


if __name__ == "__main__":
    raise SystemExit(main())
