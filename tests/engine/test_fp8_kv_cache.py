"""K and V in e4m3: what the cache does to the logits, and where the scales of a layer come from."""

from __future__ import annotations

import functools
import json
import logging
import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import models_zoo
import numpy as np
import pytest
from engine.weights.quantized.checkpoint_formats import save
from harness import Harness
from numpy.typing import NDArray
from optional_packages import require_packages

from tidewheel.engine.errors import ModelError
from tidewheel.engine.loading.opened_model import OpenedModel, open_model
from tidewheel.engine.models.spec import AttentionSpec, LatentAttentionSpec, mixers
from tidewheel.engine.options import EngineOptions

torch = pytest.importorskip("torch")
require_packages("transformers")

Array = NDArray[Any]

K_SCALES, V_SCALES = (0.004, 0.011), (0.0007, 0.002)
SCHEME = {"num_bits": 8, "type": "float", "symmetric": True, "dynamic": False, "strategy": "tensor"}
QUANTIZED = {
    "quant_method": "compressed-tensors", "format": "float-quantized", "config_groups": {}, "kv_cache_scheme": SCHEME,
}  # fmt: skip
ATTENTION = "model.layers.{}.self_attn."
UNEQUAL = {"0": 1, "1": 1}, {"0": 1, "1": 2}
PROMPT = np.random.default_rng(5).integers(0, models_zoo.VOCAB_SIZE, 90).tolist()
# Of what e4m3 rounds off. Where products are of bfloat16, attention rounds queries and weights, too: 0.13 was measured.
MAX_ERROR = 0.2


def scale_tensors(k: str = "k_scale", v: str = "v_scale") -> dict[str, Array]:
    """The scales of both layers, as checkpoints have them."""
    tensors = {}
    for layer in range(2):
        tensors[ATTENTION.format(layer) + k] = np.array([K_SCALES[layer]], np.float32)
        tensors[ATTENTION.format(layer) + v] = np.array(V_SCALES[layer], np.float32)
    return tensors


@functools.cache
def llama() -> Any:
    return models_zoo.build(models_zoo.CASES["llama"])


def checkpoint(folder: Path, tensors: Mapping[str, Array], **fields: Any) -> Path:
    """A tiny Llama with these tensors and fields of config.json besides its own."""
    llama().save_pretrained(folder)
    own = {name: weight.numpy() for name, weight in llama().state_dict().items()}
    config = json.loads((folder / "config.json").read_text())
    save(folder, {**config, **fields}, {**own, **tensors})
    return folder


def opened(folder: Path, **options: Any) -> OpenedModel:
    return open_model(EngineOptions(model=str(folder), device="cpu", skip_tokenizer_init=True, **options))


def logits(model: OpenedModel) -> Array:
    executor = model.load(
        EngineOptions(model=""), kv_cache_bytes=1 << 22, max_model_len=128, max_num_seqs=128, max_num_batched_tokens=128
    )
    found = Harness(executor).logits(PROMPT, chunk=50)
    executor.close()
    return found


@functools.cache
def reference(k: tuple[float, ...] | None, v: tuple[float, ...] | None) -> Array:
    """Transformers' logits with K and V divided by a layer's scales and rounded to e4m3; None: as they are."""

    import transformers

    class RoundedCache(transformers.DynamicCache):  # type: ignore[misc]
        def update(self, keys: Any, values: Any, layer_idx: int, *args: Any, **kwargs: Any) -> Any:
            if k is not None and v is not None:
                keys, values = rounded(keys, k[layer_idx]), rounded(values, v[layer_idx])
            return super().update(keys, values, layer_idx, *args, **kwargs)

    with torch.no_grad():
        model = llama().double()
        found = model(torch.tensor([PROMPT]), past_key_values=RoundedCache(), use_cache=True).logits[0].float().numpy()
        llama().float()
    return np.asarray(found)


def rounded(x: Any, scale: float) -> Any:
    divided = x.float() / np.float32(scale).item()
    return divided.clamp(-448, 448).to(torch.float8_e4m3fn).to(x.dtype) * float(np.float32(scale))


def agrees(found: Array, k: tuple[float, ...] = K_SCALES, v: tuple[float, ...] = V_SCALES) -> bool:
    """Whether these are the logits with a cache in e4m3, and not those with an exact cache or other scales.

    A number between two of e4m3 may be rounded to the other one, because ours is not in float64.
    """
    expected, exact = reference(k, v), reference(None, None)
    error, rounding = np.abs(found - expected), np.abs(expected - exact)
    return bool(math.sqrt(np.mean(error**2)) < MAX_ERROR * math.sqrt(np.mean(rounding**2)))


