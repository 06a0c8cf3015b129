"""Files that Ollama's own converter wrote, in llama.cpp's words: the vision tower lies beside the language model.

Its names: https://github.com/ollama/ollama/tree/main/convert.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np

from ...errors import ModelError
from ...models.config import MAX_LAYERS
from .fields import Fields
from .reader import GgufFile

Metadata = dict[str, Any]

_IN_LAYER = re.compile(r"(v\.blk\.\d{1,6})\.(.+)\.(weight|bias)")
_MODULES = {
    "attn_output": "attn_out",
    "attn_norm": "ln1",
    "layer_norm1": "ln1",
    "ffn_norm": "ln2",
    "layer_norm2": "ln2",
    "mlp.fc1": "ffn_up",
    "mlp.fc2": "ffn_down",
}
# Of the tower's metadata, what has the same name in both.
_SAME = (
    "image_size",
    "patch_size",
    "embedding_length",
    "feed_forward_length",
    "block_count",
    "attention.head_count",
    "attention.layer_norm_epsilon",
    "spatial_merge_size",
    "window_size",
)
_SCALED_GEMMAS = (34, 48, 62)  # the layers of 4B, 12B and 27B, of whose rope old files do not say the factor 8
_MROPE = (16, 24, 24)
_SPLITTING = "tokenizer.ggml.pre"
_ROPE_THETA = 1e4  # of Llama 4's tower


class _Kind(NamedTuple):
    """An architecture: the tensor by which its files are known, the projector type, modules by name, and metadata."""

    known_by: str
    projector: str
    modules: Mapping[str, str]
    metadata: Callable[[GgufFile], Metadata]
    architecture: str | None = None  # what llama.cpp calls it, if not the same
    splitting: str | None = None  # how texts are split into words, which its converter knows of few models


def in_llama_cpp_words(file: GgufFile) -> GgufFile:
    """The file with llama.cpp's names for tensors and metadata, if Ollama's converter wrote it with a vision tower.

    Any other file is returned as it is. Raises ModelError, naming the file and the key, for metadata that has no such
    words.
    """
    name = file.metadata.get("general.architecture")
    kind = _KINDS.get(name) if isinstance(name, str) else None
    if kind is None or kind.known_by not in file.tensors:
        return file
    own = f"{name}."
    prefix = f"{kind.architecture or name}."
    metadata: Metadata = {
        prefix + key.removeprefix(own) if key.startswith(own) else key: value for key, value in file.metadata.items()
    }
    said = {f"clip.vision.{key}": file.metadata.get(f"{own}vision.{key}") for key in _SAME}
    metadata |= {key: value for key, value in said.items() if value is not None}
    metadata |= {"clip.has_vision_encoder": True, "clip.projector_type": kind.projector}
    metadata |= {"general.architecture": prefix.removesuffix("."), **kind.metadata(file)}
    if kind.splitting is not None and metadata.get(_SPLITTING) == "default":
        metadata[_SPLITTING] = kind.splitting
    tensors = {}
    for tensor in file.tensors.values():
        renamed = _renamed(tensor.name, kind.modules)
        if renamed in tensors:
            raise ModelError(f"{tensor.origin} is in the file twice, as {renamed} too")
        tensors[renamed] = replace(tensor, name=renamed)
    return GgufFile(file.path, metadata, tensors)


def _renamed(name: str, modules: Mapping[str, str]) -> str:
    if found := _IN_LAYER.fullmatch(name):
        return f"{found[1]}.{_MODULES.get(found[2], found[2])}.{found[3]}"
    module, _, end = name.rpartition(".")
    return modules.get(name) or (f"{modules[module]}.{end}" if module in modules else name)


def _gemma3(file: GgufFile) -> Metadata:
    fields = Fields(file, "gemma3.")
    side = fields.integer("vision.image_size") // fields.integer("vision.patch_size")
    tokens = math.isqrt(fields.integer("mm.tokens_per_image", 256))
    metadata: Metadata = {"clip.use_gelu": True, "clip.vision.projector.scale_factor": max(side // tokens, 1)}
    local = fields.optional_number("rope.local.freq_base")
    if fields.raw("attention.layer_norm_rms_epsilon") is None:
        metadata["gemma3.attention.layer_norm_rms_epsilon"] = 1e-6
    if local is not None:
        metadata["gemma3.rope.freq_base_swa"] = local
    if fields.raw("rope.scaling.factor") is None and fields.integer("block_count") in _SCALED_GEMMAS:
        metadata |= {"gemma3.rope.scaling.type": "linear", "gemma3.rope.scaling.factor": 8.0}
    return metadata


def _llama4(file: GgufFile) -> Metadata:
    fields = Fields(file, "llama4.")
    ratio = fields.number("vision.pixel_shuffle_ratio")
    merge = round(1 / ratio) if ratio > 0 else 0
    if not merge or abs(merge * ratio - 1) > 1e-6:
        raise fields.error("vision.pixel_shuffle_ratio", "1 / n")
    if fields.optional_number("vision.rope.freq_base") not in (None, _ROPE_THETA):
        raise fields.error("vision.rope.freq_base", f"{_ROPE_THETA:g}")
    return {
        "clip.use_gelu": True,
        "clip.vision.projector.scale_factor": merge,
        "llama4.feed_forward_length": fields.integer("intermediate_size"),
        "llama4.expert_feed_forward_length": fields.integer("intermediate_size_moe"),
    }


def _mistral3(file: GgufFile) -> Metadata:
    fields = Fields(file, "mistral3.")
    eps = fields.optional_number("vision.attention.layer_norm_epsilon")
    return {
        "clip.use_silu": True,
        "clip.vision.spatial_merge_size": fields.integer("spatial_merge_size", 2),
        "clip.vision.attention.layer_norm_epsilon": 1e-5 if eps is None else eps,
        "clip.vision.has_halved_heads": True,
    }


def _qwen25vl(file: GgufFile) -> Metadata:
    fields = Fields(file, "qwen25vl.")
    depth, key = fields.integer("vision.block_count"), "vision.fullatt_block_indexes"
    if depth > MAX_LAYERS:
        raise fields.error("vision.block_count", f"at most {MAX_LAYERS}")
    whole = fields.raw(key)
    if whole is None:
        layers = [7, 15, 23, 31]
    elif isinstance(whole, np.ndarray) and whole.dtype.kind in "iu" and len(whole) <= MAX_LAYERS:
        layers = whole.tolist()
    else:
        raise fields.error(key, f"an array of at most {MAX_LAYERS} integers")
    every = int(layers[0]) + 1 if layers else 0
    if every < 1 or layers != [*range(every - 1, depth, every)]:
        raise fields.error(key, "each n-th layer, with the same n")
    sections = fields.raw("rope.mrope_section")
    return {
        "clip.use_silu": True,
        "clip.vision.image_size": fields.integer("vision.image_size", 560),  # which nothing depends on
        "clip.vision.n_wa_pattern": every,
        "qwen2vl.rope.dimension_sections": np.array(_MROPE, np.int32) if sections is None else sections,
    }


_KINDS = {
    "gemma3": _Kind(
        "v.patch_embedding.weight",
        "gemma3",
        {
            "v.patch_embedding": "v.patch_embd",
            "v.position_embedding": "v.position_embd",
            "v.post_layernorm": "v.post_ln",
            "mm.mm_input_projection": "mm.input_projection",
            "mm.mm_soft_emb_norm": "mm.soft_emb_norm",
        },
        _gemma3,
    ),
    "llama4": _Kind(
        "v.patch_embedding.weight",
        "llama4",
        {
            "v.patch_embedding": "v.patch_embd",
            "v.class_embedding": "v.class_embd",
            "v.positional_embedding_vlm": "v.position_embd.weight",
            "v.layernorm_pre": "v.pre_ln",
            "v.layernorm_post": "v.post_ln",
            "v.vision_adapter.mlp.fc1": "mm.model.mlp.1",
            "v.vision_adapter.mlp.fc2": "mm.model.mlp.2",
            "mm.linear_1": "mm.model.fc",
        },
        _llama4,
        splitting="llama4",
    ),
    "mistral3": _Kind(
        "v.patch_conv.weight",
        "pixtral",
        {
            "v.patch_conv": "v.patch_embd",
            "v.encoder_norm": "v.pre_ln",
            "mm.norm": "mm.input_norm",
            "mm.patch_merger.merging_layer": "mm.patch_merger",
            "mm.linear_1": "mm.1",
            "mm.linear_2": "mm.2",
        },
        _mistral3,
        splitting="tekken",
    ),
    "qwen25vl": _Kind(
        "v.patch_embd_0.weight",
        "qwen2.5vl_merger",
        {
            "v.patch_embd_0": "v.patch_embd",
            "v.patch_embd_1.weight": "v.patch_embd.weight.1",
            "v.merger.ln_q": "v.post_ln",
            "v.merger.mlp.0": "mm.0",
            "v.merger.mlp.2": "mm.2",
        },
        _qwen25vl,
        "qwen2vl",
    ),
}
