"""More wrappers of images and sound. Their other parts have no numbers here: they are never computed of text alone."""

from __future__ import annotations

import contextlib
import json
import logging
from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import models_zoo
import numpy as np
import pytest
from harness import Harness, load, make_device
from numpy.typing import NDArray
from safetensors.numpy import save_file

from tidewheel.engine.models import describe

Tensors = dict[str, NDArray[np.float32]]


def as_in_memory(tensors: Tensors) -> Tensors:
    return tensors


def experts_transposed(tensors: Tensors) -> Tensors:
    """As Qwen3-VL's checkpoints have them."""
    return {
        name: tensor.transpose(0, 2, 1) if ".experts." in name else tensor
        for name, tensor in within("model.language_model.", tensors).items()
    }


def within(prefix: str, tensors: Tensors) -> Tensors:
    return {
        (name.replace("model.language_model.", prefix) if name.startswith("model.language_model.") else name): tensor
        for name, tensor in tensors.items()
    }


def as_llava(tensors: Tensors) -> Tensors:
    """All of the language model below `language_model`, as older checkpoints have it."""
    tensors = {f"language_model.{name}" if name == "lm_head.weight" else name: t for name, t in tensors.items()}
    return within("language_model.model.", tensors)


def as_qwen2_vl(tensors: Tensors) -> Tensors:
    """By the language model's own names."""
    return within("model.", tensors)


def as_kimi(tensors: Tensors) -> Tensors:
    """The language model below `language_model`, and each expert's matrices by themselves."""
    return single_experts(as_llava(tensors))


def single_experts(tensors: Tensors) -> Tensors:
    single: Tensors = {}
    for name, tensor in tensors.items():
        module, _, kind = name.rpartition(".")
        if not module.endswith(".experts"):
            single[name] = tensor
            continue
        for i, matrix in enumerate(tensor):
            parts = {"down_proj": matrix}
            if kind == "gate_up_proj":
                parts = dict(zip(("gate_proj", "up_proj"), np.split(matrix, 2), strict=True))
            single |= {f"{module}.{i}.{part}.weight": content for part, content in parts.items()}
    return single


def as_thinker(tensors: Tensors) -> Tensors:
    """The part that thinks, of a model that speaks too."""
    tensors = {f"thinker.{name}": t for name, t in single_experts(within("model.", tensors)).items()}
    return tensors | {"talker.model.norm.weight": np.zeros(8, np.float32)}


class Wrapper(NamedTuple):
    model_type: str
    text: dict[str, Any]
    stored: Callable[[Tensors], Tensors] = as_in_memory
    whole: str = ""  # the architecture of a config that has this one in its thinker_config
    model: str = ""  # its class, where transformers has none for its type
    others: Mapping[str, Any] = MappingProxyType({})  # what the config needs to say of other parts
    divisor: float = 1.0  # of logits, which the wrapper in transformers leaves out


_TEXT = {**models_zoo._LLAMA, "vocab_size": models_zoo.VOCAB_SIZE, "rms_norm_eps": 1e-5}


def text_of(name: str, model_type: str, **fields: Any) -> dict[str, Any]:
    return {**models_zoo.CASES[name].config, "vocab_size": models_zoo.VOCAB_SIZE, "model_type": model_type, **fields}


def sections(*sizes: int, **fields: float) -> dict[str, Any]:
    return {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [*sizes], **fields}


