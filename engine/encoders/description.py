"""EncoderDescription: what a model folder in sentence-transformers' layout says about its encoder."""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ..errors import ModelError
from ..files.folder import read_config, read_json, read_json_array, read_json_if_there
from ..files.reading import is_there, require_file, require_no_special_files
from ..files.wording import shown
from ..models.overrides import overridden
from ..weights.gguf.choosing import find_gguf
from .classification import ClassActivation, activation_of, labels_of
from .conversion import Conversion, conversion, pair_template
from .detection import graph_in
from .families import FAMILIES, encoder_model
from .model import AnswerTokens, EncoderModel
from .options import Convert
from .pair_template import PairTemplate
from .pooling import POOLING_MODES
from .tasks import Task

logger = logging.getLogger(__name__)

_MAX_GRAPH_BYTES = 2**31 - 1  # protobuf's limit; larger models keep their weights in other files
_MODE_FLAGS = {
    "pooling_mode_cls_token": "cls",
    "pooling_mode_max_tokens": "max",
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_mean_sqrt_len_tokens": "mean_sqrt_len_tokens",
    "pooling_mode_weightedmean_tokens": "weightedmean",
    "pooling_mode_lasttoken": "lasttoken",
}
# Their positions start after the padding token's id, so the limit is smaller by that number.
_POSITIONS_AFTER_PADDING = frozenset(
    "camembert data2vec-text longformer mpnet roberta roberta-prelayernorm xlm-roberta xlm-roberta-xl xmod".split()
)
_NO_LIMIT = 10**6  # tokenizers without a limit say 10**30


@dataclass(frozen=True, kw_only=True)
class EncoderDescription:
    """An encoder's files, its limits in tokens, and how its output becomes an answer.

    Either there is a `model`, whose safetensors lie in `folder`, or a `graph` in ONNX. `pooling` are the modes of an
    embedding model, and `dense_folders` those of its Dense modules behind the pooling, which a `model` needs.
    `is_pooled_as_asked`: the pooling or the normalizing is not that of its files, but was asked for.
    `foreign_modules` are its modules that Tidewheel cannot compute. If there are any, the graph must output the
    finished embedding. `task` is the main one. A classifier has `labels`, and an `activation` unless it gives logits.
    It may read pairs of texts in a `pair_template`. `architecture` is the config's `model_type`. `dimensions` are those
    of a vector that requests get without asking for a number. `matryoshka` are the numbers that the model was trained
    for; True: any, False: none but the whole, None: nothing is said, and any is taken.
    """

    folder: Path
    model: EncoderModel | None
    graph: Path | None
    tokenizer_folder: Path
    task: Task
    max_length: int
    vocab_size: int | None
    pad_token_id: int | None
    architecture: str = ""
    lower_case: bool = False
    pooling: tuple[str, ...] = ()
    is_pooled_as_asked: bool = False
    pools_prompt: bool = True
    dense_folders: tuple[Path, ...] = ()
    foreign_modules: tuple[str, ...] = ()
    normalize: bool = False
    dimensions: int | None = None
    matryoshka: tuple[int, ...] | bool | None = None
    prompts: Mapping[str, str] = field(default_factory=dict)
    default_prompt_name: str | None = None
    labels: tuple[str, ...] = ()
    activation: ClassActivation | None = None
    pair_template: PairTemplate | None = None


def describe_encoder(
    folder: Path, overrides: Mapping[str, Any] | None = None, convert: Convert = "auto"
) -> EncoderDescription:
    """Read a model folder, whose config has `overrides` in place of its own fields, or a GGUF file.

    Raises ModelError, which names the file and what it should contain.
    """
    if (file := gguf_in(folder)) is not None:
        return _in_gguf(file, overrides, convert)
    modules = _Modules(folder)
    graph = graph_in(folder)
    converted, model = _native_model(modules, graph, overrides, convert)
    config, classifies = converted.config, converted.classifies
    if model is not None:
        graph = None
    elif graph is None:
        raise _no_graph(folder, modules, config)
    else:
        require_file(graph, _MAX_GRAPH_BYTES)
        require_no_special_files(graph.parent)  # the graph may name any file in its folder as its weights
        for beside in graph.parent.glob(f"{graph.name}?data"):  # as they are most often named
            require_file(beside)
    shared: dict[str, Any] = {
        "folder": modules.transformer_folder,
        "model": model,
        "graph": graph,
        "tokenizer_folder": modules.transformer_folder,
        "task": "classify" if classifies else "embed",
        "max_length": _max_length(modules, config, None if model is None else model.max_length),
        "vocab_size": _integer(config, "vocab_size"),
        "pad_token_id": _integer(config, "pad_token_id"),
        "architecture": str(config.get("model_type") or ""),
        "lower_case": bool(modules.transformer_config.get("do_lower_case")),
    }
    settings_path = folder / "config_sentence_transformers.json"
    settings = read_json_if_there(settings_path)
    if classifies:
        prompts, default = _prompts(settings_path, settings)
        instruction = None if default is None else prompts[default]
        template = pair_template(
            modules.transformer_folder, converted, instruction, modules.template_variables, listed=modules.listed
        )
        if template is None and default is not None:
            raise ModelError(f"{settings_path} has a default prompt, which is not supported in a classifier")
        path = modules.transformer_folder / "config.json"
        labels = labels_of(path, config)
        activation = activation_of(path, config, settings_path, settings, num_labels=len(labels))
        return EncoderDescription(**shared, labels=labels, activation=activation, pair_template=template)
    model_type = settings.get("model_type", "SentenceTransformer")
    if model_type != "SentenceTransformer":
        raise ModelError(
            f"{settings_path}: the model is a {shown(model_type)}; of these only sequence classifiers are served"
        )
    pooling, normalize = modules.pooling, modules.normalize
    if not modules.listed:
        if model is not None and model.pooling is not None:
            pooling, normalize = (model.pooling,), True
        how = f"{pooling[0]}{', and normalized' * normalize}"
        logger.info("%s has no modules.json: a text's vector is pooled by %s", folder, how)
    prompts, default = _prompts(settings_path, settings)
    return EncoderDescription(
        **shared,
        matryoshka=_matryoshka(modules.transformer_folder / "config.json", config),
        pooling=pooling,
        pools_prompt=modules.pools_prompt,
        dense_folders=() if model is None else modules.dense,
        foreign_modules=modules.foreign if model is None else (),
        normalize=normalize,
        prompts=prompts,
        default_prompt_name=default,
    )


