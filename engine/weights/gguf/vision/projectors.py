"""The types of projectors that are supported: how a file of one becomes a config, and where its tensors lie.

The types: https://github.com/ggml-org/llama.cpp/blob/master/gguf-py/gguf/constants.py.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import NamedTuple

from ....models.tensor_ref import TensorRef
from .clip_file import SECOND_FRAME, ClipFile, Words

_MOST_TOKENS = 4096  # of an image, as in llama.cpp: files of Qwen's do not say it
_NEWLINES = ("v.image_newline", "model.image_newline")
_SIGLIP_GELU = "gelu_pytorch_tanh"
_POSITIONS = "v.position_embd.weight"
# As converters count MiniCPM-V and MiniCPM-o, whose images are alike.
_MINICPM_VERSIONS = {2: "2.5", 3: "2.6", 4: "2.6", 5: "4.0", 6: "4.0", 100045: "4.5"}


class Projector(NamedTuple):
    """A file in the words of config.json and preprocessor_config.json.

    `names` are the tensors outside of layers, by Tidewheel's names of modules or of whole weights, and `in_layers`
    those in a layer that have other names than usual. `rotated_pairs`: in the rows of q and k, the two of a rotated
    pair are neighbours, as they are not in the model's own checkpoints. `colours_last`: a patch's three colours of a
    pixel are neighbours in these, as they never are in files.
    """

    config: Words
    processor: Words
    names: Mapping[str, str | TensorRef]
    rotated_pairs: bool = False
    colours_last: bool = False
    in_layers: Mapping[str, str] = MappingProxyType({})


def _qwen(clip: ClipFile, architecture: str, vision: Words, least: int, names: Mapping[str, str] = {}) -> Projector:
    merge, frames = clip.fields.integer("spatial_merge_size", 2), 1 + (SECOND_FRAME in clip.tensors)
    merging = {"spatial_merge_size": merge, "temporal_patch_size": frames}
    most = clip.fields.integer("image_max_pixels", _MOST_TOKENS * (clip.patch * merge) ** 2)
    pixels = {"shortest_edge": clip.fields.integer("image_min_pixels", least), "longest_edge": most}
    return Projector(
        {"architectures": [architecture], "vision_config": {**clip.tower(_SIGLIP_GELU), **merging, **vision}},
        clip.processor(patch_size=clip.patch, merge_size=merge, temporal_patch_size=frames, size=pixels),
        {"merge_norm": "v.post_ln", "merge": "mm.0", "connector": "mm.2", **names},
    )


def _qwen2(clip: ClipFile) -> Projector:
    ratio = (clip.inner + 0.5) / clip.hidden  # rounded down again
    vision = {"hidden_size": clip.rows("mm.2.weight"), "mlp_ratio": ratio}
    return _qwen(clip, "Qwen2VLForConditionalGeneration", vision, 56**2)


def _qwen25(clip: ClipFile) -> Projector:
    every = clip.fields.integer("n_wa_pattern")
    vision = {
        "out_hidden_size": clip.rows("mm.2.weight"),
        "window_size": clip.fields.integer("window_size", 112),
        "fullatt_block_indexes": [*range(every - 1, clip.depth, every)],
    }
    return _qwen(clip, "Qwen2_5_VLForConditionalGeneration", vision, 56**2)


def _qwen3(clip: ClipFile) -> Projector:
    """Qwen3-VL, or Qwen3.5, which takes nothing after layers."""
    flags = clip.numbers("is_deepstack_layers") or []
    taken = [layer for layer, is_taken in enumerate(flags) if is_taken]
    names: dict[str, str] = {}
    for i, layer in enumerate(taken):
        merger = f"v.deepstack.{layer}"
        names |= {f"merge_{i}.norm": f"{merger}.norm", f"merge_{i}": f"{merger}.fc1", f"connector_{i}": f"{merger}.fc2"}
    vision = {
        "out_hidden_size": clip.rows("mm.2.weight"),
        "num_position_embeddings": clip.rows(_POSITIONS),
        "deepstack_visual_indexes": taken,
    }
    architecture = "Qwen3VLForConditionalGeneration" if taken else "Qwen3_5ForConditionalGeneration"
    return _qwen(clip, architecture, vision, 256**2, names)


def _paddleocr(clip: ClipFile) -> Projector:
    """PaddleOCR-VL. The image_size of its files is not that of the table of positions."""
    vision = {"image_size": math.isqrt(clip.rows(_POSITIONS)) * clip.patch}
    names = {"merge_norm": "mm.input_norm", "merge": "mm.1", "connector": "mm.2"}
    return _qwen(clip, "PaddleOCRVLForConditionalGeneration", vision, 384**2, names)


def _glm4v(clip: ClipFile) -> Projector:
    merge, frames = clip.fields.integer("spatial_merge_size", 2), 1 + (SECOND_FRAME in clip.tensors)
    vision = {
        "out_hidden_size": clip.rows("mm.model.fc.weight"),
        "intermediate_size": clip.rows("mm.up.weight"),
        "attention_bias": any(f"v.blk.0.{name}.bias" in clip.tensors for name in ("attn_qkv", "attn_q")),
        "spatial_merge_size": merge,
        "temporal_patch_size": frames,
    }
    edges = {"shortest_edge": "image_min_pixels", "longest_edge": "image_max_pixels"}
    given = {edge: clip.fields.optional_integer(key, 1) for edge, key in edges.items()}
    return Projector(
        {"architectures": ["Glm4vForConditionalGeneration"], "vision_config": {**clip.tower(), **vision}},
        clip.processor(
            patch_size=clip.patch,
            merge_size=merge,
            temporal_patch_size=frames,
            size={edge: frames * pixels for edge, pixels in given.items() if pixels is not None},
        ),
        {
            "pre_norm": "v.norm_embd",
            "blocks.weight": TensorRef("mm.patch_merger.weight", matrix=True),
            "blocks.bias": "mm.patch_merger.bias",
            "merge": "mm.model.fc",
            "merge_norm": "mm.post_norm",
            "merge_gate": "mm.gate",
            "merge_up": "mm.up",
            "connector": "mm.down",
        },
    )


def _gemma3(clip: ClipFile) -> Projector:
    tokens = clip.side // clip.patch // clip.fields.integer("projector.scale_factor", 4)
    vision = {**clip.tower(_SIGLIP_GELU), "model_type": "siglip_vision_model"}
    return Projector(
        {
            "architectures": ["Gemma3ForConditionalGeneration"],
            "vision_config": vision,
            "mm_tokens_per_image": tokens**2,
        },
        clip.processor(size={"height": clip.side, "width": clip.side}),
        {
            "connector.weight": TensorRef("mm.input_projection.weight", transpose=True),
            "connector.norm": "mm.soft_emb_norm",
        },
    )


def _gemma4(clip: ClipFile) -> Projector:
    """Gemma 4. The image_size and the activation of its files are not those of the model."""
    head_dim = clip.rows("v.blk.0.attn_q.weight") // clip.fields.integer("attention.head_count")
    merge = clip.fields.integer("projector.scale_factor", 3)
    vision = {
        **clip.tower(),
        "hidden_activation": _SIGLIP_GELU,
        "head_dim": head_dim,
        "num_key_value_heads": clip.rows("v.blk.0.attn_k.weight") // max(head_dim, 1),
        "pooling_kernel_size": merge,
        "position_embedding_size": clip.rows(_POSITIONS, 1),
        "use_clipped_linears": "v.blk.0.attn_q.input_min" in clip.tensors,
        "standardize": "v.std_bias" in clip.tensors,
    }
    return Projector(
        {"architectures": ["Gemma4ForConditionalGeneration"], "vision_config": vision},
        clip.processor(patch_size=clip.patch, pooling_kernel_size=merge, do_normalize=True),
        {
            "columns": _POSITIONS,
            "rows": _POSITIONS,
            "std_bias": "v.std_bias",
            "std_scale": "v.std_scale",
            "connector": "mm.input_projection",
        },
        colours_last=True,
    )


def _idefics3(clip: ClipFile) -> Projector:
    edge = clip.fields.integer("preproc_image_size", 4 * clip.side)
    scale = clip.fields.integer("projector.scale_factor")
    return Projector(
        {
            "architectures": ["Idefics3ForConditionalGeneration"],
            "vision_config": clip.tower(_SIGLIP_GELU),
            "scale_factor": scale,
        },
        clip.processor(size={"longest_edge": edge}, max_image_size={"longest_edge": clip.side}),
        {"connector": "mm.model.fc"},
    )


def _kimi(clip: ClipFile) -> Projector:
    """Kimi-VL. The rows of q and k are in the order of its checkpoints, so they are turned as in these."""
    merge = clip.fields.integer("projector.scale_factor", 2)
    side = math.isqrt(clip.rows(_POSITIONS))
    vision = {
        **clip.tower(),
        "merge_kernel_size": [merge, merge],
        "init_pos_emb_height": side,
        "init_pos_emb_width": side,
    }
    return Projector(
        {"architectures": ["KimiVLForConditionalGeneration"], "vision_config": vision},
        clip.processor(patch_size=clip.patch, merge_kernel_size=[merge, merge], pad_input=True),
        {
            "positions": TensorRef(_POSITIONS, flat=True),  # row by row, in one dimension less
            "merge_norm": "mm.input_norm",
            "merge": "mm.1",
            "connector": "mm.2",
        },
    )


def _llama4(clip: ClipFile) -> Projector:
    inner, outer = clip.rows("mm.model.mlp.1.weight"), clip.rows("mm.model.mlp.2.weight")
    vision = {
        **clip.tower(),
        "pixel_shuffle_ratio": 1 / clip.fields.integer("projector.scale_factor"),
        "projector_input_dim": inner,
        "projector_output_dim": outer,
        "vision_output_dim": outer,
    }
    # Converters since Gemma 4 give a norm of these models the name of one of Gemma's.
    renamed = {} if "v.blk.0.ln2.weight" in clip.tensors else {"mlp_norm": "attn_post_norm"}
    return Projector(
        {"architectures": ["Llama4ForConditionalGeneration"], "vision_config": vision},
        clip.processor(size={"height": clip.side, "width": clip.side}),
        {"merge": "mm.model.mlp.1", "adapter": "mm.model.mlp.2", "connector": "mm.model.fc"},
        in_layers=renamed,
    )


def _mlp(clip: ClipFile) -> Projector:
    """LLaVA: 1.5, or NeXT and Granite Vision, whose files have a row between those of features."""
    has_class = "v.class_embd" in clip.tensors
    newline = next((name for name in _NEWLINES if name in clip.tensors), None)
    layers = clip.numbers("feature_layer") or [clip.depth]
    edges = clip.numbers("image_grid_pinpoints") or []
    sizes = [edges[i : i + 2] for i in range(0, len(edges), 2)]
    vision = {
        **clip.tower(),
        "model_type": "clip_vision_model" if has_class else "siglip_vision_model",
        **({} if has_class else {"hidden_act": _SIGLIP_GELU}),
    }
    config: Words = {
        "architectures": ["LlavaForConditionalGeneration"],
        "vision_config": vision,
        "vision_feature_layer": layers,
        "vision_feature_select_strategy": "default" if has_class else "full",
        "multimodal_projector_bias": "mm.0.bias" in clip.tensors,
    }
    square = {"height": clip.side, "width": clip.side}
    names = {"merge": "mm.0", "connector": "mm.2"}
    if newline is None:
        # LLaVA 1.5 was trained with images in a frame of the mean colour.
        framed: Words = {"image_processor_type": "LlavaImageProcessor", "do_pad": True}
        return Projector(config, clip.processor(**framed, size=square, crop_size=square), names)
    config |= {"architectures": ["LlavaNextForConditionalGeneration"], "image_grid_pinpoints": sizes or None}
    processor = clip.processor(size=square, image_grid_pinpoints=sizes or None)
    return Projector(config, processor, {**names, "newline": newline})


def _pixtral(clip: ClipFile) -> Projector:
    """Pixtral, or Mistral 3, which joins neighbouring patches."""
    is_merging = "mm.patch_merger.weight" in clip.tensors
    config = {
        "architectures": ["Mistral3ForConditionalGeneration" if is_merging else "LlavaForConditionalGeneration"],
        "vision_config": {**clip.tower(), "model_type": "pixtral"},
        "spatial_merge_size": clip.fields.integer("spatial_merge_size", 1),
        "vision_feature_layer": clip.depth,
        "vision_feature_select_strategy": "full",
        "multimodal_projector_bias": "mm.1.bias" in clip.tensors,
    }
    names = {"merge": "mm.1", "connector": "mm.2", "blocks": "mm.patch_merger", "merge_norm": "mm.input_norm"}
    rotated = not clip.fields.flag("has_halved_heads", False)  # which Ollama's files have
    return Projector(config, clip.processor(size={"longest_edge": clip.side}), names, rotated_pairs=rotated)


def _internvl(clip: ClipFile) -> Projector:
    vision = {
        "norm_type": "layer_norm" if "v.blk.0.ln1.bias" in clip.tensors else "rms_norm",
        "attention_bias": any(f"v.blk.0.{name}.bias" in clip.tensors for name in ("attn_qkv", "attn_q")),
        "use_qk_norm": "v.blk.0.attn_q_norm.weight" in clip.tensors,
    }
    least, most = (clip.fields.integer(f"preproc_{name}_tiles", count) for name, count in (("min", 1), ("max", 12)))
    return Projector(
        {
            "architectures": ["InternVLForConditionalGeneration"],
            "vision_config": {**clip.tower(), **vision},
            "downsample_ratio": 1 / clip.fields.integer("projector.scale_factor", 2),
        },
        clip.processor(size={"height": clip.side, "width": clip.side}, min_patches=least, max_patches=most),
        {"merge.norm": "mm.model.mlp.0", "merge": "mm.model.mlp.1", "connector": "mm.model.mlp.3"},
    )


def _lfm2(clip: ClipFile) -> Projector:
    factor = clip.fields.integer("projector.scale_factor", 2)
    return Projector(
        {
            "architectures": ["Lfm2VlForConditionalGeneration"],
            "vision_config": {**clip.tower(_SIGLIP_GELU), "num_patches": clip.rows(_POSITIONS)},
            "downsample_factor": factor,
            "projector_hidden_size": clip.rows("mm.1.weight"),
            "projector_bias": "mm.1.bias" in clip.tensors,
            "projector_use_layernorm": "mm.input_norm.weight" in clip.tensors,
        },
        clip.processor(encoder_patch_size=clip.patch, downsample_factor=factor),
        {"merge.norm": "mm.input_norm", "merge": "mm.1", "connector": "mm.2"},
        colours_last=True,
    )


def _resampler(clip: ClipFile) -> Projector:
    """MiniCPM-V before 4.6. The image_size of its files is not that of the table of positions."""
    version = _MINICPM_VERSIONS.get(clip.top.integer("minicpmv_version", 2))
    if version is None:
        raise clip.top.error("minicpmv_version", f"one of {', '.join(map(str, _MINICPM_VERSIONS))}")
    queries = clip.rows("resampler.query")
    side = math.isqrt(clip.rows(_POSITIONS)) * clip.patch
    return Projector(
        {
            "architectures": ["MiniCPMV"],
            "version": version,
            "query_num": queries,
            "vision_config": {**clip.tower(_SIGLIP_GELU), "image_size": side},
        },
        clip.processor(patch_size=clip.patch, image_feature_size=queries, use_image_id=version != "2.5"),
        {
            "learned": "resampler.query",
            "query_norm": "resampler.ln_q",
            "kv": "resampler.kv",
            "kv_norm": "resampler.ln_kv",
            "queries": "resampler.attn.q",
            "keys": "resampler.attn.k",
            "values": "resampler.attn.v",
            "attended": "resampler.attn.out",
            "connector.norm": "resampler.ln_post",
            "connector": "resampler.proj",
        },
    )


PROJECTORS: Mapping[str, Callable[[ClipFile], Projector]] = {
    "gemma3": _gemma3,
    "gemma4v": _gemma4,
    "glm4v": _glm4v,
    "idefics3": _idefics3,
    "internvl": _internvl,
    "kimivl": _kimi,
    "lfm2": _lfm2,
    "llama4": _llama4,
    "mlp": _mlp,
    "paddleocr": _paddleocr,
    "pixtral": _pixtral,
    "qwen2.5vl_merger": _qwen25,
    "qwen2vl_merger": _qwen2,
    "qwen3vl_merger": _qwen3,
    "resampler": _resampler,
}
