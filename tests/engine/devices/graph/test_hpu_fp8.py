"""FP8 on Gaudi by the files of vllm-gaudi's calibration, on a software model of habana_frameworks."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import torch
from engine.devices.fakes.hpu import FakeHpu
from engine.devices.graph.loading import load
from engine.devices.graph.served import MEMORY, SPEC
from engine.devices.made_models import RandomWeights
from engine.weights.stored_tensors import stored
from harness import Harness

from tidewheel.engine.devices import get_device
from tidewheel.engine.devices.graph.hpu import HpuAdapter
from tidewheel.engine.devices.graph.options import GraphOptions
from tidewheel.engine.devices.graph.weights import Weights
from tidewheel.engine.devices.grouping import grouped
from tidewheel.engine.errors import DeviceError
from tidewheel.engine.weights.tensor import DenseTensor

Configure = Callable[..., FakeHpu]

MODULES = ["self_attn.qkv_proj", "self_attn.o_proj", "mlp.gate_up_proj", "mlp.down_proj"]
TOKENS = [5, 9, 60, 3]


@pytest.fixture
def configure(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, request: pytest.FixtureRequest) -> Configure:
    """Install a card, and write INC's configuration and what each card has measured: a module's inputs."""

    def write(config: dict[str, object], *measured: dict[str, object], card: str = "GAUDI2") -> FakeHpu:
        fake = FakeHpu(MEMORY, lazy=False, card=card).install(monkeypatch)
        request.addfinalizer(fake.accelerator.leave)
        for rank, inputs in enumerate(measured):
            nodes = {name: {"inputs": value, "params": {}} for name, value in inputs.items()}
            path = tmp_path / f"inc_output_hooks_maxabs_{rank}_{len(measured)}.json"
            path.write_text(json.dumps({"GlobalRank": None, "LocalRank": rank, "Mode": "", "Nodes": nodes}))
        (tmp_path / "inc_output_hooks_maxabs_MAXABS_HW_0_1.json").write_text("{}")  # scales, which INC writes beside
        path = tmp_path / "maxabs_quant.json"
        path.write_text(json.dumps({"mode": "QUANTIZE", "dump_stats_path": str(tmp_path / "inc_output"), **config}))
        monkeypatch.setenv("QUANT_CONFIG", str(path))
        return fake

    return write


def weights_of(name: str, values: torch.Tensor) -> Weights:
    adapter = HpuAdapter(GraphOptions())
    adapter.enter()
    tensor = DenseTensor(values.numpy(), "float32", origin="made")
    return Weights([(f"{name}.weight", tensor)], torch.bfloat16, adapter.device, adapter.operations)


@pytest.mark.parametrize(
    ("card", "config", "scale", "input_scale"),
    [
        # A weight's largest value is 1, an input's 300. 1 / (240 x 0.5) = 2^-6.9, and 300 / (240 x 0.25) = 5.
        ("GAUDI2", {}, 2**-4, 16),
        ("GAUDI2", {"scale_method": "maxabs_pow2"}, 2**-6, 8),
        ("GAUDI2", {"scale_method": "maxabs_arbitrary", "scale_format": "CONST"}, 1 / 120, 5),
        ("GAUDI2", {"scale_method": "UNIT_SCALE"}, 1, 1),
        # 1 / (448 x 0.5) = 2^-7.8, and 300 / (448 x 0.25) = 2.7.
        ("GAUDI3", {"scale_method": "maxabs_hw"}, 2**-7, 4),
        ("GAUDI3", {"device_for_scales": "GAUDI2"}, 2**-4, 16),
    ],
)
def test_weights_and_inputs_are_rounded_as_inc_does(
    configure: Configure, card: str, config: dict[str, object], scale: float, input_scale: float
) -> None:
    configure(
        config,
        {"model.layers.3.self_attn.qkv_proj": [[[12.5]]]},
        {"model.layers.3.self_attn.qkv_proj": [[[300]]]},
        card=card,
    )
    generator = torch.Generator().manual_seed(2)
    weight, x = torch.rand(6, 32, generator=generator), torch.randn(2, 3, 32, generator=generator).bfloat16() * 90
    weight[2, 5] = -1
    rounded = (weight.bfloat16() / torch.tensor(scale).bfloat16()).to(torch.float8_e4m3fn).float() * scale
    narrow = (x.float() / input_scale).clamp(-240, 240).to(torch.float8_e4m3fn).float() * input_scale
    weights = weights_of("layers.3.k", weight)
    y = weights.linear("layers.3.k")(x.to("hpu"))
    assert y.dtype == torch.bfloat16
    torch.testing.assert_close(y.cpu().float(), narrow @ rounded.T, rtol=0.01, atol=0.01)
    torch.testing.assert_close(weights["layers.3.k.weight"].cpu().float(), rounded, rtol=0.01, atol=0)


@pytest.mark.parametrize(
    ("config", "name", "fp8"),
    [
        ({}, "layers.0.o", True),
        ({}, "layers.0.shared.up", False),
        ({"blocklist": {"names": ["self_attn"], "types": []}}, "layers.0.o", False),
        ({"blocklist": {"names": [r"layers\.1\.", "lm_head"]}}, "layers.0.o", True),
        ({"blacklist": {"types": ["RowParallelLinear"]}}, "layers.0.o", False),
        ({"allowlist": {"names": [], "types": ["ParallelLMHead"]}}, "layers.0.o", False),
        ({"allowlist": {"names": ["^language_model"], "types": []}}, "layers.0.o", True),
        ({"allowlist": {"types": ["ParallelLMHead"]}}, "head", True),
        ({"ignore_modules_wo_measures": True}, "layers.0.down", False),
    ],
)
def test_lists_choose_layers(configure: Configure, config: dict[str, object], name: str, fp8: bool) -> None:
    configure(config, {"language_model.model.layers.0.self_attn.o_proj": [[2.0]], "language_model.lm_head": [[3.0]]})
    weights = weights_of(name, torch.ones(4, 8))
    assert isinstance(weights.matrix(f"{name}.weight"), torch.Tensor) is not fp8


@pytest.mark.parametrize(
    ("config", "inputs", "message"),
    [
        (
            {"mode": "MEASURE"},
            1,
            r"mode must be QUANTIZE, not MEASURE: calibrate with vllm-gaudi's calibrate_model\.sh",
        ),
        ({"fp8_config": "E5M2"}, 1, "fp8_config must be E4M3, not E5M2"),
        ({"dynamic_quantization": True}, 1, "dynamic_quantization must be FALSE, not True"),
        ({"scale_method": "maxabs_hw_opt_weight"}, 1, "scale_method must be .*maxabs_hw.*, not 'maxabs_hw_opt_weight'"),
        ({"device_for_scales": "GAUDI3"}, 1, "there is no FP8 with scales of GAUDI3 on GAUDI2"),
        ({"blocklist": {"names": ["("]}}, 1, "blocklist must have lists of names and types: "),
        ({"moe": 1}, 1, "'moe' is not known here"),
        ({"dump_stats_path": "/nowhere/inc"}, 1, r"there is no /nowhere/inc_hooks_maxabs_RANK_SIZE\.json"),
        ({}, [[]], r"inputs of model\.layers\.0\.self_attn\.o_proj in .*_0_1\.json are not positive numbers"),
        ({}, [["x"]], "are not positive numbers"),
        ({}, [[1.0, float("nan")]], "are not positive numbers"),
    ],
)
def test_what_is_not_done_is_refused(
    configure: Configure, config: dict[str, object], inputs: object, message: str
) -> None:
    configure(config, {"model.layers.0.self_attn.o_proj": inputs})
    with pytest.raises(DeviceError, match=rf"QUANT_CONFIG /.*/maxabs_quant\.json: .*{message}"):
        HpuAdapter(GraphOptions())


def test_a_layer_without_a_measure_and_a_quantized_one_are_refused(configure: Configure) -> None:
    configure({}, {"model.layers.0.self_attn.o_proj": 1})
    store = HpuAdapter(GraphOptions()).operations.store
    assert store is not None
    with pytest.raises(DeviceError, match=r"there is no measure of layers\.0\.mlp\.gate_up_proj or .*mlp\.up_proj"):
        store("layers.0.up.weight", torch.ones(4, 8))
    with pytest.raises(DeviceError, match=r"layers\.0\.o\.weight is quantized already: unset QUANT_CONFIG"):
        store("layers.0.o.weight", grouped(stored("int8", (40, 512), "made")))


def test_a_configuration_that_is_not_there_is_named(configure: Configure, monkeypatch: pytest.MonkeyPatch) -> None:
    configure({}, {})
    monkeypatch.setenv("QUANT_CONFIG", "/nowhere/quant.json")
    with pytest.raises(DeviceError, match=r"QUANT_CONFIG: .*/nowhere/quant\.json"):
        HpuAdapter(GraphOptions())


def test_a_model_is_served_in_fp8(configure: Configure) -> None:
    exact = Harness(load((SPEC, RandomWeights(SPEC)), dtype="bfloat16", kv_cache_dtype="bfloat16")).logits(TOKENS)
    modules = ["lm_head", *(f"model.layers.{layer}.{module}" for layer in (0, 1) for module in MODULES)]
    configure({}, {module: [[[8.0]]] for module in modules})
    on_hpu = partial(
        load,
        (SPEC, RandomWeights(SPEC)),
        make_device=lambda options, memory: get_device("hpu", [options]),
        num_blocks=8,
    )
    with pytest.raises(DeviceError, match="the hpu device does not compute in float16: take --dtype bfloat16"):
        on_hpu(dtype="float16")
    in_fp8 = Harness(on_hpu(dtype="bfloat16", kv_cache_dtype="bfloat16")).logits(TOKENS)
    distance = abs(in_fp8 - exact).mean() / abs(exact).mean()
    assert 0.01 < distance < 0.2
