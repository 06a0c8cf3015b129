"""Checkpoints that are stored in fewer bits: from what config.json says of them to the reader of their layers."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Literal, Protocol, get_args, runtime_checkable

from ...errors import ModelError
from ...files.wording import one_line, shown
from ...models.config import ConfigReader
from ..contents import Contents
from ..quantization import Method, is_method
from ..stored import StoredMatrix
from .layer import LayerTensors

if TYPE_CHECKING:
    from .awq import Awq
    from .bitsandbytes import BitsAndBytes
    from .compressed_tensors import CompressedTensors
    from .fp8 import Fp8
    from .gptq import Gptq
    from .mxfp4 import Mxfp4

__all__ = [
    "QUANTIZATION_ALIASES",
    "SETTINGS_FILES",
    "CheckpointMethod",
    "ExpertReader",
    "LayerReader",
    "LayerTensors",
    "layer_reader",
    "method_in_words",
    "method_to_load_with",
    "readers",
]

CheckpointMethod = Literal["gptq", "awq", "compressed-tensors", "fp8", "bitsandbytes", "mxfp4", "gguf"]
QUANTIZATION_ALIASES = {
    "auto_awq": "awq",
    "auto_gptq": "gptq",
    "awq_marlin": "awq",
    "gpt_oss_mxfp4": "mxfp4",
    "gptq_marlin": "gptq",
}
"""vLLM's names for some of them, and for its kernels."""
SETTINGS_FILES = {"quantize_config.json": "gptq", "quant_config.json": "awq"}
"""Where early checkpoints of a method have what others have as `quantization_config` in config.json."""


class LayerReader(Protocol):
    """A method of quantization. Which layers are quantized, their tensors tell.

    `name` is its quant_method. `works` and `refused` say in Markdown what of it is read; `docs/models.md` has them.
    """

    name: str
    works: str
    refused: str

    def matrix(self, layer: LayerTensors) -> StoredMatrix | None:
        """The layer's matrix; None if the layer is not quantized. Raises ModelError, naming the tensor."""


@runtime_checkable
class ExpertReader(LayerReader, Protocol):
    """A method that quantizes stacks of experts' matrices, which in floats are tensors `[experts, inputs, outputs]`."""

    def expert(self, experts: LayerTensors, name: str, index: int) -> StoredMatrix | None:
        """The matrix of expert `index` of the stack `name`; None if the stack is not quantized. Raises ModelError."""


def layer_reader(config: Mapping[str, Any]) -> LayerReader | None:
    """The reader of the layers of a config.json's model; None if it is not quantized.

    Raises ModelError for a method that is not supported, or one of its settings.
    """
    found = _read_method(config)
    if found is None:
        return None
    method, fields = found
    by_name = {reader.name: reader for reader in readers()}
    if method not in by_name:
        raise ModelError(
            f"config.json: checkpoints quantized by {shown(method)} are not supported; supported are "
            f"{', '.join(by_name)}. Take one of these, or the model's checkpoint without quantization"
        )
    return by_name[method](ConfigReader(fields, "config.json: quantization_config"))


def method_in_words(config: Mapping[str, Any]) -> str | None:
    """How a config.json's model is quantized, whether that is supported or not; None if it is not."""
    found = _read_method(config)
    if found is None:
        return None
    method, fields = found
    facts = [
        f"{name} {fields[name]}" for name in ("bits", "w_bit", "group_size", "desc_act", "format") if name in fields
    ]
    return one_line(f"{method} ({', '.join(facts)})" if facts else method)


def readers() -> list[type[Gptq | Awq | CompressedTensors | Fp8 | BitsAndBytes | Mxfp4]]:
    """One for each method that is supported."""
    # Most checkpoints are not quantized, and start without them.
    from .awq import Awq
    from .bitsandbytes import BitsAndBytes
    from .compressed_tensors import CompressedTensors
    from .fp8 import Fp8
    from .gptq import Gptq
    from .mxfp4 import Mxfp4

    return [Gptq, Awq, CompressedTensors, Fp8, BitsAndBytes, Mxfp4]


def method_to_load_with(
    asked: Method | CheckpointMethod | None, config: Mapping[str, Any], contents: Callable[[], Contents] | None
) -> Method | None:
    """The method that a device quantizes to by --quantization; None if it names the checkpoint's own, or nothing.

    fp8 is both: it names the method of a checkpoint that has it, and quantizes one in floats. Raises ModelError for a
    checkpoint's method that this one, with its config.json and contents, does not have.
    """
    if asked is None or (is_method(asked) and asked != "fp8"):
        return asked
    if contents is not None and (held := contents()).kind == "GGUF":
        if asked == "gguf":
            return None
        types = ", ".join(stored.name for stored in held.formats)
        raise ModelError(
            f"--quantization {asked} names the method of a checkpoint, but this one is a GGUF file with {types}: leave "
            "the option out, and the weights stay as they are"
        )
    found = _read_method(config)
    if found is None and is_method(asked):
        return asked
    if found is None:
        raise ModelError(
            f"--quantization {asked} names the method of a checkpoint, but this one is not quantized: leave the option "
            f"out, or quantize while loading with one of {', '.join(get_args(Method))}"
        )
    if found[0] != asked:
        raise ModelError(
            f"--quantization {asked} names the method of a checkpoint, but this one's is {shown(found[0])}: leave "
            "the option out to use the checkpoint's own method"
        )
    return None


def _read_method(config: Mapping[str, Any]) -> tuple[str, Mapping[str, Any]] | None:
    fields = config.get("quantization_config") or config.get("compression_config")
    if fields is None:
        return None
    if not isinstance(fields, dict):
        raise ModelError(f"config.json: quantization_config must be an object, got {shown(fields)}")
    method = fields.get("quant_method") or fields.get("method")
    if method is None and "config_groups" in fields:
        method = "compressed-tensors"
    if not isinstance(method, str):
        raise ModelError("config.json: quantization_config does not name its quant_method")
    return method, fields
