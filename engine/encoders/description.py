"""EncoderDescription: what a model folder in sentence-transformers' layout says about its encoder."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import field, replace
from pathlib import Path
from typing import Any

from ..declaring.record import record
from ..errors import ModelError
from ..files.folder import read_config, read_json_if_there
from ..files.reading import is_there, require_file, require_no_special_files
from ..files.wording import shown
from ..models.overrides import overridden
from ..weights.gguf.choosing import find_gguf
from ..weights.pickles import PYTORCH, PYTORCH_INDEX
from .classification import ClassActivation, activation_of, labels_of
from .colbert import LateInteraction, pylate, stanford
from .conversion import Conversion, conversion, pair_template
from .detection import graph_in
from .families import COLBERT, FAMILIES, encoder_model
from .linears import TokenLayers, linear_file
from .model import EncoderModel
from .modules import Modules, SpladePooling, integer_of
from .options import Convert
from .pair_template import PairTemplate
from .tasks import Task

logger = logging.getLogger(__name__)

_MAX_GRAPH_BYTES = 2**31 - 1  # protobuf's limit; larger models keep their weights in other files
# Their positions start after the padding token's id, so the limit is smaller by that number.
_POSITIONS_AFTER_PADDING = frozenset(
    "camembert data2vec-text longformer mpnet roberta roberta-prelayernorm xlm-roberta xlm-roberta-xl xmod".split()
)
_IN_GRAPHS: frozenset[Task] = frozenset({"embed", "classify"})  # these may run in ONNX Runtime
_MOST_WORDS = 2**24  # float32 has room for their numbers
_NO_LIMIT = 10**6  # tokenizers without a limit say 10**30


@record(frozen=True, kw_only=True)
class EncoderDescription:
    """An encoder's files, its limits in tokens, and how its output becomes an answer.

    Either there is a `model`, whose checkpoint lies in `folder`, or a `graph` in ONNX. `pooling` are the modes of an
    embedding model, and `dense_folders` those of its Dense modules behind the pooling, which a `model` needs.
    `is_pooled_as_asked`: the pooling or the normalizing is not that of its files, but was asked for.
    `foreign_modules` are its modules that Tidewheel cannot compute. If there are any, the graph must output the
    finished embedding. `task` is the main one. A classifier has `labels`, and an `activation` unless it gives logits.
    It may read pairs of texts in a `pair_template`. `architecture` is the config's `model_type`. `dimensions` are those
    of a vector that requests get without asking for a number. `matryoshka` are the numbers that the model was trained
    for; True: any, False: none but the whole, None: nothing is said, and any is taken. `token_layers` make vectors and
    weights of tokens, and `late_interaction` is how ColBERT takes its texts. Where a sparse encoder computes documents
    alone, the folder `static_queries` has the weights of a query's words.
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
    token_layers: TokenLayers = field(default_factory=TokenLayers)
    late_interaction: LateInteraction | None = None
    static_queries: Path | None = None