_LLAMA, _QWEN2 = {**_TEXT, "model_type": "llama"}, {**_TEXT, "model_type": "qwen2"}
_QWEN3 = {**_TEXT, "model_type": "qwen3", "head_dim": 16}
_GLM = {**_TEXT, "model_type": "glm4v_text", "rope_parameters": sections(2, 1, 1, partial_rotary_factor=0.5)}
_QWEN3_MOE = {
    **_TEXT,
    **models_zoo._EXPERTS,
    "head_dim": 16,
    "norm_topk_prob": True,
    "rope_parameters": sections(2, 3, 3),
}
_SIGLIP = {"model_type": "siglip_vision_model", "model_args": {"embed_dim": 8}}
_QWEN3_5 = {**models_zoo._DELTA, "vocab_size": models_zoo.VOCAB_SIZE, "model_type": "qwen3_5_text"}
_GRANITE = text_of("granite", "granite")
CASES = {
    "audio-flamingo3": Wrapper("audioflamingo3", _QWEN2, as_llava, model="AudioFlamingo3ForConditionalGeneration"),
    "blip-2": Wrapper("blip-2", text_of("opt", "opt")),
    "instruct-blip": Wrapper("instructblip", _LLAMA),
    "instruct-blip-video": Wrapper("instructblipvideo", _LLAMA),
    "emu3": Wrapper(
        "emu3",
        {**_TEXT, "model_type": "emu3_text_model", "pad_token_id": 0},
        others={"vocabulary_map": {"<image>": 1}},
    ),
    "fast-vlm": Wrapper("fast_vlm", _QWEN2, others={"vision_config": _SIGLIP}),
    "fun-asr-nano": Wrapper(
        "fun_asr_nano", _QWEN3, others={"adaptor_config": {"hidden_size": 64, "intermediate_size": 16}}
    ),
    "gemma4-unified": Wrapper(
        "gemma4_unified",
        {
            **_TEXT,
            "model_type": "gemma4_unified_text",
            "head_dim": 16,
            "global_head_dim": 24,
            "layer_types": ["sliding_attention", "full_attention"],
            "sliding_window": 20,
            "attention_k_eq_v": True,
            "num_global_key_value_heads": 1,
        },
        others={"vision_config": {}},
    ),
    "glm-asr": Wrapper("glmasr", _LLAMA),
    "glm-ocr": Wrapper("glm_ocr", {**_GLM, "model_type": "glm_ocr_text"}),
    "granite4-vision": Wrapper(
        "granite4_vision",
        {**_GRANITE, "model_type": "granite4_vision_text"},
        others={"downsample_rate": "1/4", "deepstack_layer_map": []},
    ),
    "granite-docling": Wrapper(
        "granite_docling",
        {**_GRANITE, "model_type": "granite_docling_text", "pad_token_id": 0},
        others={"vision_config": {"out_hidden_size": 64}},
    ),
    "granite-speech": Wrapper("granite_speech", _GRANITE, as_llava, divisor=3.0),
    "granite-speech-plus": Wrapper("granite_speech_plus", _GRANITE, as_llava, divisor=3.0),
    "hunyuan-vl": Wrapper(
        "hunyuan_vl",
        {
            **_TEXT,
            "model_type": "hunyuan_vl_text",
            "head_dim": 16,
            "rope_parameters": sections(2, 2, 2, 2, factor=1.0, alpha=50.0) | {"rope_type": "dynamic"},
        },
        as_qwen2_vl,
    ),
    "minicpm-ocr": Wrapper("minicpm_ocr", _QWEN3_5),
    "minicpm-v4.7": Wrapper("minicpmv4_7", _QWEN3_5),
    # Whose second layer looks at images.
    "mllama": Wrapper(
        "mllama",
        {
            **_TEXT,
            "model_type": "mllama_text_model",
            "num_hidden_layers": 3,
            "cross_attention_layers": [1],
            "pad_token_id": 0,
        },
        as_llava,
    ),
    "moss-transcribe": Wrapper("moss_transcribe_diarize", _QWEN3),
    "music-flamingo": Wrapper("musicflamingo", _QWEN2, as_llava, model="MusicFlamingoForConditionalGeneration"),
    "nemotron-omni": Wrapper("nemotron_h_omni", text_of("nemotron-h", "nemotron_h")),
    "omni-asr": Wrapper("omniasr", _LLAMA),
    "ovis2": Wrapper("ovis2", _QWEN2),
    "paddleocr-vl": Wrapper(
        "paddleocr_vl",
        {**_TEXT, "model_type": "paddleocr_vl_text", "head_dim": 16, "rope_parameters": sections(2, 3, 3)},
        as_qwen2_vl,
    ),
    "perception-lm": Wrapper("perception_lm", _LLAMA, others={"vision_config": _SIGLIP}),
    "qwen2-audio": Wrapper("qwen2_audio", _QWEN2, as_llava),
    "qwen2.5-omni-thinker": Wrapper(
        "qwen2_5_omni_thinker", {**_TEXT, "model_type": "qwen2_5_omni_text", "rope_parameters": sections(2, 3, 3)}
    ),
    "qwen3-asr": Wrapper("qwen3_asr", _QWEN3),
    "vibevoice-asr": Wrapper("vibevoice_asr", _QWEN2, as_llava),
    "deepseek-vl": Wrapper("deepseek_vl", _LLAMA),
    "deepseek-vl-hybrid": Wrapper("deepseek_vl_hybrid", _LLAMA),
    "exaone4.5": Wrapper("exaone4_5", text_of("exaone4", "exaone4")),
    "glm4.1v": Wrapper("glm4v", _GLM),
    "glm4.6v": Wrapper("glm46v", _GLM),
    "glm4.5v": Wrapper(
        "glm4v_moe",
        text_of("glm4-moe", "glm4v_moe_text", rope_parameters=sections(2, 1, 1, partial_rotary_factor=0.5))
        | {"use_qk_norm": False},
        single_experts,
    ),
    "got-ocr2": Wrapper("got_ocr2", _QWEN2),
    "granite-vision": Wrapper("llava_next", text_of("granite", "granite"), divisor=3.0),
    "idefics2": Wrapper("idefics2", {**_TEXT, "model_type": "mistral"}),
    "janus": Wrapper("janus", _LLAMA),
    "kimi-k2.5": Wrapper("kimi_k25", text_of("deepseek-v3", "deepseek_v3"), as_kimi),
    "lighton-ocr": Wrapper("lighton_ocr", _QWEN3),
    "llava-next-video": Wrapper("llava_next_video", _LLAMA),
    "minicpm-v4.6": Wrapper("minicpmv4_6", _QWEN3_5),
    "qianfan-ocr": Wrapper("qianfan_ocr", _QWEN3),
    "qwen2.5-omni": Wrapper(
        "qwen2_5_omni_thinker",
        {**_TEXT, "model_type": "qwen2_5_omni_text", "rope_parameters": sections(2, 3, 3)},
        as_thinker,
        "Qwen2_5OmniForConditionalGeneration",
    ),
    "qwen3-omni": Wrapper(
        "qwen3_omni_moe_thinker",
        {**_QWEN3_MOE, "model_type": "qwen3_omni_moe_text"},
        as_thinker,
        "Qwen3OmniMoeForConditionalGeneration",
    ),
    "qwen3-vl-experts": Wrapper("qwen3_vl_moe", {**_QWEN3_MOE, "model_type": "qwen3_vl_moe_text"}, experts_transposed),
    "qwen3-vl-experts-as-in-memory": Wrapper("qwen3_vl_moe", {**_QWEN3_MOE, "model_type": "qwen3_vl_moe_text"}),
    "video-llama3": Wrapper("video_llama_3", _QWEN2),
    "video-llava": Wrapper("video_llava", _LLAMA),
    "vip-llava": Wrapper("vipllava", _LLAMA),
}


