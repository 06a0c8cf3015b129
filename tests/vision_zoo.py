"""Small random models that see images, one of each family, as transformers makes and processes them."""

from __future__ import annotations

import importlib
import inspect
import json
import math
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple
from unittest.mock import MagicMock, patch

import numpy as np
import tokenizers
import torch
import transformers
from numpy.typing import NDArray
from PIL import Image as Pillow
from safetensors.numpy import load_file, save_file
from tokenizers import decoders, models, pre_tokenizers

Image = NDArray[np.uint8]

_TEXT = {
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 16,
    "max_position_embeddings": 512,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_LLAMA, _QWEN2 = {**_TEXT, "model_type": "llama"}, {**_TEXT, "model_type": "qwen2"}
_GRANITE = {
    **_TEXT,
    "embedding_multiplier": 3.0,
    "logits_scaling": 0.5,
    "residual_multiplier": 0.5,
    "attention_multiplier": 0.2,
}
_COHERE2 = {
    **_TEXT,
    "model_type": "cohere2",
    "layer_types": ["sliding_attention", "full_attention"],
    "logit_scale": 1.0,  # which transformers forgets in models that see images
}
_QWEN3_5 = {
    "model_type": "qwen3_5_text",
    "layer_types": ["linear_attention", "full_attention"],
    "linear_num_value_heads": 2,
    "linear_num_key_heads": 2,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
}
_EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
_DEEPSEEK = {
    **_TEXT,
    "model_type": "deepseek_v3",
    "num_key_value_heads": 2,
    "head_dim": 8,
    "kv_lora_rank": 16,
    "q_lora_rank": None,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 8,
    "v_head_dim": 8,
    "first_k_dense_replace": 2,
    "n_group": 1,
    "topk_group": 1,
    "n_routed_experts": 8,
}
_SIGLIP = {
    "hidden_size": 24,
    "intermediate_size": 40,
    "num_hidden_layers": 3,
    "num_attention_heads": 3,
    "image_size": 32,
    "patch_size": 4,
}
_QWEN = {"depth": 3, "num_heads": 2, "patch_size": 4, "spatial_merge_size": 2, "temporal_patch_size": 2}
_SECTIONS = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 3, 3]}
_CLIP_MEAN, _CLIP_STD = (0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711)
_PIXTRAL = {
    "model_type": "pixtral",
    "hidden_size": 32,
    "intermediate_size": 40,
    "num_hidden_layers": 3,
    "num_attention_heads": 2,
    "image_size": 48,
    "patch_size": 4,
}
_QWEN_PIXELS = {"size": {"shortest_edge": 16 * 16, "longest_edge": 48 * 40}, "patch_size": 4, "merge_size": 2}
_QWEN_TOKENS = ("<|vision_start|>", "<|image_pad|>", "<|vision_end|>", "<|video_pad|>")


class VisionCase(NamedTuple):
    """A family: its configs, its image processor, the class of its processor and the tokens that it knows."""

    model: str
    config: str
    vision: Mapping[str, Any]
    text: Mapping[str, Any]
    image_processor: str
    settings: Mapping[str, Any]
    processor: str
    attributes: Mapping[str, Any]  # of the processor, whose own making needs torchvision
    tokens: tuple[str, ...]
    prompt: str
    others: Mapping[str, Any] = {}  # fields of the config
    published: Callable[[VisionModel], VisionModel] | None = None  # the model in a format that transformers has not


_CELLS = [f"<row_{row}_col_{column}>" for row in range(1, 7) for column in range(1, 7)]
_IDEFICS_TOKENS = ("<fake_token_around_image>", "<image>", "<global-img>", *_CELLS)


def _smolvlm(model: str) -> VisionCase:
    attributes = {
        "fake_image_token": "<fake_token_around_image>",
        "image_token": "<image>",
        "global_image_token": "<global-img>",
        "global_image_tag": "<global-img>",
        "image_seq_len": 16,
    }
    return VisionCase(
        f"{model}ForConditionalGeneration",
        f"{model}Config",
        _SIGLIP,
        _LLAMA,
        f"{model}ImageProcessorPil",
        {"size": {"longest_edge": 96}, "max_image_size": {"longest_edge": 32}},
        f"{model}Processor",
        attributes,
        _IDEFICS_TOKENS,
        "User:<image>what is it",
        {"scale_factor": 2},
    )


def _llava(tower: Mapping[str, Any] = {}, **others: Any) -> VisionCase:
    return VisionCase(
        "LlavaForConditionalGeneration",
        "LlavaConfig",
        {**_SIGLIP, "model_type": "clip_vision_model", **tower},
        _LLAMA,
        "CLIPImageProcessorPil",
        {"size": {"shortest_edge": 32}, "crop_size": {"height": 32, "width": 32}},
        "LlavaProcessor",
        {"image_token": "<image>", "patch_size": 4, "num_additional_image_tokens": int(not tower)}
        | {"vision_feature_select_strategy": others.get("vision_feature_select_strategy", "default")},
        ("<image>",),
        "USER: <image>\nwhat",
        others,
    )


def _next(
    name: str,
    vision: Mapping[str, Any],
    settings: Mapping[str, Any],
    text: Mapping[str, Any] = _LLAMA,
    pinpoints: Sequence[list[int]] = ([32, 64], [64, 32], [64, 64], [96, 32], [32, 96], [128, 128]),
    **others: Any,
) -> VisionCase:
    sizes, strategy = [*pinpoints], others.get("vision_feature_select_strategy", "default")
    attributes = {
        "image_token": "<image>",
        "patch_size": 4,
        "num_additional_image_tokens": int(strategy == "default"),
        "vision_feature_select_strategy": strategy,
        "vision_aspect_ratio": others.get("vision_aspect_ratio"),
        "num_image_tokens": 64,
        "downsample_rate": others.get("downsample_rate"),
    }
    return VisionCase(
        f"{name}ForConditionalGeneration",
        f"{name}Config",
        {**_SIGLIP, **vision},
        text,
        f"{name}ImageProcessorPil",
        {"image_grid_pinpoints": sizes, **settings},
        f"{name}Processor",
        attributes,
        ("<image>",),
        "USER: <image>\nwhat",
        {"image_grid_pinpoints": sizes, **others},
    )


def _qwen(
    name: str, vision: Mapping[str, Any], text: Mapping[str, Any], settings: Mapping[str, Any] = {}
) -> VisionCase:
    return VisionCase(
        f"{name}ForConditionalGeneration",
        f"{name}Config",
        {**_QWEN, **vision},
        {**_TEXT, **text},
        "Qwen2VLImageProcessorPil",
        {**_QWEN_PIXELS, **settings},
        "Qwen2VLProcessor" if name == "Qwen2VL" else "Qwen2_5_VLProcessor" if "2_5" in name else "Qwen3VLProcessor",
        {"image_token": "<|image_pad|>"},
        _QWEN_TOKENS,
        "see <|vision_start|><|image_pad|><|vision_end|> and",
        {"image_token_id": 301},
    )


def _glm(name: str, text: Mapping[str, Any]) -> VisionCase:
    return VisionCase(
        f"{name}ForConditionalGeneration",
        f"{name}Config",
        {
            **_QWEN,
            "hidden_size": 32,
            "out_hidden_size": 32,
            "intermediate_size": 48,
            "image_size": 20,
            "attention_bias": True,
        },
        {
            **_TEXT,
            "rope_parameters": {**_SECTIONS, "mrope_section": [2, 1, 1], "partial_rotary_factor": 0.5},
            **text,
        },
        "Glm4vImageProcessorPil",
        {**_QWEN_PIXELS, "size": {"shortest_edge": 16 * 16, "longest_edge": 96 * 40}},
        "Glm4vProcessor",
        {"image_token": "<|image|>"},
        ("<|begin_of_image|>", "<|image|>", "<|end_of_image|>", "<|begin_of_video|>", "<|video|>", "<|end_of_video|>"),
        "see <|begin_of_image|><|image|><|end_of_image|> and",
        {"image_token_id": 301},
    )


