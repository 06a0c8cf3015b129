"""GGUF files of tiny models that see images, as llama.cpp's converter has them: an mmproj file, and the text."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple
from unittest.mock import patch

import gguf
import gguf_files
import numpy as np
import tokenizers
import transformers
from numpy.typing import NDArray
from vision_zoo import VisionModel

Array = NDArray[np.float32]
Change = Callable[[Any], None]

TYPES = {
    "smolvlm": "idefics3",
    "llava": "mlp",
    "llava-siglip": "mlp",
    "llava-next": "mlp",
    "pixtral": "pixtral",
    "mistral3": "pixtral",
    "qwen2-vl": "qwen2vl_merger",
    "qwen2.5-vl": "qwen2.5vl_merger",
    "qwen3-vl": "qwen3vl_merger",
    "qwen3.5": "qwen3vl_merger",
    "glm4.1v": "glm4v",
    "paddleocr-vl": "paddleocr",
    "lfm2-vl": "lfm2",
    "gemma3": "gemma3",
    "gemma4": "gemma4v",
    "gemma4-e2b": "gemma4v",
    "internvl": "internvl",
    "kimi-vl": "kimivl",
    "llama4": "llama4",
    "minicpm-v2.5": "resampler",
    "minicpm-v2.6": "resampler",
}
"""The cases of the zoo that there are files of, and the types of their projectors."""

_TEXT = {"qwen2-vl": "qwen2vl", "qwen2.5-vl": "qwen2vl", "qwen3-vl": "qwen3vl"}  # architectures with their own names
_LAYER = re.compile(
    r".*\b(?:layers?|blocks)\.(\d+)\.(.+?)(?:\.linear)?\.(weight|bias|input_min|input_max|output_min|output_max)"
)
_IN_LAYER = {
    "ln1": "norm0 norm1 layer_norm1 attention_norm layernorm_before input_layernorm",
    "ln2": "norm2 layer_norm2 ffn_norm layernorm_after pre_feedforward_layernorm",
    "attn_post_norm": "post_attention_layernorm",
    "ffn_post_norm": "post_feedforward_layernorm",
    "attn_qkv": "attn.qkv",
    "attn_q": "self_attn.q_proj attention.q_proj",
    "attn_k": "self_attn.k_proj attention.k_proj",
    "attn_v": "self_attn.v_proj attention.v_proj",
    "attn_q_norm": "attention.q_norm self_attn.q_norm",
    "attn_k_norm": "attention.k_norm self_attn.k_norm",
    "attn_out": "wo attn.proj self_attn.out_proj self_attn.o_proj attention.o_proj attention.projection_layer",
    "ffn_gate": "mlp.gate_proj feed_forward.gate_proj",
    "ffn_up": "mlp.fc1 mlp.linear_fc1 mlp.up_proj feed_forward.up_proj",
    "ffn_down": "mlp.fc2 mlp.linear_fc2 mlp.down_proj feed_forward.down_proj",
}
_MODULES = {theirs: ours for ours, several in _IN_LAYER.items() for theirs in several.split()}
_OF_KIMI = {"norm1": "ln2", "mlp.fc0": "ffn_up", "mlp.fc1": "ffn_down"}  # which counts from 0
_TOP = {
    "v.patch_embd": r"patch_embed\.proj|embeddings\.patch_embedding|patch_conv|patch_embeddings\.projection"
    r"|patch_embedder\.input_proj|patch_embedding\.linear",
    "v.position_embd": r"position_embeddings?|pos_embed|pos_emb|position_embedding_table|positional_embedding_vlm",
    "v.class_embd": r"class_embedding|cls_token",
    "v.pre_ln": r"pre_layrnorm|ln_pre|layernorm_pre",
    "v.post_ln": r"post_layernorm|merger\.ln_q|merger\.norm|layernorm_post|final_layernorm",
    "v.std_bias": r"std_bias",
    "v.std_scale": r"std_scale",
    "v.norm_embd": r"post_conv_layernorm",
    "v.image_newline": r"image_newline",
    "mm.model.fc": r"modality_projection\.proj|merger\.proj",
    "mm.0": r"visual\.merger\.mlp\.0|visual\.merger\.linear_fc1",
    "mm.2": r"visual\.merger\.mlp\.2|visual\.merger\.linear_fc2",
    "mm.post_norm": r"post_projection_norm",
    "mm.gate": r"merger\.gate_proj",
    "mm.up": r"merger\.up_proj",
    "mm.down": r"merger\.down_proj",
    "mm.patch_merger": r"downsample|patch_merger\.merging_layer",
    "mm.input_projection": r"mm_input_projection|embedding_projection",
    "mm.model.mlp.1": r"vision_adapter\.mlp\.fc1",
    "mm.model.mlp.2": r"vision_adapter\.mlp\.fc2",
    "mm.soft_emb_norm": r"mm_soft_emb_norm",
}
_PROJECTOR = re.compile(r".*(?:projector|mlp_AR)\.(linear_[12]|norm|layer_norm|pre_norm)\.(weight|bias)")
_OF_TEXT = ("lm_head.", "model.text_model.", "model.layers.", "model.embed_tokens.", "model.norm.", "mtp.", "llm.")
_LLAVA_LIKE = {
    "mlp": {"linear_1": "mm.0", "linear_2": "mm.2"},
    "pixtral": {"linear_1": "mm.1", "linear_2": "mm.2", "norm": "mm.input_norm"},
    "paddleocr": {"linear_1": "mm.1", "linear_2": "mm.2", "pre_norm": "mm.input_norm"},
    "kimivl": {"linear_1": "mm.1", "linear_2": "mm.2", "pre_norm": "mm.input_norm"},
    "llama4": {"linear_1": "mm.model.fc"},
    "lfm2": {"linear_1": "mm.1", "linear_2": "mm.2", "layer_norm": "mm.input_norm"},
    "internvl": {"linear_1": "mm.model.mlp.1", "linear_2": "mm.model.mlp.3", "layer_norm": "mm.model.mlp.0"},
}


def write_mmproj(
    path: Path,
    name: str,
    made: VisionModel,
    quantize: gguf_files.Quantize = gguf_files.as_float32,
    change: Change = lambda writer: None,
) -> Path:
    """The tower of a case. `change` gets the writer, whose fields and tensors are those of a file, before the end."""
    writer = gguf.GGUFWriter(path, "clip")
    writer.add_type("mmproj")
    write_tower(writer, name, made, quantize)
    change(writer)
    return gguf_files.finish(writer)


def write_tower(
    writer: Any, name: str, made: VisionModel, quantize: gguf_files.Quantize = gguf_files.as_float32
) -> None:
    """All of an mmproj file but what says that it is one."""
    _write_fields(writer, name, made)
    for stored, data in sorted(_tensors(name, made)):
        of_a_block = not stored.startswith(("v.blk.", "mm.")) or data.ndim != 2 or data.shape[-1] % 32
        as_it_is = gguf_files.as_float32 if of_a_block else quantize
        written, kind = as_it_is(stored, np.ascontiguousarray(data))
        writer.add_tensor(stored, written, raw_dtype=kind)


def as_ollama(name: str, made: VisionModel) -> Change:
    """What makes a language model's file one of Ollama's, which has the tower too."""
    vision, kind = made.config["vision_config"], _OLLAMA[name]

    def change(writer: Any) -> None:
        kept = writer.kv_data[0]
        own = kept["general.architecture"].value
        for key in [key for key in kept if key.startswith(f"{own}.")]:
            kept[f"{kind.architecture}{key.removeprefix(own)}"] = kept.pop(key)
        kept["general.architecture"].value = kind.architecture
        for missing in kind.without:
            kept.pop(f"{kind.architecture}.{missing}", None)
        for field, value in kind.fields(vision).items():
            writer.add_key_value(f"{kind.architecture}.{field}", *value)
        if name == "llama4":
            text = made.config["text_config"]
            sizes = {"feed_forward_length": "intermediate_size", "intermediate_size": "intermediate_size_mlp"}
            for field, size in {**sizes, "intermediate_size_moe": "intermediate_size"}.items():
                writer.add_uint32(f"llama4.{field}", text[size])
        if name == "qwen2.5-vl":
            kept["qwen25vl.rope.mrope_section"] = kept.pop("qwen25vl.rope.dimension_sections")
        for original, data in made.stored.items():
            if original.startswith(kind.parts):
                for stored, tensor in _of_ollama(kind, original, data):
                    writer.add_tensor(stored, np.ascontiguousarray(tensor))

    return change


def _of_ollama(kind: _Ollama, original: str, data: Array) -> Iterator[tuple[str, Array]]:
    renamed = re.sub("|".join(map(re.escape, kind.names)), lambda found: kind.names[found[0]], original)
    if "patch_embed.proj" in renamed:
        for frame in range(2):
            yield renamed.replace("patch_embed.proj", f"patch_embd_{frame}"), data[:, :, frame]
    elif "attn.qkv" in renamed:
        for part, one in zip("qkv", np.split(data, 3), strict=True):
            yield renamed.replace("attn.qkv", f"attn_{part}"), one
    else:
        yield renamed, data + 1 if renamed == "mm.mm_soft_emb_norm.weight" else data


class _Ollama(NamedTuple):
    """What its converter does with an architecture: names in the order in which they are replaced."""

    architecture: str
    parts: tuple[str, ...]
    names: dict[str, str]
    fields: Callable[[dict[str, Any]], dict[str, tuple[Any, Any]]]
    without: tuple[str, ...] = ()


def _numbers(vision: dict[str, Any], **keys: str) -> dict[str, tuple[Any, Any]]:
    return {f"vision.{key.replace('__', '.')}": (vision[name], gguf.GGUFValueType.UINT32) for key, name in keys.items()}


_ATTENTION = {f"{part}_proj": f"attn_{part}" for part in "qkv"}
_OLLAMA = {
    "gemma3": _Ollama(
        "gemma3",
        ("vision_tower.", "multi_modal_projector."),
        {
            "vision_tower.embeddings": "v",
            "vision_tower": "v",
            "encoder.layers": "blk",
            **{f"self_attn.{name}": new for name, new in _ATTENTION.items()},
            "self_attn.out_proj": "attn_output",
            "input_projection_weight": "input_projection.weight",
            "multi_modal_projector": "mm",
        },
        lambda vision: {
            **_numbers(
                vision,
                block_count="num_hidden_layers",
                embedding_length="hidden_size",
                feed_forward_length="intermediate_size",
                image_size="image_size",
                patch_size="patch_size",
                attention__head_count="num_attention_heads",
            ),
            "vision.attention.layer_norm_epsilon": (1e-6, gguf.GGUFValueType.FLOAT32),
            "mm.tokens_per_image": (16, gguf.GGUFValueType.UINT32),
        },
        ("attention.layer_norm_rms_epsilon",),
    ),
    "llama4": _Ollama(
        "llama4",
        ("vision_model.", "multi_modal_projector."),
        {
            "patch_embedding.linear": "patch_embedding",
            "vision_model": "v",
            "model.layers": "blk",
            "input_layernorm": "attn_norm",
            "post_attention_layernorm": "ffn_norm",
            **{f"self_attn.{name}": new for name, new in _ATTENTION.items()},
            "self_attn.o_proj": "attn_output",
            "multi_modal_projector": "mm",
        },
        lambda vision: {
            **_numbers(
                vision,
                block_count="num_hidden_layers",
                embedding_length="hidden_size",
                feed_forward_length="intermediate_size",
                image_size="image_size",
                patch_size="patch_size",
                attention__head_count="num_attention_heads",
            ),
            "vision.rope.freq_base": (10_000.0, gguf.GGUFValueType.FLOAT32),
            "vision.layer_norm_epsilon": (1e-5, gguf.GGUFValueType.FLOAT32),
            "vision.pixel_shuffle_ratio": (0.5, gguf.GGUFValueType.FLOAT32),
        },
        ("feed_forward_length", "expert_feed_forward_length"),
    ),
    "mistral3": _Ollama(
        "mistral3",
        ("vision_tower.", "multi_modal_projector."),
        {
            "transformer.layers": "blk",
            "vision_tower": "v",
            "ln_pre": "encoder_norm",
            **{f"attention.{name}": new for name, new in _ATTENTION.items()},
            "attention.o_proj": "attn_output",
            "attention_norm": "attn_norm",
            "feed_forward.gate_proj": "ffn_gate",
            "feed_forward.down_proj": "ffn_down",
            "feed_forward.up_proj": "ffn_up",
            "multi_modal_projector": "mm",
        },
        lambda vision: {
            **_numbers(
                vision,
                block_count="num_hidden_layers",
                embedding_length="hidden_size",
                feed_forward_length="intermediate_size",
                image_size="image_size",
                patch_size="patch_size",
                attention__head_count="num_attention_heads",
            ),
            "spatial_merge_size": (2, gguf.GGUFValueType.UINT32),
        },
    ),
    "qwen2.5-vl": _Ollama(
        "qwen25vl",
        ("visual.",),
        {
            "mlp.down_proj": "ffn_down",
            "mlp.gate_proj": "ffn_gate",
            "mlp.up_proj": "ffn_up",
            "visual": "v",
            "blocks": "blk",
            "attn.proj": "attn_out",
            "norm1": "ln1",
            "norm2": "ln2",
        },
        lambda vision: {
            **_numbers(
                vision,
                block_count="depth",
                embedding_length="hidden_size",
                attention__head_count="num_heads",
                patch_size="patch_size",
                spatial_merge_size="spatial_merge_size",
                window_size="window_size",
                temporal_patch_size="temporal_patch_size",
            ),
            "vision.attention.layer_norm_epsilon": (1e-6, gguf.GGUFValueType.FLOAT32),
        },
    ),
}


def write_text(
    path: Path, name: str, made: VisionModel, tokenizer: tokenizers.Tokenizer, change: Change = lambda writer: None
) -> Path:
    """The language model of a case."""
    text = made.model.config.text_config
    kind = {"qwen2_vl_text": "qwen2", "qwen2_5_vl_text": "qwen2", "qwen3_vl_text": "qwen3", "mistral": "llama"}
    fields = {**text.to_dict(), "model_type": kind.get(text.model_type, text.model_type)}
    sections = (fields.get("rope_parameters") or {}).pop("mrope_section", None)
    config = transformers.AutoConfig.for_model(**fields)
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    if name == "llama4":  # whose text is a whole model
        model.load_state_dict(made.model.language_model.state_dict())
    else:
        inner = made.model.model
        model.model.load_state_dict((getattr(inner, "language_model", None) or inner.text_model).state_dict())
        model.lm_head.load_state_dict(made.model.lm_head.state_dict())
    arch = next((arch for arch, word in gguf.MODEL_ARCH_NAMES.items() if word == _TEXT.get(name)), None)

    class Writer(gguf.GGUFWriter):  # type: ignore[misc]
        def write_header_to_file(self, *arguments: Any, **named: Any) -> None:
            if sections is not None:
                self.add_rope_dimension_sections([*sections, 0])
            if name == "qwen3-vl":
                taken = made.config["vision_config"]["deepstack_visual_indexes"]
                self.add_uint32("qwen3vl.n_deepstack_layers", len(taken))
            change(self)
            super().write_header_to_file(*arguments, **named)

    fast = transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer)
    with patch.object(gguf_files.gguf, "GGUFWriter", Writer):
        return gguf_files.write(path, model, fast, arch=arch)


def _write_fields(writer: Any, name: str, made: VisionModel) -> None:
    kind, vision, settings = TYPES[name], made.config["vision_config"], made.settings

    def first(*names: str) -> Any:
        return next(vision[key] for key in names if vision.get(key) is not None)

    size, hidden = first("patch_size"), first("embed_dim", "hidden_size")
    size = size[0] if isinstance(size, list) else size
    side = vision.get("image_size", 5 * size)
    side = 3 * size if kind == "gemma4v" else side  # any number
    depth = first("num_hidden_layers", "depth")
    writer.add_bool("clip.has_vision_encoder", True)
    writer.add_string("clip.vision.projector_type" if kind == "gemma4v" else "clip.projector_type", kind)
    numbers = {
        "image_size": side[0] if isinstance(side, list) else side,
        "patch_size": size,
        "embedding_length": hidden,
        "feed_forward_length": vision.get("intermediate_size", 0),
        "block_count": depth - (name in ("llava", "llava-next")),
        "attention.head_count": first("num_attention_heads", "num_heads"),
        "projection_dim": 32,
    }
    merge = made.config.get("spatial_merge_size") or vision.get("spatial_merge_size")
    if merge is not None:
        numbers["spatial_merge_size"] = merge
    scale = {"idefics3": "scale_factor", "lfm2": "downsample_factor"}.get(kind)
    if scale is not None:
        numbers["projector.scale_factor"] = made.config[scale]
    elif kind in ("gemma3", "internvl", "gemma4v", "kimivl", "llama4"):
        numbers["projector.scale_factor"] = 2
    if kind == "idefics3":
        numbers["preproc_image_size"] = settings["size"]["longest_edge"]
    if kind == "internvl":
        numbers |= {"preproc_min_tiles": 1, "preproc_max_tiles": settings["max_patches"]}
    if kind == "qwen2.5vl_merger":
        numbers |= {"n_wa_pattern": 2, "window_size": vision["window_size"]}
    if name.startswith(("qwen", "glm", "paddle")):
        counted = 2 if name.startswith("glm") else 1
        numbers["image_min_pixels"] = settings["size"]["shortest_edge"] // counted
        numbers["image_max_pixels"] = settings["size"]["longest_edge"] // counted
    for key, number in numbers.items():
        writer.add_uint32(f"clip.vision.{key}", number)
    writer.add_float32("clip.vision.attention.layer_norm_epsilon", _eps(vision))
    writer.add_array(
        "clip.vision.image_mean",
        [float(value) for value in settings.get("image_mean", settings.get("norm_mean", (0.5,) * 3))],
    )
    writer.add_array(
        "clip.vision.image_std",
        [float(value) for value in settings.get("image_std", settings.get("norm_std", (0.5,) * 3))],
    )
    if "deepstack_visual_indexes" in vision and name == "qwen3-vl":
        taken = vision["deepstack_visual_indexes"]
        writer.add_array("clip.vision.is_deepstack_layers", [layer in taken for layer in range(depth)])
    if "image_grid_pinpoints" in made.config:
        edges = [edge for size in made.config["image_grid_pinpoints"] for edge in size]
        writer.add_array("clip.vision.image_grid_pinpoints", edges)
    if kind == "resampler":
        writer.add_int32("clip.minicpmv_version", 2 if made.config["version"] == 2.5 else 3)
    act = "gelu" if kind in ("kimivl", "llama4") else vision.get("hidden_act", "quick_gelu")
    if act == "silu":
        writer.add_bool("clip.use_silu", True)
    elif act != "quick_gelu":
        writer.add_bool("clip.use_gelu", True)


def _eps(vision: dict[str, Any]) -> float:
    return next((float(vision[key]) for key in ("layer_norm_eps", "rms_norm_eps") if vision.get(key)), 1e-6)


def _tensors(name: str, made: VisionModel) -> Iterator[tuple[str, Array]]:
    kind, vision = TYPES[name], made.config["vision_config"]
    for original, data in made.stored.items():
        if "language_model" in original or original.startswith(_OF_TEXT):
            continue
        if kind == "mlp" and ("post_layernorm" in original or (name != "llava-siglip" and ".layers.2." in original)):
            continue
        if found := re.fullmatch(r".*deepstack_merger_list\.(\d+)\.(.+)\.(weight|bias)", original):
            layer = vision["deepstack_visual_indexes"][int(found[1])]
            yield f"v.deepstack.{layer}.{found[2].replace('linear_', '')}.{found[3]}", data
            continue
        if found := re.fullmatch(r".*\.layer\.(\d+)\.lambda_([12])", original):
            yield f"v.blk.{found[1]}.ls{found[2]}.weight", data
            continue
        found = _LAYER.fullmatch(original)
        if found is not None and found[2] == "wqkv":
            for part, one in zip("qkv", np.split(data, 3), strict=True):
                yield f"v.blk.{found[1]}.attn_{part}.{found[3]}", one
            continue
        if found is not None and found[2] in {**_MODULES, **_OF_KIMI}:
            yield from _of_layer(kind, vision, found, data)
            continue
        yield from _outside(kind, original, data, vision)


def _of_layer(kind: str, vision: dict[str, Any], found: re.Match[str], data: Array) -> Iterator[tuple[str, Array]]:
    layer, module, end = found[1], {**_MODULES, **(_OF_KIMI if kind == "kimivl" else {})}[found[2]], found[3]
    if module == "attn_qkv" and kind.startswith("qwen2"):
        for part, one in zip("qkv", np.split(data, 3), strict=True):
            yield f"v.blk.{layer}.attn_{part}.{end}", one
        return
    if kind == "pixtral" and module in ("attn_q", "attn_k"):
        heads = data.reshape(vision["num_attention_heads"], 2, -1, *data.shape[1:])
        data = heads.swapaxes(1, 2).reshape(data.shape)
    yield f"v.blk.{layer}.{module}.{end}", data


def _outside(kind: str, original: str, data: Array, vision: dict[str, Any]) -> Iterator[tuple[str, Array]]:
    if kind == "resampler" and original.startswith("resampler."):
        yield from _of_resampler(original, data)
        return
    projector = _PROJECTOR.fullmatch(original)
    if projector is not None:
        yield f"{_LLAVA_LIKE[kind][projector[1]]}.{projector[2]}", data
        return
    module, end = original, ""
    for suffix in (".weight", ".bias", "_weight"):
        if original.endswith(suffix):
            module, end = original.removesuffix(suffix), f".{suffix[1:]}"
            break
    stored = next(ours for ours, theirs in _TOP.items() if re.search(rf"(?:^|\.)(?:{theirs})$", module))
    end = ".weight" if stored == "v.position_embd" else end
    if stored == "v.patch_embd" and end == ".weight" and data.ndim == 5:
        yield "v.patch_embd.weight", data[:, :, 0]
        yield "v.patch_embd.weight.1", data[:, :, 1]
    elif stored == "v.position_embd" and kind == "kimivl":
        yield f"{stored}{end}", data.reshape(-1, data.shape[-1])
    elif stored == "v.patch_embd" and data.ndim == 2 and end == ".weight" and kind != "llama4":
        size = vision["patch_size"]
        yield "v.patch_embd.weight", data.reshape(-1, size, size, 3).transpose(0, 3, 1, 2)
    elif stored == "mm.soft_emb_norm":
        yield f"{stored}.weight", data + 1
    else:
        yield f"{stored}{end}", data


def _of_resampler(original: str, data: Array) -> Iterator[tuple[str, Array]]:
    if original == "resampler.proj":
        yield "resampler.proj.weight", data.T
        yield "resampler.pos_embed_k", np.zeros((4, data.shape[0]), np.float32)
    elif "in_proj" in original:
        for part, one in zip("qkv", np.split(data, 3), strict=True):
            yield original.replace("in_proj_", f"{part}."), one
    else:
        yield original.replace("_proj", ""), data
