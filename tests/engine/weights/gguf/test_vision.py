"""GGUF files that make models see: what is read of them, where they are found, and broken ones."""

from __future__ import annotations

import asyncio
import functools
import io
import json
import logging
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import gguf
import gguf_files
import numpy as np
import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")
pytest.importorskip("tidewheel._native")

from fake_hub import fake_hub, with_hub
from mmproj_files import TYPES, as_ollama, write_mmproj, write_text, write_tower
from PIL import Image
from plain_tower import tower_weights
from vision_zoo import CASES, VisionCase, VisionModel, photo, tokenizer_of, vision_model

from tidewheel.engine.core.request import Request
from tidewheel.engine.devices.cpu.formats import tower_formats
from tidewheel.engine.errors import ModelError
from tidewheel.engine.loading.inspection import Inspection, inspect_model
from tidewheel.engine.loading.load import load_engine
from tidewheel.engine.loading.opened_model import open_model
from tidewheel.engine.media.families import vision_of
from tidewheel.engine.media.media import MediaFiles
from tidewheel.engine.media.options import MediaOptions
from tidewheel.engine.media.processing import Pixels
from tidewheel.engine.media.vision import Vision
from tidewheel.engine.options import EngineOptions
from tidewheel.engine.sampling_params import SamplingParams
from tidewheel.engine.weights.gguf.choosing import choose_mmproj, find_mmproj
from tidewheel.engine.weights.gguf.ollama import in_llama_cpp_words
from tidewheel.engine.weights.gguf.reader import read_gguf
from tidewheel.engine.weights.gguf.vision.projectors import PROJECTORS
from tidewheel.engine.weights.gguf.vision.tower import GgufTower
from tidewheel.engine.weights.tensor import BlockTensor, WeightSource, to_float32
from tidewheel.server.commands.cli import main

FOLDERS = TemporaryDirectory()
# What files do not say: settings of the processor that models share.
UNSAID = {
    "lfm2-vl": ("tile_size", "min_image_tokens", "max_image_tokens", "max_tiles"),
    "gemma4": ("max_soft_tokens",),
    "gemma4-e2b": ("max_soft_tokens",),
    "kimi-vl": ("in_token_limit",),
    "llama4": ("max_patches",),
    "minicpm-v2.5": ("scale_resolution", "max_slice_nums"),
    "minicpm-v2.6": ("scale_resolution", "max_slice_nums"),
}
# All of these, as an option.
SAID = {
    "gemma4": {"max_soft_tokens": 70},
    "qwen2.5-vl": {"size": {"shortest_edge": 16 * 16, "longest_edge": 48 * 40}},
}
SIZES = [(61, 97), (120, 37)]


@functools.cache
def case_of(name: str) -> VisionCase:
    """A case whose language model knows all tokens of its tokenizer."""
    case = CASES[name]
    # GGUF files have not all fields of a config.
    layers = {"layer_types": ["sliding_attention", "full_attention"]}
    fields = {"gemma3": {**layers, "query_pre_attn_scalar": 16}}
    text = {**case.text, **fields.get(name, {})}
    if name == "mistral3":
        case = case._replace(vision={**case.vision, "hidden_act": "silu"})  # as files of Ollama take it to be
    return case._replace(text={**text, "vocab_size": tokenizer_of(case).get_vocab_size() + 1})


@functools.cache
def made(name: str) -> VisionModel:
    return vision_model(case_of(name), Path(FOLDERS.name) / name)


def checkpoint_vision(name: str) -> Vision:
    vision = vision_of(made(name).config, made(name).settings)
    assert vision is not None
    return vision


def file_vision(path: Path, settings: dict[str, Any] | None = None, width: int = 32) -> tuple[Vision, WeightSource]:
    tower = GgufTower(read_gguf(path))
    config = {"hidden_size": width, "rms_norm_eps": 1e-5}
    vision = vision_of(tower.vision_config(config), {**tower.processor(), **(settings or {})})
    assert vision is not None
    return vision, tower.tower_weights(vision.spec, vision.tensors)