def _gemma4(vision: Mapping[str, Any], text: Mapping[str, Any], name: str = "Gemma4") -> VisionCase:
    sizes = {"patch_size": 4, "pooling_kernel_size": 2}
    heads = {"global_head_dim": 24, "layer_types": ["sliding_attention", "full_attention"]}
    return VisionCase(
        f"{name}ForConditionalGeneration",
        f"{name}Config",
        {**sizes, **vision},
        {**_TEXT, **heads, **text},
        "Gemma4ImageProcessorPil" if name == "Gemma4" else "",
        {**sizes, "max_soft_tokens": 70},
        f"{name}Processor",
        {"boi_token": "<|image>", "image_token": "<|image|>", "eoi_token": "<image|>"},
        ("<|image|>", "<|image>", "<image|>"),
        "look <|image|> here",
    )


_GEMMA4 = {
    "hidden_size": 24,
    "intermediate_size": 40,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "position_embedding_size": 300,
}


def _as_internvl_chat(made: VisionModel) -> VisionModel:
    """InternVL as first published: other names, and q, k and v in one matrix."""
    text = made.config["text_config"] | {"architectures": ["Qwen2ForCausalLM"], "tie_word_embeddings": True}
    tower = {**made.config["vision_config"], "model_type": "intern_vit_6b", "image_size": 32, "patch_size": 4}
    tower |= {"qk_normalization": tower.pop("use_qk_norm"), "qkv_bias": tower.pop("attention_bias")}
    config = {
        "architectures": ["InternVLChatModel"],
        "model_type": "internvl_chat",
        "vision_config": tower,
        "llm_config": text,
        "downsample_ratio": 0.5,
        "ps_version": "v2",
        "select_layer": -1,
        "force_image_size": 32,
        "dynamic_image_size": True,
        "use_thumbnail": True,
        "min_dynamic_patch": 1,
        "max_dynamic_patch": made.settings["max_patches"],
    }
    renamed = (
        ("embeddings.cls_token", "embeddings.class_embedding"),
        ("embeddings.position_embeddings", "embeddings.position_embedding"),
        ("embeddings.patch_embeddings.projection", "embeddings.patch_embedding"),
        ("encoder.layer.", "encoder.layers."),
        ("attention.projection_layer", "attn.proj"),
        ("attention.q_norm", "attn.q_norm"),
        ("attention.k_norm", "attn.k_norm"),
        ("layernorm_before", "norm1"),
        ("layernorm_after", "norm2"),
        ("lambda_", "ls"),
        ("multi_modal_projector.layer_norm", "mlp1.0"),
        ("multi_modal_projector.linear_1", "mlp1.1"),
        ("multi_modal_projector.linear_2", "mlp1.3"),
        ("language_model.model.", "language_model."),
        ("language_model.", "language_model.model."),
        ("vision_tower.", "vision_model."),
    )
    stored = {}
    for name, tensor in made.stored.items():
        name = name.removeprefix("model.")
        for old, new in renamed:
            name = name.replace(old, new)
        stored[name] = tensor
    for name in [name for name in stored if ".attention.q_proj." in name]:
        parts = [stored.pop(name.replace("q_proj", f"{part}_proj")) for part in "qkv"]
        stored[name.replace("attention.q_proj", "attn.qkv")] = np.concatenate(parts)
    settings = {"size": 32, "crop_size": 32, "do_center_crop": True, "image_mean": made.settings["image_mean"]}
    settings |= {"image_std": made.settings["image_std"], "feature_extractor_type": "CLIPFeatureExtractor"}
    return made._replace(config=config, settings=settings, stored=stored)


_INTERNVL = VisionCase(
    "InternVLForConditionalGeneration",
    "InternVLConfig",
    {**_SIGLIP, "image_size": [32, 32], "patch_size": [4, 4], "use_qk_norm": True, "attention_bias": True},
    _QWEN2,
    "GotOcr2ImageProcessorPil",
    {"size": {"height": 32, "width": 32}, "max_patches": 6, "image_mean": [0.485, 0.456, 0.406]},
    "InternVLProcessor",
    {
        "start_image_token": "<img>",
        "image_token": "<IMG_CONTEXT>",
        "end_image_token": "</img>",
        "image_seq_length": 16,
    },
    ("<img>", "<IMG_CONTEXT>", "</img>"),
    "see <IMG_CONTEXT>\nwhat",
)


def _as_kimi_vl(made: VisionModel) -> VisionModel:
    """Kimi-VL: Kimi K2.5 by other names, with q, k and v in one matrix, the pairs that rope turns side by side."""
    renamed = (
        ("language_model.", "language_model.model."),
        ("lm_head", "language_model.lm_head"),
        ("mm_projector.", "multi_modal_projector."),
        ("projector.in_proj", "projector.linear_1"),
        ("projector.out_proj", "projector.linear_2"),
        ("vision_tower.layers.", "vision_tower.encoder.blocks."),
        ("vision_tower.final", "vision_tower.encoder.final"),
        ("pos_emb.position_embeddings", "pos_emb.weight"),
        ("attn.proj.", "wo."),
    )
    changed = {"norm1": "norm0", "norm2": "norm1", "fc1": "fc0", "fc2": "fc1"}
    stored = {}
    for name, tensor in made.model.state_dict().items():
        name = name.removeprefix("model.")
        for old, new in renamed:
            name = name.replace(old, new)
        if ".blocks." in name:
            name = ".".join(changed.get(part, part) for part in name.split("."))
        stored[name] = tensor.numpy()
    for name in [name for name in stored if ".blocks." in name and ".q_proj." in name]:
        parts = [stored.pop(name.replace("q_proj", f"{part}_proj")) for part in "qkv"]
        heads = [part.reshape(2, 2, 8, -1).swapaxes(1, 2).reshape(part.shape) for part in parts[:2]]
        stored[name.replace("attn.q_proj", "wqkv")] = np.concatenate([*heads, parts[2]])
    tower = {**made.config["vision_config"], "model_type": "moonvit"}
    tower |= {f"init_{name}": tower.pop(name) for name in ("pos_emb_height", "pos_emb_width")}
    config = {
        "architectures": ["KimiVLForConditionalGeneration"],
        "model_type": "kimi_vl",
        "vision_config": tower,
        "text_config": made.config["text_config"],
        "tie_word_embeddings": made.config["tie_word_embeddings"],
        "media_placeholder_token_id": made.config["image_token_id"],
    }
    return made._replace(config=config, stored=stored)


