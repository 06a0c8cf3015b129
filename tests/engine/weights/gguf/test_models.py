"""Models in GGUF files, against the transformers models that they were written from."""

from __future__ import annotations

import asyncio
import re
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import gguf_files
import models_zoo
import mtp_zoo
import numpy as np
import pytest
from harness import Harness, load, make_device
from samples import swept

from tidewheel.engine.core.request import Request
from tidewheel.engine.errors import ModelError
from tidewheel.engine.loading.load import load_engine
from tidewheel.engine.models import describe
from tidewheel.engine.options import EngineOptions
from tidewheel.engine.sampling_params import SamplingParams
from tidewheel.engine.weights import open_source
from tidewheel.engine.weights.gguf import weights as gguf_weights
from tidewheel.engine.weights.quantization import stored_as_blocks
from tidewheel.engine.weights.tensor import BlockTensor, DenseTensor, to_float32

NAMES = [
    "llama", "llama-bias", "llama-yarn", "qwen3", "gemma2", "gemma3", "phi3-longrope", "smollm3", "gpt2",
    "falcon-grouped", "ministral3", "stablelm", "lfm2-experts", "qwen3_5-experts", "qwen3_next-experts",
    "granitemoehybrid-experts", "falcon-h1", "nemotron-h-experts", "mamba2", "mixtral", "phimoe", "qwen2-moe",
    "granitemoe-shared", "gpt-oss", "glm4-moe", "ernie4-5-moe", "bamba", "deepseek-v3", "minicpm3", "gemma3n",
    "gemma4-experts", "llama4", "olmo3",
]  # fmt: skip
TOKENS = 8
# Which need nothing, or one thing alone, that the others do not need.
MORE_NAMES = [
    "llama-tied", "llama-mqa", "llama-linear", "llama-llama3", "qwen2", "phi3", "granite", "lfm2", "qwen3_5",
    "granitemoehybrid", "nemotron-h", "qwen3-moe", "olmoe", "granitemoe", "deepseek-v2", "gemma4",
    "gemma", "olmo2", "exaone4", "exaone4-full", "glm4",
    "ernie4-5", "hunyuan", "cohere", "cohere2", "stablelm-parallel", "starcoder2", "phi",
    "glm4-moe-lite", "gemma4-keys", "glm", "hunyuan-moe", "olmo",
    "gpt-bigcode", "gpt-neox", "gpt-neox-sequential", "falcon", "falcon-one-norm", "bloom", "mpt",
]  # fmt: skip
# What a file does not say, and the architecture decides.
UNLIKE = {
    "lfm2": {"conv_bias": False, "block_auto_adjust_ff_dim": False},
    "llama-bias": {"hidden_act": "silu"},
    "smollm3": {"no_rope_layer_interval": 4, "num_hidden_layers": 4},
    "stablelm-parallel": {"qk_layernorm": False},
    "cohere2": {"sliding_window_pattern": 4, "layer_types": None, "num_hidden_layers": 4},
    "starcoder2": {"sliding_window": 4096},
    "gemma2": {"query_pre_attn_scalar": 24},
    "gemma3": {"query_pre_attn_scalar": 24},
    "qwen2-moe": {"mlp_only_layers": [], "use_sliding_window": False},
    "olmoe": {"norm_topk_prob": False},
    "gpt-oss": {"swiglu_limit": 7.0},
    "phimoe": {
        "router_jitter_noise": 0.01,
        "rope_parameters": models_zoo.CASES["phimoe"].config["rope_parameters"]
        | dict.fromkeys(("short_mscale", "long_mscale"), 1.243163121016122),
    },
    "deepseek-v3": {"rope_parameters": {**models_zoo.CASES["deepseek-v3"].config["rope_parameters"], "mscale": 0.8}},
    "minicpm3": {"dim_model_base": 256, "attention_bias": False, "mlp_bias": False, "v_head_dim": 16},
    "gemma4-keys": {"attention_bias": False},
    "bamba": {"mlp_bias": False},
    "llama4": {"no_rope_layers": None, "num_hidden_layers": 4, "floor_scale": 8192},
    "hunyuan-moe": {"head_dim": 16},
}


def model_of(name: str) -> Any:
    case = models_zoo.CASES[name]
    return models_zoo.build(models_zoo.Case(case.model_type, case.config | UNLIKE.get(name, {})))


