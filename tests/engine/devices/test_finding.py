"""Accelerators are found by their files, and what is missing comes with its cure; then their packages are asked."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest

from tidewheel.engine.devices import get_device
from tidewheel.engine.devices.asking import Answer, ask, choose
from tidewheel.engine.devices.finding import ACCELERATORS, find, is_there
from tidewheel.engine.devices.parallel_options import ParallelOptions
from tidewheel.engine.errors import DeviceError
from tidewheel.engine.install_hint import install_command
from tidewheel.engine.loading.opened_model import open_model
from tidewheel.engine.options import EngineOptions

GIB = 2**30
NVIDIA, AMD, INTEL, GAUDI, NEURON, TPU = (
    ("0x10de", "0x030200"),
    ("0x1002", "0x120000"),
    ("0x8086", "0x038000"),
    ("0x1da3", "0x120000"),
    ("0x1d0f", "0x088000"),
    ("0x1ae0", "0xff0000"),
)
NPU, DISK, CARD = ("0x8086", "0x120000"), ("0x1d0f", "0x010802"), ("0x1ae0", "0x020000")
NO_DRIVER = "the hardware is present, but its driver is not: install it on the host, then modprobe"

TORCH = """
import atexit
print("a banner")
atexit.register(print, "[1, 2, 3, 4]")
class _Device:
    def is_available(self): return {available}
    def device_count(self): return 2
    def get_device_name(self): return "Imaginary"
    def mem_get_info(self): return 3 * 2**30, 4 * 2**30
class _Accelerator:
    def is_available(self): return {available}
    def device_count(self): return 2
    def get_memory_info(self): return 3 * 2**30, 4 * 2**30
cuda = hpu = xpu = _Device()
accelerator = _Accelerator()
"""
BUILDS = {"cuda": "13.0", "hip": "7.15.26333", "xpu": 20260000}
JAX = """
class _Device:
    device_kind = "TPU v9"
    def memory_stats(self): return {"bytes_limit": 4 * 2**30, "bytes_in_use": 2**30}
def local_devices(backend): return [_Device()] * 2
"""


class Machine:
    """Files like those of a machine with accelerators."""

    def __init__(self, root: Path) -> None:
        self.root = root

    def write(self, path: str, text: str = "") -> Machine:
        """A file."""
        (self.root / path).parent.mkdir(parents=True, exist_ok=True)
        (self.root / path).write_text(text)
        return self

    def function(self, folder: str, identity: tuple[str, str]) -> Machine:
        """A PCI function, of a vendor and a class."""
        vendor, kind = identity
        return self.write(f"{folder}/vendor", vendor + "\n").write(f"{folder}/class", kind + "\n")

    def nodes(self, name: str) -> tuple[str, ...]:
        """The nodes that are found of an accelerator."""
        return find(name, self.root, {}).nodes


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    return Machine(tmp_path / "root")


@pytest.fixture
def packages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder whose packages are imported before all others, in this process and in its child processes."""
    folder = tmp_path / "packages"
    folder.mkdir()
    for name in ("torch", "jax", "libtpu", "habana_frameworks", "torch_neuronx"):
        monkeypatch.delitem(sys.modules, name, raising=False)  # else what other tests have imported is found
    monkeypatch.setenv("PYTHONPATH", f"{folder}{os.pathsep}{os.environ.get('PYTHONPATH', '')}")
    monkeypatch.syspath_prepend(folder)
    return folder


def install(folder: Path, builds: Mapping[str, object] = BUILDS, torch: str = TORCH.format(available=True)) -> None:
    """All vendors' packages, as far as they are asked. Torch is the build of several vendors at once."""
    versions = "".join(f"{name}: Optional[str] = {version!r}\n" for name, version in builds.items())
    files = {
        "torch/__init__.py": torch,
        "torch/version.py": f"from typing import Optional\n{versions}",
        "jax/__init__.py": JAX,
        "libtpu/__init__.py": "",
        "habana_frameworks/torch/__init__.py": "",
        "torch_neuronx/__init__.py": "",
    }
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)


def equip(machine: Machine, name: str) -> None:
    """Put an accelerator in."""
    nodes = {
        "cuda": "nvidia0", "rocm": "dri/renderD128", "xpu": "dri/renderD129", "hpu": "accel/accel0",
        "neuron": "neuron0", "tpu": "accel0",
    }  # fmt: skip
    machine.write(f"dev/{nodes[name]}")
    if name == "rocm":
        machine.write("dev/kfd").function("sys/class/drm/renderD128/device", AMD)
    if name == "xpu":
        machine.function("sys/class/drm/renderD129/device", INTEL)


