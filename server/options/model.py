"""MODEL and the engine's options, as the commands that run a model take them; no model is the embedded one."""

from __future__ import annotations

import argparse
import os
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from tidewheel.engine.adapters.options import LoraOptions
from tidewheel.engine.declaring.mistakes import Mistakes, made
from tidewheel.engine.declaring.option import options_of
from tidewheel.engine.devices import DEVICE_OPTIONS
from tidewheel.engine.media.options import MediaOptions
from tidewheel.engine.options import EngineOptions
from tidewheel.engine.pipeline_options import PipelineOptions
from tidewheel.engine.speculation.options import SpeculativeOptions
from tidewheel.engine.weights.quantization import Method

from .parser import OptionParser, add_option, build, in_order_of_help, read_given

DEMO_MODEL = Path(__file__).parents[1] / "demo"
DEMO_MODEL_NAME = "tidewheel-demo"
DEMO_QUANTIZATION: Method = "int8-channel"  # as many of its held-out prompts are answered right as in bfloat16, sooner

MODEL_OPTIONS = in_order_of_help(
    (EngineOptions, LoraOptions, SpeculativeOptions, PipelineOptions, MediaOptions, *DEVICE_OPTIONS),
    "model cache_dir kv_cache_dtype threads_bind pipeline_parallel_size bucketing enable_lora speculative_config "
    "limit_mm_per_prompt seed".split(),
)
"""The options of the engine, of adapters, drafts, pipelines, images and videos, and of devices."""

_REMARKS = {
    "model": " [the embedded demo model]",
    "quantization": f" [no; {DEMO_QUANTIZATION} for the embedded demo model, unless --dtype is given]",
}
_SEVERAL = "; several times for several models, each as NAME=MODEL" + _REMARKS["model"]


def model_parser(
    prog: str, description: str, usage: str = "[MODEL] [options]", *, takes_several: bool = False
) -> OptionParser:
    """A parser for a command that runs a model: it knows MODEL and the engine's options.

    With `takes_several` it has a list of models, one for each --model.
    """
    parser = OptionParser(
        prog=prog,
        usage=f"{prog} {usage}",
        description=description,
        epilog="Each option may also be given as an environment variable: --max-model-len as\n"
        "TIDEWHEEL_MAX_MODEL_LEN. The command line takes precedence.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("positional_model", nargs="?", metavar="MODEL", help="same as --model")
    group = parser.add_argument_group("model")
    for option in MODEL_OPTIONS:
        several = takes_several and option.name == "model"
        remark = _SEVERAL if several else _REMARKS.get(option.name, "")
        add_option(group, option, remark, action="append" if several else "store")
    return parser


def read_model_options(
    parsed: Mapping[str, Any], mistakes: Mistakes, environment: Mapping[str, str] = os.environ
) -> dict[str, Any]:
    """The engine's options that were given, by name; `mistakes` gets what is unusable."""
    positional = parsed.get("positional_model")
    named = {} if positional is None else {"model": positional}
    if positional is not None and parsed.get("model") not in (None, positional):
        mistakes.add(f"two models are given: {positional} and --model {parsed['model']}; leave one out")
    return read_given(MODEL_OPTIONS, {**parsed, **named}, environment, mistakes)


def engine_options(given: Mapping[str, Any]) -> EngineOptions:
    """The engine's options of what was given of them, by name. Raises OptionError.

    Without a model they mean the embedded one, on the CPU with DEMO_QUANTIZATION where they leave open how its weights
    are stored.
    """
    mistakes = Mistakes()
    given_to = [group for group in DEVICE_OPTIONS if any(o.name in given for o in options_of(group))]
    groups = [mistakes.attempt(build, group, given) for group in given_to]
    rest = {
        "lora": mistakes.attempt(build, LoraOptions, given),
        "speculative": mistakes.attempt(build, SpeculativeOptions, given),
        "pipeline": mistakes.attempt(build, PipelineOptions, given),
        "media": mistakes.attempt(build, MediaOptions, given),
        "device_options": tuple(group for group in groups if group is not None),
    }
    # A group that cannot be made is left out here: its mistakes are reported with those of the others.
    others: dict[str, Any] = {name: group for name, group in rest.items() if group is not None}
    is_demo = "model" not in given
    if is_demo:
        others["model"] = str(DEMO_MODEL)
    attempted = mistakes.attempt(lambda: build(EngineOptions, given, **others))
    mistakes.raise_any()
    options = made(attempted)
    if is_demo and options.quantization is None and options.dtype == "auto" and options.device in ("auto", "cpu"):
        return replace(options, quantization=DEMO_QUANTIZATION)
    return options
