"""Models that see pictures, of known shapes and with random weights, and pictures for them.

Making one needs torch and transformers, which `make test` installs.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from shapes import VOCAB_SIZE, tokenizer

_FIRST_SPECIAL_ID = 3  # of `tokenizer`
_NOISE = 2**20  # random numbers, which are repeated: drawing billions would take minutes
_SPREAD = 0.02
_CHAT_TEMPLATE = """\
{{%- for message in messages %}}
{{%- if message.content is string %}}{{{{ message.content }}}}
{{%- else %}}
{{%- for part in message.content %}}{{{{ part.text if part.type == "text" else "{placeholder}" }}}}{{%- endfor %}}
{{%- endif %}}
{{%- endfor %}}
"""
LARGE_PICTURE = (4000, 3000)  # width and height of twelve million pixels


@dataclass(frozen=True)
class VisionShape:
    """A model's config and its processor's settings, with transformers' names of classes and fields.

    `tokens` are those that the model wants besides text, and `ids` the fields of the config with a token's id, by that
    token. `tokenizer_names` are fields of tokenizer_config.json. A picture stands as `placeholder` in a prompt. A
    LARGE_PICTURE is brought to the sizes `resized` (width, height) with Pillow's filter number `resample`.
    `published_names`: how tensors' names begin in published checkpoints, by how transformers begins them now.
    """

    model_type: str
    processor: str
    image_processor: str
    config: Mapping[str, Any]
    settings: Mapping[str, Any]
    tokens: tuple[str, ...]
    placeholder: str
    ids: Mapping[str, str]
    resized: tuple[tuple[int, int], ...]
    resample: int
    tokenizer_names: Mapping[str, str] = field(default_factory=dict)
    processor_settings: Mapping[str, Any] = field(default_factory=dict)
    published_names: Mapping[str, str] = field(default_factory=dict)


_OF_ALL = {"do_resize": True, "do_rescale": True, "rescale_factor": 1 / 255, "do_normalize": True}
_HALF = {"image_mean": [0.5, 0.5, 0.5], "image_std": [0.5, 0.5, 0.5]}
_AROUND, _GLOBAL = "<fake_token_around_image>", "<global-img>"
_SMOLVLM = VisionShape(
    "smolvlm",
    "SmolVLMProcessor",
    "SmolVLMImageProcessor",
    {
        "scale_factor": 4,
        "vision_config": {
            "model_type": "smolvlm_vision", "hidden_size": 768, "intermediate_size": 3072, "num_hidden_layers": 12,
            "num_attention_heads": 12, "image_size": 512, "patch_size": 16,
        },
        "text_config": {
            "model_type": "llama", "architectures": ["VLlama3ForCausalLM"], "hidden_size": 576,
            "intermediate_size": 1536, "num_hidden_layers": 30, "num_attention_heads": 9, "num_key_value_heads": 3,
            "max_position_embeddings": 8192, "rope_theta": 1e5,
        },
    },
    {"size": {"longest_edge": 2048}, "max_image_size": {"longest_edge": 512}, "do_image_splitting": True,
     "do_convert_rgb": True, "do_pad": True, "resample": 1, **_HALF},
    (_AROUND, "<image>", _GLOBAL, "<end_of_utterance>",
     *(f"<row_{row}_col_{column}>" for row in range(1, 7) for column in range(1, 7))),
    "<image>",
    {"image_token_id": "<image>"},
    ((2048, 1536), (512, 512)),
    1,
    {"fake_image_token": _AROUND, "image_token": "<image>", "global_image_token": _GLOBAL,
     "end_of_utterance_token": "<end_of_utterance>"},
    {"image_seq_len": 64},
)  # fmt: skip
_QWEN25 = VisionShape(
    "qwen2_5_vl",
    "Qwen2_5_VLProcessor",
    "Qwen2VLImageProcessor",
    {
        "vision_config": {
            "hidden_size": 1280, "out_hidden_size": 2048, "depth": 32, "num_heads": 16, "intermediate_size": 3420,
            "patch_size": 14, "spatial_merge_size": 2, "temporal_patch_size": 2, "window_size": 112,
            "fullatt_block_indexes": [7, 15, 23, 31],
        },
        "text_config": {
            "model_type": "qwen2_5_vl_text", "hidden_size": 2048, "intermediate_size": 11008, "num_hidden_layers": 36,
            "num_attention_heads": 16, "num_key_value_heads": 2, "max_position_embeddings": 32768,
            "rope_parameters": {"rope_type": "default", "rope_theta": 1e6, "mrope_section": [16, 24, 24]},
        },
    },
    {"min_pixels": 3136, "max_pixels": 12845056, "patch_size": 14, "merge_size": 2, "temporal_patch_size": 2,
     "image_mean": [0.48145466, 0.4578275, 0.40821073], "image_std": [0.26862954, 0.26130258, 0.27577711]},
    ("<|vision_start|>", "<|image_pad|>", "<|vision_end|>", "<|video_pad|>"),
    "<|vision_start|><|image_pad|><|vision_end|>",
    {"image_token_id": "<|image_pad|>", "video_token_id": "<|video_pad|>", "vision_start_token_id": "<|vision_start|>",
     "vision_end_token_id": "<|vision_end|>"},
    ((4004, 2996),),
    3,
    {"image_token": "<|image_pad|>", "video_token": "<|video_pad|>"},
)  # fmt: skip
_GEMMA3 = VisionShape(
    "gemma3",
    "Gemma3Processor",
    "Gemma3ImageProcessor",
    {
        "mm_tokens_per_image": 256,
        "vision_config": {
            "model_type": "siglip_vision_model", "hidden_size": 1152, "intermediate_size": 4304,
            "num_hidden_layers": 27, "num_attention_heads": 16, "image_size": 896, "patch_size": 14,
            "vision_use_head": False,
        },
        "text_config": {
            "model_type": "gemma3_text", "hidden_size": 2560, "intermediate_size": 10240, "num_hidden_layers": 34,
            "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 256, "sliding_window": 1024,
            "max_position_embeddings": 32768,
        },
    },
    {"size": {"height": 896, "width": 896}, "resample": 2, "do_convert_rgb": True, "image_seq_length": 256, **_HALF},
    ("<start_of_image>", "<image_soft_token>", "<end_of_image>", "\n", "\n\n", "\n\n\n", "\n\n\n\n"),
    "<start_of_image>",
    {"image_token_id": "<image_soft_token>", "boi_token_id": "<start_of_image>", "eoi_token_id": "<end_of_image>"},
    ((896, 896),),
    2,
    {"boi_token": "<start_of_image>", "image_token": "<image_soft_token>", "eoi_token": "<end_of_image>"},
    {"image_seq_length": 256},
    {"vision_tower.": "vision_tower.vision_model."},
)  # fmt: skip
VISION_SHAPES: dict[str, VisionShape] = {
    "smolvlm-256m": _SMOLVLM,
    "qwen2.5-vl-3b": _QWEN25,
    "gemma-3-4b": _GEMMA3,
}
"""SmolVLM 256M, Qwen2.5-VL 3B and Gemma 3 4B, all with the vocabulary of `shapes`."""


def make(name: str, folder: Path) -> Path:
    """Write the model of a shape into a folder, unless it is there. Returns the folder."""
    if folder.exists():
        return folder
    import torch
    from transformers import AutoConfig, AutoModelForImageTextToText

    shape = VISION_SHAPES[name]
    ids = {token: _FIRST_SPECIAL_ID + i for i, token in enumerate(shape.tokens)}
    of_text = {
        **shape.config["text_config"],
        "vocab_size": VOCAB_SIZE,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "pad_token_id": 0,
        "tie_word_embeddings": True,
    }
    fields = {**shape.config, "text_config": of_text, "tie_word_embeddings": True}
    config = AutoConfig.for_model(shape.model_type, **fields, **{name: ids[token] for name, token in shape.ids.items()})
    with torch.device("meta"):
        model: Any = AutoModelForImageTextToText.from_config(config, dtype=torch.bfloat16)
    model.to_empty(device="cpu")
    model.tie_weights()
    _fill(model)
    part = folder.with_name(f"{folder.name}.part")
    shutil.rmtree(part, ignore_errors=True)
    model.save_pretrained(part)
    del model  # which is as large as what is read again next
    _rename(part, shape.published_names)
    vocabulary = tokenizer(*shape.tokens)
    vocabulary.init_kwargs.update(shape.tokenizer_names)
    vocabulary.save_pretrained(part)
    whose = {"processor_class": shape.processor}
    settings = {**_OF_ALL, **shape.settings, **whose, "image_processor_type": shape.image_processor}
    (part / "preprocessor_config.json").write_text(json.dumps(settings, indent=2))
    (part / "processor_config.json").write_text(json.dumps({**shape.processor_settings, **whose}, indent=2))
    (part / "chat_template.jinja").write_text(_CHAT_TEMPLATE.format(placeholder=shape.placeholder))
    part.rename(folder)
    return folder


def _rename(folder: Path, names: Mapping[str, str]) -> None:
    """Give tensors whose names begin as a key of `names` its value there instead."""
    from safetensors.torch import load_file, save_file

    for file in folder.glob("*.safetensors") if names else ():
        tensors = load_file(file)
        for name in list(tensors):
            begin = next(filter(name.startswith, names), "")
            if begin:
                tensors[names[begin] + name[len(begin) :]] = tensors.pop(name)
        save_file(tensors, file.with_suffix(".part"), {"format": "pt"})
        file.with_suffix(".part").rename(file)


def _fill(model: Any) -> None:
    """Small random numbers everywhere, and ones for the weights of norms."""
    import torch

    noise = (torch.randn(_NOISE, generator=torch.Generator().manual_seed(0)) * _SPREAD).bfloat16()
    with torch.no_grad():
        for name, weight in model.named_parameters():
            flat = weight.reshape(-1)
            for start in range(0, len(flat), _NOISE):
                part = flat[start : start + _NOISE]
                part.copy_(noise[: len(part)])
            if weight.ndim == 1 and name.endswith("weight"):
                weight += 1


def picture(folder: Path, width: int, height: int, seed: int) -> Path:
    """A JPEG file with waves of colours under noise, which is made unless it is there."""
    from PIL import Image

    file = folder / f"{width}x{height}-{seed}.jpg"
    if file.exists():
        return file
    rng = np.random.default_rng(seed)
    y, x = np.mgrid[0 : 1 : height * 1j, 0 : 1 : width * 1j].astype(np.float32)
    turns = rng.uniform(3, 12, (3, 3))
    image = np.stack([np.sin(a * x + b * y + c * x * y) for a, b, c in turns], -1) * 90 + 128
    image += rng.normal(0, 8, image.shape).astype(np.float32)
    folder.mkdir(parents=True, exist_ok=True)
    Image.fromarray(np.clip(image, 0, 255).astype(np.uint8)).save(file, quality=90)
    return file
