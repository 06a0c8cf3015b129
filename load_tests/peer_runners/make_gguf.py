"""Writes a Hugging Face checkpoint or another GGUF file as GGUF, with llama.cpp's packages `gguf` and `llama_cpp`.

usage: make_gguf.py MODEL FORMAT.gguf [IMPORTANCES.npz]

FORMAT is BF16, F32 or a file type of llama.cpp's such as Q8_0. IMPORTANCES has the mean squares of inputs, by the names
of tensors: a GGUF file is then converted as with an importance matrix.
"""

from __future__ import annotations

import ctypes
import json
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import gguf
import llama_cpp
import numpy as np
from gguf.constants import GGMLQuantizationType, TokenType
from numpy.typing import NDArray

_BASE = "BF16"
Config = dict[str, Any]
Tensors = Iterator[tuple[str, Any]]


def main() -> None:
    """Write the file; of a checkpoint, also the bfloat16 file next to it that others are converted from."""
    model, target = Path(sys.argv[1]), Path(sys.argv[2])
    if model.is_file():
        quantize(model, target, dict(np.load(sys.argv[3])) if len(sys.argv) > 3 else {})
        return
    base = target.with_name(f"{_BASE}.gguf")
    if not base.exists():
        write_base(model, base)
    if target != base:
        quantize(base, target)


