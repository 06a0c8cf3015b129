"""Options of one device: they reach it, and have no effect on another, which is said."""

from __future__ import annotations

import logging
import subprocess
import sys

import pytest
from engine.devices.made_models import PLAIN, RandomWeights, decoder

from tidewheel.engine.devices import get_device
from tidewheel.engine.devices.cpu.options import CpuOptions
from tidewheel.engine.devices.limits import ExecutorOptions
from tidewheel.engine.errors import DeviceError
from tidewheel.server.options.serve import parse_options

EXECUTOR = ExecutorOptions("float32", 1 << 22, max_model_len=64, max_num_seqs=1, max_num_batched_tokens=64)


@pytest.mark.parametrize("name", ["auto", "cpu"])
def test_a_device_obeys_its_own_options(name: str, caplog: pytest.LogCaptureFixture) -> None:
    pytest.importorskip("tidewheel._native")
    spec = decoder(PLAIN)
    device = get_device(name, [CpuOptions(threads_bind="1000")])
    with pytest.raises(DeviceError, match="CPU 1000"):
        device.load(spec, RandomWeights(spec), EXECUTOR)
    assert "no effect" not in caplog.text


def test_options_of_another_device_are_said_to_have_no_effect(caplog: pytest.LogCaptureFixture) -> None:
    assert get_device("torch", [CpuOptions(threads_bind="1000")]).name == "torch"
    (record,) = caplog.records
    assert record.levelno == logging.WARNING
    assert record.message == "--threads-bind: no effect on the torch device, only on cpu"


@pytest.mark.parametrize(
    "line",
    [
        "--gpu-memory-utilization 0.9",
        "--no-enforce-eager",
        "--graph-reserved-mem 0.1",
        "--tpu-bucket-padding-gap 0",
        "--no-hpu-profiler-enabled",
    ],
)
def test_an_option_may_be_given_its_default(line: str, caplog: pytest.LogCaptureFixture) -> None:
    options = parse_options(["m", *line.split()], {}).engine.device_options
    get_device("torch", options)
    (record,) = caplog.records
    assert f"{line.split()[0].replace('--no-', '--')}: no effect on the torch device" in record.message


def test_options_from_the_environment_count_as_given(caplog: pytest.LogCaptureFixture) -> None:
    options = parse_options(["m"], {"VLLM_CPU_OMP_THREADS_BIND": "auto"}).engine.device_options
    get_device("torch", options)
    assert caplog.messages == ["--threads-bind: no effect on the torch device, only on cpu"]


def test_nothing_is_said_of_options_that_were_not_given(caplog: pytest.LogCaptureFixture) -> None:
    get_device("torch")
    assert caplog.records == []


def test_options_are_known_without_the_native_extension() -> None:
    code = """
import sys
sys.modules["tidewheel._native"] = None
from tidewheel.engine.devices import DEVICE_OPTIONS
print("numpy" in sys.modules, [group.__name__ for group in DEVICE_OPTIONS])
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    names = ["CpuOptions", "ParallelOptions", "GraphOptions", "MemoryOptions", "HpuOptions", "TpuOptions"]
    assert done.stdout == f"False {names}\n"