def gguf_in(path: Path) -> Path | None:
    """The GGUF file that `path` is, or that lies in it alone: in a folder without a config.json."""
    if path.is_file():
        return path
    return None if is_there(path / "config.json") or is_there(path / "modules.json") else find_gguf(path)


def _in_gguf(path: Path, overrides: Mapping[str, Any] | None, convert: Convert) -> EncoderDescription:
    from ..weights.gguf.source import GgufSource
    from .gguf.models import encoder_in

    found = encoder_in(GgufSource(path).file, overrides, convert)
    if not (found.pooling or found.labels):
        logger.info("%s does not say how its vectors are pooled: they are the means of its tokens' vectors", path)
    return EncoderDescription(
        folder=path,
        model=found.model,
        graph=None,
        tokenizer_folder=path,
        task="classify" if found.labels else "embed",
        max_length=found.max_length,
        vocab_size=found.model.embedding.num_words,
        pad_token_id=found.pad_token_id,
        architecture=found.architecture,
        pooling=() if found.labels else found.pooling or ("mean",),
        normalize=not found.labels,
        labels=found.labels,
        activation=None if not found.labels else "sigmoid" if len(found.labels) == 1 else "softmax",
        pair_template=None if found.pair_texts is None else PairTemplate(*found.pair_texts),
    )


def is_native(folder: Path, overrides: Mapping[str, Any] | None = None, convert: Convert = "auto") -> bool:
    """Whether the model whose small files are in this folder would run from safetensors, if it has any."""
    try:
        modules = _Modules(folder)
        converted = _converted(modules, overrides, convert)
        return (converted.classifies or not modules.uncomputed) and _computed(converted) is not None
    except ModelError:
        return False


def has_weights(folder: Path) -> bool:
    """Whether a folder has safetensors."""
    return folder.is_dir() and any(folder.glob("*.safetensors"))


def _native_model(
    modules: _Modules, graph: Path | None, overrides: Mapping[str, Any] | None, convert: Convert
) -> tuple[Conversion, EncoderModel | None]:
    """What the model is served as, and how our own kernels compute it; None if they cannot. If there is a graph, that
    runs instead.
    """
    as_it_is = Conversion(_config(modules, overrides))
    if not has_weights(modules.transformer_folder):
        return as_it_is, None
    try:
        converted = _converted(modules, overrides, convert)
        model = _computed(converted)
        if model is not None and modules.uncomputed and not converted.classifies:
            raise ModelError(f"modules.json has modules that are not supported: {', '.join(modules.uncomputed)}")
    except ModelError as error:
        if graph is None:
            raise
        logger.warning("%s is run in place of the safetensors: %s", graph, error)
        return as_it_is, None
    if model is None and graph is not None:
        logger.info("%s is run: %s has no kernels here", graph, converted.config["architectures"][0])
    return converted, model


def _config(modules: _Modules, overrides: Mapping[str, Any] | None) -> Mapping[str, Any]:
    return overridden(read_config(modules.transformer_folder), overrides, None, None)


def _converted(modules: _Modules, overrides: Mapping[str, Any] | None, convert: Convert) -> Conversion:
    config = _config(modules, overrides)
    return conversion(modules.transformer_folder, config, convert, listed=modules.listed, answer=modules.answer)


def _computed(converted: Conversion) -> EncoderModel | None:
    return encoder_model(converted.config, converts=converted.converts, answer=converted.answer)


