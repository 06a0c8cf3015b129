"""Tells what an encoder is, and whether it would be served beside the chat model. A graph is not opened."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from ..declaring.option import OptionError
from ..errors import DeviceError, ModelError
from ..files.folder import read_config
from ..options import EngineOptions
from ..weights.pickles import PYTORCH_GLOB
from .as_asked import as_asked
from .classification import ClassActivation
from .description import EncoderDescription, describe_encoder
from .detection import graph_in
from .native_graph import planned_weights
from .onnx_graph import import_onnxruntime
from .options import EncoderOptions
from .settings import settings_of
from .tasks import Task
from .tokenization import EncoderTokenizer

CheckpointFormat = Literal["safetensors", "PyTorch", "GGUF", "ONNX"]
_WIDTHS = ("hidden_size", "dim", "d_model", "n_embd")  # what families call the size of a token's vector


@dataclass(frozen=True, slots=True)
class EncoderInspection:
    """All that is known of an encoder. If it is refused, fields that cannot be known are None or empty.

    `bytes` is the size of the `files`: of the graph and its weights, or of a checkpoint if it `is_native`. Then `dtype`
    is what its weights are kept in, and `memory_bytes` about what they take with the longest text. `tasks` are what
    requests can ask for, as far as that is known before a graph is opened. `width` is how many numbers a vector has, if
    the config says it, and `matryoshka` what it says of cut ones, as in EncoderDescription. A classifier has `labels`,
    and a cross-encoder only one, for which it gives a score. `pooling` are the modes that make one vector of the
    tokens' vectors, and `in_graph` the modules that the graph itself must compute. `max_length` is in tokens. `refusal`
    is the error that serving it would give.
    """

    model: str
    architecture: str | None
    is_native: bool
    format: CheckpointFormat
    files: Sequence[str]
    bytes: int
    dtype: str | None
    memory_bytes: int | None
    tasks: Sequence[Task]
    is_cross_encoder: bool | None
    labels: Sequence[str]
    width: int | None
    matryoshka: Sequence[int] | bool | None
    pooling: Sequence[str]
    in_graph: Sequence[str]
    normalize: bool
    activation: ClassActivation | None
    prompts: Mapping[str, str]
    default_prompt_name: str | None
    max_length: int | None
    vocab_size: int | None
    refusal: str | None


def inspect_encoder(options: EngineOptions, path: Path, *, whole: bool) -> EncoderInspection:
    """Look at the encoder in a folder or file, as the options that name it would serve it. If it is not `whole`, it has
    no tokenizer.
    """
    model = options.model
    refusal: str | None = None
    config: dict[str, Any] = {}
    architecture: str | None = None
    description: EncoderDescription | None = None
    dtype: str | None = None
    memory_bytes: int | None = None
    try:
        description = describe_encoder(path)
        settings = settings_of(options, EncoderOptions())
        description = as_asked(description, settings)
        if description.folder.is_file():
            architecture = description.architecture
        else:
            config = read_config(description.tokenizer_folder)
            architecture = _architecture(config)
        if whole:
            EncoderTokenizer.load(
                description.tokenizer_folder, lower_case=description.lower_case, pairs=bool(description.labels)
            )
        if description.graph is not None:
            import_onnxruntime()
        if description.model is not None:
            dtype, memory_bytes = planned_weights(
                description.folder, description.model, description.max_length, settings.dtype
            )
    except (ModelError, DeviceError, OptionError) as error:
        refusal = str(error) if Path(model).expanduser() == path else str(error).replace(str(path), model)
    is_native = description is not None and description.model is not None
    graph, files = graph_in(path), []
    format: CheckpointFormat = "ONNX"
    if description is not None and description.folder.is_file():
        format, files = "GGUF", [description.folder]
    elif description is not None and is_native:
        format, files = "safetensors", sorted(description.folder.glob("*.safetensors"))
        if not files:
            format, files = "PyTorch", sorted(description.folder.glob(PYTORCH_GLOB))
    elif graph is not None:
        files = sorted(file for file in graph.parent.glob(f"{graph.name}*") if file.is_file())
    return EncoderInspection(
        model=model,
        architecture=architecture,
        is_native=is_native,
        format=format,
        files=[str(file.relative_to(path)) if file != path else file.name for file in files],
        bytes=sum(file.stat().st_size for file in files),
        dtype=dtype,
        memory_bytes=memory_bytes,
        tasks=() if description is None else tasks_of(description),
        is_cross_encoder=None if description is None else len(description.labels) == 1,
        labels=() if description is None else description.labels,
        width=None if description is None else _width(description, config),
        matryoshka=None if description is None else description.matryoshka,
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


def tasks_of(description: EncoderDescription) -> Sequence[Task]:
    """What requests can ask such an encoder for, the main task first."""
    model = description.model
    if description.task == "classify" and model is not None and model.head is not None and model.head.fits_each_token:
        return ("classify", "token_classify")
    if description.task != "embed" or model is None:
        return (description.task,)
    return ("embed", "token_embed", "sparse") if description.token_layers.weights_file else ("embed", "token_embed")


def _architecture(config: Mapping[str, Any]) -> str | None:
    names = config.get("architectures")
    return str(names[0]) if isinstance(names, list) and names else None


def _width(description: EncoderDescription, config: Mapping[str, Any]) -> int | None:
    if not description.pooling or description.foreign_modules or description.dense_folders:
        return None
    if description.model is not None:
        tower = description.model.tower
        dense = [projection.outputs for name, projection in tower.projections if name.startswith("dense.")]
        return [tower.hidden_size * len(description.pooling), *dense][-1]
    sizes = [config[name] for name in _WIDTHS if isinstance(config.get(name), int)]
    return sizes[0] * len(description.pooling) if sizes else None
