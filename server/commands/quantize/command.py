"""The command line of `tidewheel quantize`."""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from tidewheel.engine.declaring.option import options_of
from tidewheel.engine.declaring.values import positive_count
from tidewheel.engine.options import EngineOptions
from tidewheel.engine.quantizing.layouts import FOLDER_METHODS
from tidewheel.engine.weights.block_mix import BLOCK_MIXES

from ...options.parser import OptionParser, argument_type, build, read_asked
from ..eval.windows import DEFAULT_CONTEXT
from .report import render
from .work import KINDS, quantize

_OPTIONS = ("revision", "download_dir", "load_format", "tokenizer", "tokenizer_revision", "tokenizer_mode", "dtype")


def run(arguments: Sequence[str]) -> int:
    """The `quantize` command. Raises TidewheelError if a model or a text cannot be used, or OUT cannot be written."""
    parser = OptionParser(
        prog="tidewheel quantize",
        description="Write a model anew in fewer bits. A GGUF file becomes a GGUF file, which llama.cpp reads too, and "
        "a Hugging Face folder one that vLLM and transformers read too.",
        epilog="The same command completes a run that was interrupted. What is written is read back and compared.",
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("model", metavar="MODEL", help="a .gguf file, a folder in floats, or a hub id, such as owner/name:F16")
    add("out", metavar="OUT", help="the file or folder to write; it must not exist")
    add("--type", required=True, choices=KINDS, metavar="TYPE",
        help=f"for a file one of {', '.join(BLOCK_MIXES)}; for a folder one of {', '.join(FOLDER_METHODS)}, the last "
        "of which is in the format of compressed-tensors")  # fmt: skip
    add("--calibrate", nargs="+", action="extend", metavar="FILE",
        help="texts in UTF-8 that the model computes first: weights are then chosen for the least error of outputs on "
        "them, and not of the weights themselves")  # fmt: skip
    add("--context", type=argument_type(positive_count), metavar="TOKENS",
        help=f"the length of the windows that the texts are cut into [{DEFAULT_CONTEXT}]")  # fmt: skip
    add("--json", action="store_true", help="print JSON")
    options = [option for option in options_of(EngineOptions) if option.field in _OPTIONS]
    parsed, asked = read_asked(parser, "reading the model", options, arguments, _engine_options)
    logging.basicConfig(level=logging.WARNING, format="%(levelname)s %(name)s: %(message)s")
    texts = [Path(name) for name in parsed["calibrate"] or ()]
    context = parsed["context"] or DEFAULT_CONTEXT
    report = quantize(asked, Path(parsed["out"]), parsed["type"], texts, context)
    print(json.dumps(asdict(report), indent=2) if parsed["json"] else render(report, parsed["out"]), end="")
    return 0


def _engine_options(model: str, given: Mapping[str, Any]) -> EngineOptions:
    """Raises OptionError."""
    return build(EngineOptions, given, model=model, device="cpu")
