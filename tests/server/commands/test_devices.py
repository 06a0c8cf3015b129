"""`tidewheel devices` says what the machine, or a fake one, has."""

from __future__ import annotations

import builtins
import importlib.util
import json
import os
from pathlib import Path
from typing import Any

import pytest

from tidewheel.engine.devices import DEVICE_NAMES
from tidewheel.engine.devices.asking import Answer
from tidewheel.engine.devices.finding import ACCELERATORS, Finding, find
from tidewheel.engine.errors import DeviceError
from tidewheel.engine.machine.cpu_list import cpu_list
from tidewheel.engine.machine.huge_pages import HugePages, huge_pages
from tidewheel.engine.machine.memory import Memory
from tidewheel.server.commands.cli import main
from tidewheel.server.commands.devices import Cores, DevicesReport, DeviceState, accelerator, cpu_model, detect, render

native: Any = pytest.importorskip("tidewheel._native")

GIB = 2**30
MACHINE = DevicesReport(
    auto="cpu",
    devices=[DeviceState("cpu", True, "native kernels"), DeviceState("torch", False, "needs torch")],
    cpu_model="Imaginary 9000",
    architecture="x86_64",
    isa_levels=["avx512", "avx2", "scalar"],
    isa_note="avx9 is slow here",
    isa="avx2",
    cores=Cores(16, [0, 1, 2, 3, 8], [0, 1, 2, 3], [[0, 1], [2]], {0: [0, 1, 8], 1: [2, 3]}, 2.5),
    memory=Memory(64 * GIB, 10 * GIB, 16 * GIB, 6 * GIB),
    huge_pages=HugePages("madvise", 2 * 2**20, 8, 3),
)


def test_the_text_has_every_fact() -> None:
    lines = dict(line.split("  ", 1) for line in render(MACHINE).splitlines() if not line.startswith("device"))
    facts = {name: value.strip() for name, value in lines.items()}
    assert facts == {
        "processor": "Imaginary 9000 (x86_64)",
        "ISA levels": "avx512, avx2 (in use), scalar (avx9 is slow here)",
        "cores": "16 logical, 5 allowed (CPUs 0-3,8), 4 of them physical",
        "threads": "3 in 2 groups, on CPUs 0-1|2 (--threads-bind changes it)",
        "NUMA": "node 0: CPUs 0-1,8; node 1: CPUs 2-3",
        "cgroup CPU quota": "2.5 cores' worth of time",
        "memory": "64.00 GiB, 10.00 GiB available",
        "cgroup memory limit": "16.00 GiB, 6.00 GiB used",
        "huge pages": "transparent: madvise; reserved: 8 of 2 MiB, 3 free",
    }
    assert "cpu: available (native kernels; what --device auto means)\n" in render(MACHINE)
    assert "torch: not available (needs torch)\n" in render(MACHINE)


