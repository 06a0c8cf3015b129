"""Tells what an encoder is, and whether it would be served beside the chat model. A graph is not opened."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..errors import DeviceError, ModelError
from ..files.folder import read_config, read_json_if_there
from ..files.reading import is_there
from .classification import ClassActivation
from .conversion import says_it_encodes
from .description import EncoderDescription, describe_encoder, graph_in, has_weights
from .families import FAMILIES
from .onnx_graph import import_onnxruntime
from .tokenization import EncoderTokenizer

_GENERATES = ("ForCausalLM", "ForConditionalGeneration", "LMHeadModel")
_WIDTHS = ("hidden_size", "dim", "d_model", "n_embd")  # what families call the size of a token's vector


@dataclass(frozen=True, slots=True)
class EncoderInspection:
    """All that is known of an encoder. If it is refused, fields that cannot be known are None or empty.

    `bytes` is the size of the `files`: of the graph and its weights, or of safetensors if it `is_native`. `width` is
    how many numbers a vector has, if the config says it. A classifier has `labels`, and a cross-encoder only one, for
    which it gives a score. `pooling` are the modes that make one vector of the tokens' vectors, and `in_graph` the
    modules that the graph itself must compute. `max_length` is in tokens. `refusal` is the error that serving it with
    --embedding-model would give.
    """

    model: str
    architecture: str | None
    is_native: bool
    files: Sequence[str]
    bytes: int
    is_cross_encoder: bool | None
    labels: Sequence[str]
    width: int | None
    pooling: Sequence[str]
    in_graph: Sequence[str]
    normalize: bool
    activation: ClassActivation | None
    prompts: Mapping[str, str]
    default_prompt_name: str | None
    max_length: int | None
    vocab_size: int | None
    refusal: str | None


def is_encoder(path: Path) -> bool:
    """Whether it is a folder with an encoder's graph, or safetensors of one. A model that generates text is none."""
    if not path.is_dir():
        return False
    try:
        config = read_json_if_there(path / "config.json")
    except ModelError:
        return False
    architecture = _architecture(config)
    says = architecture in FAMILIES or says_it_encodes(config, listed=is_there(path / "modules.json"))
    if says and has_weights(path):
        return True
    return graph_in(path) is not None and not any(task in (architecture or "") for task in _GENERATES)


def inspect_encoder(model: str, path: Path, *, whole: bool) -> EncoderInspection:
    """Look at the encoder in a folder, which `model` names. If it is not `whole`, it has no tokenizer."""
    refusal: str | None = None
    config: dict[str, Any] = {}
    description: EncoderDescription | None = None
    try:
        description = describe_encoder(path)
        config = read_config(description.tokenizer_folder)
        if whole:
            EncoderTokenizer.load(
                description.tokenizer_folder, lower_case=description.lower_case, pairs=bool(description.labels)
            )
        if description.graph is not None:
            import_onnxruntime()
    except (ModelError, DeviceError) as error:
        refusal = str(error) if Path(model).expanduser() == path else str(error).replace(str(path), model)
    is_native = description is not None and description.model is not None
    graph, files = graph_in(path), []
    if description is not None and is_native:
        files = sorted(description.folder.glob("*.safetensors"))
    elif graph is not None:
        files = sorted(file for file in graph.parent.glob(f"{graph.name}*") if file.is_file())
    return EncoderInspection(
        model=model,
        architecture=_architecture(config),
        is_native=is_native,
        files=[str(file.relative_to(path)) for file in files],
        bytes=sum(file.stat().st_size for file in files),
        is_cross_encoder=None if description is None else len(description.labels) == 1,
        labels=() if description is None else description.labels,
        width=None if description is None else _width(description, config),
        pooling=() if description is None else description.pooling,
        in_graph=() if description is None else description.foreign_modules,
        normalize=description is not None and description.normalize,
        activation=None if description is None else description.activation,
        prompts={} if description is None else dict(description.prompts),
        default_prompt_name=None if description is None else description.default_prompt_name,
        max_length=None if description is None else description.max_length,
        vocab_size=None if description is None else description.vocab_size,
        refusal=refusal,
    )


def _architecture(config: Mapping[str, Any]) -> str | None:
    names = config.get("architectures")
    return str(names[0]) if isinstance(names, list) and names else None


def _width(description: EncoderDescription, config: Mapping[str, Any]) -> int | None:
    if description.labels or description.foreign_modules or description.dense_folders:
        return None
    sizes = [config[name] for name in _WIDTHS if isinstance(config.get(name), int)]
    return sizes[0] * len(description.pooling) if sizes else None