def _no_graph(folder: Path, modules: _Modules, config: Mapping[str, Any]) -> ModelError:
    lacks = "no safetensors and no onnx/model.onnx"
    if has_weights(modules.transformer_folder):
        known = ", ".join(sorted(FAMILIES))
        name = shown(config["architectures"][0])
        lacks = f"no onnx/model.onnx, and {name} does not run from its safetensors (these do: {known})"
    return ModelError(
        f"{folder} has {lacks}: sentence-transformers writes one with "
        "SentenceTransformer(MODEL, backend='onnx').save_pretrained(FOLDER), or CrossEncoder for a reranker"
    )


class _Modules:
    """The modules in `modules.json`: a transformer, and those that make one vector of its output.

    `foreign` are those that only an ONNX graph computes, and `uncomputed` those of them that are no Dense modules
    behind the pooling. The folders of these are in `dense`. `answer` is a reranker's. `listed`: there is such a file.
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
        is_pooled = False
        for i, module in enumerate(read_json_array(path) if self.listed else []):
            if not isinstance(module, dict) or not isinstance(module.get("type"), str):
                raise ModelError(f"{path}: entry {i} does not name the module's type")
            kind, place = module["type"].rpartition(".")[2], folder / str(module.get("path", ""))
            if not os.path.isdir(place) and (i == 0 or kind == "Pooling"):
                raise ModelError(f"{path}: entry {i} is in {shown(str(place))}, which is not a folder")
            if i == 0 and kind != "Transformer":
                raise ModelError(
                    f"{path}: the first module is a {shown(kind)}; only models of a Transformer are served"
                )
            was_normalized, self.normalize = self.normalize, kind == "Normalize"
            if i == 0:
                self.transformer_folder = place
            elif kind == "Pooling" and not self.pooling:
                self._read_pooling(place / "config.json")
                is_pooled = True
            elif kind == "LogitScore":
                self.answer = _answer_in(place / "config.json")
            elif kind not in ("Normalize", "Dropout"):
                foreign.append(kind)
                if kind == "Dense" and is_pooled and not was_normalized:
                    dense.append(place)
                else:
                    uncomputed.append(kind)
        if not self.listed:
            self.pooling = ("mean",)
        elif not self.pooling:
            foreign.append("no Pooling")
            uncomputed.append("no Pooling")
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


def _integer(config: Mapping[str, Any], name: str) -> int | None:
    value = config.get(name)
    return value if isinstance(value, int) and not isinstance(value, bool) and value >= 0 else None


def _max_length(modules: _Modules, config: Mapping[str, Any], longest: int | None) -> int:
    """The longest input in tokens, by sentence-transformers' file or else by the tokenizer, within the positions, and
    within `longest`.
    """
    folder = modules.transformer_folder
    tokenizer_config = read_json_if_there(folder / "tokenizer_config.json")
    said = modules.transformer_config.get("max_seq_length") or tokenizer_config.get("model_max_length")
    positions = _integer(config, "max_position_embeddings")
    if positions and str(config.get("model_type")) in _POSITIONS_AFTER_PADDING:
        positions -= (_integer(config, "pad_token_id") or 0) + 1
    limits = [
        int(limit) for limit in (said, positions, longest) if isinstance(limit, int | float) and 1 <= limit < _NO_LIMIT
    ]
    if not limits:
        raise ModelError(
            f"{folder} does not say how long an input may be: add max_seq_length to sentence_bert_config.json"
        )
    return min(limits)


def _answer_in(path: Path) -> AnswerTokens:
    """The tokens of a LogitScore module."""
    config = read_json(path)
    true, false = _integer(config, "true_token_id"), _integer(config, "false_token_id")
    if true is None or (false is None and config.get("false_token_id") is not None):
        raise ModelError(f"{path}: true_token_id must be a token's id, and false_token_id another one or null")
    return AnswerTokens(true, false)


def _matryoshka(path: Path, config: Mapping[str, Any]) -> tuple[int, ...] | bool | None:
    """What a config says of cut vectors, in vLLM's words."""
    sizes, is_one = config.get("matryoshka_dimensions"), config.get("is_matryoshka")
    if sizes is None or sizes == []:
        return is_one if isinstance(is_one, bool) else None
    if not isinstance(sizes, list) or not all(isinstance(size, int) and size > 0 for size in sizes):
        raise ModelError(f"{path}: matryoshka_dimensions must be a list of numbers, got {shown(sizes)}")
    return tuple(sorted(sizes))


def _prompts(path: Path, settings: Mapping[str, Any]) -> tuple[dict[str, str], str | None]:
    """The prompts by name, and the default one's name."""
    given = settings.get("prompts") or {}
    if not isinstance(given, dict):
        raise ModelError(f"{path}: prompts must be an object of texts by name")
    prompts = {name: prompt for name, prompt in given.items() if isinstance(prompt, str)}
    default = settings.get("default_prompt_name")
    if default is not None and not (isinstance(default, str) and default in prompts):
        raise ModelError(
            f"{path}: the default prompt {shown(default)} is not one of its prompts {shown(sorted(prompts))}"
        )
    return prompts, default
