"""The options of encoders that are served beside the chat model, or alone."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal, get_args

from ..declaring.option import Options, option
from ..declaring.record import record
from ..declaring.values import at_least, count, json_object
from ..model_names import short_name
from .pooler_config import check_pooler_config

Runner = Literal["auto", "generate", "pooling"]
Convert = Literal["auto", "none", "embed", "classify"]
"""What a decoder is served as, in vLLM's words: `embed` and `classify` make an encoder of it, `none` only takes what is
one, and `auto` does what its files say."""

_TASKS: Mapping[str, tuple[Runner, Convert]] = {
    "auto": ("auto", "auto"),
    "generate": ("generate", "none"),
    "embed": ("pooling", "embed"),
    "embedding": ("pooling", "embed"),
    "classify": ("pooling", "classify"),
    "score": ("pooling", "auto"),
    "reward": ("pooling", "auto"),
}
"""What vLLM's older option stands for."""

EncoderDType = Literal["auto", "float32", "bfloat16", "float16", "int8", "int8-channel"]


@record(frozen=True, kw_only=True)
class EncoderOptions(Options):
    """Which encoders to serve, under which names (without any, their own), and on how many threads.

    `runner` and `convert` say what the MODEL of a command is, and `pooler_config` how it pools. `task` is vLLM's older
    name for the first two. `threads` None: 1 beside a chat model, and without one as many as that would have.
    """

    runner: Runner = option(
        "auto",
        "what MODEL does: generate writes text, pooling gives embeddings, classes or scores, and no chat model is "
        "served; auto finds it out",
        choices=get_args(Runner),
    )
    convert: Convert = option(
        "auto",
        "what a MODEL that generates is made into: embed gives embeddings, classify classes; auto does what its files "
        "say, and none takes only what is an encoder already",
        choices=get_args(Convert),
    )
    task: str = option("auto", "vLLM's older name for --runner and --convert together", choices=tuple(_TASKS))
    pooler_config: Mapping[str, Any] | None = option(
        None,
        'how MODEL makes one vector of a text, e.g. {"pooling_type": "CLS", "use_activation": false, "dimensions": '
        "256}; what is left out is as the model's files say",
        parse=json_object,
        check=check_pooler_config,
        metavar="JSON",
    )
    models: Sequence[str] = option(
        (),
        "embedding models and cross-encoders to serve too: folders, GGUF files or hub ids",
        flag="--embedding-model",
        metavar="MODEL",
    )
    names: Sequence[str] = option(
        (),
        "their names in the API, one each [--embedding-model, or the last part of its path]",
        flag="--served-embedding-model-name",
        metavar="NAME",
    )
    threads: int | None = option(
        None,
        "threads for embedding models that cannot run between the steps of a chat model; beside one, at a lower "
        "priority [1 beside a chat model, else all cores]",
        flag="--embedding-threads",
        parse=count,
        check=at_least(1),
        metavar="N",
    )
    dtype: EncoderDType = option(
        "auto",
        "what embedding models in safetensors and GGUF are kept in: auto keeps the checkpoint's own type; bfloat16, "
        "int8 and int8-channel are smaller and faster than float32",
        flag="--embedding-dtype",
        metavar="DTYPE",
    )

    @property
    def meant_runner(self) -> Runner:
        """What MODEL does, also as `task` or `convert` says it."""
        if self.runner != "auto":
            return self.runner
        if (of_task := _TASKS[self.task][0]) != "auto":
            return of_task
        return "pooling" if self.convert in ("embed", "classify") else "auto"

    @property
    def meant_convert(self) -> Convert:
        """What MODEL is made into, also as `task` says it."""
        return _TASKS[self.task][1] if self.convert == "auto" else self.convert

    def _contradictions(self) -> Iterator[str]:
        runner, convert = _TASKS[self.task]
        for flag, value, meant in (("--runner", self.runner, runner), ("--convert", self.convert, convert)):
            if "auto" not in (value, meant) and value != meant:
                yield f"--task {self.task} and {flag} {value} contradict each other: leave --task out"
        if self.runner == "generate" and self.convert in ("embed", "classify"):
            yield f"--convert {self.convert} needs --runner pooling"
        if self.meant_runner == "generate" and self.pooler_config is not None:
            yield "--pooler-config needs --runner pooling"
        if self.names and len(self.names) != len(self.models):
            yield f"--served-embedding-model-name needs {len(self.models)} names, one for each --embedding-model"
        names = self.names or [*map(short_name, self.models)]
        if len(set(names)) != len(names):
            yield "two embedding models have the same name: give each its own with --served-embedding-model-name"
