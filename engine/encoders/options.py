"""The options of encoders that are served beside the chat model."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from ..declaring.option import Options, option
from ..declaring.values import at_least, count
from ..model_names import short_name

Convert = Literal["auto", "none", "embed", "classify"]
"""What a decoder is served as, in vLLM's words: `embed` and `classify` make an encoder of it, `none` only takes what is
one, and `auto` does what its files say."""

EncoderDType = Literal["auto", "float32", "bfloat16", "float16", "int8"]


@dataclass(frozen=True, kw_only=True)
class EncoderOptions(Options):
    """Which encoders to serve, under which names (without any, their own), and on how many threads."""

    models: Sequence[str] = option(
        (),
        "embedding models and cross-encoders to serve too: folders or hub ids",
        flag="--embedding-model",
        metavar="MODEL",
    )
    names: Sequence[str] = option(
        (),
        "their names in the API, one each [--embedding-model, or the last part of its path]",
        flag="--served-embedding-model-name",
        metavar="NAME",
    )
    threads: int = option(
        1,
        "threads for all embedding models together, at a lower priority than the chat model's",
        flag="--embedding-threads",
        parse=count,
        check=at_least(1),
        metavar="N",
    )

    dtype: EncoderDType = option(
        "auto",
        "what embedding models in safetensors are kept in: auto keeps the checkpoint's own type; bfloat16 and int8 are "
        "smaller and faster",
        flag="--embedding-dtype",
        metavar="DTYPE",
    )

    def _contradictions(self) -> Iterator[str]:
        if self.names and len(self.names) != len(self.models):
            yield f"--served-embedding-model-name needs {len(self.models)} names, one for each --embedding-model"
        names = self.names or [*map(short_name, self.models)]
        if len(set(names)) != len(names):
            yield "two embedding models have the same name: give each its own with --served-embedding-model-name"
