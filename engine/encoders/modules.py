"""Modules: what `modules.json` says of a model in sentence-transformers' layout."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, NamedTuple

from ..errors import ModelError
from ..files.folder import read_json, read_json_array
from ..files.reading import is_there
from ..files.wording import shown
from .model import AnswerTokens
from .pooling import POOLING_MODES
from .router import Routes, read_routes

_MODE_FLAGS = {
    "pooling_mode_cls_token": "cls",
    "pooling_mode_max_tokens": "max",
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_mean_sqrt_len_tokens": "mean_sqrt_len_tokens",
    "pooling_mode_weightedmean_tokens": "weightedmean",
    "pooling_mode_lasttoken": "lasttoken",
}
_TRANSFORMERS = ("Transformer", "MLMTransformer")
_TWICE = {"relu": False, "log1p_relu": True}


class SpladePooling(NamedTuple):
    """How the weight of a word is made of its logits: see HeadSpec."""

    pooling: Literal["max", "sum"] = "max"
    log_twice: bool = False


class Modules:
    """The modules in `modules.json`: a transformer, and those that make vectors of its output.

    `foreign` are those that only an ONNX graph computes, and `uncomputed` those of them that are no Dense modules
    behind the pooling. The folders of these are in `dense`. Without a pooling, Dense modules are for each token: their
    folders are in `token_dense`. `splade` is there instead of all these where the transformer predicts words, and
    `routes` too if it does so of documents alone. `answer` is a reranker's. `listed`: there is such a file.
    """

    def __init__(self, folder: Path) -> None:
        path = folder / "modules.json"
        self.transformer_folder = folder
        self.pooling: tuple[str, ...] = ()
        self.pools_prompt = True
        self.normalize = False
        self.answer: AnswerTokens | None = None
        self.listed = is_there(path)
        foreign: list[str] = []
        uncomputed: list[str] = []
        dense: list[Path] = []
        token_dense: list[Path] = []
        self.splade: SpladePooling | None = None
        self.routes: Routes | None = None
        is_pooled = False
        for i, module in enumerate(read_json_array(path) if self.listed else []):
            if not isinstance(module, dict) or not isinstance(module.get("type"), str):
                raise ModelError(f"{path}: entry {i} does not name the module's type")
            kind, place = module["type"].rpartition(".")[2], folder / str(module.get("path", ""))
            if not os.path.isdir(place) and (i == 0 or kind == "Pooling"):
                raise ModelError(f"{path}: entry {i} is in {shown(str(place))}, which is not a folder")
            if i == 0 and kind == "Router":
                self.routes = read_routes(place)
                self.transformer_folder = self.routes.transformer
                self.splade = _splade_pooling(self.routes.pooling / "config.json")
                continue
            if self.routes is not None:
                raise ModelError(f"{path}: a {shown(kind)} behind a Router is not supported")
            if i == 0 and kind not in _TRANSFORMERS:
                raise ModelError(
                    f"{path}: the first module is a {shown(kind)}; only models of a Transformer or a Router are served"
                )
            was_normalized, self.normalize = self.normalize, kind == "Normalize"
            if i == 0:
                self.transformer_folder = place
            elif kind == "Pooling" and not self.pooling:
                self._read_pooling(place / "config.json")
                is_pooled = True
            elif kind == "LogitScore":
                self.answer = _answer_in(place / "config.json")
            elif kind == "SpladePooling" and not is_pooled and not self.splade:
                self.splade = _splade_pooling(place / "config.json")
            elif kind not in ("Normalize", "Dropout"):
                foreign.append(kind)
                if kind == "Dense" and is_pooled and not was_normalized:
                    dense.append(place)
                elif kind == "Dense" and not is_pooled and not was_normalized:
                    token_dense.append(place)
                else:
                    uncomputed.append(kind)
        if not self.listed:
            self.pooling = ("mean",)
        elif is_pooled or self.splade:
            uncomputed += ["Dense"] * len(token_dense)
            token_dense = []
        elif not token_dense:
            foreign.append("no Pooling")
            uncomputed.append("no Pooling")
        self.token_dense = tuple(token_dense)
        self.foreign, self.uncomputed, self.dense = tuple(foreign), tuple(uncomputed), tuple(dense)
        self.transformer_config = self._transformer_config()

    @property
    def template_variables(self) -> Mapping[str, Any]:
        """What sentence-transformers gives the chat template beside messages."""
        options = self.transformer_config.get("processing_kwargs")
        given = options.get("chat_template") if isinstance(options, dict) else None
        return given if isinstance(given, dict) else {}

    def _transformer_config(self) -> dict[str, Any]:
        """`sentence_bert_config.json`, which older versions named after the architecture."""
        paths = sorted(self.transformer_folder.glob("sentence_*_config.json"))
        return read_json(paths[0]) if paths else {}

    def _read_pooling(self, path: Path) -> None:
        config = read_json(path)
        modes = config.get("pooling_mode") or [mode for flag, mode in _MODE_FLAGS.items() if config.get(flag)]
        modes = modes if isinstance(modes, list) else [modes]
        for mode in modes or ["mean"]:
            if not isinstance(mode, str) or mode not in POOLING_MODES:
                raise ModelError(
                    f"{path}: pooling mode {shown(mode)} is not known; known are {', '.join(POOLING_MODES)}"
                )
        self.pooling = tuple(modes or ["mean"])
        self.pools_prompt = config.get("include_prompt", True) is not False


def integer_of(config: Mapping[str, Any], name: str) -> int | None:
    """A field that is a number from 0 on; None if it is anything else."""
    value = config.get(name)
    return value if isinstance(value, int) and not isinstance(value, bool) and value >= 0 else None


def _answer_in(path: Path) -> AnswerTokens:
    """The tokens of a LogitScore module."""
    config = read_json(path)
    true, false = integer_of(config, "true_token_id"), integer_of(config, "false_token_id")
    if true is None or (false is None and config.get("false_token_id") is not None):
        raise ModelError(f"{path}: true_token_id must be a token's id, and false_token_id another one or null")
    return AnswerTokens(true, false)


def _splade_pooling(path: Path) -> SpladePooling:
    config = read_json(path)
    pooling, activation = config.get("pooling_strategy", "max"), config.get("activation_function", "relu")
    if pooling not in ("max", "sum"):
        raise ModelError(f"{path}: pooling_strategy must be max or sum, got {shown(pooling)}")
    if not isinstance(activation, str) or activation not in _TWICE:
        raise ModelError(f"{path}: activation_function must be one of {', '.join(_TWICE)}, got {shown(activation)}")
    return SpladePooling(pooling, _TWICE[activation])
