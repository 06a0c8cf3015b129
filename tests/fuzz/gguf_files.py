"""The harnesses of GGUF files: of their bytes, and of files that are described."""

from __future__ import annotations

import contextlib
import tempfile
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from fuzz import described_gguf
from fuzz.harness import Harness, in_folder

from tidewheel.engine.errors import ModelError
from tidewheel.engine.media.families import vision_of
from tidewheel.engine.models import describe
from tidewheel.engine.models.generation import sampling_defaults
from tidewheel.engine.weights import open_source
from tidewheel.engine.weights.finite import require_finite
from tidewheel.engine.weights.gguf.reader import read_gguf
from tidewheel.engine.weights.gguf.vision.tower import GgufTower
from tidewheel.server.chat.templates import ChatTemplate

_HALF = gguf.GGMLQuantizationType.F16
_LAYER = {
    "attn_norm": (8,), "attn_q": (8, 8), "attn_k": (4, 8), "attn_v": (4, 8), "attn_output": (8, 8), "ffn_norm": (8,),
    "ffn_gate": (32, 8), "ffn_up": (32, 8), "ffn_down": (8, 32),
}  # fmt: skip


def read_gguf_model(folder: Path) -> None:
    source = open_source(str(folder))
    description = describe(source.config)
    sampling_defaults(source.generation())
    weights = source.weights(description)
    require_finite([weights[name] for name in weights])
    tokenizer = source.tokenizer()
    tokenizer.decode(tokenizer.encode("hi ab <e>")[:20])
    if tokenizer.chat_template is not None:
        with contextlib.suppress(ModelError):  # which does not know where the template is from
            ChatTemplate(tokenizer.chat_template, tokenizer.special_tokens_map)


def _tokenizer(writer: Any, kind: str) -> None:
    words = ["a", "b", "h", "i", "ab", "Ġ"] if kind == "gpt2" else ["▁", "a", "b", "h", "i", "ab"]
    tokens = ["<unk>", "<b>", "<e>", *words]
    writer.add_tokenizer_model(kind)
    writer.add_token_list(tokens)
    writer.add_token_types([2, 3, 3, *[1] * 6])
    if kind == "gpt2":
        writer.add_tokenizer_pre("qwen2")
        writer.add_token_merges(["a b"])
    else:
        writer.add_token_scores([0.0] * 3 + [-float(i) for i in range(6)])
        writer.add_unk_token_id(0)
        writer.add_add_space_prefix(True)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_add_bos_token(True)
    writer.add_chat_template("{% for m in messages %}<b>{{ m.content }}<e>{% endfor %}")


def model_file(arch: str, tokenizer: str) -> bytes:
    """A model of one layer, whose matrices are F16, F32 and Q4_0."""
    with tempfile.TemporaryDirectory() as folder:
        writer = gguf.GGUFWriter(Path(folder) / "model.gguf", arch)
        writer.add_context_length(64)
        writer.add_embedding_length(8)
        writer.add_block_count(1)
        writer.add_feed_forward_length(32)
        writer.add_head_count(2)
        writer.add_head_count_kv(1)
        writer.add_layer_norm_rms_eps(1e-5)
        writer.add_rope_freq_base(10000.0)
        writer.add_sampling_temp(0.5)
        _tokenizer(writer, tokenizer)
        writer.add_tensor("token_embd.weight", np.zeros((9, 8), np.float16), raw_dtype=_HALF)
        writer.add_tensor("output_norm.weight", np.ones(8, np.float32))
        if arch == "llama":
            writer.add_tensor("rope_freqs.weight", np.ones(2, np.float32))
        for name, shape in _LAYER.items():
            data, kind = np.ones(shape, np.float32), gguf.GGMLQuantizationType.F32
            if len(shape) == 2:
                kind = gguf.GGMLQuantizationType.Q4_0 if name == "ffn_down" else _HALF
            writer.add_tensor(f"blk.0.{name}.weight", gguf.quants.quantize(data, kind), raw_dtype=kind)
            if arch == "qwen2" and name in ("attn_q", "attn_k", "attn_v"):
                writer.add_tensor(f"blk.0.{name}.bias", np.zeros(shape[0], np.float32))
        return _written(writer)


def _written(writer: Any) -> bytes:
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    content: bytes = writer.path.read_bytes()
    return content


def read_tower(folder: Path) -> None:
    tower = GgufTower(read_gguf(folder / "mmproj.gguf"))
    vision = vision_of(tower.vision_config({"hidden_size": 8, "rms_norm_eps": 1e-5}), tower.processor())
    assert vision is not None
    weights = tower.tower_weights(vision.spec, vision.tensors)
    require_finite([weights[name] for name in weights])


def tower_file() -> bytes:
    """A tower of one layer, of Qwen2-VL."""
    with tempfile.TemporaryDirectory() as folder:
        writer = gguf.GGUFWriter(Path(folder) / "mmproj.gguf", "clip")
        writer.add_string("clip.projector_type", "qwen2vl_merger")
        sizes = {"image_size": 56, "patch_size": 4, "block_count": 1, "attention.head_count": 2}
        for key, size in sizes.items():
            writer.add_uint32(f"clip.vision.{key}", size)
        writer.add_float32("clip.vision.attention.layer_norm_epsilon", 1e-6)
        writer.add_array("clip.vision.image_mean", [0.5] * 3)
        writer.add_array("clip.vision.image_std", [0.25] * 3)
        square, vector = (8, 8), (8,)
        shapes = {f"v.blk.0.attn_{part}": square for part in ("q", "k", "v", "out")}
        shapes |= {"v.blk.0.ffn_up": (32, 8), "v.blk.0.ffn_down": (8, 32), "mm.0": (32, 32), "mm.2": (8, 32)}
        for name, shape in shapes.items():
            kind = gguf.GGMLQuantizationType.Q8_0 if shape[1] % 32 == 0 else _HALF
            writer.add_tensor(f"{name}.weight", gguf.quants.quantize(np.ones(shape, np.float32), kind), raw_dtype=kind)
            writer.add_tensor(f"{name}.bias", np.zeros(shape[0], np.float32))
        for name in ("v.blk.0.ln1", "v.blk.0.ln2", "v.post_ln"):
            writer.add_tensor(f"{name}.weight", np.ones(vector, np.float32))
            writer.add_tensor(f"{name}.bias", np.zeros(vector, np.float32))
        for name in ("v.patch_embd.weight", "v.patch_embd.weight.1"):
            writer.add_tensor(name, np.ones((8, 3, 4, 4), np.float32))
        return _written(writer)


GGUF: dict[str, Harness] = {
    "mmproj": Harness(in_folder(lambda data: {"mmproj.gguf": data}, read_tower, names_files=True), [tower_file()]),
    "gguf": Harness(
        in_folder(lambda data: {"model.gguf": data}, read_gguf_model, names_files=True),
        [model_file("llama", "llama"), model_file("qwen2", "gpt2")],
    ),
    "gguf-described": Harness(
        in_folder(described_gguf.files, read_gguf_model, names_files=True), described_gguf.seeds()
    ),
}