def greedy(model: Any, prompt: list[int], count: int) -> list[int]:
    import torch

    ids = torch.tensor([prompt])
    with torch.no_grad():
        made = model.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=count, do_sample=False, pad_token_id=0
        )
    tokens: list[int] = made[0, len(prompt) :].tolist()
    return tokens


@pytest.mark.parametrize("name", [*NAMES, *map(swept, MORE_NAMES)])
def test_a_file_in_float32_gives_transformers_greedy_tokens(name: str, tmp_path: Path) -> None:
    model = model_of(name)
    assert served(gguf_files.write(tmp_path / "model.gguf", model)) == expected_of(model)


def served(path: Path) -> list[list[int]]:
    """What is generated greedily after each of two prompts."""
    executor = load(make_device("cpu"), path)
    try:
        return [running.output for running in Harness(executor).generate(models_zoo.prompts()[-2:], TOKENS)]
    finally:
        executor.close()


def expected_of(model: Any) -> list[list[int]]:
    return [greedy(model, prompt, TOKENS) for prompt in models_zoo.prompts()[-2:]]


@pytest.mark.parametrize("name", ["deepseek-v2", "qwen3_next-experts"])
def test_older_files_divide_matrices_otherwise(name: str, tmp_path: Path) -> None:
    model = model_of(name)
    assert served(gguf_files.write(tmp_path / "m.gguf", model, old=True)) == expected_of(model)


@pytest.mark.parametrize(
    ("arch", "name", "config", "theirs"),
    [
        (gguf.MODEL_ARCH.INTERNLM2, "llama", {}, "InternLM2ForCausalLM"),
        (gguf.MODEL_ARCH.QWEN2VL, "qwen2", {}, "Qwen2ForCausalLM"),
        (gguf.MODEL_ARCH.QWEN3VL, "qwen3", {}, "Qwen3ForCausalLM"),
        (gguf.MODEL_ARCH.QWEN3VLMOE, "qwen3-moe", {}, "Qwen3MoeForCausalLM"),
        (gguf.MODEL_ARCH.PADDLEOCR, "mistral", {"sliding_window": None}, "LlamaForCausalLM"),
        (gguf.MODEL_ARCH.HUNYUAN_VL, "hunyuan", {}, "HunYuanDenseV1ForCausalLM"),
        # Scores of the usual scale, and the others as MiniCPM has them.
        (
            gguf.MODEL_ARCH.MINICPM,
            "granite",
            {"attention_multiplier": 0.25, "attention_bias": False},
            "MiniCPMForCausalLM",
        ),
    ],
    ids=["internlm2", "qwen2vl", "qwen3vl", "qwen3vlmoe", "paddleocr", "hunyuan_vl", "minicpm"],
)
def test_models_that_transformers_has_under_another_name(
    arch: Any, name: str, config: dict[str, Any], theirs: str, tmp_path: Path
) -> None:
    case = models_zoo.CASES[name]
    model = models_zoo.build(models_zoo.Case(case.model_type, case.config | config))
    path = gguf_files.write(tmp_path / "m.gguf", model, arch=arch)
    assert open_source(str(path)).config["architectures"] == [theirs]
    assert served(path) == expected_of(model)


@pytest.mark.parametrize("name", ["llama", "gemma4-experts", "stablelm", "starcoder2", "glm4-moe"])
def test_queries_keys_and_values_may_be_one_matrix_of_any_model(name: str, tmp_path: Path) -> None:
    class Fusing(gguf.GGUFWriter):  # type: ignore[misc]
        def __init__(self, *arguments: Any) -> None:
            super().__init__(*arguments)
            self.waiting: dict[str, dict[str, Any]] = defaultdict(dict)

        def add_tensor(self, name: str, tensor: Any, raw_dtype: Any = None) -> None:
            found = re.fullmatch(r"(blk\.\d+)\.attn_([qkv])\.(weight|bias)", name)
            if found is None:
                super().add_tensor(name, tensor, raw_dtype=raw_dtype)
                return
            fused = f"{found[1]}.attn_qkv.{found[3]}"
            parts = self.waiting[fused]
            parts[found[2]] = tensor
            if len(parts) == 3:
                super().add_tensor(fused, np.concatenate([parts[part] for part in "qkv"]))

    model = model_of(name)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gguf_files.gguf, "GGUFWriter", Fusing)
        path = gguf_files.write(tmp_path / "m.gguf", model)
    assert "blk.0.attn_qkv.weight" in [tensor.name for tensor in gguf.GGUFReader(path).tensors]
    assert served(path) == expected_of(model)


