"""The whole step, with the attention kernel for TPUs, lowers for TPUs: no TPU is needed for that."""

from __future__ import annotations

from dataclasses import replace

import pytest
from engine.devices.made_models import MLP, NORM, PLAIN, ROPE, decoder, decoder_of

from tidewheel.engine.devices.tpu.heads import Kernel, with_heads_for
from tidewheel.engine.models.spec import DecoderSpec, ParallelSpec, ResidualBlockSpec, tensor_shapes

jax = pytest.importorskip("jax")

PAGES, PAGE_SIZE, WIDTH = 32, 16, 8
CAPPED = replace(PLAIN, rope=ROPE, softcap=30.0, sliding_window=40)


@pytest.fixture(params=["TPU_V5E", "TPU_V6E"])
def _chip(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fake a chip for the kernel's lowering, which asks for its sizes."""
    from jax._src.pallas.mosaic import lowering, tpu_info

    chip = tpu_info.get_tpu_info_for_chip(tpu_info.ChipVersion[request.param], 1)
    for module in (tpu_info, lowering):
        if hasattr(module, "get_tpu_info"):
            monkeypatch.setattr(module, "get_tpu_info", lambda: chip)


def step_for_tpu(spec: DecoderSpec, dtype: str, num_devices: int = 1) -> str:
    """The StableHLO of a step of 64 tokens of 8 sequences."""
    from tidewheel.engine.devices.tpu.cache import cache_arrays
    from tidewheel.engine.devices.tpu.decoder import TpuDecoder
    from tidewheel.engine.devices.tpu.mesh import make_mesh, replicated, weight_sharding
    from tidewheel.engine.devices.tpu.programs import Programs

    spec = with_heads_for(spec, num_devices)
    kernel = Kernel(available=True, num_devices=num_devices, itemsize=4 if dtype == "float32" else 2)
    mesh = make_mesh(num_devices)
    decoder_ = TpuDecoder(spec, mesh, kernel.computes)
    params = {
        name: jax.ShapeDtypeStruct(
            shape, dtype if len(shape) == 2 else "float32", sharding=weight_sharding(mesh, name, shape)
        )
        for name, shape in tensor_shapes(spec).items()
    }
    blocks = dict.fromkeys(spec.windows(), PAGES)
    cache = cache_arrays(decoder_.kept, kernel, mesh, blocks, PAGE_SIZE, dtype, 1)  # type: ignore[arg-type]
    hidden = jax.ShapeDtypeStruct((64, spec.hidden_size), "float32", sharding=replicated(mesh))
    step = Programs(decoder_, mesh, len(spec.windows()), WIDTH, 8, params, cache, hidden).step(64, 8)
    return str(jax.export.export(step.function, platforms=["tpu"])(*step.arguments).mlir_module())


@pytest.mark.usefixtures("_chip")
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_a_step_lowers_with_the_kernel(dtype: str) -> None:
    spec = decoder(replace(PLAIN, rope=ROPE), CAPPED)
    assert step_for_tpu(spec, dtype).count("tpu_custom_call") == 2


@pytest.mark.usefixtures("_chip")
def test_a_step_lowers_on_two_chips_and_beside_an_mlp() -> None:
    beside = ParallelSpec((ResidualBlockSpec(PLAIN), ResidualBlockSpec(MLP)))
    assert "tpu_custom_call" in step_for_tpu(decoder_of((ResidualBlockSpec(beside, NORM),)), "bfloat16", 2)


@pytest.mark.usefixtures("_chip")
def test_what_the_kernel_does_not_do_lowers_without_it() -> None:
    assert "tpu_custom_call" not in step_for_tpu(decoder(replace(PLAIN, sinks=True)), "bfloat16")
