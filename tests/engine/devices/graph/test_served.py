"""Each accelerator serves a storm of requests on the software model of its vendor's package.

The model refuses what graphs cannot hold, so that what passes here is static in shape and place.
"""

from __future__ import annotations

import json
import logging
import re
from dataclasses import replace
from pathlib import Path

import pytest
from engine.devices.fakes.accelerator import Accelerator
from engine.devices.fakes.cuda import FakeCuda
from engine.devices.fakes.hpu import FakeHpu, FusedRMSNorm, FusedSDPA, apply_rotary_pos_emb
from engine.devices.fakes.neuron import FakeNeuron
from engine.devices.fakes.xpu import FakeXpu
from engine.devices.graph.served import FEW_BUCKETS, MAX_LENGTH, MEMORY, MIXED, SPEC, load, reference, serve, storm
from samples import swept

from tidewheel.engine.declaring.option import Options
from tidewheel.engine.devices import get_device
from tidewheel.engine.devices.executor import Executor
from tidewheel.engine.devices.graph.hpu_options import HpuOptions
from tidewheel.engine.errors import DeviceError
from tidewheel.engine.models.spec import DecoderSpec
from tidewheel.engine.weights.dtypes import DType

EAGER = replace(FEW_BUCKETS, enforce_eager=True)


class Installed:
    """A faked device, with the model loaded."""

    def __init__(
        self, name: str, accelerator: Accelerator, options: list[Options], dtype: DType, spec: DecoderSpec
    ) -> None:
        self.accelerator = accelerator
        self.executor: Executor = load(get_device(name, options), dtype, spec)
        self.warmed_up = len(accelerator.compiled)

    @property
    def compiled_later(self) -> list[object]:
        return self.accelerator.compiled[self.warmed_up :]


@pytest.fixture
def install(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest, tmp_path: Path):
    monkeypatch.setenv("TORCH_NEURONX_NEFF_CACHE_DIR", str(tmp_path / "neff"))

    def make(
        name: str, *options: Options, lazy: bool = True, dtype: DType = "float32", spec: DecoderSpec = SPEC
    ) -> Installed:
        fakes = {
            "cuda": lambda: FakeCuda(MEMORY),
            "rocm": lambda: FakeCuda(MEMORY),
            "xpu": lambda: FakeXpu(MEMORY, has_fp64=False),
            "hpu": lambda: FakeHpu(MEMORY, lazy=lazy),
            "neuron": lambda: FakeNeuron(MEMORY),
        }
        fake = fakes[name]().install(monkeypatch)
        request.addfinalizer(fake.accelerator.leave)
        return Installed(name, fake.accelerator, list(options), dtype, spec)

    return make


# The model of a package looks at each operation, which takes most of the time here.
@pytest.mark.parametrize(
    ("name", "lazy", "options"),
    [
        ("cuda", True, FEW_BUCKETS),
        pytest.param("rocm", True, FEW_BUCKETS, marks=pytest.mark.sweep),
        pytest.param("xpu", True, FEW_BUCKETS, marks=pytest.mark.sweep),
        ("hpu", True, FEW_BUCKETS),
        pytest.param("hpu", True, EAGER, marks=pytest.mark.sweep),
        pytest.param("hpu", False, EAGER, marks=pytest.mark.sweep),
    ],
    ids=["cuda", "rocm", "xpu", "hpu-graphs", "hpu-lazy", "hpu-eager"],
)
def test_a_storm_compiles_nothing_and_gives_the_reference_tokens(install, name, lazy, options) -> None:
    count = 6 if name == "cuda" else 3  # jobs; what comes in a second wave is the same on all of them
    expected = reference("torch", "float32")[:count]  # before all operations are looked at
    installed = install(name, options, lazy=lazy)
    limits = installed.executor.limits
    if name == "hpu":
        assert (limits.chunked_prefill, limits.mixed_steps, limits.block_size) == (False, False, 128)
    assert installed.warmed_up > 0
    assert serve(installed.executor, storm()[:count]) == expected
    assert installed.compiled_later == []
    stats = installed.executor.stats()
    assert (stats.num_outside, stats.num_compilations) == (0, 0)


@pytest.mark.parametrize("name", ["cuda", swept("hpu")])
def test_all_kinds_of_layers_are_captured_and_give_the_right_tokens(install, name: str) -> None:
    expected = reference("graph-cpu", "float32", MIXED, 3)
    # Each bucket is looked at, operation by operation.
    options = replace(FEW_BUCKETS, prompt_bs_bucket_max=1, prompt_seq_bucket_min=MAX_LENGTH, decode_bs_bucket_min=4)
    installed = install(name, options, spec=MIXED)
    assert serve(installed.executor, storm()[:3]) == expected
    assert installed.compiled_later == []