def describe_encoder(
    folder: Path, overrides: Mapping[str, Any] | None = None, convert: Convert = "auto"
) -> EncoderDescription:
    """Read a model folder, whose config has `overrides` in place of its own fields, or a GGUF file.

    Raises ModelError, which names the file and what it should contain.
    """
    if (file := gguf_in(folder)) is not None:
        return _in_gguf(file, overrides, convert)
    modules = Modules(folder)
    settings_path = folder / "config_sentence_transformers.json"
    settings = read_json_if_there(settings_path)
    graph = graph_in(folder)
    task = _task_of(modules, _config(modules, overrides), settings)
    token_layers = _token_layers(modules, task)
    if task not in _IN_GRAPHS:
        graph = None
    converted, model = _native_model(modules, graph, overrides, convert, task, needed=bool(token_layers))
    config = converted.config
    task = "classify" if converted.classifies else _task_of(modules, config, settings)
    interaction = None
    if task == "token_embed":
        interaction = pylate(settings_path, settings) if modules.token_dense else stanford(modules.transformer_folder)
    if model is not None:
        graph = None
        _check_reach(model, interaction)
    elif graph is None:
        raise _no_graph(folder, modules, config, task)
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
        "task": task,
        "max_length": _max_length(
            modules,
            config,
            None if model is None else model.max_length,
            None if interaction is None else max(interaction.document_length, interaction.query_length),
        ),
        "vocab_size": integer_of(config, "vocab_size"),
        "pad_token_id": integer_of(config, "pad_token_id"),
        "architecture": str(config.get("model_type") or ""),
        "lower_case": bool(modules.transformer_config.get("do_lower_case")),
    }
    if task in ("classify", "token_classify"):
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
    if interaction is not None:
        prompts = {"query": interaction.query_prefix, "document": interaction.document_prefix}
        return EncoderDescription(
            **shared,
            token_layers=token_layers,
            late_interaction=interaction,
            normalize=True,
            prompts=prompts,
            default_prompt_name="document",
        )
    tasks = None if model is None else model.tasks
    prompts, default = _prompts(settings_path, settings, None if tasks is None else tasks.prompts)
    if task == "sparse" and (routes := modules.routes) is not None:
        return EncoderDescription(
            **shared,
            prompts={"query": "", "document": "", **prompts},
            default_prompt_name=default or routes.default,
            static_queries=routes.query,
        )
    if task == "sparse":
        return EncoderDescription(**shared, prompts=prompts, default_prompt_name=default)
    model_type = settings.get("model_type", "SentenceTransformer")
    if model_type != "SentenceTransformer":
        raise ModelError(
            f"{settings_path}: the model is a {shown(model_type)}, which is not served; embedding models, sequence "
            "classifiers, SPLADE models and ColBERT models of PyLate are"
        )
    pooling, normalize = modules.pooling, modules.normalize
    if not modules.listed:
        if model is not None and model.pooling is not None:
            pooling, normalize = (model.pooling,), True
        how = f"{pooling[0]}{', and normalized' * normalize}"
        logger.info("%s has no modules.json: a text's vector is pooled by %s", folder, how)
    return EncoderDescription(
        **shared,
        token_layers=token_layers,
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
    """Whether the model whose small files are in this folder would run from its weights, if it has any."""
    try:
        modules = Modules(folder)
        converted = _converted(modules, overrides, convert)
        return (converted.classifies or not modules.uncomputed) and _computed(converted, "embed") is not None
    except ModelError:
        return False


def has_weights(folder: Path) -> bool:
    """Whether a folder has safetensors, or tensors in PyTorch's files."""
    return _has_safetensors(folder) or is_there(folder / PYTORCH) or is_there(folder / PYTORCH_INDEX)


def _has_safetensors(folder: Path) -> bool:
    return folder.is_dir() and any(folder.glob("*.safetensors"))


def _task_of(modules: Modules, config: Mapping[str, Any], settings: Mapping[str, Any]) -> Task:
    """The main task. Modules take a model's rows of tokens, whatever its architecture's head is."""
    architecture = str(config["architectures"][0])
    if architecture.endswith("ForSequenceClassification"):
        return "classify"
    if architecture.endswith(("ForTokenClassification", "RewardModel")) and not modules.listed:
        return "token_classify"
    if modules.splade is not None or settings.get("model_type") == "SparseEncoder":
        return "sparse"
    return "token_embed" if architecture == COLBERT or modules.token_dense else "embed"


def _token_layers(modules: Modules, task: Task) -> TokenLayers:
    folder = modules.transformer_folder
    if task == "token_embed":
        return TokenLayers(modules.token_dense, module=None if modules.token_dense else "linear")
    if task == "embed":  # as BGE-M3 has them
        vectors, weights = (linear_file(folder, f"{name}_linear") for name in ("colbert", "sparse"))
        return TokenLayers(vectors_file=vectors, weights_file=weights)
    return TokenLayers()


def _check_reach(model: EncoderModel, interaction: LateInteraction | None) -> None:
    """Raises ModelError if masks that fill up a query could lie beyond what the model's attention reaches."""
    if interaction is None or not interaction.expands or interaction.attends or model.tower.reach is None:
        return
    if model.tower.reach == 1:
        raise ModelError(
            "the model's attention is causal, so all tokens of a query must be attended to, also those that fill it "
            "up: set attend_to_expansion_tokens to true"
        )
    if interaction.query_length > model.tower.reach:
        raise ModelError(
            f"queries of {interaction.query_length} tokens are longer than the model's attention reaches, "
            f"{model.tower.reach} tokens: set query_length to that, or attend_to_expansion_tokens to true"
        )


def _native_model(
    modules: Modules,
    graph: Path | None,
    overrides: Mapping[str, Any] | None,
    convert: Convert,
    task: Task,
    *,
    needed: bool,
) -> tuple[Conversion, EncoderModel | None]:
    """What the model is served as, and how our own kernels compute it; None if they cannot. If there is a graph, that
    runs instead, and also in place of PyTorch's files unless the kernels are `needed`.
    """
    as_it_is, folder = Conversion(_config(modules, overrides)), modules.transformer_folder
    if not has_weights(folder) or (graph is not None and not needed and not _has_safetensors(folder)):
        return as_it_is, None
    try:
        converted = _converted(modules, overrides, convert)
        model = _computed(converted, task)
        if model is not None and modules.uncomputed and not converted.classifies and task != "token_classify":
            raise ModelError(f"modules.json has modules that are not supported: {', '.join(modules.uncomputed)}")
        if model is not None and task == "sparse":
            model = _sparse(model, str(converted.config["architectures"][0]), modules.splade or SpladePooling())
    except ModelError as error:
        if graph is None:
            raise
        logger.warning("%s is run in place of the safetensors: %s", graph, error)
        return as_it_is, None
    if model is None and graph is not None:
        logger.info("%s is run: %s has no kernels here", graph, converted.config["architectures"][0])
    return converted, model


def _config(modules: Modules, overrides: Mapping[str, Any] | None) -> Mapping[str, Any]:
    return overridden(read_config(modules.transformer_folder), overrides, None, None)


def _converted(modules: Modules, overrides: Mapping[str, Any] | None, convert: Convert) -> Conversion:
    config = _config(modules, overrides)
    return conversion(modules.transformer_folder, config, convert, listed=modules.listed, answer=modules.answer)


def _computed(converted: Conversion, task: Task) -> EncoderModel | None:
    return encoder_model(
        converted.config,
        converts=converted.converts,
        answer=converted.answer,
        predicts_words=task == "sparse",
    )


def _sparse(model: EncoderModel, architecture: str, pooling: SpladePooling) -> EncoderModel:
    if model.head is None or not model.head.num_labels <= _MOST_WORDS:
        raise ModelError(
            f"{shown(architecture)} does not predict words here, at most {_MOST_WORDS}, as a sparse encoder must: the "
            "architectures for that end in ForMaskedLM"
        )
    return replace(model, head=replace(model.head, pooling=pooling.pooling, log_twice=pooling.log_twice))


def _no_graph(folder: Path, modules: Modules, config: Mapping[str, Any], task: Task) -> ModelError:
    known, name = ", ".join(sorted(FAMILIES)), shown(config["architectures"][0])
    has_none = not has_weights(modules.transformer_folder)
    if task not in _IN_GRAPHS:
        why = "it has none" if has_none else f"{name} does not run from them (these do: {known})"
        return ModelError(f"{folder} is a model for {task}, which needs safetensors: {why}")
    lacks = "no safetensors and no onnx/model.onnx"
    if not has_none:
        lacks = f"no onnx/model.onnx, and {name} does not run from its safetensors (these do: {known})"
    return ModelError(
        f"{folder} has {lacks}: sentence-transformers writes one with "
        "SentenceTransformer(MODEL, backend='onnx').save_pretrained(FOLDER), or CrossEncoder for a reranker"
    )


def _max_length(modules: Modules, config: Mapping[str, Any], longest: int | None, said: int | None) -> int:
    """The longest input in tokens: as `said`, else by sentence-transformers' file or else by the tokenizer, within the
    positions, and within `longest`.
    """
    folder = modules.transformer_folder
    tokenizer_config = read_json_if_there(folder / "tokenizer_config.json")
    said = said or modules.transformer_config.get("max_seq_length") or tokenizer_config.get("model_max_length")
    positions = integer_of(config, "max_position_embeddings")
    if positions and str(config.get("model_type")) in _POSITIONS_AFTER_PADDING:
        positions -= (integer_of(config, "pad_token_id") or 0) + 1
    limits = [
        int(limit) for limit in (said, positions, longest) if isinstance(limit, int | float) and 1 <= limit < _NO_LIMIT
    ]
    if not limits:
        raise ModelError(
            f"{folder} does not say how long an input may be: add max_seq_length to sentence_bert_config.json"
        )
    return min(limits)


def _matryoshka(path: Path, config: Mapping[str, Any]) -> tuple[int, ...] | bool | None:
    """What a config says of cut vectors, in vLLM's words."""
    sizes, is_one = config.get("matryoshka_dimensions"), config.get("is_matryoshka")
    if sizes is None or sizes == []:
        return is_one if isinstance(is_one, bool) else None
    if not isinstance(sizes, list) or not all(isinstance(size, int) and size > 0 for size in sizes):
        raise ModelError(f"{path}: matryoshka_dimensions must be a list of numbers, got {shown(sizes)}")
    return tuple(sorted(sizes))


def _prompts(
    path: Path, settings: Mapping[str, Any], of_tasks: Mapping[str, str] | None = None
) -> tuple[dict[str, str], str | None]:
    """The prompts by name, also those `of_tasks` that config.json has, and the default one's name."""
    given = settings.get("prompts") or {}
    if not isinstance(given, dict):
        raise ModelError(f"{path}: prompts must be an object of texts by name")
    prompts = {**(of_tasks or {}), **{name: prompt for name, prompt in given.items() if isinstance(prompt, str)}}
    default = settings.get("default_prompt_name")
    if default is not None and not (isinstance(default, str) and default in prompts):
        raise ModelError(
            f"{path}: the default prompt {shown(default)} is not one of its prompts {shown(sorted(prompts))}"
        )
    return prompts, default