def expected_weights(name: str) -> dict[str, Any]:
    return {key: value.numpy() for key, value in tower_weights(checkpoint_vision(name), made(name).stored).items()}


def in_float32(settings: Any) -> Any:
    """Settings with the numbers that files have of theirs."""
    if isinstance(settings, Pixels):
        settings = (settings.factor, settings.mean, settings.std)
    if isinstance(settings, tuple):
        return tuple(map(in_float32, settings))
    return np.float32(settings) if isinstance(settings, float) else settings


def test_all_types_are_tested() -> None:
    assert {*TYPES.values()} == {*PROJECTORS}


@pytest.mark.parametrize("name", TYPES)
def test_a_file_is_the_tower_of_its_checkpoint(name: str, tmp_path: Path) -> None:
    path = write_mmproj(tmp_path / "mmproj.gguf", name, made(name))
    said = {key: made(name).settings[key] for key in UNSAID.get(name, ())}
    (vision, weights), checkpoint = file_vision(path, said, CASES[name].text["hidden_size"]), checkpoint_vision(name)
    assert vision.spec == checkpoint.spec
    assert vision.added_after == checkpoint.added_after
    assert (vision.placeholder, vision.slot) == (checkpoint.placeholder, checkpoint.slot)
    if name != "gemma4":  # whose language model says it
        assert vision.two_way == checkpoint.two_way
    if name not in ("llava", "llava-siglip"):  # whose files are of models that saw images in a frame
        assert in_float32(vision.settings) == in_float32(checkpoint.settings)
    expected = expected_weights(name)
    assert {*weights} == {*expected}
    for key, values in expected.items():
        found = to_float32(weights[key])
        assert found.shape == values.shape, key
        # Norms with 1 added lose a bit, and factors are multiplied here.
        np.testing.assert_allclose(
            found, values, rtol=1e-6, atol=2e-7 if key.endswith("norm.weight") else 0, err_msg=key
        )


def quantize(kind: str) -> gguf_files.Quantize:
    return gguf_files.quantized(gguf.GGMLQuantizationType[kind])


@pytest.mark.parametrize("kind", ["F16", "BF16", "Q8_0", "Q5_1", "Q4_0"])
@pytest.mark.parametrize("name", ["qwen2-vl", "qwen3-vl", "pixtral"])
def test_matrices_may_be_in_any_type(name: str, kind: str, tmp_path: Path) -> None:
    vision, weights = file_vision(write_mmproj(tmp_path / "mmproj.gguf", name, made(name), quantize(kind)))
    kept = tower_formats(vision.spec, "bfloat16", None, weights)
    number = gguf.GGMLQuantizationType[kind]
    expected = expected_weights(name)
    for key in ("layers.0.q.weight", "layers.1.k.weight", "layers.2.up.weight", "merge.weight", "connector.weight"):
        values = gguf.quants.dequantize(gguf.quants.quantize(expected[key], number), number)
        np.testing.assert_array_equal(to_float32(weights[key]), values, err_msg=key)
        stays = kind.startswith("Q") and key.startswith("layers.")
        assert isinstance(weights[key], BlockTensor) == stays
        assert kept[key].kind == (kind.lower() if stays else "bfloat16")


def swapped(writer: Any) -> None:
    """As the first converters called the matrices of MLPs."""
    tensors = writer.tensors[0]
    for layer in range(3):
        for kind in ("weight", "bias"):
            up, down = (f"v.blk.{layer}.ffn_{name}.{kind}" for name in ("up", "down"))
            if up in tensors:
                tensors[up], tensors[down] = tensors[down], tensors[up]


def fused(writer: Any) -> None:
    """Queries, keys and values in one matrix."""
    tensors = writer.tensors[0]
    for layer in range(3):
        for kind in ("weight", "bias"):
            parts = [tensors.pop(f"v.blk.{layer}.attn_{part}.{kind}") for part in "qkv"]
            whole = np.concatenate([part.tensor for part in parts])
            writer.add_tensor(f"v.blk.{layer}.attn_qkv.{kind}", whole)