def test_nodes_are_told_apart(machine: Machine) -> None:
    for node in ("nvidia0", "nvidia1", "nvidia10", "nvidia2", "nvidiactl", "nvidia-uvm", "neuron0", "neuron_extra"):
        machine.write(f"dev/{node}")
    assert machine.nodes("cuda") == ("/dev/nvidia0", "/dev/nvidia1", "/dev/nvidia2", "/dev/nvidia10")
    assert machine.nodes("neuron") == ("/dev/neuron0",)
    assert machine.nodes("hpu") == machine.nodes("tpu") == ()


def test_gpus_of_all_vendors_have_nodes_of_the_same_names(machine: Machine) -> None:
    for number, vendor in enumerate((INTEL, AMD, NVIDIA, AMD), 128):
        machine.write(f"dev/dri/renderD{number}").function(f"sys/class/drm/renderD{number}/device", vendor)
    machine.write("dev/dri/card0").write("dev/dri/renderD132")
    assert machine.nodes("xpu") == ("/dev/dri/renderD128",)
    assert machine.nodes("rocm") == ()
    machine.write("dev/kfd")
    assert machine.nodes("rocm") == ("/dev/dri/renderD129", "/dev/dri/renderD131")


@pytest.mark.parametrize(("name", "key"), [("rocm", "hip"), ("xpu", "xpu")])
def test_a_gpu_that_most_processors_have_counts_where_torch_is_built_for_it(
    machine: Machine, packages: Path, name: str, key: str
) -> None:
    equip(machine, name)
    install(packages, {**BUILDS, key: None})
    assert not is_there(name, machine.root, {})
    (missing,) = find(name, machine.root, {}).missing
    assert missing.startswith("torch is installed without ")
    assert f"use the image of Dockerfile.{name}, or pip install --force-reinstall " in missing
    install(packages)
    assert is_there(name, machine.root, {})


def test_an_accelerator_of_another_vendor_is_no_gaudi(machine: Machine) -> None:
    machine.write("dev/accel/accel0").function("sys/class/accel/accel0/device", NPU)
    machine.write("dev/accel/accel1").function("sys/class/accel/accel1/device", GAUDI)
    machine.write("dev/accel/accel_controlD1")
    assert machine.nodes("hpu") == ("/dev/accel/accel1",)
    assert machine.nodes("tpu") == ()


def test_both_kinds_of_tpu_nodes(machine: Machine) -> None:
    machine.write("dev/accel0").function("sys/class/accel/accel0/device", TPU)
    machine.write("dev/vfio/vfio").write("dev/vfio/1").write("dev/vfio/2")
    machine.function("sys/kernel/iommu_groups/1/devices/0000:00:04.0", TPU)
    machine.function("sys/kernel/iommu_groups/2/devices/0000:00:05.0", DISK)
    assert machine.nodes("tpu") == ("/dev/accel0", "/dev/vfio/1")
    assert machine.nodes("hpu") == ()


def test_a_gpu_under_windows(machine: Machine) -> None:
    machine.write("dev/dxg")
    assert machine.nodes("cuda") == ()
    machine.write("usr/lib/wsl/lib/libcuda.so.1")
    assert machine.nodes("cuda") == ("/dev/dxg",)


@pytest.mark.parametrize("name", ACCELERATORS)
def test_a_machine_that_has_everything(machine: Machine, packages: Path, name: str) -> None:
    install(packages)
    equip(machine, name)
    finding = find(name, machine.root, {})
    assert finding.missing == ()
    assert len(finding.nodes) == 1
    assert is_there(name, machine.root, {})
    for other in set(ACCELERATORS) - {name}:
        assert find(other, machine.root, {}).missing != ()


MENDED = [
    ("cuda", "/dev/nvidia0 is missing: docker run --gpus all"),
    ("rocm", "/dev/kfd, or an AMD GPU in /dev/dri, is missing: docker run --device=/dev/kfd --device=/dev/dri"),
    ("xpu", "an Intel GPU in /dev/dri is missing: docker run --device=/dev/dri"),
    ("hpu", "/dev/accel/accel0 is missing: docker run --runtime=habana"),
    ("neuron", "/dev/neuron0 is missing: docker run --device=/dev/neuron0"),
    ("tpu", "/dev/accel0 or /dev/vfio/0 is missing: docker run --privileged"),
]


