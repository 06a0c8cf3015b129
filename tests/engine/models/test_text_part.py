"""The language model of a checkpoint that takes images too: it computes what the whole model computes of text."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import models_zoo
import numpy as np
import pytest
from harness import Harness, load, make_device
from safetensors.numpy import save_file

from tidewheel.engine.errors import ModelError
from tidewheel.engine.models import describe
from tidewheel.engine.models.spec import AttentionSpec, DecoderSpec, mixers
from tidewheel.engine.models.text_part import text_part

TEXT = {**models_zoo._LLAMA, "vocab_size": models_zoo.VOCAB_SIZE, "rms_norm_eps": 1e-5}
VISION = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "image_size": 28,
    "patch_size": 14,
}
YARN = {
    "rope_type": "yarn",
    "rope_theta": 1e4,
    "factor": 16.0,
    "original_max_position_embeddings": 16,
    "llama_4_scaling_beta": 0.3,
}
SECTIONS = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 3, 3]}
_QWEN_VISION = {"depth": 1, "hidden_size": 32, "intermediate_size": 48, "num_heads": 2, "out_hidden_size": 64}
_DELTA = {**models_zoo._DELTA, "vocab_size": models_zoo.VOCAB_SIZE}
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "mistral3": (
        "mistral3",
        {
            "text_config": {**TEXT, "model_type": "ministral3", "head_dim": 16, "rope_parameters": YARN},
            "vision_config": {**VISION, "model_type": "pixtral", "head_dim": 16},
            "tie_word_embeddings": False,
        },
    ),
    "gemma3": (
        "gemma3",
        {
            "text_config": {
                **TEXT,
                "model_type": "gemma3_text",
                "head_dim": 16,
                "sliding_window": 20,
                "layer_types": ["sliding_attention", "full_attention"],
                "query_pre_attn_scalar": 16,
            },
            "vision_config": {**VISION, "model_type": "siglip_vision_model"},
            "mm_tokens_per_image": 4,
        },
    ),
    "gemma4": (
        "gemma4",
        {
            "text_config": {
                **TEXT,
                "model_type": "gemma4_text",
                "num_hidden_layers": 4,
                "head_dim": 16,
                "global_head_dim": 24,
                "sliding_window": 20,
                "layer_types": ["sliding_attention", "full_attention"] * 2,
                "num_kv_shared_layers": 2,
                "vocab_size_per_layer_input": models_zoo.VOCAB_SIZE,
                "hidden_size_per_layer_input": 16,
            },
            "vision_config": {**VISION, "model_type": "gemma4_vision", "num_key_value_heads": 2, "head_dim": 16},
            "audio_config": None,
            "image_token_id": 1,
            "video_token_id": 2,
        },
    ),
    "qwen2.5-vl": (
        "qwen2_5_vl",
        {
            "text_config": {**TEXT, "model_type": "qwen2_5_vl_text", "rope_parameters": SECTIONS},
            "vision_config": _QWEN_VISION,
            "tie_word_embeddings": False,
        },
    ),
    "lfm2-vl": (
        "lfm2_vl",
        {
            "text_config": {
                **models_zoo.CASES["lfm2"].config,
                "model_type": "lfm2",
                "vocab_size": models_zoo.VOCAB_SIZE,
            },
            "vision_config": {**VISION, "model_type": "siglip2_vision_model", "num_patches": 4},
            "image_token_id": 1,
        },
    ),
    "qwen3.5": (
        "qwen3_5",
        {
            "text_config": {**_DELTA, "model_type": "qwen3_5_text"},
            "vision_config": {**_QWEN_VISION, "num_position_embeddings": 16},
            "tie_word_embeddings": False,
        },
    ),
    # Saved expert by expert; in memory, and in some checkpoints, with all experts in one tensor.
    "qwen3.5-experts": (
        "qwen3_5_moe",
        {
            "text_config": {
                **_DELTA,
                **models_zoo._EXPERTS,
                "shared_expert_intermediate_size": 40,
                "model_type": "qwen3_5_moe_text",
            },
            "vision_config": {**_QWEN_VISION, "num_position_embeddings": 16},
            "tie_word_embeddings": False,
        },
    ),
}


@pytest.fixture(scope="module", params=CASES)
def saved(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    """A tiny random model with an encoder of images, in a folder."""
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    model_type, fields = CASES[request.param]
    config = transformers.AutoConfig.for_model(model_type, **fields)
    model = transformers.AutoModelForImageTextToText.from_config(config, attn_implementation="eager").eval()
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            noise = torch.randn(weight.shape, generator=generator)
            vector = weight.ndim == 1
            weight.copy_(0.2 * noise + float(name.endswith("norm.weight")) if vector else 0.1 * noise)
    folder = tmp_path_factory.mktemp("images")
    model.save_pretrained(folder)
    return folder, model


def reference(model: Any, tokens: list[int]) -> Any:
    import torch

    with torch.no_grad():
        return model(input_ids=torch.tensor([tokens])).logits[0].float().numpy()


def assert_computes_as(name: str, folder: Path) -> None:
    """The checkpoint in `folder` has the logits of that model of the zoo."""
    tokens = models_zoo.prompts()[-1]
    executor = load(make_device("cpu"), folder)
    logits = Harness(executor).logits(tokens, chunk=20)
    executor.close()
    expected = models_zoo.reference_logits(name, tokens)
    assert np.abs(logits - expected).max() <= 1e-4 * np.abs(expected).max()


def test_text_is_computed_as_by_the_whole_model(
    saved: tuple[Path, Any], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder, model = saved
    tokens = models_zoo.prompts()[-1]
    expected = reference(model, tokens)
    for path in (folder, renamed(folder, model, tmp_path)):
        caplog.clear()
        with caplog.at_level(logging.INFO):
            executor = load(make_device("cpu"), path)
        logits = Harness(executor).logits(tokens, chunk=20)
        executor.close()
        assert np.abs(logits - expected).max() <= 1e-4 * np.abs(expected).max()
        said = [record.message for record in caplog.records if "only the language model is served" in record.message]
        assert len(said) == 1
        assert "vi" in said[0].partition("tensors of")[2]  # vision_tower or visual


def test_gemma_3n_is_served_by_the_names_that_its_checkpoints_have(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    model = models_zoo.model("gemma3n")
    state = {name: tensor.numpy() for name, tensor in model.state_dict().items() if name != "lm_head.weight"}
    state = {name.replace("model.", "model.language_model.", 1): tensor for name, tensor in state.items()}
    # Of layers that read another's K and V, and of other parts.
    state["model.language_model.layers.5.self_attn.k_proj.weight"] = np.zeros((48, 64), np.float32)
    state["model.audio_tower.conformer.0.norm.weight"] = np.zeros(8, np.float32)
    save_file({name: np.ascontiguousarray(tensor) for name, tensor in state.items()}, tmp_path / "model.safetensors")
    config = {"architectures": ["Gemma3nForConditionalGeneration"], "text_config": model.config.to_dict()}
    (tmp_path / "config.json").write_text(json.dumps(config), "utf-8")
    assert_computes_as("gemma3n", tmp_path)


@pytest.mark.parametrize(
    ("architecture", "prefix", "around"),
    [
        ("InternVLChatModel", "language_model.", lambda config: {"llm_config": config, "tie_word_embeddings": True}),
        ("MiniCPMV", "llm.", lambda config: {**config, "version": 2.6, "model_type": "minicpmv"}),
        ("DotsOCRForCausalLM", "", lambda config: {**config, "model_type": "dots_ocr"}),
    ],
)
def test_a_language_model_within_one_whose_code_lies_beside_its_weights(
    architecture: str, prefix: str, around: Callable[[dict[str, Any]], dict[str, Any]], tmp_path: Path
) -> None:
    pytest.importorskip("transformers")
    model = models_zoo.model("qwen2")
    state = {prefix + name: tensor.numpy().copy() for name, tensor in model.state_dict().items()}
    save_file({**state, "vpm.embeddings.weight": np.zeros(8, np.float32)}, tmp_path / "model.safetensors")
    config = {**around(model.config.to_dict()), "architectures": [architecture]}
    (tmp_path / "config.json").write_text(json.dumps(config), "utf-8")
    assert_computes_as("qwen2", tmp_path)


def test_phi_3_vision_has_images_below_its_decoder(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    model = models_zoo.model("phi3")
    state = {name: tensor.numpy().copy() for name, tensor in model.state_dict().items()}
    state["model.vision_embed_tokens.wte.weight"] = np.zeros(8, np.float32)
    save_file(state, tmp_path / "model.safetensors")
    config = {**model.config.to_dict(), "architectures": ["Phi3VForCausalLM"]}
    (tmp_path / "config.json").write_text(json.dumps(config), "utf-8")
    assert_computes_as("phi3", tmp_path)


def text_spec(model_type: str, architecture: str, **fields: Any) -> DecoderSpec:
    text = {**TEXT, "model_type": model_type, "head_dim": 16, **fields}
    return describe({"architectures": [architecture], "text_config": text}).spec


def attentions(spec: DecoderSpec) -> list[AttentionSpec]:
    return [mixer for layer in spec.layers for mixer in mixers(layer) if isinstance(mixer, AttentionSpec)]


def test_layers_see_whole_images_only_where_there_are_some() -> None:
    spec = text_spec("gemma3_text", "Gemma3ForConditionalGeneration")
    assert all(attention.two_way for attention in attentions(spec))
    for model_type, name in (("gemma4_text", "Gemma4"), ("gemma4_unified_text", "Gemma4Unified")):
        fields: dict[str, Any] = {"layer_types": ["sliding_attention", "full_attention"], "num_hidden_layers": 2}
        fields["hidden_size_per_layer_input"] = 0
        for seen in ("vision", None):
            architecture = f"{name}ForConditionalGeneration"
            spec = text_spec(model_type, architecture, use_bidirectional_attention=seen, **fields)
            both_ways = [i for i, attention in enumerate(attentions(spec)) if attention.two_way]
            assert both_ways == ([0] if seen else [])
    alone = describe({**TEXT, "architectures": ["Gemma3ForCausalLM"], "head_dim": 16}).spec
    assert not any(attention.two_way for attention in attentions(alone))


@pytest.mark.parametrize(
    ("model_type", "architecture", "axes"),
    [
        ("qwen2_vl_text", "Qwen2VLForConditionalGeneration", (0, 0, 1, 1, 1, 2, 2, 2)),
        ("qwen2_5_vl_text", "Qwen2_5_VLForConditionalGeneration", (0, 0, 1, 1, 1, 2, 2, 2)),
        ("qwen3_vl_text", "Qwen3VLForConditionalGeneration", (0, 1, 2, 0, 1, 2, 0, 1)),
        ("qwen3", "InternVLForConditionalGeneration", ()),  # which has no sections of its own
        ("glm4v_text", "Glm4vForConditionalGeneration", (0, 0, 1, 2)),
        ("paddleocr_vl_text", "PaddleOCRVLForConditionalGeneration", (0, 0, 1, 1, 1, 2, 2, 2)),
        ("qwen2_5_omni_text", "Qwen2_5OmniForConditionalGeneration", ()),
    ],
)
def test_rope_has_axes_in_models_whose_images_have_rows_and_columns(
    model_type: str, architecture: str, axes: tuple[int, ...]
) -> None:
    sections = [2, 3, 3] if axes[:2] != (0, 1) else [3, 3, 2]
    rope: dict[str, Any] = {"rope_type": "default", "mrope_section": sections}
    if model_type == "glm4v_text":
        rope |= {"mrope_section": [2, 1, 1], "partial_rotary_factor": 0.5}
    for attention in attentions(text_spec(model_type, architecture, rope_scaling=rope)):
        assert attention.rope is not None
        assert attention.rope.axes == axes


def test_sections_that_a_config_leaves_out_are_the_usual_ones() -> None:
    spec = text_spec("qwen3_vl_text", "Qwen3VLForConditionalGeneration", head_dim=128)
    rope = attentions(spec)[0].rope
    assert rope is not None
    assert [rope.axes.count(axis) for axis in range(3)] == [24, 20, 20]


def test_a_minicpm_v_of_an_unknown_version_is_refused() -> None:
    with pytest.raises(ModelError, match=r"version must be one of 2\.5, 2\.6, 4\.0, 4\.5, got 3: it says which"):
        describe({"architectures": ["MiniCPMV"], "version": 3})
    with pytest.raises(ModelError, match="version must be one of"):
        describe({"architectures": ["MiniCPMV"], "vocab_size": 122753})  # 2.0
    first = text_part("MiniCPMV", {"architectures": ["MiniCPMV"], "vocab_size": 128256})  # 2.5, which says none
    assert first["architectures"] == ["LlamaForCausalLM"]


def renamed(folder: Path, model: Any, target: Path) -> Path:
    """The same model with the names that transformers has in memory, and checkpoints since 4.52 have."""
    state = model.state_dict()
    if model.config.tie_word_embeddings:
        del state["lm_head.weight"]
    save_file({name: tensor.numpy().copy() for name, tensor in state.items()}, target / "model.safetensors")
    (target / "config.json").write_text((folder / "config.json").read_text("utf-8"), "utf-8")
    return target


def changed(change: Callable[[dict[str, Any]], object]) -> dict[str, Any]:
    config = {"architectures": ["Mistral3ForConditionalGeneration"], "text_config": {**TEXT, "model_type": "mistral"}}
    config = json.loads(json.dumps(config))
    change(config)
    return config


def without_heads(config: dict[str, Any]) -> None:
    del config["text_config"]["num_key_value_heads"]
    config["text_config"].update(num_attention_heads=16, head_dim=16)


def test_a_text_config_leaves_out_what_is_usual() -> None:
    spec = describe(changed(without_heads)).spec
    assert [attention.num_kv_heads for attention in spec.attentions()] == [8, 8]
    spec = describe({"architectures": ["LlavaForConditionalGeneration"], "text_config": {"vocab_size": 32064}}).spec
    assert (spec.hidden_size, spec.vocab_size, len(spec.layers)) == (4096, 32064, 32)


def test_layers_that_look_at_images_are_counted_out() -> None:
    config = {"architectures": ["MllamaForConditionalGeneration"], "text_config": {"model_type": "mllama_text_model"}}
    assert len(describe(config).spec.layers) == 32
    for layers in ([0, 1], [3], "all", [-1]):
        text = {"model_type": "mllama_text_model", "num_hidden_layers": 2, "cross_attention_layers": layers}
        with pytest.raises(ModelError, match="cross_attention_layers must be a list"):
            describe({**config, "text_config": text})


def test_a_text_config_that_is_not_served_is_refused_by_name() -> None:
    with pytest.raises(ModelError, match="text_config must be an object"):
        describe(changed(lambda config: config.pop("text_config")))
    with pytest.raises(
        ModelError, match=r"its language model is of type 'xyz_text', which is not supported.*types are: .*llama,"
    ):
        describe(changed(lambda config: config["text_config"].update(model_type="xyz_text")))
    with pytest.raises(ModelError, match=r"its language model is of type None, which is not supported"):
        describe(changed(lambda config: config["text_config"].pop("model_type")))
    with pytest.raises(ModelError, match="hidden_act"):
        describe(changed(lambda config: config["text_config"].update(hidden_act="xielu")))