@pytest.mark.parametrize(("name", "change"), [("qwen2-vl", swapped), ("smolvlm", swapped), ("smolvlm", fused)])
def test_older_files_have_other_names(name: str, change: Callable[[Any], None], tmp_path: Path) -> None:
    _, weights = file_vision(write_mmproj(tmp_path / "mmproj.gguf", name, made(name), change=change))
    for key, values in expected_weights(name).items():
        np.testing.assert_array_equal(to_float32(weights[key]), values, err_msg=key)


NAMES = [
    "README.md",
    "model-Q4_K_M.gguf",
    "mmproj-F32.gguf",
    "mmproj-F16.gguf",
    "mmproj-BF16.gguf",
    "Q8_0/model-Q8_0-00001-of-00002.gguf",
    "Q8_0/mmproj-model-Q8_0.gguf",
    "other/mmproj-F16.gguf",
]


@pytest.mark.parametrize(
    ("names", "model", "chosen"),
    [
        (NAMES, "model-Q4_K_M.gguf", "mmproj-BF16.gguf"),
        (NAMES, "Q8_0/model-Q8_0-00001-of-00002.gguf", "Q8_0/mmproj-model-Q8_0.gguf"),
        (NAMES, "IQ2/model-IQ2_M.gguf", "mmproj-BF16.gguf"),
        (NAMES[:2], "model-Q4_K_M.gguf", None),
        (["mmproj-F32.gguf", "mmproj-Q8_0.gguf"], "m-Q8_0.gguf", "mmproj-Q8_0.gguf"),
        (["mmproj-a-F32.gguf", "mmproj-b-F16.gguf"], "A-Q8_0.gguf", "mmproj-a-F32.gguf"),
        (["x/mmproj.gguf"], "y/m.gguf", None),
        (["M.MMPROJ-Q8_0.gguf"], "m.gguf", "M.MMPROJ-Q8_0.gguf"),
    ],
)
def test_the_nearest_file_whose_bits_fit_is_chosen(names: Sequence[str], model: str, chosen: str | None) -> None:
    assert choose_mmproj(names, model) == chosen


def test_a_file_is_looked_for_beside_a_model_and_within_a_snapshot(tmp_path: Path) -> None:
    for folder in (tmp_path, tmp_path / "snapshots" / "commit"):
        (folder / "sub").mkdir(parents=True)
        (folder / "sub" / "model.gguf").touch()
        (folder / "mmproj-F16.gguf").touch()
    assert find_mmproj(tmp_path / "sub" / "model.gguf") is None
    snapshot = tmp_path / "snapshots" / "commit"
    assert find_mmproj(snapshot / "sub" / "model.gguf") == snapshot / "mmproj-F16.gguf"


@functools.cache
def written_text(name: str) -> Path:
    return write_text(Path(FOLDERS.name) / f"{name}.gguf", name, made(name), tokenizer_of(case_of(name)))


def text_file(folder: Path, name: str) -> Path:
    path = folder / "model.gguf"
    path.symlink_to(written_text(name))
    return path


def folder_of(name: str) -> Path:
    """The checkpoint, with all that serving it needs."""
    folder = Path(FOLDERS.name) / name
    (folder / "preprocessor_config.json").write_text(json.dumps(made(name).settings))
    tokenizer_of(case_of(name)).save(str(folder / "tokenizer.json"))
    return folder


def opened(path: Path, **media: Any) -> Any:
    return open_model(EngineOptions(str(path), device="cpu", media=MediaOptions(**media)))