# The model of the package looks at each operation.
def test_a_storm_on_hpu_is_compiled_and_runs_on_fused_kernels(install) -> None:
    expected = reference("graph-cpu", "bfloat16")[:3]
    kernels = (FusedSDPA, FusedRMSNorm, apply_rotary_pos_emb)
    calls = [kernel.calls for kernel in kernels]
    installed = install("hpu", FEW_BUCKETS, lazy=False, dtype="bfloat16")
    assert serve(installed.executor, storm()[:3]) == expected
    assert installed.compiled_later == []
    assert all(kernel.calls > before for kernel, before in zip(kernels, calls, strict=True))


def test_the_log_tells_what_loading_takes_on_hpu_as_vllms_does(install, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    installed = install("hpu", replace(FEW_BUCKETS, skip_warmup=True))
    of_host = r"of host memory \([\d.]+ GiB/[\d.]+ GiB used\)"
    size, used = r"([\d.]+ [KM]?i?B)", r"\([\d.]+ [KM]iB/64 MiB used\)"
    patterns = [
        rf"Pre-loading model weights on hpu:0 took {size} of device memory \(\1/64 MiB used\) and .* {of_host}",
        rf"Wrapping in HPU Graph took {size} of device memory {used} and .* {of_host}",
        rf"Loading model weights took in total {size} of device memory \(\1/64 MiB used\) and .* {of_host}",
        rf"Model profiling run took {size} of device memory {used} and .* {of_host}",
        "Free device memory: .*",
        rf"# HPU blocks: {installed.executor.limits.num_blocks}, # CPU blocks: 0",
        rf"Initializing cache engine took {size} of device memory {used} and .* {of_host}",
        rf"init_cache_engine took {size} of device memory {used} and .* {of_host}",
    ]
    told = iter(caplog.messages)
    for pattern in patterns:
        assert any(re.fullmatch(pattern, line) for line in told), (pattern, caplog.text)


# The model of the package looks at each operation.
def test_a_storm_on_neuron_compiles_nothing_and_gives_the_tokens_of_its_type(install, tmp_path: Path) -> None:
    expected = reference("graph-cpu", "bfloat16")[:3]
    installed = install("neuron", FEW_BUCKETS, dtype="bfloat16")
    assert installed.executor.limits.max_prefill_seqs == 1
    assert (tmp_path / "neff").is_dir()
    assert serve(installed.executor, storm()[:3]) == expected
    assert installed.compiled_later == []


def test_closing_gives_the_memory_back(install) -> None:
    installed = install("cuda", EAGER)
    taken = installed.accelerator.taken_bytes
    installed.executor.close()
    assert installed.accelerator.taken_bytes < taken / 10


def test_neuron_refuses_float32_with_a_way_out(install) -> None:
    with pytest.raises(DeviceError, match="does not compute in float32: take --dtype bfloat16 or float16"):
        install("neuron", FEW_BUCKETS, dtype="float32")
    assert get_device("neuron").default_dtype("float32") == "bfloat16"


def test_hpu_tells_of_steps_and_compilations_and_writes_a_trace(
    install, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.chdir(tmp_path)
    asked = HpuOptions(
        hpu_log_step_graph_compilation=True, hpu_log_step_cpu_fallbacks_all=True, hpu_profiler_enabled=True
    )
    installed = install("hpu", replace(FEW_BUCKETS, skip_warmup=True), asked)
    with caplog.at_level(logging.WARNING):
        tokens = serve(installed.executor, storm()[:1])
        told = [record.getMessage() for record in caplog.records if "GRAPH_COMPILATION" in record.message]
        assert told
        assert "VLLM_HPU_STEP_GRAPH_COMPILATION: [('TotalNumber', " in told[0]
        assert "prompt num_seqs:1" in told[0]
        assert "VLLM_HPU_STEP_CPU_FALLBACK: [('TotalNumber', 0)], prompt num_seqs:1" in caplog.text
        assert "decode num_seqs:1" in caplog.text
        caplog.clear()
        tokens += serve(installed.executor, storm()[:1])
    assert "GRAPH_COMPILATION" not in caplog.text
    installed.executor.close()
    (path,) = tmp_path.glob("server_events_*.json")
    events = json.loads(path.read_text())
    assert len(events) == sum(map(len, tokens))
    assert all(event["dur"] > 0 for event in events)
    assert events[0]["name"].startswith("prompt")