@pytest.mark.parametrize(("name", "missing"), MENDED)
def test_a_missing_node(machine: Machine, packages: Path, name: str, missing: str) -> None:
    install(packages)
    assert find(name, machine.root, {}).missing == (missing,)
    assert not is_there(name, machine.root, {})


@pytest.mark.parametrize(("name", "identity"), [("cuda", NVIDIA), ("hpu", GAUDI), ("neuron", NEURON), ("tpu", TPU)])
def test_hardware_without_a_node_counts_where_its_own_package_is(
    machine: Machine, packages: Path, name: str, identity: tuple[str, str]
) -> None:
    machine.function("sys/bus/pci/devices/0000:00:1e.0", identity)
    install(packages)
    assert is_there(name, machine.root, {}) == (name != "cuda")  # torch is for others, too


@pytest.mark.parametrize(
    ("name", "identity", "driver", "missing"),
    [
        ("cuda", NVIDIA, "nvidia", "/dev/nvidia0 is missing, but the hardware is present: docker run --gpus all"),
        ("cuda", NVIDIA, "", f"{NO_DRIVER} nvidia"),
        ("rocm", AMD, "", f"{NO_DRIVER} amdgpu"),
        ("xpu", INTEL, "", f"{NO_DRIVER} xe"),
        (
            "xpu",
            INTEL,
            "i915",
            "an Intel GPU in /dev/dri is missing, but the hardware is present: docker run --device=/dev/dri",
        ),
        ("hpu", GAUDI, "", f"{NO_DRIVER} habanalabs"),
        ("neuron", DISK, "", "/dev/neuron0 is missing: docker run --device=/dev/neuron0"),
        ("neuron", NEURON, "", f"{NO_DRIVER} neuron"),
        ("tpu", CARD, "", "/dev/accel0 or /dev/vfio/0 is missing: docker run --privileged"),
    ],
)
def test_hardware_without_a_node(
    machine: Machine, packages: Path, name: str, identity: tuple[str, str], driver: str, missing: str
) -> None:
    install(packages)
    machine.function("sys/bus/pci/devices/0000:00:1e.0", identity)
    if driver:
        machine.write(f"sys/module/{driver}/version", "550.54.15\n")
    finding = find(name, machine.root, {})
    assert finding.missing == (missing,)
    assert ("driver 550.54.15" in finding.facts) == bool(driver)


def test_a_driver_that_only_proc_knows(machine: Machine) -> None:
    line = "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  570.124.06  Release Build  (dvs-builder)\n"
    machine.write("proc/driver/nvidia/version", line)
    assert "driver 570.124.06" in find("cuda", machine.root, {}).facts


@pytest.mark.parametrize(
    ("name", "removed", "missing"),
    [
        ("cuda", ("torch",), "torch is not installed: " + install_command("cuda")),
        ("rocm", ("torch",),
         "torch is not installed: use the image of Dockerfile.rocm, or pip install --force-reinstall "
         "'torch[device-all]' --index-url https://stable.repo.amd.com/rocm/whl-next/"),
        ("hpu", ("habana_frameworks",), "habana_frameworks is not installed: use the image of Dockerfile.hpu"),
        ("neuron", ("torch", "torch_neuronx"),
         "torch and torch_neuronx are not installed: use the image of Dockerfile.neuron"),
        ("tpu", ("libtpu",), "libtpu is not installed: " + install_command("tpu")),
    ],
)  # fmt: skip
def test_a_missing_package(
    machine: Machine, monkeypatch: pytest.MonkeyPatch, name: str, removed: tuple[str, ...], missing: str
) -> None:
    installed = {"torch", "jax", "libtpu", "habana_frameworks", "torch_neuronx"} - set(removed)
    monkeypatch.setattr("tidewheel.engine.devices.finding._is_installed", installed.__contains__)
    monkeypatch.setattr("tidewheel.engine.devices.finding._is_right_torch", lambda kind: True)
    equip(machine, name)
    assert find(name, machine.root, {}).missing == (missing,)


def test_a_torch_without_cuda(machine: Machine, packages: Path) -> None:
    install(packages, {**BUILDS, "cuda": None})
    equip(machine, "cuda")
    (missing,) = find("cuda", machine.root, {}).missing
    assert missing == "torch is installed without CUDA: pip install --force-reinstall torch"