def _as_phi3v(made: VisionModel) -> VisionModel:
    """Phi-3.5-vision, which is not in transformers: LLaVA's tower and language model, with what is between them."""
    generator = torch.Generator().manual_seed(1)
    sizes = {"img_projection.0": (32, 96), "img_projection.2": (32, 32)}
    between = {"glb_GN": torch.randn((1, 1, 96), generator=generator)}
    between["sub_GN"] = torch.randn((1, 1, 1, 96), generator=generator)
    for name, size in sizes.items():
        between[f"{name}.weight"] = torch.randn(size, generator=generator) * 0.15
        between[f"{name}.bias"] = torch.randn(size[0], generator=generator) * 0.2
    inner = made.model.model
    stored = {f"model.{name}": tensor for name, tensor in inner.language_model.state_dict().items()}
    stored["lm_head.weight"] = made.model.lm_head.weight.detach()
    prefix = "model.vision_embed_tokens."
    tower = inner.vision_tower.state_dict()
    begin = "" if any(name.startswith("vision_model.") for name in tower) else "vision_model."
    stored |= {f"{prefix}img_processor.{begin}{name}": tensor for name, tensor in tower.items()}
    stored |= {f"{prefix}{name}": tensor for name, tensor in between.items()}
    named = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "image_size", "patch_size")
    of_tower = {name: made.config["vision_config"][name] for name in named}
    config = {
        **{name: value for name, value in made.config["text_config"].items() if name != "layer_types"},
        "architectures": ["Phi3VForCausalLM"],
        "model_type": "phi3_v",
        "img_processor": {**of_tower, "name": "clip_vision_model", "image_dim_out": 24, "num_img_tokens": 16},
        "embd_layer": {
            "embedding_cls": "image",
            "hd_transform_order": "sub_glb",
            "projection_cls": "mlp",
            "use_hd_transform": True,
            "with_learnable_separator": True,
        },
    }
    arrays = {
        name: np.ascontiguousarray(tensor.numpy()) for name, tensor in stored.items() if tensor.is_floating_point()
    }
    reference = _PhiModel(made.model, between)
    return made._replace(model=reference, config=config, stored=arrays)


class _PhiModel:
    """Its forward pass, by the published formulas, around CLIP and a language model of transformers."""

    def __init__(self, llava: Any, between: Mapping[str, torch.Tensor]) -> None:
        self._llava, self._between = llava, between

    def __call__(self, input_ids: torch.Tensor, pixel_values: Any, **ignored: Any) -> Any:
        inner = self._llava.model
        embeddings = inner.language_model.embed_tokens(input_ids)
        places = input_ids[0] == self._llava.config.image_token_index
        rows = [row for one in pixel_values for row in self._features(one)]
        embeddings[0, places] = torch.stack(rows)
        states = inner.language_model(inputs_embeds=embeddings, use_cache=False).last_hidden_state
        return SimpleNamespace(logits=self._llava.lm_head(states))

    def get_image_features(self, pixel_values: Any, **ignored: Any) -> Any:
        return SimpleNamespace(pooler_output=[self._features(one) for one in pixel_values])

    def _features(self, image: torch.Tensor) -> torch.Tensor:
        """Of the numbers of a padded image [3, height, width]."""
        rows, columns = image.shape[1] // 32, image.shape[2] // 32
        whole = torch.nn.functional.interpolate(image[None], size=(32, 32), mode="bicubic")
        tiles = image.reshape(3, rows, 32, columns, 32).permute(1, 3, 0, 2, 4).reshape(-1, 3, 32, 32)
        lines = [*self._lines(tiles, rows, columns), self._between["glb_GN"][0], *self._lines(whole, 1, 1)]
        joined = torch.cat(lines)
        for name in ("img_projection.0", "img_projection.2"):
            joined = joined if name.endswith("0") else torch.nn.functional.gelu(joined)
            joined = torch.nn.functional.linear(joined, *(self._between[f"{name}.{end}"] for end in ("weight", "bias")))
        return joined

    def _lines(self, tiles: torch.Tensor, rows: int, columns: int) -> list[torch.Tensor]:
        """Each row of joined patches [columns * 4 + 1, 96], the last of which is learned."""
        states = self._llava.model.vision_tower(tiles, output_hidden_states=True).hidden_states[-2][:, 1:]
        grid = states.reshape(rows, columns, 8, 8, 24).permute(0, 2, 1, 3, 4).reshape(rows * 8, columns * 8, 24)
        return [
            torch.cat(
                [grid[y : y + 2, x : x + 2].reshape(1, -1) for x in range(0, columns * 8, 2)]
                + [self._between["sub_GN"][0, 0]]
            )
            for y in range(0, rows * 8, 2)
        ]


_QUERIES = 5


def _as_resampled(made: VisionModel) -> VisionModel:
    """MiniCPM-V before 4.6, which is not in transformers: SigLIP and text of LLaVA, with a resampler between them."""
    version = {"llama": 2.5, "qwen2": 2.6}[made.config["text_config"]["model_type"]]
    generator = torch.Generator().manual_seed(2)
    width = made.config["text_config"]["hidden_size"]
    shapes: dict[str, tuple[int, ...]] = {
        "query": (_QUERIES, width),
        "proj": (width, width),
        "kv_proj.weight": (width, 24),
    }
    shapes |= {"attn.in_proj_weight": (3 * width, width), "attn.out_proj.weight": (width, width)}
    shapes |= {"attn.in_proj_bias": (3 * width,), "attn.out_proj.bias": (width,)}
    shapes |= {f"ln_{name}.{kind}": (width,) for name in ("q", "kv", "post") for kind in ("weight", "bias")}
    between = {name: torch.randn(shape, generator=generator) * 0.1 for name, shape in shapes.items()}
    for name in between:
        between[name] += float(name.startswith("ln_") and name.endswith("weight"))
    reference = _ResampledModel(made.model, between, version)
    stored = {f"llm.model.{name}": tensor for name, tensor in made.model.model.language_model.state_dict().items()}
    stored |= {f"vpm.{name}": tensor for name, tensor in reference.tower.state_dict().items()}
    stored |= {f"resampler.{name}": tensor for name, tensor in between.items()}
    stored["llm.lm_head.weight"] = made.model.lm_head.weight.detach()
    config = {
        **{name: value for name, value in made.config["text_config"].items() if name != "layer_types"},
        "architectures": ["MiniCPMV"],
        "model_type": "minicpmv",
        "version": version,
        "query_num": _QUERIES,
        "vision_config": {**made.config["vision_config"], "model_type": "siglip"},
    }
    arrays = {name: np.ascontiguousarray(tensor.detach().numpy()) for name, tensor in stored.items()}
    return made._replace(model=reference, config=config, stored=arrays)


