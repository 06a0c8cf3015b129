"""The command line of `tidewheel eval`."""

from __future__ import annotations

import json
import logging
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from tidewheel.engine.declaring.mistakes import Mistakes
from tidewheel.engine.declaring.values import positive_count
from tidewheel.engine.errors import TidewheelError
from tidewheel.engine.files.wording import reason

from ...options.model import DEMO_MODEL_NAME, engine_options, model_parser, read_model_options
from ...options.parser import OptionParser, argument_type
from ...options.serve import refuse_unknown_variables
from .measure import measure
from .model import FLOAT32
from .report import METHOD, render
from .windows import DEFAULT_CONTEXT, default_texts

_STDOUT = "-"


def run(arguments: Sequence[str]) -> int:
    """The `eval` command. Raises TidewheelError if a model or a text cannot be used."""
    parser = _parser()
    mistakes = Mistakes()
    parsed = parser.read(arguments, mistakes)
    refuse_unknown_variables(mistakes)
    given = read_model_options(parsed, mistakes)
    parser.refuse(mistakes)
    target = parsed["json"]
    if target not in (None, _STDOUT) and not Path(target).parent.is_dir():
        raise TidewheelError(f"--json: there is no folder {Path(target).parent}")
    logging.basicConfig(level=logging.WARNING, format="%(levelname)s %(name)s: %(message)s")
    report = measure(
        engine_options(given),
        given.get("model") or DEMO_MODEL_NAME,
        _texts(parsed),
        parsed["context"],
        parsed["reference"],
        _say,
    )
    print(render(report), end="", file=sys.stderr if target == _STDOUT else sys.stdout)
    if target is not None:
        _write(target, json.dumps(asdict(report), indent=2) + "\n")
    return 0


def _parser() -> OptionParser:
    parser = model_parser(
        "tidewheel eval",
        "Measure a model's quality: its perplexity on a text, and its divergence from a reference.\n\n" + METHOD,
    )
    group = parser.add_argument_group("evaluation")
    add = group.add_argument
    add("--text", nargs="+", action="extend", metavar="FILE",
        help="texts in UTF-8; each is measured separately [18 KB of prose, code and languages]")  # fmt: skip
    add("--reference", metavar=f"{FLOAT32}|MODEL",
        help="also measure the divergence from this reference: float32 is the same model with dequantized weights "
        "and KV cache in float32; MODEL is another model with the same vocabulary, also in float32")  # fmt: skip
    add("--context", type=argument_type(positive_count), metavar="TOKENS",
        help=f"the length of a window [{DEFAULT_CONTEXT}, or the model's context if that is shorter]")  # fmt: skip
    add(
        "--json",
        metavar="FILE",
        help="also write JSON to FILE; - writes it to standard output, and the table to standard error",
    )
    return parser


def _texts(parsed: Mapping[str, Any]) -> Sequence[Path]:
    return default_texts() if parsed["text"] is None else [Path(name) for name in parsed["text"]]


def _say(what: str) -> None:
    print(f"{what} ...", file=sys.stderr, flush=True)


def _write(target: str, text: str) -> None:
    if target == _STDOUT:
        sys.stdout.write(text)
        return
    try:
        Path(target).write_text(text)
    except OSError as error:
        raise TidewheelError(f"--json {target} cannot be written: {reason(error)}") from error
