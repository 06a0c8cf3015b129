"""The adapter for Gaudi cards, on a software model of habana_frameworks."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Callable

import pytest
import torch
from engine.devices.fakes.hpu import FakeHpu, FusedSDPA
from engine.devices.made_models import PLAIN

from tidewheel.engine.devices.graph.attention import AttentionLayer, Context, gather_attention
from tidewheel.engine.devices.graph.hpu import HpuAdapter
from tidewheel.engine.devices.graph.options import GraphOptions
from tidewheel.engine.errors import DeviceError

Install = Callable[[bool], FakeHpu]


@pytest.fixture
def install(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> Install:
    def make(lazy: bool) -> FakeHpu:
        fake = FakeHpu(lazy=lazy).install(monkeypatch)
        request.addfinalizer(fake.accelerator.leave)
        return fake

    return make


def test_a_machine_without_the_package_is_told_what_to_do() -> None:
    with pytest.raises(DeviceError, match=r"habana_frameworks is not installed: use the image of Dockerfile\.hpu"):
        HpuAdapter(GraphOptions())


def test_a_machine_without_a_card_is_told_what_to_do(install: Install, monkeypatch: pytest.MonkeyPatch) -> None:
    install(True)
    monkeypatch.setattr(torch.hpu, "is_available", lambda: False)
    with pytest.raises(DeviceError, match="finds no card: see that hl-smi lists one"):
        HpuAdapter(GraphOptions())


@pytest.mark.parametrize(
    ("lazy", "eager", "captures", "compiled"),
    [
        (True, False, True, 2),  # what two launches accumulate
        (True, True, False, 2),
        (False, False, False, 2),  # a function for two shapes
        (False, True, False, 6),  # three operations
    ],
)
def test_the_four_modes(
    install: Install, caplog: pytest.LogCaptureFixture, lazy: bool, eager: bool, captures: bool, compiled: int
) -> None:
    with caplog.at_level("INFO"):
        hpu = install(lazy)
        adapter = HpuAdapter(GraphOptions(enforce_eager=eager))
    assert f"(PT_HPU_LAZY_MODE={int(lazy)})" in caplog.text
    adapter.enter()
    launch = adapter.compile(lambda x, out: out.copy_(x * 2 + 1))
    for size in (3, 4):
        x = torch.tensor([1.0] * size).to(adapter.device)
        out = torch.tensor([0.0] * size).to(adapter.device)
        for _ in range(2):
            adapter.run(lambda x=x, out=out: launch(x, out))
        adapter.synchronize()
        assert out.cpu().tolist() == [3.0] * size
    assert adapter.captures is captures
    assert len(hpu.accelerator.compiled) == compiled


def test_a_captured_launch_is_replayed_behind_the_copies_of_its_inputs(install: Install) -> None:
    hpu = install(True)
    adapter = HpuAdapter(GraphOptions())
    adapter.enter()
    x, out = torch.zeros(3, device=adapter.device), torch.zeros(3, device=adapter.device)
    launch: Callable[[], object] = lambda: out.copy_(x * 2)  # noqa: E731
    adapter.run(launch)
    replay = adapter.capture(launch)
    compiled = len(hpu.accelerator.compiled)
    for value in (4.0, 5.0):
        x.copy_(torch.full((3,), value), non_blocking=True)
        replay()
        assert out.cpu().tolist() == [2 * value] * 3
    assert len(hpu.accelerator.compiled) == compiled


def test_what_waits_to_be_compiled_does_not_change_a_launch(install: Install) -> None:
    hpu = install(True)
    adapter = HpuAdapter(GraphOptions())
    adapter.enter()
    x, out = torch.zeros(3, device=adapter.device), torch.zeros(3, device=adapter.device)
    adapter.run(lambda: out.copy_(x * 2))
    compiled = len(hpu.accelerator.compiled)
    out.fill_(1)
    adapter.run(lambda: out.copy_(x * 2))
    assert len(hpu.accelerator.compiled) == compiled + 1  # the fill, by itself


def test_memory_is_what_the_driver_has(install: Install) -> None:
    install(True)
    adapter = HpuAdapter(GraphOptions())
    adapter.enter()
    before = adapter.memory()
    x = torch.zeros(1000, device=adapter.device)
    assert adapter.memory() == (before.free - 4000, before.total)
    del x


@pytest.mark.parametrize(
    ("module", "kernel", "used_for"),
    [
        ("kernels", "FusedSDPA", "attention"),
        ("kernels", "RotaryPosEmbeddingMode", "RoPE"),
        ("normalization", "FusedRMSNorm", "RMSNorm"),
    ],
)
def test_a_release_without_a_kernel_is_told_which(
    install: Install,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    module: str,
    kernel: str,
    used_for: str,
) -> None:
    install(False)
    monkeypatch.delattr(sys.modules[f"habana_frameworks.torch.hpex.{module}"], kernel)
    adapter = HpuAdapter(GraphOptions())
    assert f"habana_frameworks.torch.hpex.{module} has no {kernel}" in caplog.text
    assert f"torch's own operations compute {used_for}" in caplog.text
    has = {
        "attention": adapter.attend is not gather_attention,
        "RoPE": adapter.operations.rotate is not None,
        "RMSNorm": adapter.operations.rms_norm is not None,
    }
    assert has == {name: name != used_for for name in has}


@pytest.mark.parametrize(
    ("num_queries", "window", "softcap"),
    [(12, None, None), (12, 9, None), (12, None, 2.0), (1, None, None), (1, 9, None)],
    ids=["all", "window", "softcap", "decode", "decode-window"],
)
def test_prompts_and_decodes_attend_as_everywhere_else(
    install: Install, num_queries: int, window: int | None, softcap: float | None
) -> None:
    install(False)
    adapter = HpuAdapter(GraphOptions())
    S, Q, H, G, D, block_size = 2, num_queries, 4, 2, 16, 4
    spec = dataclasses.replace(
        PLAIN, num_heads=H, num_kv_heads=G, head_dim=D, scale=0.3, sliding_window=window, softcap=softcap
    )
    generator = torch.Generator().manual_seed(3)
    keys, values = (torch.randn(9 * block_size, G, D, generator=generator).bfloat16() for _ in range(2))
    tables = torch.tensor([[1, 2, 3, 4], [5, 6, 7, 8]])
    positions = torch.arange(12 - Q, 12).expand(S, Q)
    keys[4 * block_size :: block_size * 4] = values[4 * block_size :: block_size * 4] = torch.nan  # behind the prompts
    context = Context(positions, tables, keys, values)
    layer = AttentionLayer(spec, block_size, None, None)
    q = torch.randn(S, Q, H, D, generator=generator).bfloat16()
    calls = FusedSDPA.calls
    attended = adapter.attend(q, context, layer)
    assert FusedSDPA.calls == calls + (softcap is None)
    expected = gather_attention(q, context, layer)
    assert torch.allclose(attended.float(), expected.float(), atol=0.02)


@pytest.mark.parametrize("interleaved", [False, True])
def test_the_kernels_of_rope_and_norms_compute_what_torch_does(install: Install, interleaved: bool) -> None:
    install(False)
    operations = HpuAdapter(GraphOptions()).operations
    assert operations.rotate is not None
    assert operations.rms_norm is not None
    x = torch.randn(2, 3, 4, 8, generator=torch.Generator().manual_seed(5))
    angles = torch.arange(24.0).view(2, 3, 4)
    pairs = torch.view_as_complex(
        x.unflatten(-1, (4, 2)).contiguous() if interleaved else torch.stack(x.chunk(2, -1), -1).contiguous()
    )
    turned = torch.view_as_real(pairs * torch.polar(torch.ones(2, 3, 1, 4), angles[:, :, None]))
    expected = turned.flatten(-2) if interleaved else turned.transpose(-1, -2).flatten(-2)
    assert torch.allclose(operations.rotate(x, angles.cos(), angles.sin(), interleaved), expected, atol=1e-5)
    weight = torch.arange(8.0)
    expected = torch.nn.functional.rms_norm(x, [8], weight, 1e-5)
    assert torch.allclose(operations.rms_norm(x, weight, 1e-5), expected, atol=1e-5)