@pytest.mark.parametrize("name", ["llava", "qwen2-vl", "qwen3-vl", "gemma3", "gemma4"])
def test_a_model_takes_the_file_beside_it(name: str, tmp_path: Path) -> None:
    path, said = text_file(tmp_path, name), {"mm_processor_kwargs": SAID.get(name)}
    assert opened(path, **said).vision is None
    mmproj = write_mmproj(tmp_path / "mmproj-F32.gguf", name, made(name))
    model = opened(path, **said)
    assert model.vision.vision.spec == checkpoint_vision(name).spec
    both_ways = [attention.two_way for attention in model.spec.attentions()]
    assert both_ways == {"gemma3": [True] * 2, "gemma4": [True, False]}.get(name, [False] * 2)
    assert all(bool(attention.rope.axes) == name.startswith("qwen") for attention in model.spec.attentions())
    assert opened(path, language_model_only=True).vision is None
    elsewhere = mmproj.rename(tmp_path / "tower.bin")
    assert opened(path).vision is None
    assert opened(path, mmproj=str(elsewhere), **said).vision.vision.settings == model.vision.vision.settings


async def answered(path: Path, name: str) -> tuple[list[int], list[float]]:
    """Tokens and their log probabilities, after two pictures."""
    options = {"dtype": "float32", "max_model_len": 400, "max_num_seqs": 2}
    media = MediaOptions(mm_processor_kwargs=SAID.get(name))
    engine = load_engine(EngineOptions(str(path), device="cpu", media=media, **options))
    assert engine.media is not None
    pictures = []
    for seed, size in enumerate(SIZES):
        content = io.BytesIO()
        Image.fromarray(photo(*size, seed)).save(content, "PNG")
        pictures.append(await engine.media.read(MediaFiles((content.getvalue(),)), "image"))
    expanded = engine.media.expand(" then ".join([case_of(name).prompt] * 2), pictures, "prompt")
    ids, spans = engine.media.spread(engine.tokenizer.encode(expanded.text, add_special_tokens=False), expanded)
    sampling = SamplingParams(max_tokens=4, temperature=0, ignore_eos=True, logprobs=1)
    engine.start()
    outputs = [output async for output in engine.submit(Request("request", ids, sampling, media=spans))]
    await engine.stop()
    tokens = [token for output in outputs for token in output.token_ids]
    return tokens, [entry.logprob for output in outputs for entry in output.logprobs or ()]


@pytest.mark.parametrize("name", ["smolvlm", "qwen2-vl", "qwen3-vl", "gemma3", "gemma4"])
def test_prompts_go_on_as_with_the_checkpoint(name: str, tmp_path: Path) -> None:
    path = text_file(tmp_path, name)
    write_mmproj(tmp_path / "mmproj-F32.gguf", name, made(name))
    (tokens, logprobs), expected = (asyncio.run(answered(model, name)) for model in (path, folder_of(name)))
    assert tokens == expected[0]
    assert logprobs == pytest.approx(expected[1], abs=1e-4)


def test_a_quantized_tower_sees_nearly_the_same(tmp_path: Path) -> None:
    name, path = "qwen2.5-vl", text_file(tmp_path, "qwen2.5-vl")
    mmproj, logprobs = tmp_path / "mmproj.gguf", []
    for quantized in (quantize("Q8_0"), quantize("F32")):
        write_mmproj(mmproj, name, made(name), quantized)
        logprobs.append(asyncio.run(answered(path, name))[1])
    assert logprobs[0] != logprobs[1]
    assert logprobs[0] == pytest.approx(logprobs[1], abs=0.05)


def test_inspect_counts_the_tower(tmp_path: Path) -> None:
    path = text_file(tmp_path, "qwen2-vl")
    write_mmproj(tmp_path / "mmproj-F32.gguf", "qwen2-vl", made("qwen2-vl"))
    found = inspect_model(EngineOptions(str(path), device="cpu"))
    assert isinstance(found, Inspection)
    assert found.vision is not None
    assert found.vision.parameters == sum(values.size for values in expected_weights("qwen2-vl").values())
    assert found.vision.tokens["512 x 512"] > 0


