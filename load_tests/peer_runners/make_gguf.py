"""Writes a Hugging Face Llama checkpoint as GGUF files, with llama.cpp's own packages `gguf` and `llama_cpp`.

usage: make_gguf.py MODEL FORMAT.gguf       FORMAT: BF16, or a file type of llama.cpp's such as Q8_0
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gguf
import llama_cpp
import numpy as np
from gguf.constants import GGMLQuantizationType, TokenType

_BASE = "BF16"


def main() -> None:
    """Write the file, and beside it the one in bfloat16 that others are made from."""
    model, target = Path(sys.argv[1]), Path(sys.argv[2])
    target.parent.mkdir(parents=True, exist_ok=True)
    base = target.with_name(f"{_BASE}.gguf")
    if not base.exists():
        write_base(model, base)
    if target != base:
        quantize(base, target)


def write_base(model: Path, target: Path) -> None:
    """The checkpoint in bfloat16. Raises ValueError for another architecture than Llama's."""
    config = json.loads((model / "config.json").read_text())
    if config["architectures"] != ["LlamaForCausalLM"]:
        raise ValueError(f"{config['architectures']} cannot be written as GGUF: only LlamaForCausalLM can")
    part = target.with_suffix(".part")
    writer = gguf.GGUFWriter(part, "llama")
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    head_dim = config.get("head_dim") or config["hidden_size"] // heads
    rope = config.get("rope_parameters") or {"rope_theta": config.get("rope_theta", 10000.0)}
    writer.add_name(model.name)
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(heads)
    writer.add_head_count_kv(kv_heads)
    writer.add_key_length(head_dim)
    writer.add_value_length(head_dim)
    writer.add_rope_dimension_count(head_dim)
    writer.add_rope_freq_base(rope["rope_theta"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_vocab_size(config["vocab_size"])
    writer.add_file_type(gguf.LlamaFileType.MOSTLY_BF16)
    add_tokenizer(writer, model, config["vocab_size"])
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, config["num_hidden_layers"])
    for name, array in tensors(model):
        if name.endswith(("q_proj.weight", "k_proj.weight")):
            array = interleave(array, heads if "q_proj" in name else kv_heads)
        kind = GGMLQuantizationType.BF16 if array.ndim == 2 else GGMLQuantizationType.F32
        target_name = names.get_name(name, try_suffixes=(".weight", ".bias"))
        writer.add_tensor(target_name, gguf.quants.quantize(array, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    part.rename(target)


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
    writer.add_tokenizer_pre("default")
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


def quantize(base: Path, target: Path) -> None:
    """Convert a GGUF file with llama.cpp to the type that `target` is named for. Raises RuntimeError if it does not."""
    options = llama_cpp.llama_model_quantize_default_params()
    options.ftype = getattr(llama_cpp, f"LLAMA_FTYPE_MOSTLY_{target.stem}")
    part = target.with_suffix(".part")
    if status := llama_cpp.llama_model_quantize(str(base).encode(), str(part).encode(), options):
        raise RuntimeError(f"llama_model_quantize to {target} returned {status}")
    part.rename(target)


if __name__ == "__main__":
    main()