def test_glm_4_that_sees_images_has_heads_that_are_rotated_in_halves(tmp_path: Path) -> None:
    class Turning(gguf.GGUFWriter):  # type: ignore[misc]
        def add_tensor(self, name: str, tensor: Any, raw_dtype: Any = None) -> None:
            if ".attn_q." in name or ".attn_k." in name:
                heads = tensor.reshape(-1, head_dim, *tensor.shape[1:])
                turned = (heads[:, 0:rotated:2], heads[:, 1:rotated:2], heads[:, rotated:])
                tensor = np.ascontiguousarray(np.concatenate(turned, axis=1).reshape(tensor.shape))
            super().add_tensor(name, tensor, raw_dtype=raw_dtype)

        def add_rope_dimension_count(self, count: int) -> None:
            super().add_rope_dimension_count(count)
            self.add_rope_dimension_sections([count // 2 - 2, 1, 1, 0])

    model = model_of("glm4")
    head_dim = model.config.head_dim
    rotated = int(head_dim * model.config.rope_parameters["partial_rotary_factor"])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gguf_files.gguf, "GGUFWriter", Turning)
        path = gguf_files.write(tmp_path / "m.gguf", model)
    assert served(path) == expected_of(model)


def test_overrides_do_not_say_how_a_file_is_quantized(tmp_path: Path) -> None:
    source = open_source(str(gguf_files.zoo_file(tmp_path / "model.gguf", "qwen2")))
    said = {**source.config, "quantization_config": {"quant_method": "gptq"}}
    with pytest.raises(ModelError, match="a GGUF file contains how its tensors are quantized"):
        source.weights(describe(said), said)


@pytest.mark.parametrize("kind", ["F16", "BF16", "Q4_0", "Q8_0"])
def test_weights_are_what_the_package_dequantizes(kind: str, tmp_path: Path) -> None:
    number = gguf.GGMLQuantizationType[kind]
    path = gguf_files.zoo_file(tmp_path / "model.gguf", "qwen2", gguf_files.quantized(number))
    source = open_source(str(path))
    weights = source.weights(describe(source.config))
    floats = kind.endswith("16")
    assert weights.dtype == {"F16": "float16", "BF16": "bfloat16"}.get(kind, "bfloat16")
    state = models_zoo.model("qwen2").state_dict()
    for name, stored in (("layers.0.q", "self_attn.q_proj"), ("layers.0.down", "mlp.down_proj")):
        found = [key for key in weights if key.startswith("layers.0.") and key.endswith(f"{name[9:]}.weight")]
        weight = weights[found[0]]
        data = state[f"model.layers.0.{stored}.weight"].numpy()
        expected = gguf.quants.dequantize(gguf.quants.quantize(data, number), number)
        assert isinstance(weight, DenseTensor if floats else BlockTensor)
        assert weight.mapped
        assert weights.stored_format(found[0]) == (None if floats else stored_as_blocks(weight.kind))
        np.testing.assert_array_equal(to_float32(weight), expected)


def test_scales_that_are_all_zero_are_refused(tmp_path: Path) -> None:
    def quantize(name: str, data: Any) -> Any:
        of_a_group = np.where(np.arange(data.shape[-1]) < 32, 0, data)  # as a few weights may be
        data = {"blk.0.ffn_up.weight": 0 * data, "blk.0.ffn_gate.weight": of_a_group}.get(name, data)
        return gguf_files.quantized(gguf.GGMLQuantizationType.Q4_0)(name, data.astype(np.float32))

    source = open_source(str(gguf_files.zoo_file(tmp_path / "m.gguf", "qwen2", quantize)))
    weights = source.weights(describe(source.config))
    assert np.count_nonzero(to_float32(weights["layers.0.gate.weight"])[:, :32]) == 0
    with pytest.raises(ModelError, match=r"m.gguf: tensor blk.0.ffn_up.weight has only scales of 0"):
        weights["layers.0.up.weight"]


def test_a_stack_of_experts_is_looked_through_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    looked: list[str] = []
    monkeypatch.setattr(gguf_weights, "require_scales", lambda stored: looked.append(stored.name))
    quantize = gguf_files.quantized(gguf.GGMLQuantizationType.Q4_0)
    source = open_source(str(gguf_files.zoo_file(tmp_path / "m.gguf", "olmoe", quantize)))
    weights = source.weights(describe(source.config))
    experts = [name for name in weights if ".experts." in name and isinstance(weights[name], BlockTensor)]
    assert looked == [*dict.fromkeys(looked)]
    assert len(looked) < len(experts)


def test_a_folder_with_one_file_is_that_model_and_with_two_is_refused(tmp_path: Path) -> None:
    gguf_files.zoo_file(tmp_path / "one.gguf", "qwen2")
    (tmp_path / "mmproj-one.gguf").touch()
    source = open_source(str(tmp_path))
    assert source.config["architectures"] == ["Qwen2ForCausalLM"]
    (tmp_path / "two.gguf").touch()
    with pytest.raises(ModelError, match=r"several GGUF models \(one.gguf, two.gguf\): name one, as in .*:one.gguf"):
        open_source(str(tmp_path))
    assert open_source(f"{tmp_path}:one.gguf").config == source.config


def test_load_formats_name_what_the_file_must_be(tmp_path: Path) -> None:
    path = gguf_files.zoo_file(tmp_path / "one.gguf", "qwen2")
    assert open_source(str(path), load_format="gguf").config == open_source(str(path)).config
    dummy = open_source(str(path), load_format="dummy")
    assert dummy.weights(describe(dummy.config)).identity is None
    with pytest.raises(ModelError, match=r"one.gguf is a GGUF file, but --load-format is safetensors"):
        open_source(str(path), load_format="safetensors")
    with pytest.raises(ModelError, match="has no GGUF file"):
        open_source(str(models_zoo.folder("qwen2")), load_format="gguf")


def split(folder: Path) -> list[Path]:
    class Split(gguf.GGUFWriter):  # type: ignore[misc]
        def __init__(self, *arguments: Any) -> None:
            super().__init__(*arguments, split_max_tensors=9)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gguf_files.gguf, "GGUFWriter", Split)
        gguf_files.zoo_file(folder / "model.gguf", "qwen2")
    return sorted(folder.glob("*.gguf"))


