"""The command line of `tidewheel bench`."""

from __future__ import annotations

import json
import logging
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from tidewheel.engine.declaring.mistakes import Mistakes
from tidewheel.engine.declaring.values import positive_count
from tidewheel.engine.errors import TidewheelError

from ...options.model import model_parser, read_model_options
from ...options.parser import OptionParser, argument_type
from ...options.serve import refuse_unknown_variables
from .kernels import measure_kernels, render_kernels
from .measure import measure
from .report import render
from .workload import (
    BATCH_SIZES,
    KERNELS,
    LONG_BATCH_SIZES,
    LONG_CONTEXTS,
    QUICK,
    SHORT_CONTEXT,
    Workload,
    decodes_of,
    parse_counts,
    parse_prefills,
)

_SKIPPABLE = ("engine", "startup")
_STDOUT = "-"
_SUBCOMMANDS_OF_VLLM = ("latency", "mm-processor", "serve", "startup", "sweep", "throughput")


def run(arguments: Sequence[str]) -> int:
    """The `bench` command. Raises TidewheelError if the model cannot be loaded or the workload does not fit."""
    parser = _parser()
    if arguments and arguments[0] in _SUBCOMMANDS_OF_VLLM and not Path(arguments[0]).exists():
        parser.error(
            f"there is no bench {arguments[0]}: tidewheel bench MODEL measures a model without a server, and the "
            "programs of load_tests/ one that is served (load_tests/README.md)"
        )
    mistakes = Mistakes()
    parsed = parser.read(arguments, mistakes)
    refuse_unknown_variables(mistakes)
    given = read_model_options(parsed, mistakes)
    parser.refuse(mistakes)
    workload = _workload(parser, parsed)
    target, skip = parsed["json"], frozenset(parsed["skip"])
    if target not in (None, _STDOUT) and not Path(target).parent.is_dir():
        raise TidewheelError(f"--json: there is no folder {Path(target).parent}")
    logging.basicConfig(level=logging.WARNING, format="%(levelname)s %(name)s: %(message)s")
    if parsed["kernels"]:
        kernels = measure_kernels(given, workload, _say)
        written, data = render_kernels(kernels), asdict(kernels)
    else:
        report = measure(given, workload, skip, _say)
        written, data = render(report), asdict(report)
    print(written, end="", file=sys.stderr if target == _STDOUT else sys.stdout)
    if target is not None:
        _write(target, json.dumps(data, indent=2) + "\n")
    return 0


def _parser() -> OptionParser:
    parser = model_parser("tidewheel bench", "Measure a model's speed and memory beside this machine's own ceilings.")
    group = parser.add_argument_group("benchmark")
    add = group.add_argument
    default = Workload()
    add("--prefill", type=argument_type(parse_prefills), metavar="PROMPTSxTOKENS,...",
        help=f"prompts to compute [{_listed(default.prefills)}]")  # fmt: skip
    add("--batch-sizes", type=argument_type(parse_counts), metavar="N,...",
        help=f"sequences to decode together [{_listed(BATCH_SIZES)}]")  # fmt: skip
    add("--contexts", type=argument_type(parse_counts), metavar="TOKENS,...",
        help=f"context length before the decoded tokens [{SHORT_CONTEXT}; and {_listed(LONG_CONTEXTS)} where they "
        f"fit, with batches of {_listed(LONG_BATCH_SIZES)} and without the engine]")  # fmt: skip
    add("--decode-tokens", type=argument_type(positive_count), metavar="TOKENS",
        help=f"number of tokens to decode, at least 2 [{default.decode_tokens}]")  # fmt: skip
    add("--repeats", type=argument_type(positive_count), metavar="N", help=f"of everything [{default.repeats}]")
    add("--quick", action="store_true", help="a quick look instead of a measurement: fewer and shorter runs")
    add("--profile", action="store_true", help="also measure the time of each kernel")
    add("--kernels", action="store_true",
        help="only kernels, on all threads and on one; without MODEL, those of a 1B model in each format")  # fmt: skip
    add("--skip", nargs="+", choices=_SKIPPABLE, default=[], help="leave out this measurement")
    add(
        "--json",
        metavar="FILE",
        help="also write JSON to FILE; - writes it to standard output, and the table to standard error",
    )
    return parser


def _workload(parser: OptionParser, parsed: Mapping[str, Any]) -> Workload:
    base = QUICK if parsed["quick"] else KERNELS if parsed["kernels"] else Workload()
    batch_sizes, contexts = parsed["batch_sizes"], parsed["contexts"]
    values: dict[str, Any] = {"prefills": parsed["prefill"], "profile": parsed["profile"]}
    values |= {name: parsed[name] for name in ("decode_tokens", "repeats")}
    if batch_sizes is not None or contexts is not None:
        sizes = batch_sizes or sorted({decode.batch_size for decode in base.decodes})
        values["decodes"] = decodes_of(sizes, contexts or sorted({decode.context for decode in base.decodes}))
        if contexts is not None:
            values["long_decodes"] = ()
        elif base.long_decodes:
            values["long_decodes"] = decodes_of([size for size in sizes if size in LONG_BATCH_SIZES], LONG_CONTEXTS)
    workload = replace(base, **{field: value for field, value in values.items() if value is not None})
    if workload.decode_tokens < 2:
        parser.error("--decode-tokens must be at least 2, because the time between tokens is measured")
    return workload


def _listed(items: Iterable[object]) -> str:
    return ",".join(map(str, items))


def _say(what: str) -> None:
    print(f"{what} ...", file=sys.stderr, flush=True)


def _write(target: str, text: str) -> None:
    if target == _STDOUT:
        sys.stdout.write(text)
        return
    try:
        Path(target).write_text(text)
    except OSError as error:
        raise TidewheelError(f"--json {target} cannot be written: {error.strerror}") from error