def test_this_machine(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["devices", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    cores, memory = report["cores"], report["memory"]
    assert report["isa_levels"] == native.available_isa_levels()
    assert report["isa"] in report["isa_levels"]
    assert cores["allowed"] == sorted(os.sched_getaffinity(0))
    assert {cpu for group in cores["threads"] for cpu in group} <= set(cores["physical"]) <= set(cores["allowed"])
    assert sorted(cpu for node in cores["numa_nodes"].values() for cpu in node) == cores["allowed"]
    assert 0 < memory["available"] <= memory["total"]
    devices = {device["name"]: device for device in report["devices"]}
    assert set(devices) == {*DEVICE_NAMES} - {"auto"}
    assert devices["cpu"]["available"]
    assert devices[report["auto"]]["available"]
    assert devices["torch"]["available"] == (importlib.util.find_spec("torch") is not None)
    for name in ACCELERATORS:
        if missing := find(name).missing:
            assert not devices[name]["available"]
            assert devices[name]["missing"] == [*missing]
    assert main(["devices"]) == 0
    assert f"{report['isa']} (in use)" in capsys.readouterr().out


NODES, FACTS = ("/dev/nvidia0", "/dev/nvidia1"), ("driver 550.54.15", "CUDA_VISIBLE_DEVICES=0")


def test_an_accelerator_that_can_be_used() -> None:
    answer = Answer(2, "Imaginary", 3 * GIB, 4 * GIB)
    state = accelerator(Finding("cuda", NODES, FACTS, ()), lambda name: answer)
    said = "2 x Imaginary, 3.00 GiB of 4.00 GiB free in the first"
    found = "/dev/nvidia0 and 1 more like it, driver 550.54.15, CUDA_VISIBLE_DEVICES=0"
    assert state == DeviceState("cuda", True, f"{said}; {found}", (said, *NODES, *FACTS), ())


def test_an_accelerator_that_lacks_something_is_not_asked() -> None:
    def ask(name: str) -> Answer:
        raise AssertionError("asked")

    missing = ("a: mend a", "b: mend b")
    state = accelerator(Finding("cuda", NODES, FACTS, missing), ask)
    assert state == DeviceState("cuda", False, "a: mend a; b: mend b", (*NODES, *FACTS), missing)


def test_an_accelerator_whose_package_fails() -> None:
    def ask(name: str) -> Answer:
        raise DeviceError("ImportError: no such symbol")

    state = accelerator(Finding("cuda", NODES[:1], FACTS[:1], ()), ask)
    assert (state.available, state.missing) == (False, ("ImportError: no such symbol",))
    assert state.detail == "ImportError: no such symbol; found: /dev/nvidia0, driver 550.54.15"


def test_jax_on_the_cpu_is_not_what_auto_means(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("jax")
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")
    report = detect()
    tpu = next(device for device in report.devices if device.name == "tpu")
    assert tpu.available
    assert tpu.detail.endswith("JAX_PLATFORMS=cpu, JAX computes on the CPU")
    assert report.auto != "tpu"


def test_a_level_that_is_not_there_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TIDEWHEEL_ISA", "mmx")
    with pytest.raises(DeviceError, match="mmx"):
        detect()


def test_without_the_native_extension_the_rest_is_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    real_import = builtins.__import__

    def without_native(name: str, *rest: Any) -> Any:
        if name == "tidewheel" and rest[2] == ("_native",):
            raise ImportError("no such file")
        return real_import(name, *rest)

    monkeypatch.setattr(builtins, "__import__", without_native)
    report = detect()
    assert report.devices[0] == DeviceState("cpu", False, "the native extension cannot be loaded: no such file")
    assert (report.isa, report.cores) == (None, None)
    assert "cpu: not available" in render(report)
    assert "huge pages" in render(report)


@pytest.mark.parametrize(
    ("cpuinfo", "name"),
    [
        ("processor\t: 0\nmodel\t\t: 17\nmodel name\t: Some CPU @ 2 GHz\n\nmodel name\t: Other\n", "Some CPU @ 2 GHz"),
        ("vendor_id : IBM/S390\nprocessor 0: version = FF,  machine = 3931\n", "version = FF,  machine = 3931"),
        ("processor\t: 0\ncpu\t\t: POWER9, altivec supported\nclock\t\t: 2166MHz\n", "POWER9, altivec supported"),
    ],
)
def test_processor_names(tmp_path: Path, cpuinfo: str, name: str) -> None:
    (tmp_path / "proc").mkdir()
    (tmp_path / "proc/cpuinfo").write_text(cpuinfo)
    assert cpu_model(tmp_path) == name


def test_a_processor_without_a_name_has_at_least_an_architecture(tmp_path: Path) -> None:
    assert cpu_model(tmp_path)


def test_huge_pages(tmp_path: Path) -> None:
    assert huge_pages(tmp_path) == HugePages(None, None, 0, 0)
    (tmp_path / "sys/kernel/mm/transparent_hugepage").mkdir(parents=True)
    (tmp_path / "sys/kernel/mm/transparent_hugepage/enabled").write_text("[always] madvise never\n")
    (tmp_path / "proc").mkdir()
    (tmp_path / "proc/meminfo").write_text("HugePages_Total:  4\nHugePages_Free:  1\nHugepagesize:  2048 kB\n")
    assert huge_pages(tmp_path) == HugePages("always", 2**21, 4, 1)


@pytest.mark.parametrize(
    ("cpus", "text"), [([], ""), ([3], "3"), ([0, 1, 2], "0-2"), ([5, 0, 2, 1, 9, 8], "0-2,5,8-9")]
)
def test_cpu_lists_are_as_threads_bind_takes_them(cpus: list[int], text: str) -> None:
    assert cpu_list(cpus) == text
    if cpus:
        assert native.parse_cpu_list(text) == sorted(cpus)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (["--model", "m"], "--model needs --ray-address"),
        (["--cpus-per-replica", "2"], "--cpus-per-replica needs --ray-address"),
        (["--ray-address", "10.0.0.1:1", "--dtype", "float16"], "--dtype needs --model"),
        (["--ray-address", "10.0.0.1:1", "--cpus-per-replica", "0"], "--cpus-per-replica"),
    ],
)
def test_what_nodes_would_take_needs_nodes(given: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["devices", *given])
    assert ended.value.code == 2
    assert said in capsys.readouterr().err