def test_a_split_model_is_one_model(tmp_path: Path) -> None:
    files = split(tmp_path)
    assert len(files) == 3
    (tmp_path / "whole").mkdir()
    whole = open_source(str(gguf_files.zoo_file(tmp_path / "whole" / "w.gguf", "qwen2")))
    for given in (files[0], tmp_path):
        source = open_source(str(given))
        assert source.config == whole.config
        parts, one = source.weights(describe(source.config)), whole.weights(describe(whole.config))
        for name in one:
            np.testing.assert_array_equal(to_float32(parts[name]), to_float32(one[name]))
    with pytest.raises(ModelError, match=r"is a later part of a model: give its first file, model-00001-of-00003.gguf"):
        open_source(str(files[1])).config  # noqa: B018
    files[2].unlink()
    with pytest.raises(ModelError, match=r"model-00003-of-00003.gguf, a part of the model .* does not exist"):
        open_source(str(files[0])).config  # noqa: B018


def written(path: Path, change: Callable[[Any], None], arch: str = "qwen2") -> Path:
    writer = gguf.GGUFWriter(path, arch)
    config = models_zoo.model("qwen2").config
    gguf_files._write_config(writer, config)
    change(writer)
    return gguf_files.finish(writer)


def embedding(writer: Any) -> None:
    writer.add_tensor("token_embd.weight", np.zeros((320, 64), np.float32))


def no_theta(writer: Any) -> None:
    del writer.kv_data[0]["qwen2.rope.freq_base"]
    writer.add_rope_freq_base(0)


