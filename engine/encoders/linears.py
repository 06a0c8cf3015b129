"""Linear layers beside an encoder: sentence-transformers' Dense modules, ColBERT's, and BGE-M3's files."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Literal

from ..declaring.record import record
from ..errors import ModelError
from ..files.folder import read_json
from ..files.reading import is_there
from ..models.config import ConfigReader
from ..models.spec import ProjectionSpec
from ..weights.checkpoint import open_checkpoint, open_file
from ..weights.stored import Stored

# The activations of a Dense module, by the last part of their names in torch.
_DENSE_ACTIVATIONS: Mapping[str, Literal["gelu", "relu", "silu", "tanh"] | None] = {
    "GELU": "gelu",
    "Identity": None,
    "ReLU": "relu",
    "SiLU": "silu",
    "Tanh": "tanh",
}
_MOST_NUMBERS = 1 << 16  # of a vector


@record(frozen=True, slots=True)
class Linear:
    """A linear layer: its `tensors` are `weight` and, if it has one, `bias`. `activation` is what `spec` lacks."""

    spec: ProjectionSpec
    tensors: Stored
    activation: str | None = None


@record(frozen=True, slots=True)
class TokenLayers:
    """What is computed of each token's row beside the encoder.

    Its vector: by Dense modules in `dense_folders`, one after the other, by the `module` of the model's own checkpoint,
    or by the layer in `vectors_file`. Its weight: by the layer in `weights_file`.
    """

    dense_folders: tuple[Path, ...] = ()
    module: str | None = None
    vectors_file: Path | None = None
    weights_file: Path | None = None

    def __bool__(self) -> bool:
        return bool(self.dense_folders) or any((self.module, self.vectors_file, self.weights_file))


def layers_beside(
    checkpoint: Stored, folder: Path, size: int, dense_folders: Sequence[Path], tokens: TokenLayers
) -> dict[str, Linear]:
    """The linear layers beside the encoder of `size` in `folder`, by the names of their projections.

    `dense.0` and so on are in `dense_folders`, behind the pooling. `tokens.0` and so on make the vectors of tokens, and
    `sparse` their weights. Raises ModelError.
    """
    vectors = [*map(dense_module, tokens.dense_folders)]
    if tokens.module is not None:
        vectors.append(_linear(checkpoint, tokens.module, folder))
    if tokens.vectors_file is not None:
        vectors.append(_read_file(tokens.vectors_file))
    for linear in vectors:
        if linear.spec.inputs != size:
            raise ModelError(
                f"{folder}: a layer for the vectors of tokens takes {linear.spec.inputs} numbers, and gets {size}"
            )
        size = linear.spec.outputs
    linears = {f"dense.{index}": dense_module(own) for index, own in enumerate(dense_folders)}
    linears |= {f"tokens.{index}": linear for index, linear in enumerate(vectors)}
    if tokens.weights_file is not None:
        linears["sparse"] = _read_file(tokens.weights_file)
        if linears["sparse"].spec.outputs != 1:
            raise ModelError(f"{tokens.weights_file} must have a matrix of one row, which gives a token its weight")
    return linears


def linear_file(folder: Path, name: str) -> Path | None:
    """The file of a layer of its own, in safetensors or as torch saves it; None if there is none."""
    return next((path for end in ("safetensors", "pt") if is_there(path := folder / f"{name}.{end}")), None)


def dense_module(folder: Path) -> Linear:
    """A Dense module. Its activation is tanh where its config is silent. Raises ModelError."""
    path = folder / "config.json"
    config = ConfigReader(read_json(path), str(path))
    config.refuse("use_residual", False)
    name = str(config.raw("activation_function") or "Tanh").rpartition(".")[2]
    if name not in _DENSE_ACTIVATIONS:
        raise config.error("activation_function", "one of torch's " + ", ".join(_DENSE_ACTIVATIONS))
    activation = _DENSE_ACTIVATIONS[name]
    spec = ProjectionSpec(
        config.integer("in_features"),
        config.integer("out_features"),
        bias=config.flag("bias", True),
        activation=None if activation == "tanh" else activation,
    )
    return Linear(spec, _of_module(open_checkpoint(folder), "linear"), activation)


def _linear(checkpoint: Stored, module: str, place: Path) -> Linear:
    """The layer `module` of a checkpoint, of the size that it has there; an empty name for a file of one layer."""
    tensors = _of_module(checkpoint, module)
    shape = tensors["weight"].shape if "weight" in tensors else ()
    if len(shape) != 2 or not 1 <= min(shape) <= max(shape) <= _MOST_NUMBERS:
        raise ModelError(
            f"{place} must have a matrix {f'{module}.weight'.lstrip('.')} of at most {_MOST_NUMBERS} rows and columns"
        )
    return Linear(ProjectionSpec(shape[1], shape[0], bias="bias" in tensors), tensors)


def _read_file(path: Path) -> Linear:
    if path.suffix == ".safetensors":
        return _linear(open_file(path), "", path)
    from ..weights.pytorch_file import NotPlainTensorsError, open_pytorch_file

    try:
        return _linear(open_pytorch_file(path), "", path)
    except NotPlainTensorsError as error:
        raise ModelError(
            f"{path} holds more than tensors, or is broken, and is not read: {error}. Save the layer's weight and bias "
            f"as {path.with_suffix('.safetensors').name}"
        ) from error


def _of_module(checkpoint: Stored, module: str) -> Stored:
    prefix = f"{module}." if module else ""
    return {kind: checkpoint[f"{prefix}{kind}"] for kind in ("weight", "bias") if f"{prefix}{kind}" in checkpoint}
