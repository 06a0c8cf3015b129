"""libtpu, the compiler of TPUs, compiles the device's programs, with the kernel where the layer has one."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from engine.devices.made_models import NORM, decoder_of
from model_configs import CONFIGS
from optional_packages import require_packages
from published_configs import PUBLISHED, published_spec

from tidewheel.engine.devices.coverage import missing_kinds
from tidewheel.engine.devices.limits import LoraLimits
from tidewheel.engine.errors import DeviceError
from tidewheel.engine.models import describe
from tidewheel.engine.models.spec import AttentionSpec, ExpertsSpec, ResidualBlockSpec

if TYPE_CHECKING:
    from engine.devices.tpu.ahead_of_time import Steps

pytest.importorskip("jax")
require_packages("libtpu")

CHIPS = ("v4", "v5e", "v5e-4", "v5p", "v6e")
OF_FOUR_CHIPS = ("DeepSeek V3", "Llama 4 Scout")


def heads(num_heads: int, num_kv_heads: int, head_dim: int, **options: object) -> AttentionSpec:
    return AttentionSpec(num_heads, num_kv_heads, head_dim, head_dim**-0.5, **options)  # type: ignore[arg-type]


# JAX's kernel compiles for none of these as it comes, except for the last.
@pytest.mark.parametrize(
    ("chips", "attention", "dtype", "max_model_len"),
    [
        pytest.param("v5e", heads(4, 2, 256, softcap=50.0, sliding_window=64), "bfloat16", 256, id="as in Gemma 2"),
        pytest.param("v6e", heads(4, 2, 160), "bfloat16", 256, id="as in StableLM 2 12B"),
        pytest.param("v5e", heads(8, 8, 128), "float32", 256, id="as in Llama 2, float32"),
        pytest.param("v4", heads(15, 5, 64), "bfloat16", 256, id="SmolLM2 360M"),
        pytest.param("v5e", heads(48, 1, 128), "bfloat16", 4096, id="StarCoder"),
        pytest.param("v5e", heads(71, 1, 64), "bfloat16", 4096, id="Falcon 7B"),
        pytest.param("v5e-4", heads(32, 8, 128), "bfloat16", 256, id="Llama 3.1 8B on 4 chips"),
    ],
)
def test_attention_compiles_with_the_kernel(
    chips: str, attention: AttentionSpec, dtype: str, max_model_len: int
) -> None:
    from engine.devices.tpu.ahead_of_time import KERNEL, Compiler

    spec = decoder_of((ResidualBlockSpec(attention, NORM),))
    compiler = Compiler(spec, chips, dtype, max_model_len=max_model_len, max_num_batched_tokens=64)
    assert KERNEL in compiler.programs.step(64, 8).compile().as_text()


@pytest.mark.parametrize("attention", [heads(4, 4, 64), heads(4, 4, 256)], ids=["together", "head by head"])
def test_copying_pages_takes_no_memory_of_its_own(attention: AttentionSpec) -> None:
    from engine.devices.tpu.ahead_of_time import Compiler

    programs = Compiler(decoder_of((ResidualBlockSpec(attention, NORM),)), "v5e", max_model_len=256).programs
    memory = programs.copy([0]).compile().memory_analysis()
    assert memory.temp_size_in_bytes < memory.alias_size_in_bytes / 10


@pytest.fixture(scope="module")
def steps() -> Steps:
    from engine.devices.tpu.ahead_of_time import Steps

    return Steps()


@pytest.mark.sweep
@pytest.mark.timeout(3600)  # XLA compiles a large step for minutes
@pytest.mark.parametrize("chips", CHIPS)
@pytest.mark.parametrize("model", PUBLISHED)
def test_the_largest_step_of_published_models_compiles(model: str, chips: str, steps: Steps) -> None:
    from engine.devices.tpu.ahead_of_time import Compiler

    spec = published_spec(model)
    if model in OF_FOUR_CHIPS and not chips.endswith("-4"):
        pytest.skip("two layers of it do not fit into the memory of one chip")
    try:
        step = Compiler(spec, chips).programs.step(2048, 128)
    except DeviceError as error:
        pytest.skip(str(error))
    kernels = sum(attention.alibi_slopes is None and not attention.sinks for attention in spec.attentions())
    assert steps.num_kernels(step, chips) == kernels


@pytest.mark.sweep
@pytest.mark.timeout(3600)  # XLA compiles a large step for minutes
@pytest.mark.parametrize("chips", CHIPS)
@pytest.mark.parametrize("model", ["Gemma 2 9B", "Llama 3.1 8B", "Qwen2.5 7B"])
def test_all_programs_of_a_model_compile_as_at_a_start(model: str, chips: str) -> None:
    from engine.devices.tpu.ahead_of_time import Compiler

    programs = Compiler(published_spec(model), chips).programs
    for program in (
        programs.step(2048, 128),
        programs.step(16, 16),
        programs.head(128),
        programs.head(8),
        programs.copy([0]),
    ):
        program.compile()


@pytest.mark.sweep
@pytest.mark.parametrize("chips", CHIPS)
def test_adapters_of_experts_compile(chips: str) -> None:
    from engine.devices.tpu.ahead_of_time import Compiler

    experts = ResidualBlockSpec(ExpertsSpec(8, 2, 512), NORM)
    spec = decoder_of((ResidualBlockSpec(heads(4, 4, 64), NORM), experts))
    options = {"max_model_len": 256, "max_num_batched_tokens": 64, "lora": LoraLimits(2, 16, "bfloat16")}
    programs = Compiler(spec, chips, **options).programs
    for program in (programs.step(64, 8, 16), programs.adapter()):
        program.compile()


def test_all_architectures_of_the_device_are_among_the_published_models() -> None:
    served = {name for name, config in CONFIGS.items() if not missing_kinds("tpu", describe(config).spec)}
    assert served <= {config["architectures"][0] for config in PUBLISHED.values()}
