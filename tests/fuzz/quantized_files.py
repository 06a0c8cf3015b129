"""The harness of quantized checkpoints: a JSON input describes a layer's tensors and config.

Such files are well-formed, whatever they hold; the harness of safetensors is for those that are not. So changes reach
the readers of the layers.
"""

from __future__ import annotations

import dataclasses
import json
import math
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from fuzz.harness import Harness, in_folder, written

from engine.weights.quantized import checkpoint_formats
from tidewheel.engine.models import describe
from tidewheel.engine.models.spec import tensor_shapes
from tidewheel.engine.models.tensor_ref import TensorRef
from tidewheel.engine.weights import open_source
from tidewheel.engine.weights.finite import require_finite
from tidewheel.engine.weights.tensor import to_float32

CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"], "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1,
    "num_attention_heads": 2, "num_key_value_heads": 1, "vocab_size": 20, "max_position_embeddings": 64,
}  # fmt: skip
UP = "model.layers.0.mlp.up_proj"
EXPERTS = "model.layers.0.mlp.experts.up"
MAX_BYTES = 1 << 14  # of a tensor
# Of the file's dtypes, bits of an element.
BITS = {
    "BOOL": 8, "U8": 8, "I8": 8, "F8_E4M3": 8, "F8_E5M2": 8, "I16": 16, "U16": 16, "F16": 16, "BF16": 16, "I32": 32,
    "U32": 32, "F32": 32, "I64": 64, "U64": 64, "F64": 64,
}  # fmt: skip
DTYPES = {
    "uint8": "U8", "int8": "I8", "float8_e4m3fn": "F8_E4M3", "int32": "I32", "int64": "I64", "float16": "F16",
    "float32": "F32",
}  # fmt: skip
SEEDS = (
    "gptq-4", "gptq-3-order", "awq", "packed-4-zeros", "packed-4-order", "int8-zeros", "e4m3-block", "fp8", "mxfp4",
    "nvfp4", "nf4-double", "fp4-rest", "llm-int8",
)  # fmt: skip


def content(value: Any, count: int) -> bytes:
    """`count` bytes: those of a text or of a list of bytes, over and over."""
    data = value.encode("utf-8", "replace") if isinstance(value, str) else b"\0"
    if isinstance(value, list):
        data = bytes(number & 255 for number in value if isinstance(number, int))
    return (data * (count // max(len(data), 1) + 1))[:count].ljust(count, b"\0")


def described(tensors: Any) -> dict[str, tuple[str, list[int], bytes]]:
    """The tensors of an input that a file can have: `[dtype, shape, content]` by their names."""
    found = {}
    for name, fields in tensors.items() if isinstance(tensors, dict) else ():
        if not isinstance(fields, list) or len(fields) != 3 or not isinstance(fields[1], list) or len(fields[1]) > 6:
            continue
        dtype, shape, value = fields
        if not all(type(length) is int and 0 <= length <= MAX_BYTES for length in shape):
            continue
        count = math.prod(shape) * BITS.get(dtype, 0) // 8 if isinstance(dtype, str) else MAX_BYTES + 1
        if isinstance(dtype, str) and dtype in BITS and count <= MAX_BYTES:
            found[name] = (dtype, shape, content(value, count))
    return found


def checkpoint(tensors: Mapping[str, tuple[str, list[int], bytes]]) -> bytes:
    header, data = {}, b""
    for name, (dtype, shape, value) in tensors.items():
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [len(data), len(data) + len(value)]}
        data += value
    head = json.dumps(header).encode()
    return struct.pack("<Q", len(head)) + head + data


def floats() -> dict[str, tuple[str, list[int], bytes]]:
    """All that is not in the quantized layer."""
    what = describe(CONFIG)
    shapes = tensor_shapes(what.spec)
    names = {what.tensors[name].name: shape for name, shape in shapes.items()}
    del names[f"{UP}.weight"]
    return {name: ("F16", list(shape), bytes(2 * math.prod(shape))) for name, shape in names.items()}


FLOATS = floats()


def files(data: bytes) -> dict[str, bytes]:
    try:
        value = json.loads(data)
    except (ValueError, RecursionError):
        value = None
    if not isinstance(value, dict):
        return {"config.json": b"{}"}
    config = {**CONFIG, "quantization_config": value.get("config")}
    return {
        "config.json": json.dumps(config).encode(),
        "model.safetensors": checkpoint(FLOATS | described(value.get("tensors"))),
    }


def read_layer(folder: Path) -> None:
    source = open_source(str(folder))
    what = describe(source.config)
    method = source.config["quantization_config"]
    if isinstance(method, dict) and method.get("quant_method") == "mxfp4":
        ref = TensorRef(EXPERTS, index=1, transpose=True)
        what = dataclasses.replace(what, tensors={**what.tensors, "layers.0.up.weight": ref})
    tensor = source.weights(what)["layers.0.up.weight"]
    require_finite([tensor])
    assert to_float32(tensor).shape == (32, 32)


def seed(config: Mapping[str, Any], prefix: str, parts: Mapping[str, checkpoint_formats.Array]) -> dict[str, Any]:
    tensors = {}
    for part, array in parts.items():
        raw: Any = list(array.tobytes())
        # Most numbers do not matter, and a fuzzer is quicker with short inputs.
        short = raw[:16] if part.endswith(("weight", "packed", "blocks", "qweight", "scale", "scales", "map")) else raw
        if "quant_state" in part:
            short = array.tobytes().decode()
        tensors[f"{prefix}{part}"] = [DTYPES[array.dtype.name], list(array.shape), short]
    return {"config": config, "tensors": tensors}


def seeds() -> list[bytes]:
    random = np.random.default_rng(0)
    made = []
    for name in SEEDS:
        layer = checkpoint_formats.FORMATS[name]
        made.append(seed(layer.config, f"{UP}.", layer.make(random, 32, 32)[0]))
    experts, _ = checkpoint_formats.mxfp4_experts(random, EXPERTS, 2, 32, 32)
    return written(*made, seed(checkpoint_formats.MXFP4, "", experts))


QUANTIZED: dict[str, Harness] = {"quantized": Harness(in_folder(files, read_layer, names_files=True), seeds())}