def test_nodes_that_only_others_may_open(machine: Machine, packages: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    install(packages)
    equip(machine, "hpu")
    monkeypatch.setattr(os, "access", lambda *_: False)
    (missing,) = find("hpu", machine.root, {}).missing
    assert missing.startswith(f"user {os.getuid()} may not open /dev/accel/accel0: docker run --group-add ")


@pytest.mark.parametrize("closed", ["/dev/kfd", "/dev/dri/renderD128"])
def test_both_nodes_of_an_amd_gpu_must_be_open(
    machine: Machine, packages: Path, monkeypatch: pytest.MonkeyPatch, closed: str
) -> None:
    install(packages)
    equip(machine, "rocm")
    monkeypatch.setattr(os, "access", lambda path, _: not path.endswith(closed))
    (missing,) = find("rocm", machine.root, {}).missing
    assert missing.startswith(f"user {os.getuid()} may not open {closed}: docker run --group-add ")


@pytest.mark.parametrize(
    ("name", "environ", "missing"),
    [
        ("cuda", {"CUDA_VISIBLE_DEVICES": "1"}, ()),
        ("cuda", {"CUDA_VISIBLE_DEVICES": ""}, ("CUDA_VISIBLE_DEVICES= hides all GPUs: unset it",)),
        ("cuda", {"CUDA_VISIBLE_DEVICES": "-1"}, ("CUDA_VISIBLE_DEVICES=-1 hides all GPUs: unset it",)),
        ("rocm", {"HIP_VISIBLE_DEVICES": "1", "ROCR_VISIBLE_DEVICES": "0,1"}, ()),
        ("rocm", {"HIP_VISIBLE_DEVICES": "-1"}, ("HIP_VISIBLE_DEVICES=-1 hides all GPUs: unset it",)),
        ("xpu", {"ZE_AFFINITY_MASK": "1"}, ()),
        ("hpu", {"HABANA_VISIBLE_MODULES": "0,1"}, ()),
        ("neuron", {"NEURON_RT_VISIBLE_CORES": "0-3"}, ()),
        ("tpu", {"TPU_VISIBLE_CHIPS": "0", "JAX_PLATFORMS": "tpu,cpu"}, ()),
        ("tpu", {"JAX_PLATFORMS": "cuda"}, ("JAX_PLATFORMS=cuda hides the TPU: unset it",)),
    ],
)
def test_variables_that_choose_devices(
    machine: Machine, packages: Path, name: str, environ: Mapping[str, str], missing: tuple[str, ...]
) -> None:
    install(packages)
    equip(machine, name)
    finding = find(name, machine.root, environ)
    assert finding.missing == missing
    assert {f"{variable}={value}" for variable, value in environ.items()} <= set(finding.facts)


def test_jax_on_the_cpu_needs_no_tpu(machine: Machine, packages: Path) -> None:
    install(packages)
    equip(machine, "tpu")
    environ = {"JAX_PLATFORMS": "cpu"}
    finding = find("tpu", machine.root, environ)
    assert (finding.nodes, finding.missing) == ((), ())
    assert "JAX computes on the CPU" in finding.facts
    assert not is_there("tpu", machine.root, environ)


@pytest.mark.parametrize("name", ACCELERATORS)
def test_a_device_that_is_not_there_is_refused_before_the_model_is_looked_for(
    monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.delenv("JAX_PLATFORMS", raising=False)
    if not (missing := find(name).missing):
        pytest.skip(f"this machine has {name}")
    with pytest.raises(DeviceError) as refused:
        open_model(EngineOptions("/nowhere", device=name))
    assert str(refused.value) == f"--device {name} cannot be used: {'; '.join(missing)}"


@pytest.mark.parametrize("name", ACCELERATORS)
def test_a_package_is_asked(packages: Path, name: str) -> None:
    install(packages)
    model = {"tpu": "TPU v9", "neuron": "NeuronCore"}.get(name, "Imaginary")
    assert ask(name) == Answer(2, model, 3 * GIB, 4 * GIB)
    assert str(ask(name)) == f"2 x {model}, 3.00 GiB of 4.00 GiB free in the first"


def test_an_integrated_gpu_tells_no_memory(packages: Path) -> None:
    told = "def mem_get_info(self): return 3 * 2**30, 4 * 2**30"
    install(packages, torch=TORCH.format(available=True).replace(told, "def mem_get_info(self): raise RuntimeError", 1))
    assert ask("xpu") == Answer(2, "Imaginary", None, None)


def test_memory_that_is_not_told() -> None:
    assert str(Answer(1, "Imaginary", None, None)) == "Imaginary, memory not reported"


@pytest.mark.parametrize(
    ("torch", "message"),
    [
        ("import a_library_that_is_not_there", "ModuleNotFoundError: No module named 'a_library_that_is_not_there'"),
        (TORCH.format(available=False), r"torch\.cuda\.is_available\(\) is false"),
        ("import os; os._exit(3)", "the process that asked it ended with 3"),
    ],
)
def test_a_package_that_gives_no_answer(packages: Path, torch: str, message: str) -> None:
    install(packages, torch=torch)
    with pytest.raises(DeviceError, match=message):
        ask("cuda")


def test_a_package_that_does_not_answer(packages: Path) -> None:
    install(packages, torch="import time; time.sleep(600)")
    with pytest.raises(DeviceError, match=r"it did not answer within 0\.2 s"):
        ask("cuda", timeout_s=0.2)


def test_auto_takes_what_can_be_used_and_says_why_not_the_others(
    machine: Machine, packages: Path, caplog: pytest.LogCaptureFixture
) -> None:
    install(packages, {**BUILDS, "cuda": None})
    for name in ("cuda", "hpu"):
        equip(machine, name)
    with caplog.at_level(logging.INFO):
        assert choose(("cuda", "hpu"), GIB, machine.root) == "hpu"
    refused, taken = caplog.records
    assert (refused.levelname, taken.levelname) == ("WARNING", "INFO")
    assert refused.message.startswith("--device auto does not choose cuda (/dev/nvidia0, torch")
    assert refused.message.endswith("torch is installed without CUDA: pip install --force-reinstall torch")
    answer = "2 x Imaginary, 3.00 GiB of 4.00 GiB free in the first"
    assert taken.message.startswith(f"--device auto chooses hpu: {answer} (/dev/accel/accel0, torch")


def test_auto_falls_back_to_the_cpu_and_says_why(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    pytest.importorskip("tidewheel._native")
    if not (missing := find("hpu").missing):
        pytest.skip("this machine has a Gaudi")
    monkeypatch.setattr("tidewheel.engine.devices.is_there", lambda name: name == "hpu")
    assert get_device("auto").name == "cpu"
    (record,) = caplog.records
    assert record.levelname == "WARNING"
    assert record.message.startswith("--device auto does not choose hpu")
    assert record.message.endswith("; ".join(missing))


def test_an_accelerator_has_to_hold_its_part_of_the_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[list[str], int]] = []

    def refuse(names: list[str], weight_bytes: int) -> None:
        asked.append((names, weight_bytes))

    pytest.importorskip("tidewheel._native")
    monkeypatch.setattr("tidewheel.engine.devices.is_there", lambda name: name in ("cuda", "tpu"))
    monkeypatch.setattr("tidewheel.engine.devices.asking.choose", refuse)
    get_device("auto", (), 8 * GIB)
    get_device("auto", (ParallelOptions(tensor_parallel_size=4),), 8 * GIB)
    assert asked == [(["cuda", "tpu"], 8 * GIB), (["cuda", "tpu"], 2 * GIB)]


@pytest.mark.parametrize(
    ("torch", "weight_bytes", "reason"),
    [
        ("raise RuntimeError('no such symbol')", 0, "RuntimeError: no such symbol"),
        (
            TORCH.format(available=True),
            5 * GIB,
            "3.00 GiB of 4.00 GiB free in the first, and the weights take 5.00 GiB",
        ),
    ],
)
def test_auto_takes_nothing_that_fails(
    machine: Machine, packages: Path, caplog: pytest.LogCaptureFixture, torch: str, weight_bytes: int, reason: str
) -> None:
    install(packages, torch=torch)
    equip(machine, "cuda")
    assert choose(("cuda",), weight_bytes, machine.root) is None
    (record,) = caplog.records
    assert record.levelname == "WARNING"
    assert record.message.endswith(reason)


def test_nothing_heavy_is_imported_to_look() -> None:
    code = """
import sys
from tidewheel.engine.devices import get_device
from tidewheel.engine.devices.finding import ACCELERATORS, find
found = [find(name) for name in ACCELERATORS]
print(sorted({"torch", "jax", "libtpu", "habana_frameworks", "torch_neuronx"} & set(sys.modules)))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"