def test_without_scales_logits_are_those_of_a_cache_in_e4m3(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    model = opened(checkpoint(tmp_path, {}), kv_cache_dtype="fp8_e4m3")
    assert agrees(logits(model), (1.0, 1.0), (1.0, 1.0))
    assert "with scales of 1, because the checkpoint has none" in caplog.text
    assert model.kv_bytes_per_token == opened(tmp_path, kv_cache_dtype="int8").kv_bytes_per_token - 2 * 2 * 2 * 4


@pytest.mark.parametrize(
    ("k", "v"),
    [
        ("k_scale", "v_scale"),
        ("k_proj.output_scale", "v_proj.output_scale"),
        ("k_proj.k_scale", "v_proj.v_scale"),
        ("qkv_proj.k_scale", "qkv_proj.v_scale"),
        ("attn.k_scale", "attn.v_scale"),
    ],
)
def test_a_static_scheme_is_used_without_an_option(tmp_path: Path, k: str, v: str) -> None:
    model = opened(checkpoint(tmp_path, scale_tensors(k, v), quantization_config=QUANTIZED))
    assert model.kv_cache_dtype == "fp8_e4m3"
    assert agrees(logits(model))


def test_scales_of_other_checkpoints_are_used_if_the_type_is_asked_for(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    folder = checkpoint(tmp_path, scale_tensors(), quantization_config={"quant_method": "fp8"})
    assert agrees(logits(opened(folder, kv_cache_dtype="fp8_e4m3")))
    assert "with the checkpoint's scales" in caplog.text
    caplog.clear()
    assert opened(folder).kv_cache_dtype == "float32"
    assert "scales of K and V are not needed" in caplog.text


def test_another_type_needs_no_scales(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    model = opened(checkpoint(tmp_path, {}, quantization_config=QUANTIZED), kv_cache_dtype="float32")
    assert not agrees(logits(model))
    assert [record.message for record in caplog.records if "scales" in record.message] == [
        "The checkpoint's scales of K and V are not needed: they are for a cache of fp8_e4m3, and the cpu device "
        "caches K and V as float32"
    ]


@pytest.mark.parametrize(
    "change",
    [{"dynamic": True}, {"type": "int"}, {"num_bits": 4}, {"symmetric": False}, {"strategy": "attn_head"},
     {"strategy": "group", "group_size": 32}],
)  # fmt: skip
def test_other_schemes_are_refused_unless_a_type_is_asked_for(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, change: dict[str, Any]
) -> None:
    caplog.set_level(logging.INFO)
    scheme = {**QUANTIZED, "kv_cache_scheme": {**SCHEME, **change}}
    folder = checkpoint(tmp_path, {}, quantization_config=scheme)
    with pytest.raises(ModelError, match=r"kv_cache_scheme .* is not supported; .* such as --kv-cache-dtype float32"):
        opened(folder)
    assert opened(folder, kv_cache_dtype="bfloat16").kv_cache_dtype == "bfloat16"
    assert "instead of the type of the checkpoint's kv_cache_scheme" in caplog.text


def without(name: str) -> Callable[[dict[str, Array]], None]:
    return lambda tensors: tensors.pop(ATTENTION.format(1) + name) and None


def becomes(array: Array) -> Callable[[dict[str, Array]], None]:
    return lambda tensors: tensors.update({ATTENTION.format(1) + "v_scale": array})


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (
            becomes(np.array([0.0], np.float32)),
            "model.layers.1.self_attn.v_scale is 0.0, but K and V can only be divided",
        ),
        (becomes(np.array([-1.0], np.float32)), "v_scale is -1.0, but"),
        (becomes(np.array([np.nan], np.float32)), "v_scale is nan, but"),
        (becomes(np.array([np.inf], np.float32)), "v_scale is inf, but"),
        (becomes(np.array([1e30], np.float32)), "v_scale is 1e[+]30, which is not a scale"),
        (becomes(np.ones(2, np.float32)), r"v_scale has shape \(2,\); supported is one scale for a layer"),
        (becomes(np.ones(1, np.int32)), "v_scale is stored as I32; supported are"),
        (without("v_scale"), "tensor model.layers.1.self_attn.v_scale is missing, the divisor of V"),
        (without("k_scale"), "tensor model.layers.1.self_attn.k_scale is missing, the divisor of K"),
    ],
)
def test_bad_scales_are_named(tmp_path: Path, change: Callable[[dict[str, Array]], None], words: str) -> None:
    tensors = scale_tensors()
    change(tensors)
    checkpoint(tmp_path, tensors, quantization_config=QUANTIZED)
    with pytest.raises(ModelError, match=f"model.safetensors: .*{words}") as error:
        logits(opened(tmp_path))
    assert "\n" not in str(error.value)


def test_a_scheme_needs_scales_and_must_be_an_object(tmp_path: Path) -> None:
    checkpoint(tmp_path, {}, quantization_config=QUANTIZED)
    with pytest.raises(ModelError, match=r"model.layers.0.self_attn.k_scale is missing"):
        logits(opened(tmp_path))
    checkpoint(tmp_path, {}, quantization_config={**QUANTIZED, "kv_cache_scheme": 8})
    with pytest.raises(ModelError, match="kv_cache_scheme must be an object, got 8"):
        opened(tmp_path)


def scales_file(path: Path, **changes: Any) -> str:
    cache = {"dtype": "float8_e4m3fn", "scaling_factor": {"0": {"0": K_SCALES[0], "1": K_SCALES[1]}}, **changes}
    path.write_text(json.dumps({"model_type": "llama", "kv_cache": cache}))
    return str(path)


def test_a_file_of_scales_is_for_k_and_v(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    folder = checkpoint(tmp_path, scale_tensors(), quantization_config=QUANTIZED)
    file = scales_file(tmp_path / "scales.json")
    assert agrees(logits(opened(folder, quantization_param_path=file)), K_SCALES, K_SCALES)
    two = {"0": {"0": 0.5, "1": 2}, "1": {"0": 0.5, "1": 2}}
    file = scales_file(tmp_path / "scales.json", scaling_factor=two)
    assert agrees(logits(opened(folder, quantization_param_path=file)), (0.5, 2.0), (0.5, 2.0))
    assert opened(folder, quantization_param_path=file, kv_cache_dtype="int8").kv_scales is None
    assert "--quantization-param-path has no effect: K and V are cached as int8" in caplog.text


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("{", "is not valid JSON"),
        ("[]", "must hold a JSON object"),
        ("{}", "must have kv_cache.scaling_factor"),
        ('{"model_type": "qwen2"}', "is for models of type 'qwen2', and this one is of 'llama'"),
        ('{"kv_cache": {"dtype": "float8_e5m2", "scaling_factor": {}}}', "scales for 'float8_e5m2'; supported is"),
        ('{"kv_cache": {"dtype": "float8_e4m3fn", "scaling_factor": {}}}', "has no rank"),
        ('{"kv_cache": {"dtype": "float8_e4m3fn", "scaling_factor": {"0": 1}}}', "rank '0' must be an object"),
        ('{"kv_cache": {"dtype": "float8_e4m3fn", "scaling_factor": {"0": {"0": 1}}}}', "rank '0' lacks layer 1"),
        (
            '{"kv_cache": {"dtype": "float8_e4m3fn", "scaling_factor": {"0": {"0": 1, "1": 1, "2": 1}}}}',
            "has layer '2', which this model does not have",
        ),
        (
            json.dumps({"kv_cache": {"dtype": "float8_e4m3fn", "scaling_factor": {"0": UNEQUAL[0], "1": UNEQUAL[1]}}}),
            "has 2 ranks whose scales differ",
        ),
        ('{"kv_cache": {"dtype": "float8_e4m3fn", "scaling_factor": {"0": {"0": 0, "1": 1}}}}', "layer 0, is 0, but"),
        ('{"kv_cache": {"dtype": "float8_e4m3fn", "scaling_factor": {"0": {"0": NaN, "1": 1}}}}', "is nan, but"),
        (
            '{"kv_cache": {"dtype": "float8_e4m3fn", "scaling_factor": {"0": {"0": "1", "1": 1}}}}',
            "is '1', not a number",
        ),
    ],
)
def test_bad_files_of_scales_are_refused(tmp_path: Path, content: str, words: str) -> None:
    (tmp_path / "scales.json").write_text(content)
    model = opened(
        models_zoo.folder("llama"), kv_cache_dtype="fp8_e4m3", quantization_param_path=str(tmp_path / "scales.json")
    )
    with pytest.raises(ModelError, match=r"scales\.json") as error:
        logits(model)
    assert words in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("name", ["minicpm3", "deepseek-v3", "gemma3n", "gemma4", "falcon-h1"])