def test_inspect_shows_the_tokens_of_images_of_the_wanted_size(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = text_file(tmp_path, "qwen2-vl")
    write_mmproj(tmp_path / "mmproj-F32.gguf", "qwen2-vl", made("qwen2-vl"))

    def tokens(*options: str) -> int:
        assert main(["inspect", str(path), "--device", "cpu", "--json", *options]) == 0
        return int(json.loads(capsys.readouterr().out)["vision"]["tokens"]["512 x 512"])

    usual = tokens()
    assert tokens("--mm-processor-kwargs", '{"min_pixels": 64, "max_pixels": 640}') < usual
    assert tokens("--image-max-tokens", "9") <= 9 < usual


def test_one_file_may_have_both(tmp_path: Path) -> None:
    name, path = "smolvlm", tmp_path / "model.gguf"
    tokenizer = tokenizer_of(case_of(name))
    write_text(path, name, made(name), tokenizer, lambda writer: write_tower(writer, name, made(name)))
    assert opened(path).vision.vision.spec == checkpoint_vision(name).spec
    assert opened(path, language_model_only=True).vision is None


@functools.cache
def written_as_ollama(name: str) -> Path:
    path = Path(FOLDERS.name) / f"{name}-ollama.gguf"

    def change(writer: Any) -> None:
        as_ollama(name, made(name))(writer)
        if name == "qwen2.5-vl":
            writer.add_array("qwen25vl.vision.fullatt_block_indexes", [1])

    return write_text(path, name, made(name), tokenizer_of(case_of(name)), change)


@pytest.mark.parametrize("name", ["gemma3", "llama4", "mistral3", "qwen2.5-vl"])
def test_files_of_ollama_have_the_tower_of_the_checkpoint(name: str) -> None:
    model = opened(written_as_ollama(name))
    assert model.vision is not None
    assert model.vision.vision.spec == checkpoint_vision(name).spec
    expected = expected_weights(name)
    assert {*model.vision.weights} == {*expected}
    for key, values in expected.items():
        np.testing.assert_allclose(to_float32(model.vision.weights[key]), values, rtol=1e-6, atol=2e-7, err_msg=key)


@pytest.mark.parametrize("name", ["gemma3", "qwen2.5-vl"])
def test_files_of_ollama_go_on_as_the_checkpoint(name: str) -> None:
    (tokens, logprobs), expected = (
        asyncio.run(answered(model, name)) for model in (written_as_ollama(name), folder_of(name))
    )
    assert tokens == expected[0]
    assert logprobs == pytest.approx(expected[1], abs=1e-4)


@pytest.mark.parametrize(
    ("name", "key", "value", "says"),
    [
        ("qwen2.5-vl", "qwen25vl.vision.fullatt_block_indexes", np.array([1, 2]), "each n-th layer"),
        ("qwen2.5-vl", "qwen25vl.vision.fullatt_block_indexes", np.array([-1]), "each n-th layer"),
        ("qwen2.5-vl", "qwen25vl.vision.fullatt_block_indexes", np.arange(10_001), "at most 10000 integers"),
        ("qwen2.5-vl", "qwen25vl.vision.fullatt_block_indexes", np.array([1.0]), "integers"),
        ("qwen2.5-vl", "qwen25vl.vision.fullatt_block_indexes", 1, "integers"),
        ("qwen2.5-vl", "qwen25vl.vision.fullatt_block_indexes", "1", "integers"),
        ("qwen2.5-vl", "qwen25vl.vision.block_count", 2**30, "at most"),
        ("gemma3", "gemma3.vision.patch_size", 0, "an integer of at least 1"),
        ("gemma3", "gemma3.mm.tokens_per_image", "x", "an integer"),
        ("llama4", "llama4.vision.pixel_shuffle_ratio", 0.3, "1 / n"),
        ("llama4", "llama4.vision.rope.freq_base", 5e5, "10000"),
    ],
)
def test_broken_metadata_of_ollama_is_refused(name: str, key: str, value: Any, says: str) -> None:
    file = read_gguf(written_as_ollama(name))
    with pytest.raises(ModelError, match=f"{key} must be .*{says}"):
        in_llama_cpp_words(replace(file, metadata={**file.metadata, key: value}))
    assert in_llama_cpp_words(replace(file, tensors={})).tensors == {}


def test_llama_4_of_ollama_has_the_sizes_and_the_splitting_of_llama_cpp() -> None:
    ollama, plain = read_gguf(written_as_ollama("llama4")), read_gguf(written_text("llama4")).metadata
    assert ollama.metadata["llama4.feed_forward_length"] != plain["llama4.feed_forward_length"]
    words = in_llama_cpp_words(replace(ollama, metadata={**ollama.metadata, "tokenizer.ggml.pre": "default"})).metadata
    assert {key: words[key] for key in plain if key.startswith("llama4.")} == {
        key: value for key, value in plain.items() if key.startswith("llama4.")
    }
    assert words["tokenizer.ggml.pre"] == "llama4"


def test_large_gemmas_of_ollama_turn_slower() -> None:
    file = read_gguf(written_as_ollama("gemma3"))
    assert "gemma3.rope.scaling.factor" not in in_llama_cpp_words(file).metadata
    large = replace(file, metadata={**file.metadata, "gemma3.block_count": 34})
    assert in_llama_cpp_words(large).metadata["gemma3.rope.scaling.factor"] == 8
    plain = read_gguf(written_text("gemma3"))
    assert in_llama_cpp_words(plain) is plain


def without(name: str) -> Callable[[Any], None]:
    return lambda writer: writer.tensors[0].pop(name)


def with_field(name: str, value: Any) -> Callable[[Any], None]:
    def change(writer: Any) -> None:
        writer.kv_data[0][f"clip.{name}"].value = value

    return change


def with_tensor(name: str, *shape: int) -> Callable[[Any], None]:
    def change(writer: Any) -> None:
        writer.tensors[0].pop(name, None)
        writer.add_tensor(name, np.ones(shape, np.float32))

    return change


BROKEN = [
    (with_field("projector_type", "adapter"), "projector type 'adapter' is not supported; supported are gemma3"),
    (with_field("has_vision_encoder", False), "has no vision tower, which images need"),
    (with_field("vision.block_count", 2**30), "clip.vision.block_count must be at most"),
    (with_field("vision.block_count", 4), "has no tensor v.blk.3.ln1.weight, which images need"),
    (with_field("vision.patch_size", 0), "clip.vision.patch_size must be an integer of at least 1"),
    (with_field("vision.patch_size", 5), "v.patch_embd.weight has shape"),
    (with_field("vision.patch_size", 2**30), "patch_size must be at most"),
    (with_field("vision.attention.head_count", 5), "metadata was read as a config.json: .* the number of heads"),
    (with_field("vision.image_max_pixels", 2**30), "patches, which is more than"),
    (with_field("vision.spatial_merge_size", 10**6), "at most 8 frames and blocks of 16 x 16"),
    (with_field("vision.image_mean", [0.5]), "image_mean must be three numbers"),
    (with_field("vision.image_std", [0.0] * 3), "image_std must be three numbers"),
    (with_field("vision.is_deepstack_layers", [True] * 10_001), "must be an array of at most 10000 numbers"),
    (with_field("vision.is_deepstack_layers", [True, False, False]), "takes features after 1 layers"),
    (without("v.blk.1.attn_out.bias"), "has no tensor v.blk.1.attn_out.bias, which images need"),
    (without("v.blk.0.ffn_up.weight"), "has no tensor v.blk.0.ffn_up.weight, which images need"),
    (without("mm.2.weight"), "has no tensor mm.2.weight, which images need"),
    (with_tensor("v.deepstack.0.fc1.weight", 4, 4), "v.deepstack.0.fc1.weight has shape"),
    (with_tensor("v.position_embd.weight", 24, 32), "num_position_embeddings must be"),
    (with_tensor("v.blk.0.attn_sinks", 2), "does not belong to a projector of type qwen3vl_merger"),
]


@pytest.mark.parametrize(("change", "says"), BROKEN, ids=[says for _, says in BROKEN])
def test_a_broken_file_leaves_the_text_unless_it_was_named(
    change: Callable[[Any], None], says: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = text_file(tmp_path, "qwen3-vl")
    mmproj = write_mmproj(tmp_path / "mmproj.gguf", "qwen3-vl", made("qwen3-vl"), change=change)
    with caplog.at_level(logging.WARNING):
        assert opened(path).vision is None
    assert "images are not taken, only text" in caplog.text
    assert str(mmproj) in caplog.text
    with pytest.raises(ModelError, match=says):
        opened(path, mmproj=str(mmproj))


@pytest.mark.parametrize(
    ("name", "change", "says"),
    [
        ("gemma4", with_tensor("v.position_embd.weight", 24), "v.position_embd.weight has shape .* 2 axes"),
        ("gemma4-e2b", with_tensor("v.blk.2.ffn_up.input_max", 2), "v.blk.2.ffn_up.input_max has shape"),
        ("gemma4-e2b", without("v.blk.2.attn_out.output_min"), "has no tensor v.blk.2.attn_out.output_min"),
        ("kimi-vl", with_tensor("v.position_embd.weight", 80, 32), "v.position_embd.weight has shape"),
        ("llama4", with_tensor("v.patch_embd.weight", 32, 40), "v.patch_embd.weight has shape"),
        ("minicpm-v2.6", with_field("minicpmv_version", 1), "minicpmv_version must be one of 2"),
        ("minicpm-v2.6", without("resampler.attn.k.bias"), "has no tensor resampler.attn.k.bias"),
    ],
)
def test_what_only_some_files_have_is_checked(
    name: str, change: Callable[[Any], None], says: str, tmp_path: Path
) -> None:
    path = write_mmproj(tmp_path / "mmproj.gguf", name, made(name), change=change)
    with pytest.raises(ModelError, match=says):
        file_vision(path, {key: made(name).settings[key] for key in UNSAID[name]}, CASES[name].text["hidden_size"])


def test_a_tokenizer_without_the_token_for_images_leaves_the_text(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path, case = tmp_path / "model.gguf", case_of("llava")
    write_text(path, "llava", made("llava"), tokenizer_of(case._replace(tokens=())))
    mmproj = write_mmproj(tmp_path / "mmproj.gguf", "llava", made("llava"))
    options = {"device": "cpu", "max_model_len": 64, "max_num_seqs": 1}
    with caplog.at_level(logging.WARNING):
        assert load_engine(EngineOptions(str(path), **options)).media is None
    assert "images are not taken, only text: the tokenizer has no token <image>" in caplog.text
    with pytest.raises(ModelError, match="the tokenizer has no token <image>"):
        load_engine(EngineOptions(str(path), media=MediaOptions(mmproj=str(mmproj)), **options))


def test_a_hub_has_it_beside_its_model(tmp_path: Path) -> None:
    mmproj = write_mmproj(tmp_path / "mmproj.gguf", "llava", made("llava")).read_bytes()
    text = written_text("llava").read_bytes()
    repositories = {
        "own/seeing": {"Q8_0/model-Q8_0.gguf": text, "mmproj-F32.gguf": mmproj},
        "own/broken": {"model-Q8_0.gguf": text, "mmproj-F32.gguf": mmproj[:999]},
    }
    with fake_hub(repositories) as hub, with_hub(hub.endpoint, tmp_path / "cache"):
        sees = {}
        for model in repositories:
            found = inspect_model(EngineOptions(model, device="cpu"))
            assert isinstance(found, Inspection)
            sees[model] = found.vision is not None
        assert sees == {"own/seeing": True, "own/broken": False}
        assert open_model(EngineOptions("own/seeing", device="cpu")).vision is not None


def test_what_is_no_projector_is_refused_by_name(tmp_path: Path) -> None:
    path = text_file(tmp_path, "llava")
    (tmp_path / "mmproj.gguf").write_bytes(b"GGUF\3")
    assert opened(path).vision is None
    for mmproj, says in (
        ("mmproj.gguf", "it ends within"),
        ("none.gguf", "none.gguf"),
        ("model.gguf", "no vision tower"),
    ):
        with pytest.raises(ModelError, match=says):
            opened(path, mmproj=str(tmp_path / mmproj))
    with pytest.raises(ModelError, match=r"--mmproj .* has safetensors, whose tower lies among them"):
        opened(Path(FOLDERS.name) / "llava", mmproj=str(path))