@pytest.mark.parametrize(
    ("change", "arch", "message"),
    [
        (embedding, "mamba", "GGUF architecture 'mamba' is not supported; similar"),
        (embedding, "qwen2", "has no tensor blk.0.attn_norm.weight, which the model needs"),
        (lambda writer: writer.add_vocab_size(3), "qwen2", "m.gguf is a vocabulary without weights, which --tokenizer"),
        (lambda writer: writer.add_tensor("x", np.zeros(4, np.float32)), "qwen2", "has no tensor token_embd.weight"),
        (lambda writer: writer.add_type("adapter"), "qwen2", "m.gguf is an adapter: .* the language model itself"),
        (lambda writer: writer.add_type("mmproj"), "clip", "m.gguf is a projector"),
        (lambda writer: writer.add_type("imatrix"), "qwen2", "m.gguf is an importance matrix"),
        (
            lambda writer: (embedding(writer), writer.add_expert_count(4)),
            "qwen2",
            "models of architecture qwen2 with experts",
        ),
        (
            lambda writer: (
                embedding(writer),
                writer.kv_data[0].pop("qwen2.rope.freq_base"),
                writer.add_rope_freq_base(0),
            ),
            "qwen2",
            "m.gguf, whose metadata was read as a config.json: config.json: rope_theta must be a positive number",
        ),
        (
            lambda writer: (embedding(writer), writer.add_tensor("rope_freqs.weight", np.full(8, np.nan, np.float32))),
            "qwen2",
            "m.gguf: tensor rope_freqs.weight must hold finite numbers above 0",
        ),
    ],
    ids=[
        "architecture",
        "missing",
        "vocabulary",
        "nothing",
        "adapter",
        "projector",
        "imatrix",
        "experts",
        "theta",
        "rope-factors",
    ],
)
def test_what_cannot_be_served_is_refused_by_name(
    tmp_path: Path, change: Callable[[Any], None], arch: str, message: str
) -> None:
    source = open_source(str(written(tmp_path / "m.gguf", change, arch)))
    with pytest.raises(ModelError, match=message):
        source.weights(describe(source.config))


def test_a_tensor_that_the_family_does_not_have_is_refused(tmp_path: Path) -> None:
    class Extra(gguf.GGUFWriter):  # type: ignore[misc]
        def write_header_to_file(self, *arguments: Any) -> None:
            self.add_tensor("blk.0.attn_sinks.weight", np.zeros(4, np.float32))
            super().write_header_to_file(*arguments)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gguf_files.gguf, "GGUFWriter", Extra)
        source = open_source(str(gguf_files.zoo_file(tmp_path / "m.gguf", "qwen2")))
    with pytest.raises(ModelError, match=r"tensor blk.0.attn_sinks.weight does not belong to this architecture"):
        source.weights(describe(source.config))


@pytest.mark.parametrize("name", [swept("falcon-h1"), swept("nemotron-h-experts"), "qwen3_next-experts"])
def test_matrices_of_recurrent_layers_stay_in_the_bits_of_the_file(name: str, tmp_path: Path) -> None:
    kind = gguf.GGMLQuantizationType.Q8_0

    def quantize(stored: str, data: Any) -> Any:
        left = ("ssm_conv1d", "ssm_norm", "ssm_a", "ssm_d", "ffn_gate_inp")  # as llama.cpp leaves them
        if data.ndim < 2 or data.shape[-1] % 32 or any(part in stored for part in left):
            return gguf_files.as_float32(stored, data)
        return gguf.quants.quantize(data, kind), kind

    path = gguf_files.write(tmp_path / "m.gguf", models_zoo.model(name), quantize=quantize)
    source = open_source(str(path))
    weights = source.weights(describe(source.config))
    own = {"falcon-h1": "mamba_dt", "nemotron-h-experts": "mamba_z", "qwen3_next-experts": "delta_v"}[name]
    assert str(weights.stored_format(f"layers.0.{own}.weight")) == "q8_0"
    tokens = models_zoo.prompts()[-1]
    logits = []
    for device in ("torch", "cpu"):
        executor = load(make_device(device), path)
        logits.append(Harness(executor).logits(tokens))
        executor.close()
    # Activations are rounded to 8 bits, which sends a few tokens to other experts.
    errors = np.sqrt(np.mean((logits[1] - logits[0]) ** 2, axis=1))
    assert np.median(errors) <= 0.02 * np.abs(logits[0]).max()