def test_latents_and_shared_layers_are_divided_and_multiplied_again(tmp_path: Path, name: str) -> None:
    """A power of two changes nothing but the smallest numbers, so long as it is the same before the cache and after."""
    folder = models_zoo.folder(name)
    config = json.loads((folder / "config.json").read_text())
    exact, plain = (logits(opened(folder, kv_cache_dtype=dtype)) for dtype in ("float32", "fp8_e4m3"))
    layers = [index for index, layer in enumerate(opened(folder).spec.layers) if caches(layer)]
    factors = {str(index): 2.0 ** -(index % 2 + 1) for index in layers}
    file = tmp_path / "scales.json"
    cache = {"dtype": "float8_e4m3fn", "scaling_factor": {"0": factors}}
    file.write_text(json.dumps({"model_type": config["model_type"], "kv_cache": cache}))
    model = opened(folder, kv_cache_dtype="fp8_e4m3", quantization_param_path=str(file))
    assert np.sqrt(np.mean((logits(model) - plain) ** 2)) < MAX_ERROR * np.sqrt(np.mean((plain - exact) ** 2))


def caches(layer: Any) -> bool:
    found = (mixer for mixer in mixers(layer) if isinstance(mixer, AttentionSpec | LatentAttentionSpec))
    return any(mixer.cached is not None for mixer in found)