def write_base(model: Path, target: Path) -> None:
    """The checkpoint in bfloat16. Raises ValueError for an architecture that is not in ARCHITECTURES."""
    config = json.loads((model / "config.json").read_text())
    name = config["architectures"][0]
    if name not in ARCHITECTURES:
        raise ValueError(f"{name} cannot be written as GGUF: only {', '.join(ARCHITECTURES)} can")
    architecture, converted = ARCHITECTURES[name]
    part = target.with_suffix(".part")
    writer = gguf.GGUFWriter(part, gguf.MODEL_ARCH_NAMES[architecture])
    writer.add_name(model.name)
    writer.add_file_type(gguf.LlamaFileType.MOSTLY_BF16)
    add_shape(writer, config)
    add_tokenizer(writer, model, config["vocab_size"])
    names = gguf.get_tensor_name_map(architecture, config["num_hidden_layers"])
    for name, array in converted(writer, config, tensors(model)):
        kind = GGMLQuantizationType.BF16 if array.ndim > 1 and "conv1d" not in name else GGMLQuantizationType.F32
        target_name = names.get_name(name, try_suffixes=(".weight", ".bias"))
        if target_name is None:
            raise ValueError(f"{model} has {name}, which has no name in GGUF files")
        writer.add_tensor(target_name, gguf.quants.quantize(array, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    part.rename(target)


def add_shape(writer: gguf.GGUFWriter, config: Config) -> None:
    """Add the fields that all architectures have."""
    heads = config["num_attention_heads"]
    head_dim = config.get("head_dim") or config["hidden_size"] // heads
    rope = config.get("rope_parameters") or {"rope_theta": config.get("rope_theta", 10000.0)}
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(heads)
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_key_length(head_dim)
    writer.add_value_length(head_dim)
    writer.add_rope_dimension_count(int(head_dim * rope.get("partial_rotary_factor", 1)))
    writer.add_rope_freq_base(rope["rope_theta"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_vocab_size(config["vocab_size"])


def of_llama(writer: gguf.GGUFWriter, config: Config, given: Tensors) -> Tensors:
    """Llama: queries and keys in another order."""
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    for name, array in given:
        if name.endswith(("q_proj.weight", "k_proj.weight")):
            array = interleave(array, heads if "q_proj" in name else kv_heads)
        yield name, array


def of_qwen3_moe(writer: gguf.GGUFWriter, config: Config, given: Tensors) -> Tensors:
    """Qwen3 with experts, which are one tensor a layer in GGUF files."""
    count = config.get("num_experts") or config["num_local_experts"]
    writer.add_expert_count(count)
    writer.add_expert_used_count(config["num_experts_per_tok"])
    writer.add_expert_feed_forward_length(config["moe_intermediate_size"])
    found: dict[str, dict[int, Any]] = {}
    for name, array in given:
        before, of_expert, after = name.partition(".experts.")
        if not of_expert:
            yield name, array
            continue
        number, _, matrix = after.partition(".")
        stacked = f"{before}.experts.{matrix}"
        of_matrix = found.setdefault(stacked, {})
        of_matrix[int(number)] = array
        if len(of_matrix) == count:
            yield stacked, np.stack([of_matrix[i] for i in range(count)])
            del found[stacked]


def of_qwen3_5(writer: gguf.GGUFWriter, config: Config, given: Tensors) -> Tensors:
    """Qwen3.5 with as many key heads as value heads: then GGUF files have the same order. Else raises ValueError."""
    keys, values = config["linear_num_key_heads"], config["linear_num_value_heads"]
    if keys != values:
        raise ValueError(
            f"{keys} key heads and {values} value heads cannot be written as GGUF: only as many of both can"
        )
    writer.add_ssm_conv_kernel(config["linear_conv_kernel_dim"])
    writer.add_ssm_group_count(keys)
    writer.add_ssm_time_step_rank(values)
    writer.add_ssm_state_size(config["linear_key_head_dim"])
    writer.add_ssm_inner_size(config["linear_value_head_dim"] * values)
    writer.add_full_attention_interval(config["layer_types"].index("full_attention") + 1)
    writer.add_rope_dimension_sections([11, 11, 10, 0])  # of images; all are at one position in a text
    for name, array in given:
        name = name.replace(".dt_bias", ".dt_proj.bias")
        if name.endswith(".A_log"):
            array = -np.exp(array)
        elif name.endswith(".conv1d.weight"):
            array = array.squeeze(1)
        elif name.endswith("norm.weight") and not name.endswith("linear_attn.norm.weight"):
            array = array + 1
        yield name, array


ARCHITECTURES: dict[str, tuple[gguf.MODEL_ARCH, Callable[[gguf.GGUFWriter, Config, Tensors], Tensors]]] = {
    "LlamaForCausalLM": (gguf.MODEL_ARCH.LLAMA, of_llama),
    "Qwen3MoeForCausalLM": (gguf.MODEL_ARCH.QWEN3MOE, of_qwen3_moe),
    "Qwen3_5ForCausalLM": (gguf.MODEL_ARCH.QWEN35, of_qwen3_5),
}
"""What can be written: the architecture in GGUF files, and what adds its metadata and renames its tensors."""


def add_tokenizer(writer: gguf.GGUFWriter, model: Path, vocab_size: int) -> None:
    """The byte-level BPE of tokenizer.json."""
    tokenizer = json.loads((model / "tokenizer.json").read_text())
    by_id = {i: (token, TokenType.NORMAL) for token, i in tokenizer["model"]["vocab"].items()}
    by_id |= {
        added["id"]: (added["content"], TokenType.CONTROL if added["special"] else TokenType.USER_DEFINED)
        for added in tokenizer["added_tokens"]
    }
    entries = [by_id.get(i, (f"[PAD{i}]", TokenType.UNUSED)) for i in range(vocab_size)]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list([token for token, _ in entries])
    writer.add_token_types([kind for _, kind in entries])
    gguf.SpecialVocab(model, load_merges=True, n_vocab=vocab_size).add_to_gguf(writer)


def tensors(model: Path) -> Iterator[tuple[str, Any]]:
    """All weights of a checkpoint in float32."""
    for file in sorted(model.glob("*.safetensors")):
        with file.open("rb") as stream:
            length = int.from_bytes(stream.read(8), "little")
            header = json.loads(stream.read(length))
        data = np.memmap(file, np.uint8, "r", offset=8 + length)
        header.pop("__metadata__", None)
        for name, entry in header.items():
            start, end = entry["data_offsets"]
            yield name, as_float32(data[start:end], entry["dtype"]).reshape(entry["shape"])


def as_float32(raw: Any, dtype: str) -> Any:
    """The bytes of a tensor as float32."""
    if dtype == "BF16":
        return (raw.view(np.uint16).astype(np.uint32) << 16).view(np.float32)
    return raw.view({"F16": np.float16, "F32": np.float32}[dtype]).astype(np.float32)


def interleave(weight: Any, num_heads: int) -> Any:
    """Rows in the order of llama.cpp, which rotates neighbours where Hugging Face rotates halves."""
    rows, columns = weight.shape
    return weight.reshape(num_heads, 2, rows // num_heads // 2, columns).swapaxes(1, 2).reshape(rows, columns)


def quantize(base: Path, target: Path, importances: Mapping[str, NDArray[np.float32]] = MappingProxyType({})) -> None:
    """Convert a GGUF file with llama.cpp to the type in the name of `target`. Raises RuntimeError if this fails."""
    entries = (llama_cpp.llama_model_imatrix_data * (len(importances) + 1))()  # the last one has no name
    for entry, (name, squares) in zip(entries, importances.items(), strict=False):
        entry.name, entry.size = name.encode(), squares.size
        entry.data = squares.ctypes.data_as(ctypes.POINTER(ctypes.c_float))
    options = llama_cpp.llama_model_quantize_default_params()
    options.allow_requantize = True  # a base that is quantized itself counts as exact
    name = "LLAMA_FTYPE_ALL_F32" if target.stem == "F32" else f"LLAMA_FTYPE_MOSTLY_{target.stem}"
    options.ftype = getattr(llama_cpp, name)
    if importances:
        options.imatrix = ctypes.cast(entries, ctypes.POINTER(llama_cpp.llama_model_imatrix_data))
    part = target.with_suffix(".part")
    if status := llama_cpp.llama_model_quantize(str(base).encode(), str(part).encode(), options):
        raise RuntimeError(f"llama_model_quantize to {target} returned {status}")
    part.rename(target)


if __name__ == "__main__":
    main()