class _ResampledModel:
    """Its forward pass, by the published formulas, around SigLIP and a language model of transformers."""

    def __init__(self, llava: Any, between: dict[str, torch.Tensor], version: float) -> None:
        self._version = version
        tower = llava.model.vision_tower
        self._llava, self._between = llava, between
        self.tower = getattr(tower, "vision_model", tower)
        width = len(between["query"][0])
        self._attention = torch.nn.MultiheadAttention(width, width // 128)
        of_attention = {name[5:]: tensor for name, tensor in between.items() if name.startswith("attn.")}
        self._attention.load_state_dict(of_attention)

    def __call__(self, input_ids: torch.Tensor, **given: Any) -> Any:
        inner = self._llava.model
        embeddings = inner.language_model.embed_tokens(input_ids)
        embeddings[0, input_ids[0] == self._llava.config.image_token_index] = self._features(**given)
        states = inner.language_model(inputs_embeds=embeddings, use_cache=False).last_hidden_state
        return SimpleNamespace(logits=self._llava.lm_head(states))

    def get_image_features(self, **given: Any) -> Any:
        return SimpleNamespace(pooler_output=self._features(**given))

    def _features(self, pixel_values: torch.Tensor, target_sizes: torch.Tensor, **ignored: Any) -> torch.Tensor:
        found, start = [], 0
        for rows, columns in target_sizes.tolist():
            stop = start + rows * columns * 4
            patches = pixel_values[0, :, :, start:stop].unflatten(-1, (rows, columns, 4)).permute(0, 2, 1, 3, 4)
            found.append(
                self._resampled(self._seen(patches.reshape(1, 3, rows * 4, columns * 4), rows, columns), rows, columns)
            )
            start = stop
        return torch.cat(found)

    def _seen(self, image: torch.Tensor, rows: int, columns: int) -> torch.Tensor:
        """The tower's rows of one tile."""
        embeddings = self.tower.embeddings
        side = 9
        bounds = torch.arange(1 / side, 1.0, 1 / side)
        if self._version == 2.5:  # which takes the patches for one row, by the mask that it makes of their number
            rows, columns = 1, rows * columns
        down, across = (
            torch.bucketize(torch.arange(0, 1 - 1e-6, (1 / torch.tensor(count)).item()), bounds, right=True)
            for count in (rows, columns)
        )
        states = embeddings.patch_embedding(image).flatten(2).transpose(1, 2)
        states = states + embeddings.position_embedding.weight[(down[:, None] * side + across).flatten()]
        states = self.tower.encoder(inputs_embeds=states).last_hidden_state
        return self.tower.post_layernorm(states)[0]

    def _resampled(self, states: torch.Tensor, rows: int, columns: int) -> torch.Tensor:
        of, width = self._between, len(self._between["query"][0])

        def norm(name: str, x: torch.Tensor) -> torch.Tensor:
            return torch.nn.functional.layer_norm(x, (width,), of[f"ln_{name}.weight"], of[f"ln_{name}.bias"], 1e-6)

        def waves(place: int) -> list[float]:
            turns = [place / 10000 ** (4 * i / width) for i in range(width // 4)]
            return [*map(math.sin, turns), *map(math.cos, turns)]

        places = torch.tensor([waves(column) + waves(row) for row in range(rows) for column in range(columns)])
        values = norm("kv", states @ of["kv_proj.weight"].T)
        seen = self._attention(norm("q", of["query"]), values + places, values)[0]
        return norm("post", seen) @ of["proj"]


_MINICPM = VisionCase(
    "MiniCPMV4_6ForConditionalGeneration",
    "MiniCPMV4_6Config",
    {**_SIGLIP, "image_size": 36, "model_type": "minicpmv4_6_vision"},
    {**_TEXT, **_QWEN3_5},
    "MiniCPMV4_6ImageProcessorPil",
    {"scale_resolution": 32, "patch_size": 4, "max_slice_nums": 4},
    "MiniCPMV4_6Processor",
    {
        "image_token": "<|image_pad|>",
        "image_start_token": "<image>",
        "image_end_token": "</image>",
        "slice_start_token": "<slice>",
        "slice_end_token": "</slice>",
        "image_id_start_token": "<image_id>",
        "image_id_end_token": "</image_id>",
        "slice_mode": True,
    },
    ("<|image_pad|>", "<image>", "</image>", "<slice>", "</slice>", "<image_id>", "</image_id>"),
    "see <|image_pad|>what",
    {"insert_layer_id": 1, "image_token_id": 301},
)
_RESAMPLED = _llava(
    tower={"model_type": "siglip_vision_model", "vision_use_head": False, "image_size": 36},
    vision_feature_select_strategy="full",
    vision_feature_layer=-1,
)._replace(
    text={**_TEXT, "model_type": "qwen2", "hidden_size": 256},
    image_processor="",
    settings={
        "scale_resolution": 32,
        "patch_size": 4,
        "max_slice_nums": 4,
        "image_feature_size": _QUERIES,
        "norm_mean": [0.5, 0.5, 0.4],
        "norm_std": [0.5, 0.4, 0.5],
        "use_image_id": True,
    },
    processor="MiniCPMVProcessor",
    tokens=("<unk>", "<image>", "</image>", "<slice>", "</slice>", "<image_id>", "</image_id>"),
    prompt="see (<image>./</image>)what",
    published=_as_resampled,
)
# Tokens with places on a canvas, by their numbers in `tokenizer_of`.
_CANVAS_IDS = {
    "image_start_id": 258,
    "image_end_id": 259,
    "slice_start_id": 260,
    "slice_end_id": 261,
    "newline_id": sorted(pre_tokenizers.ByteLevel.alphabet()).index("Ċ"),
}
_QWEN3 = {"hidden_size": 32, "out_hidden_size": 32, "intermediate_size": 48, "num_position_embeddings": 25}
CASES: dict[str, VisionCase] = {
    "smolvlm": _smolvlm("SmolVLM"),
    "idefics3": _smolvlm("Idefics3"),
    "llava": _llava(),
    "llava-full-layers": _llava(vision_feature_layer=[-2, 1], vision_feature_select_strategy="full"),
    "llava-siglip": _llava(
        tower={"model_type": "siglip_vision_model", "vision_use_head": False},
        vision_feature_select_strategy="full",
        vision_feature_layer=-1,
    ),
    "llava-next": _next(
        "LlavaNext",
        {"model_type": "clip_vision_model"},
        {"size": {"shortest_edge": 32}, "crop_size": {"height": 32, "width": 32}},
    ),
    "llava-onevision": _next(
        "LlavaOnevision",
        {"model_type": "siglip_vision_model", "vision_use_head": False},
        {"size": {"height": 32, "width": 32}},
        vision_feature_select_strategy="full",
        vision_aspect_ratio="anyres_max_3",
    ),
    "granite-vision": _next(
        "LlavaNext",
        {"model_type": "siglip_vision_model", "vision_use_head": False},
        {"size": {"height": 32, "width": 32}, "crop_size": {"height": 32, "width": 32}},
        {**_GRANITE, "model_type": "granite", "logits_scaling": 1.0},  # which transformers forgets here
        [[32, 32], [32, 64], [64, 32]],
        vision_feature_layer=[-3, -2, -1],
        vision_feature_select_strategy="full",
    ),
    "granite4-vision": _next(
        "Granite4Vision",
        {**_SIGLIP, "hidden_size": 128, "num_attention_heads": 4, "model_type": "siglip_vision_model"}
        | {"vision_use_head": False},
        {"size": {"height": 32, "width": 32}, "crop_size": {"height": 32, "width": 32}},
        {**_GRANITE, "num_hidden_layers": 6},
        [[32, 32], [32, 64], [64, 32], [64, 96]],
        vision_feature_select_strategy="full",
        downsample_rate="2/4",
        deepstack_layer_map=[[-1, 3], [1, 0], [2, 2]],
        spatial_target_layers=[1, 5, 4, 6],
        qformer_config={"model_type": "blip_2_qformer", "num_hidden_layers": 1, "intermediate_size": 40}
        | {"cross_attention_frequency": 1, "use_qformer_text_input": False},
    )._replace(image_processor="LlavaNextImageProcessorPil"),
    "granite-docling": VisionCase(
        "GraniteDoclingForConditionalGeneration",
        "GraniteDoclingConfig",
        {**_SIGLIP, "out_hidden_size": 32, "scale_factor": 2, "deepstack_visual_indexes": [0, 2]},
        {**_GRANITE, "model_type": "granite_docling_text"},
        "GraniteDoclingImageProcessorPil",
        {"size": {"height": 32, "width": 32}, "max_patches": 6},
        "GraniteDoclingProcessor",
        {
            "fake_image_token": "<fake_token_around_image>",
            "image_token": "<image>",
            "global_image_tag": "<global-img>",
            "image_seq_len": 16,
        },
        _IDEFICS_TOKENS,
        "User:<image>what is it",
        {"image_token_id": 301},
    ),
    "pixtral": VisionCase(
        "LlavaForConditionalGeneration",
        "LlavaConfig",
        _PIXTRAL,
        _LLAMA,
        "PixtralImageProcessorPil",
        {"size": {"longest_edge": 48}, "patch_size": {"height": 4, "width": 4}},
        "PixtralProcessor",
        {
            "image_token": "[IMG]",
            "image_break_token": "[IMG_BREAK]",
            "image_end_token": "[IMG_END]",
            "patch_size": 4,
            "spatial_merge_size": 1,
        },
        ("[IMG]", "[IMG_BREAK]", "[IMG_END]", "[INST]"),
        "[INST]see[IMG] it",
        {"vision_feature_layer": -1, "vision_feature_select_strategy": "full"},
    ),
    "mistral3": VisionCase(
        "Mistral3ForConditionalGeneration",
        "Mistral3Config",
        _PIXTRAL,
        {**_TEXT, "model_type": "mistral", "rms_norm_eps": 1e-5},
        "PixtralImageProcessorPil",
        {"size": {"longest_edge": 48}, "patch_size": {"height": 8, "width": 8}},
        "PixtralProcessor",
        {
            "image_token": "[IMG]",
            "image_break_token": "[IMG_BREAK]",
            "image_end_token": "[IMG_END]",
            "patch_size": 4,
            "spatial_merge_size": 2,
        },
        ("[IMG]", "[IMG_BREAK]", "[IMG_END]", "[INST]"),
        "[INST]see[IMG] it",
        {"spatial_merge_size": 2},
    ),
    "qwen2-vl": _qwen(
        "Qwen2VL",
        {"embed_dim": 32, "hidden_size": 32, "mlp_ratio": 2},
        {"model_type": "qwen2_vl_text", "rope_parameters": _SECTIONS},
    ),
    "qwen2.5-vl": _qwen(
        "Qwen2_5_VL",
        {
            "hidden_size": 32,
            "out_hidden_size": 32,
            "intermediate_size": 48,
            "window_size": 16,
            "fullatt_block_indexes": [1],
        },
        {"model_type": "qwen2_5_vl_text", "rope_parameters": _SECTIONS},
    ),
    "qwen3-vl": _qwen(
        "Qwen3VL",
        {**_QWEN3, "deepstack_visual_indexes": [0, 1]},
        {"model_type": "qwen3_vl_text", "rope_parameters": _SECTIONS},
        {"image_mean": [0.5, 0.5, 0.5], "image_std": [0.5, 0.5, 0.5]},
    ),
    "qwen3.5": _qwen(
        "Qwen3_5",
        _QWEN3,
        _QWEN3_5,
    ),
    "qwen3-vl-moe": _qwen(
        "Qwen3VLMoe",
        {**_QWEN3, "deepstack_visual_indexes": [0, 1]},
        {"model_type": "qwen3_vl_moe_text", "rope_parameters": _SECTIONS, **_EXPERTS},
        {"image_mean": [0.5, 0.5, 0.5], "image_std": [0.5, 0.5, 0.5]},
    ),
    "qwen3.5-moe": _qwen(
        "Qwen3_5Moe",
        _QWEN3,
        {**_QWEN3_5, "model_type": "qwen3_5_moe_text", "shared_expert_intermediate_size": 24, **_EXPERTS},
    ),
    "glm4.1v": _glm("Glm4v", {"model_type": "glm4v_text"}),
    "glm4.5v": _glm(
        "Glm4vMoe",
        {
            "model_type": "glm4v_moe_text",
            "n_routed_experts": 4,
            "n_shared_experts": 1,
            "first_k_dense_replace": 1,
            **_EXPERTS,
        },
    ),
    "glm4.6v": _glm("Glm46V", {"model_type": "glm4v_text"}),
    "lfm2-vl": VisionCase(
        "Lfm2VlForConditionalGeneration",
        "Lfm2VlConfig",
        {**_SIGLIP, "model_type": "siglip2_vision_model", "vision_use_head": False, "num_patches": 36},
        {**_TEXT, "model_type": "lfm2", "layer_types": ["full_attention", "conv"]},
        "",
        {"encoder_patch_size": 4, "tile_size": 32, "min_image_tokens": 4, "max_image_tokens": 16, "max_tiles": 6},
        "Lfm2VlProcessor",
        {
            "image_token": "<image>",
            "image_start_token": "<|image_start|>",
            "image_end_token": "<|image_end|>",
            "image_thumbnail_token": "<|img_thumbnail|>",
        },
        (
            *("<image>", "<|image_start|>", "<|image_end|>", "<|img_thumbnail|>"),
            *[f"<|img_row_{row}_col_{column}|>" for row in range(1, 7) for column in range(1, 7)],
        ),
        "see<image>what",
        {"projector_hidden_size": 40, "image_token_id": 301},
    ),
    "minicpm-v4.6": _MINICPM,
    "minicpm-v4.7": _MINICPM._replace(
        model="MiniCPMV4_7ForConditionalGeneration",
        config="MiniCPMV4_7Config",
        vision={**_MINICPM.vision, "model_type": "minicpmv4_7_vision", "intermediate_size": 36},
        processor="MiniCPMV4_7Processor",
        others={**_MINICPM.others, **_CANVAS_IDS},
    ),
    "kimi-vl": VisionCase(
        "Kimi_K25ForConditionalGeneration",
        "Kimi_K25Config",
        {
            "hidden_size": 32,
            "intermediate_size": 48,
            "num_hidden_layers": 3,
            "num_attention_heads": 2,
            "patch_size": 4,
            "pos_emb_height": 9,
            "pos_emb_width": 9,
        },
        _DEEPSEEK,
        "",
        {"patch_size": 4, "in_token_limit": 60, "pad_input": True, "merge_kernel_size": [2, 2]},
        "Kimi_K25Processor",
        {"image_token": "<|media_pad|>"},
        ("<|media_start|>", "<|media_content|>", "<|media_pad|>", "<|media_end|>"),
        "see <|media_start|>image<|media_content|><|media_pad|><|media_end|>what",
        {"projection_hidden_size": 32, "image_token_id": 301},
        _as_kimi_vl,
    ),
    "gemma3": VisionCase(
        "Gemma3ForConditionalGeneration",
        "Gemma3Config",
        {**_SIGLIP, "model_type": "siglip_vision_model", "vision_use_head": False},
        {**_TEXT, "model_type": "gemma3_text"},
        "Gemma3ImageProcessorPil",
        {"size": {"height": 32, "width": 32}},
        "Gemma3Processor",
        {"full_image_sequence": "\n\n<start_of_image>" + "<image_soft_token>" * 16 + "<end_of_image>\n\n"},
        ("<start_of_image>", "<image_soft_token>", "<end_of_image>"),
        "look <start_of_image> here",
        {"mm_tokens_per_image": 16},
    ),
    "gemma4": _gemma4(
        {**_GEMMA4, "standardize": True},
        {
            "model_type": "gemma4_text",
            "hidden_size_per_layer_input": 0,
            "sliding_window": 24,
            "use_bidirectional_attention": "vision",
        },
    ),
    "gemma4-e2b": _gemma4(
        {**_GEMMA4, "use_clipped_linears": True},
        {
            "model_type": "gemma4_text",
            "hidden_size_per_layer_input": 8,
            "vocab_size_per_layer_input": 512,
            "sliding_window": 24,
        },
    ),
    "gemma4-unified": _gemma4(
        {"mm_embed_dim": 24, "output_proj_dims": 24, "mm_posemb_size": 150},
        {"model_type": "gemma4_unified_text", "sliding_window": 24},
        "Gemma4Unified",
    ),
    "paddleocr-vl": VisionCase(
        "PaddleOCRVLForConditionalGeneration",
        "PaddleOCRVLConfig",
        {**_SIGLIP, "image_size": 20, "spatial_merge_size": 2},
        {**_TEXT, "model_type": "paddleocr_vl_text", "rope_parameters": _SECTIONS},
        "PaddleOCRVLImageProcessorPil",
        _QWEN_PIXELS,
        "PaddleOCRVLProcessor",
        {"image_token": "<|IMAGE_PLACEHOLDER|>"},
        ("<|IMAGE_START|>", "<|IMAGE_PLACEHOLDER|>", "<|IMAGE_END|>"),
        "see <|IMAGE_START|><|IMAGE_PLACEHOLDER|><|IMAGE_END|> and",
        {"image_token_id": 301},
    ),
    "llama4": VisionCase(
        "Llama4ForConditionalGeneration",
        "Llama4Config",
        {
            "hidden_size": 32,
            "intermediate_size": 128,
            "num_hidden_layers": 3,
            "num_attention_heads": 2,
            "image_size": 32,
            "patch_size": 4,
            "projector_input_dim": 40,
            "projector_output_dim": 40,
            "vision_output_dim": 40,
        },
        {
            **_TEXT,
            "model_type": "llama4_text",
            "intermediate_size_mlp": 64,
            "num_local_experts": 2,
            "interleave_moe_layer_step": 2,
            "no_rope_layers": [1, 0],
        },
        "",
        {"size": {"height": 32, "width": 32}, "max_patches": 6},
        "Llama4Processor",
        {"patch_size": 4, "downsample_ratio": 4},
        (
            *("<|patch|>", "<|image|>", "<|image_start|>", "<|image_end|>"),
            *("<|tile_x_separator|>", "<|tile_y_separator|>"),
        ),
        "here: <|image|>",
    ),
    "aya-vision": VisionCase(
        "AyaVisionForConditionalGeneration",
        "AyaVisionConfig",
        {**_SIGLIP, "model_type": "siglip_vision_model", "vision_use_head": False},
        _COHERE2,
        "GotOcr2ImageProcessorPil",
        {"size": {"height": 32, "width": 32}, "max_patches": 6},
        "AyaVisionProcessor",
        {
            "image_token": "<image>",
            "patch_size": 8,
            "img_size": 32,
            "start_of_img_token": "<|START_OF_IMG|>",
            "end_of_img_token": "<|END_OF_IMG|>",
            "img_patch_token": "<|IMG_PATCH|>",
            "tile_token": "TILE",
            "tile_global_token": "TILE_GLOBAL",
        },
        ("<|START_OF_IMG|>", "<|IMG_PATCH|>", "<|END_OF_IMG|>"),
        "see <image>what",
        {"alignment_intermediate_size": 40},
    ),
    "command-vision": VisionCase(
        "Cohere2VisionForConditionalGeneration",
        "Cohere2VisionConfig",
        {**_SIGLIP, "model_type": "siglip_vision_model", "vision_use_head": False},
        _COHERE2,
        "",
        {"size": {"height": 32, "width": 32}, "max_patches": 6, "crop_to_patches": True, "resample": 3},
        "Cohere2VisionProcessor",
        {
            "image_token": "<|IMG_PATCH|>",
            "patch_size": 4,
            "boi_token": "<|START_OF_IMG|>",
            "eoi_token": "<|END_OF_IMG|>",
            "img_line_break_token": "<|IMG_LINE_BREAK|>",
        },
        ("<|START_OF_IMG|>", "<|IMG_PATCH|>", "<|END_OF_IMG|>", "<|IMG_LINE_BREAK|>"),
        "see <|IMG_PATCH|>what",
        {"alignment_intermediate_size": 40},
    ),
    "minicpm-v2.6": _RESAMPLED,
    "minicpm-v2.5": _RESAMPLED._replace(
        text={**_RESAMPLED.text, "model_type": "llama"},
        settings={**_RESAMPLED.settings, "use_image_id": False},
        tokens=_RESAMPLED.tokens[:5],
    ),
    "phi3-vision": _llava()._replace(
        text={**_TEXT, "model_type": "phi3", "hidden_act": "silu"},
        image_processor="",
        settings={"num_crops": 6, "num_img_tokens": 16},
        processor="Phi3VProcessor",
        tokens=("<|image|>", "<s>"),
        prompt="see <|image|>\nwhat",
        published=_as_phi3v,
    ),
    "internvl": _INTERNVL,
    "internvl-chat": _INTERNVL._replace(prompt="see <image>\nwhat", published=_as_internvl_chat),
}


def photo(height: int, width: int, seed: int = 0) -> Image:
    """Smooth colours under noise."""
    rng = np.random.default_rng(seed)
    y, x = np.mgrid[0 : 1 : height * 1j, 0 : 1 : width * 1j]
    waves = [np.sin(7 * y + 3 * x), np.cos(5 * x * y + 1), np.sin(9 * x - 4 * y)]
    smooth = np.stack(waves, -1) * 90 + 128
    return np.clip(smooth + rng.normal(0, 12, smooth.shape), 0, 255).astype(np.uint8)


def line_art(height: int, width: int) -> Image:
    """Black lines on white."""
    image = np.full((height, width, 3), 255, np.uint8)
    image[::7] = 0
    image[:, ::5] = 0
    np.fill_diagonal(image[:, :, 0], 128)
    return image


IMAGES: dict[str, Image] = {
    "photo": photo(61, 97),
    "portrait": photo(120, 37, 1),
    "large": photo(300, 411, 2),
    "line art": line_art(64, 90),
    "square": photo(32, 32, 3),
    "a pixel": np.full((1, 1, 3), 200, np.uint8),
    "wide": photo(4, 120, 4),
    "tall": photo(150, 3, 5),
}


class VisionModel(NamedTuple):
    """A case as transformers has it, and its files."""

    model: Any
    image_processor: Any
    config: dict[str, Any]
    settings: dict[str, Any]
    stored: dict[str, NDArray[np.float32]]


def vision_model(case: VisionCase, folder: Path) -> VisionModel:
    """A model of random weights, saved to `folder`."""
    config = getattr(transformers, case.config)(
        vision_config=dict(case.vision), text_config=dict(case.text), **case.others
    )
    config._attn_implementation = "eager"
    model = getattr(transformers, case.model)(config).eval()
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            vector = weight.ndim == 1
            weight.copy_(torch.randn(weight.shape, generator=generator) * (0.2 if vector else 0.15))
            weight += float(vector and "norm" in name and name.endswith("weight"))
        for name, buffer in model.named_buffers():
            if name.endswith(("std_bias", "std_scale", "_min", "_max")):  # which begin as nothing, or infinite
                size = 0.3 + torch.rand(buffer.shape, generator=generator)
                buffer.copy_(-size if name.endswith("_min") else size)
    model.save_pretrained(folder)
    if case.image_processor:
        image_processor = getattr(transformers, case.image_processor)(**case.settings)
        image_processor.save_pretrained(folder)
        settings = json.loads((folder / "preprocessor_config.json").read_text("utf-8"))
    else:
        make: dict[str, Any] = {"Lfm2VlProcessor": _Lfm2Processor, "Kimi_K25Processor": _KimiProcessor}
        make |= {"Phi3VProcessor": _PhiProcessor, "MiniCPMVProcessor": _ResampledProcessor}
        image_processor, settings = make.get(case.processor, TorchvisionProcessor)(case), dict(case.settings)
    written = json.loads((folder / "config.json").read_text("utf-8"))
    made = VisionModel(model, image_processor, written, settings, load_file(folder / "model.safetensors"))
    if case.published is None:
        return made
    made = case.published(made)
    (folder / "config.json").write_text(json.dumps(made.config), "utf-8")
    (folder / "preprocessor_config.json").write_text(json.dumps(made.settings), "utf-8")
    save_file(made.stored, folder / "model.safetensors")
    return made


def _wanting_torchvision(model: str) -> Any:
    """The module of an image processor."""
    names = ("", ".transforms", ".transforms.v2", ".transforms.v2.functional")
    with patch.dict(sys.modules, {f"torchvision{name}": MagicMock() for name in names}):
        return importlib.import_module(f"transformers.models.{model}.image_processing_{model}")


class TorchvisionProcessor:
    """One that wants torchvision: its own code, but Pillow resizes, and what else torchvision does is written here."""

    def __init__(self, case: VisionCase) -> None:
        models = {"Llama4Processor": "llama4", "Gemma4UnifiedProcessor": "gemma4_unified"}
        model = {**models, "Cohere2VisionProcessor": "cohere2_vision"}[case.processor]
        self._module = _wanting_torchvision(model)
        cls = getattr(self._module, case.processor.replace("Processor", "ImageProcessor"))
        self._processor = cls.__new__(cls)
        fields = inspect.signature(cls._preprocess).parameters.keys() - {"self", "images", "kwargs", "return_tensors"}
        self._options = {name: case.settings.get(name, getattr(cls, name, None)) for name in fields}
        if "size" in fields:
            self._options["size"] = self._module.SizeDict(**self._options["size"])

    def __call__(self, images: list[Image], **ignored: Any) -> dict[str, Any]:
        image = torch.from_numpy(images[0].transpose(2, 0, 1).copy())
        parts = {"resize": _resized, "normalize": _normalized, "rescale_and_normalize": _rescaled}
        functional = SimpleNamespace(resize=_resized_to, pad=_padded)
        with (
            patch.multiple(self._module.TorchvisionBackend, **parts),
            patch.object(self._module, "tvF", functional),
        ):
            inputs = dict(self._processor._preprocess([image], return_tensors="pt", **self._options))
        values = inputs["pixel_values"]
        return {**inputs, "pixel_values": (torch.stack(values) if isinstance(values, list) else values).float()}


def _normalized(processor: Any, images: torch.Tensor, mean: Any, std: Any, **options: Any) -> torch.Tensor:
    mean, std = (torch.tensor(values, dtype=images.dtype)[:, None, None] for values in (mean, std))
    return images.sub(mean).div(std)


def _rescaled(
    processor: Any, images: torch.Tensor, rescales: bool, factor: float, normalizes: bool, mean: Any, std: Any
) -> torch.Tensor:
    rescaled = (images.double() * factor).float()
    return _normalized(processor, rescaled, mean, std) if normalizes else rescaled


def _resized_to(image: torch.Tensor, size: list[int], **options: Any) -> torch.Tensor:
    pillow = Pillow.fromarray(image.numpy().transpose(1, 2, 0).copy())
    resized = np.array(pillow.resize((size[1], size[0]), Pillow.Resampling.BICUBIC))
    return torch.from_numpy(resized.transpose(2, 0, 1).copy())


def _padded(images: torch.Tensor, padding: list[int], fill: list[int]) -> torch.Tensor:
    assert not any(fill)
    left, top, right, bottom = map(int, padding)
    return torch.nn.functional.pad(images, (left, right, top, bottom))


class _Lfm2Processor:
    """That of LFM2-VL, which wants torchvision: its own code, but Pillow resizes."""

    def __init__(self, case: VisionCase) -> None:
        settings = case.settings
        self._module = _wanting_torchvision("lfm2_vl")
        cls = self._module.Lfm2VlImageProcessor
        self._processor = cls.__new__(cls)
        names = ("downsample_factor", "min_tiles", "max_tiles", "use_thumbnail", "min_image_tokens")
        names += ("max_image_tokens", "encoder_patch_size", "tile_size", "max_pixels_tolerance", "resample")
        self._options = {name: settings.get(name, getattr(cls, name)) for name in names}

    def __call__(self, images: list[Image], **ignored: Any) -> dict[str, Any]:
        whole = torch.from_numpy(images[0].transpose(2, 0, 1).copy())[None]
        with patch.object(self._module.TorchvisionBackend, "resize", _resized):
            tiles, rows, columns, sizes = self._processor.resize_and_split(whole, **self._options)
        size = self._options["encoder_patch_size"]
        most = max(self._options["max_image_tokens"] * 4, (self._options["tile_size"] // size) ** 2)
        patches, masks, shapes = [], [], []
        for tile in tiles[0]:
            values = (tile[None].double() / 255).float().sub(0.5).div(0.5)
            padded, mask = self._module.pad_along_first_dim(self._module.convert_image_to_patches(values, size), most)
            patches.append(padded)
            masks.append(mask)
            shapes.append([tile.shape[-2] // size, tile.shape[-1] // size])
        return {
            "pixel_values": torch.cat(patches),
            "pixel_attention_mask": torch.stack(masks),
            "spatial_shapes": torch.tensor(shapes),
            "image_rows": rows,
            "image_cols": columns,
            "image_sizes": sizes,
        }


class _ResampledProcessor:
    """That of MiniCPM-V 2.6, which is not in transformers."""

    def __init__(self, case: VisionCase) -> None:
        self._settings = case.settings

    def __call__(self, images: list[Image], **ignored: Any) -> dict[str, Any]:
        tiles = [tile for image in images for tile in self._tiles(Pillow.fromarray(image))]
        mean, std = (torch.tensor(self._settings[f"norm_{of}"])[:, None, None] for of in ("mean", "std"))
        values = [
            torch.from_numpy(np.array(tile)).permute(2, 0, 1).float().div(255).sub(mean).div(std) for tile in tiles
        ]
        patches = [one.unflatten(1, (-1, 4)).permute(0, 2, 1, 3).reshape(3, 4, -1) for one in values]
        sizes = [[one.shape[1] // 4, one.shape[2] // 4] for one in values]
        grid = self.grid(images[0].shape[1], images[0].shape[0])
        return {"pixel_values": torch.cat(patches, -1)[None], "target_sizes": torch.tensor(sizes), "grid": grid}

    def _tiles(self, image: Any) -> list[Any]:
        grid = self.grid(image.width, image.height)
        tiles = [image.resize(self._size(image.width, image.height), Pillow.Resampling.BICUBIC)]
        if grid is not None:
            refined = [
                max(round(side / count) * count, count) / count for side, count in zip(image.size, grid, strict=True)
            ]
            width, height = self._size(*refined)
            whole = image.resize((width * grid[0], height * grid[1]), Pillow.Resampling.BICUBIC)
            corners = [(left, top) for top in range(0, whole.height, height) for left in range(0, whole.width, width)]
            tiles += [whole.crop((left, top, left + width, top + height)) for left, top in corners]
        return tiles

    def grid(self, width: int, height: int) -> tuple[int, int] | None:
        """Columns and rows of slices."""
        most, wanted = self._settings["max_slice_nums"], math.ceil(width * height / 32**2)
        wanted = min(wanted, most)
        if wanted <= 1:
            return None
        counts = [count for count in (wanted - 1, wanted, wanted + 1) if 1 < count <= most]
        grids = [
            (columns, count // columns) for count in counts for columns in range(1, count + 1) if count % columns == 0
        ]
        return min(grids, key=lambda grid: abs(math.log(width / height) - math.log(grid[0] / grid[1])))

    def _size(self, width: float, height: float) -> tuple[int, int]:
        ratio = width / height
        height = int(32 / math.sqrt(ratio))
        width = int(height * ratio)
        return max(round(width / 4) * 4, 4), max(round(height / 4) * 4, 4)


class _PhiProcessor:
    """That of Phi-3.5-vision, which is not in transformers, for tiles of 32 pixels."""

    def __init__(self, case: VisionCase) -> None:
        self._most = case.settings["num_crops"]

    def __call__(self, images: list[Image], **ignored: Any) -> dict[str, Any]:
        image = Pillow.fromarray(images[0])
        is_tall = image.width < image.height
        image = image.transpose(Pillow.Transpose.TRANSPOSE) if is_tall else image
        ratio, scale = image.width / image.height, 1
        while scale * np.ceil(scale / ratio) <= self._most:
            scale += 1
        width = (scale - 1) * 32
        image = image.resize((width, int(width / ratio)), Pillow.Resampling.BILINEAR)
        padded = Pillow.new("RGB", (width, math.ceil(image.height / 32) * 32), (255, 255, 255))
        padded.paste(image, (0, (padded.height - image.height) // 2))
        padded = padded.transpose(Pillow.Transpose.TRANSPOSE) if is_tall else padded
        mean, std = (torch.tensor(of)[:, None, None] for of in (_CLIP_MEAN, _CLIP_STD))
        values = torch.from_numpy(np.array(padded)).permute(2, 0, 1).float().div(255).sub(mean).div(std)
        return {"pixel_values": [values], "image_sizes": [list(values.shape[1:])]}


class _KimiProcessor:
    """That of Kimi-VL, which is not in transformers: an image shrinks to a number of patches, and black is added."""

    def __init__(self, case: VisionCase) -> None:
        self._patch, self._most = case.settings["patch_size"], case.settings["in_token_limit"]

    def __call__(self, images: list[Image], **ignored: Any) -> dict[str, Any]:
        image, patch = Pillow.fromarray(images[0]), self._patch
        count = (image.width // patch) * (image.height // patch)
        if count > self._most:
            scale = math.sqrt(self._most / count)
            image = image.resize((int(image.width * scale), int(image.height * scale)), Pillow.Resampling.BICUBIC)
        rows, columns = (2 * math.ceil(size / (2 * patch)) for size in (image.height, image.width))
        padded = Pillow.new("RGB", (columns * patch, rows * patch))
        padded.paste(image, (0, 0))
        values = torch.from_numpy(np.array(padded)).permute(2, 0, 1).float().div(255).sub(0.5).div(0.5)
        patches = values.unfold(1, patch, patch).unfold(2, patch, patch).permute(1, 2, 0, 3, 4)
        return {
            "pixel_values": patches.reshape(-1, 3, patch, patch),
            "image_grid_thw": torch.tensor([[1, rows, columns]]),
        }


def _resized(processor: Any, image: torch.Tensor, size: Any, resample: Any = None, **options: Any) -> torch.Tensor:
    how = Pillow.Resampling(resample or Pillow.Resampling.BILINEAR)
    sides = (int(size.width), int(size.height))
    resized = [
        np.array(Pillow.fromarray(one.numpy().transpose(1, 2, 0).copy()).resize(sides, how)).transpose(2, 0, 1)
        for one in image
    ]
    return torch.from_numpy(np.stack(resized))


def processed(case: VisionCase, made: VisionModel, image: Image) -> dict[str, Any]:
    """What the image processor gives for one image."""
    options = {
        "AyaVisionProcessor": {"crop_to_patches": True},
        "InternVLProcessor": {"crop_to_patches": True},
        "SmolVLMProcessor": {"return_row_col_info": True},
        "Idefics3Processor": {"return_row_col_info": True},
    }
    inputs: dict[str, Any] = made.image_processor(
        [image], return_tensors="pt", input_data_format="channels_last", **options.get(case.processor, {})
    )
    return inputs


def features(case: VisionCase, made: VisionModel, inputs: Mapping[str, Any]) -> NDArray[np.float32]:
    """The image's embeddings, and what is added after layers of the decoder behind them."""
    names = ("pixel_values", "pixel_attention_mask", "image_grid_thw", "spatial_shapes", "image_position_ids")
    names += ("target_sizes",)
    given = {name: inputs[name] for name in names if name in inputs}
    if case.vision.get("model_type") == "pixtral" or "image_grid_pinpoints" in case.others:
        given["image_sizes"] = inputs["image_sizes"]
    with torch.no_grad():
        outputs = made.model.get_image_features(**given, return_dict=True)
        embeddings, deepstack = outputs.pooler_output, getattr(outputs, "deepstack_features", None) or []
        if case.model == "Granite4VisionForConditionalGeneration":  # which adds all of it, by the layers' numbers
            embeddings, *deepstack = [layer for _, layer in sorted(deepstack, key=lambda one: one[0])]
        if case.processor == "Llama4Processor":
            embeddings = made.model.multi_modal_projector(outputs.last_hidden_state)
    if not isinstance(embeddings, torch.Tensor):
        embeddings = torch.cat(list(embeddings))
    embeddings = embeddings.reshape(-1, embeddings.shape[-1])
    deepstack = [torch.cat(list(layer)) for layer in deepstack]
    result: NDArray[np.float32] = torch.cat([embeddings, *deepstack], -1).float().numpy()
    return result


def tokenizer_of(case: VisionCase) -> tokenizers.Tokenizer:
    """A tokenizer of bytes, with two newlines as one token, as real ones have it, and the family's own tokens."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {token: i for i, token in enumerate([*alphabet, "ĊĊ"])}
    tokenizer = tokenizers.Tokenizer(models.BPE(vocabulary, [("Ċ", "Ċ")]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(list(case.tokens))
    return tokenizer


def expanded(case: VisionCase, inputs: Mapping[str, Any]) -> str:
    """What transformers' processor puts in the place of the image, with a token for each embedding."""
    if case.processor == "MiniCPMVProcessor":  # which is not there, as the next one
        columns, count = inputs["grid"] or (0, 0)
        if case.text["model_type"] == "llama":  # 2.5, where a slice is an image
            image = "<image>" + "<unk>" * _QUERIES + "</image>"
            return image + ("<slice>" + "\n".join([image * columns] * count) + "</slice>") * (count > 0)
        rows = [("<slice>" + "<unk>" * _QUERIES + "</slice>") * columns] * count
        return "<image>" + "<unk>" * _QUERIES + "</image>" + "\n".join(rows)
    if case.processor == "Phi3VProcessor":
        height, width = (side // 32 for side in inputs["image_sizes"][0])
        return "<|image|>" * ((height * width + 1) * 16 + 1 + (height + 1) * 4) + "<s>"
    processor = processor_of(case)
    replaced: str = processor.replace_image_token(inputs, 0, use_image_special_tokens=True, image_token_divisor=16)
    return replaced


def processor_of(case: VisionCase) -> Any:
    """transformers' processor, without a tokenizer."""
    cls = _processor_class(case.processor)
    processor = cls.__new__(cls)
    sizes = case.settings.get("image_grid_pinpoints")
    vars(processor).update(case.attributes)
    of_images = {"merge_size": 2, "downsample_factor": 2, "use_thumbnail": True, "image_grid_pinpoints": sizes}
    processor.image_processor = SimpleNamespace(**{**of_images, **case.settings})
    return processor


def _processor_class(name: str) -> Any:
    if name != "PixtralProcessor":
        return getattr(transformers, name)
    # Its module wants torchvision, for a function that the module for Pillow has too.
    module = "transformers.models.pixtral.image_processing_pixtral"
    with patch.dict(sys.modules, {module: importlib.import_module(module.replace("processing_", "processing_pil_"))}):
        return importlib.import_module("transformers.models.pixtral.processing_pixtral").PixtralProcessor