def built(case: Wrapper) -> tuple[Any, Any, Tensors]:
    """A model of random weights, what computes text of it, and the weights of its language model."""
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    config = transformers.AutoConfig.for_model(case.model_type, text_config=case.text, **case.others)
    config._attn_implementation = "eager"
    with torch.device("meta"):
        model = (getattr(transformers, case.model) if case.model else of_type(config))(config).eval()
    holder = getattr(model, "model", model)  # which in some has a whole language model, with its head
    attribute = "language_model" if hasattr(holder, "language_model") else "text_model"
    language_model = type(getattr(holder, attribute))(getattr(holder, attribute).config).eval()
    setattr(holder, attribute, language_model)
    if holder is not model:
        model.lm_head = torch.nn.Linear(model.lm_head.in_features, model.lm_head.out_features, bias=False)
    fill(model)
    tied = getattr(config if holder is not model else config.text_config, "tie_word_embeddings", False)
    if tied and holder is not model:
        model.lm_head.weight = language_model.embed_tokens.weight
    state = {name: tensor for name, tensor in model.state_dict().items() if not tensor.is_meta}
    tensors = {name: t.numpy() for name, t in state.items() if not (tied and name.endswith("lm_head.weight"))}
    other = next(name for name, tensor in model.state_dict().items() if tensor.is_meta)
    return model, language_model if holder is model else model, {**tensors, other: np.zeros(8, np.float32)}


def of_type(config: Any) -> Any:
    from transformers import AutoModelForMultimodalLM

    return AutoModelForMultimodalLM._model_mapping[type(config)]


def fill(model: Any) -> None:
    import torch

    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if not weight.is_meta:
                vector = weight.ndim == 1
                weight.copy_(torch.randn(weight.shape, generator=generator) * (0.2 if vector else 0.1))
                weight += float(vector and name.endswith("norm.weight"))


def write(folder: Path, config: dict[str, Any], tensors: Tensors) -> None:
    save_file({name: np.ascontiguousarray(tensor) for name, tensor in tensors.items()}, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(config), "utf-8")


def logits_of(folder: Path, tokens: list[int]) -> NDArray[np.float32]:
    executor = load(make_device("cpu"), folder)
    try:
        return Harness(executor).logits(tokens, chunk=20)
    finally:
        executor.close()


def reference(model: Any, tokens: list[int]) -> NDArray[np.float32]:
    import torch

    with torch.no_grad():
        logits: NDArray[np.float32] = model(input_ids=torch.tensor([tokens])).logits[0].float().numpy()
    return logits