def test_layers_for_drafts_are_left_out_and_the_log_says_so(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    class WithDrafts(gguf.GGUFWriter):  # type: ignore[misc]
        def add_block_count(self, length: int) -> None:
            super().add_block_count(length + 1)
            self.add_nextn_predict_layers(1)

        def write_header_to_file(self, *arguments: Any) -> None:
            for name in ("nextn.eh_proj.weight", "attn_norm.weight"):
                self.add_tensor(f"blk.2.{name}", np.zeros(4, np.float32))
            super().write_header_to_file(*arguments)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gguf_files.gguf, "GGUFWriter", WithDrafts)
        path = gguf_files.write(tmp_path / "m.gguf", models_zoo.model("qwen3_5"))
    with caplog.at_level("INFO"):
        executor = load(make_device("torch"), path)
    assert [record.message for record in caplog.records if "not loaded" in record.message] == [
        "2 tensors of layers that predict further tokens (MTP) are not loaded; "
        '--speculative-config \'{"method": "mtp"}\' drafts with them'
    ]
    tokens = models_zoo.prompts()[3]
    expected = models_zoo.reference_logits("qwen3_5", tokens)
    assert np.abs(Harness(executor).logits(tokens) - expected).max() <= 1e-4 * np.abs(expected).max()
    executor.close()


@pytest.mark.parametrize("name", ["glm4-moe", "qwen3_5", "qwen3_5-experts", "qwen3_next-experts"])
def test_a_layer_for_drafts_is_read_where_it_is_asked_for(name: str, caplog: pytest.LogCaptureFixture) -> None:
    """The file's weights equal the checkpoint's."""
    file, checkpoint = open_source(str(mtp_zoo.gguf_file(name))), open_source(str(mtp_zoo.folder(name)))
    described = [describe(source.config, None) for source in (file, checkpoint)]
    with caplog.at_level("INFO"):
        file.weights(described[0], file.config)
    assert "layers that predict further tokens (MTP) are not loaded; --speculative-config" in caplog.text
    ours, theirs = (
        source.weights(description.with_mtp(), source.config)
        for source, description in zip((file, checkpoint), described, strict=True)
    )
    assert {*ours} == {*theirs}
    # 1 was added to Qwen's norms, and decays are not logarithms.
    most = 0 if name == "glm4-moe" else 1e-6
    for weight in theirs:
        found, wanted = to_float32(ours[weight]), to_float32(theirs[weight])
        if not name.startswith("qwen3_5") or ".delta" not in weight:  # whose heads have another order
            np.testing.assert_allclose(found, wanted, 0, most, err_msg=weight)


def test_a_file_without_a_layer_for_drafts_has_none(tmp_path: Path) -> None:
    for name in ("qwen3_5", "qwen3_next-experts"):
        assert describe(open_source(str(gguf_files.zoo_file(tmp_path / f"{name}.gguf", name))).config).mtp is None


def test_a_layer_for_drafts_alone_is_no_model(tmp_path: Path) -> None:
    class Alone(gguf.GGUFWriter):  # type: ignore[misc]
        def add_tensor(self, name: str, tensor: Any, raw_dtype: Any = None) -> None:
            if not name.startswith(("blk.0.", "blk.1.")):
                super().add_tensor(name, tensor, raw_dtype=raw_dtype)

        def write_header_to_file(self, *arguments: Any) -> None:
            self.add_nextn_predict_layers(1)
            super().write_header_to_file(*arguments)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gguf_files.gguf, "GGUFWriter", Alone)
        path = gguf_files.zoo_file(tmp_path / "mtp-m.gguf", "qwen3_5")
    with pytest.raises(ModelError, match=r"mtp-m.gguf is the layer of a model that predicts .* the language model"):
        open_source(str(path)).config  # noqa: B018
    gguf_files.zoo_file(tmp_path / "m.gguf", "qwen2")
    assert open_source(str(tmp_path)).config["architectures"] == ["Qwen2ForCausalLM"]


def test_an_engine_serves_a_file_in_text(tmp_path: Path) -> None:
    path = gguf_files.zoo_file(tmp_path / "m.gguf", "qwen2", gguf_files.quantized(gguf.GGMLQuantizationType.Q8_0))

    async def main() -> list[int]:
        engine = load_engine(EngineOptions(str(path), device="torch", max_model_len=64, max_num_seqs=2))
        engine.start()
        prompt = engine.tokenizer.encode("the quick brown")
        stream = engine.submit(Request("r", prompt, SamplingParams(max_tokens=4, temperature=0.0, ignore_eos=True)))
        tokens = [token for output in [output async for output in stream] for token in output.token_ids]
        await engine.stop()
        return tokens

    assert len(asyncio.run(main())) == 4