# Which need nothing that the others do not need.
ALIKE = (
    "audio-flamingo3",
    "deepseek-vl-hybrid",
    "fast-vlm",
    "fun-asr-nano",
    "glm-asr",
    "glm4.6v",
    "granite-docling",
    "granite-speech-plus",
    "granite4-vision",
    "instruct-blip",
    "instruct-blip-video",
    "janus",
    "llava-next-video",
    "minicpm-ocr",
    "minicpm-v4.7",
    "moss-transcribe",
    "music-flamingo",
    "omni-asr",
    "ovis2",
    "perception-lm",
    "qianfan-ocr",
    "qwen2-audio",
    "qwen2.5-omni-thinker",
    "qwen3-asr",
    "vibevoice-asr",
    "video-llama3",
    "video-llava",
    "vip-llava",
)


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.sweep) if name in ALIKE else name for name in CASES]
)
def test_text_is_computed_as_by_the_whole_model(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    case = CASES[name]
    model, language_model, tensors = built(case)
    monkeypatch.setattr("transformers.PreTrainedModel.device", "cpu")  # though its other parts are nowhere
    config = {**model.config.to_dict(), "architectures": [type(model).__name__]}
    if case.whole:
        config = {"architectures": [case.whole], "thinker_config": config}
    write(tmp_path, config, case.stored(tensors))
    tokens = models_zoo.prompts()[-1]
    expected = reference(language_model, tokens) / case.divisor
    caplog.set_level(logging.INFO)
    assert np.abs(logits_of(tmp_path, tokens) - expected).max() <= 1e-4 * np.abs(expected).max()
    assert ("layers of cross-attention" in caplog.text) == (name == "mllama")


@pytest.mark.sweep
@pytest.mark.parametrize("name", CASES)
def test_a_missing_field_means_what_transformers_takes_it_to_mean(name: str) -> None:
    """Leave out one field of the text part after the other, and compare with transformers' default for it."""
    transformers, case = pytest.importorskip("transformers"), CASES[name]

    def filled_in(text: dict[str, Any]) -> dict[str, Any]:
        config = transformers.AutoConfig.for_model(case.model_type, text_config=text, **case.others)
        said = config.to_dict()
        return {
            **said,
            "architectures": [case.model or of_type(config).__name__],
            "text_config": {**text, **said["text_config"]},
        }

    compared = set()
    for missing in filled_in(case.text)["text_config"].keys() - {"model_type"}:  # which must be there
        # Fields that one of the two cannot do without are left out.
        with contextlib.suppress(Exception):
            complete = filled_in({key: value for key, value in case.text.items() if key != missing})
            meant = describe(complete)
            text = {key: value for key, value in complete["text_config"].items() if key != missing}
            described = describe({**complete, "text_config": text})
            compared.add(missing)
        if missing in compared:
            assert described == meant, missing
    assert compared


@pytest.mark.parametrize("architecture", ["Phi4MultimodalForCausalLM", "Phi4MMForCausalLM"])
def test_phi_4_multimodal_is_served_without_the_adapters_of_images_and_sound(architecture: str, tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    rope = {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.75}
    config = transformers.Phi4MultimodalConfig(**{**_TEXT, "pad_token_id": 0, "rope_parameters": rope})
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
    layers = [type(layer)(config, i) for i, layer in enumerate(model.model.layers)]
    model.model.layers = torch.nn.ModuleList(layers)
    model.model.embed_tokens = torch.nn.Embedding(config.vocab_size, config.hidden_size)
    model.model.norm = type(model.model.norm)(config.hidden_size)
    model.model.rotary_emb = type(model.model.rotary_emb)(config)
    model.lm_head = torch.nn.Linear(config.hidden_size, config.vocab_size, bias=False)
    fill(model)
    model.eval()
    tensors = {name: tensor.numpy() for name, tensor in model.state_dict().items() if not tensor.is_meta}
    if architecture == "Phi4MMForCausalLM":
        for name in [name for name in tensors if name.endswith("_proj.weight")]:
            module = name.removesuffix(".weight")
            tensors[f"{module}.base_layer.weight"] = tensors.pop(name)
            tensors |= {f"{module}.lora_{x}.speech.weight": np.ones((4, 4), np.float32) for x in "AB"}
    tensors["model.embed_tokens_extend.image_embed.glb_GN"] = np.zeros(8, np.float32)
    write(tmp_path, {**config.to_dict(), "architectures": [architecture]}, tensors)
    tokens = models_zoo.prompts()[-1]
    expected = reference(model, tokens)
    assert np.abs(logits_of(tmp_path, tokens) - expected).max() <= 1e-4 * np.abs(expected).max()
