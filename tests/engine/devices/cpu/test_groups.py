"""`--threads-bind` and NUMA nodes: which processors compute together, on drawings of machines."""

from __future__ import annotations

import importlib
import logging
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tidewheel.engine.devices.cpu.groups import (
    choose_groups,
    default_threads,
    group_list,
    groups_by_node,
    groups_in_turn,
    groups_of_stages,
    shared_out,
    spanning_groups,
)
from tidewheel.engine.devices.cpu.options import CpuOptions
from tidewheel.engine.errors import DeviceError

native: Any = pytest.importorskip("tidewheel._native")

Machine = Callable[..., Any]


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    """Draws a machine whose NUMA nodes have these processors, and returns its topology as the native code reads it."""

    def draw(nodes: Mapping[int, str], allowed: Sequence[int] | None = None, siblings: int = 0) -> Any:
        folder = tmp_path / "sys/devices/system"
        cpus = sorted(cpu for text in nodes.values() for cpu in native.parse_cpu_list(text))
        for node, text in nodes.items():
            (folder / f"node/node{node}").mkdir(parents=True)
            (folder / f"node/node{node}/cpulist").write_text(f"{text}\n")
        (folder / "node/online").write_text(",".join(map(str, nodes)) + "\n")
        for cpu in cpus if siblings else ():
            (folder / f"cpu/cpu{cpu}/topology").mkdir(parents=True)
            core = cpu % (len(cpus) // siblings)
            threads = ",".join(str(core + i * len(cpus) // siblings) for i in range(siblings))
            (folder / f"cpu/cpu{cpu}/topology/thread_siblings_list").write_text(f"{threads}\n")
        return native.topology(f"{tmp_path}/", cpus if allowed is None else allowed)

    return draw


def auto(topology: Any, quota: float | None = None) -> str:
    return group_list(choose_groups("auto", topology, quota))


def test_auto_is_a_group_for_each_node_and_leaves_a_core_for_the_event_loop(machine: Machine) -> None:
    assert auto(machine({0: "0-31", 1: "32-63"})) == "0-31|32-62"


@pytest.mark.parametrize(
    ("nodes", "groups"),
    [
        ({0: "0-5"}, "0-5"),
        ({0: "0,2,4", 1: "1,3,5"}, "0,2,4|1,3,5"),
        ({0: "0-1", 8: "8-9", 252: ""}, "0-1|8-9"),  # numbered with gaps, and one that has memory only
    ],
)
def test_nodes_of_any_numbering(machine: Machine, nodes: Mapping[int, str], groups: str) -> None:
    assert auto(machine(nodes)) == groups


def test_what_this_process_may_use_of_the_nodes_counts(machine: Machine) -> None:
    nodes = {0: "0-3", 1: "4-7", 2: "8-11"}
    assert auto(machine(nodes, allowed=[3, 4, 9, 10])) == "3|4|9-10"


def test_one_hardware_thread_of_each_core(machine: Machine) -> None:
    assert auto(machine({0: "0-1,4-5", 1: "2-3,6-7"}, siblings=2)) == "0-1|2-3"


@pytest.mark.parametrize(
    ("quota", "groups"),
    [(6, "32-37"), (25.9, "32-55"), (32, "0-15|32-46"), (41, "0-15|32-55"), (None, "0-15|16-31|32-54")],
)
def test_a_quota_takes_as_few_nodes_as_will_do_and_of_these_alike(
    machine: Machine, quota: float | None, groups: str
) -> None:
    assert auto(machine({0: "0-15", 1: "16-31", 2: "32-55"}), quota) == groups


@given(st.lists(st.integers(0, 3), min_size=1, max_size=40), st.data())
def test_auto_takes_as_many_as_it_should_and_no_node_twice(nodes: list[int], data: st.DataObject) -> None:
    processors = [{"cpu": cpu, "core": cpu, "numa_node": node} for cpu, node in enumerate(nodes)]
    cores = data.draw(st.lists(st.sampled_from(range(len(nodes))), min_size=1, unique=True).map(sorted))
    quota = data.draw(st.none() | st.integers(1, len(cores)))
    topology: Any = {"processors": processors, "cores": cores}
    groups = choose_groups("auto", topology, quota)
    cpus = [cpu for group in groups for cpu in group]
    assert len(cpus) == len(set(cpus)) == default_threads(len(cores), quota)
    assert set(cpus) <= set(cores)
    assert all(groups)
    assert not spanning_groups(groups, topology)
    used = [nodes[group[0]] for group in groups]
    assert used == sorted(set(used))


def test_groups_that_are_named(machine: Machine) -> None:
    topology = machine({0: "0-3", 1: "4-7"})
    assert choose_groups("0-3|4-7", topology, None) == [[0, 1, 2, 3], [4, 5, 6, 7]]
    assert choose_groups("5,1|0", topology, None) == [[1, 5], [0]]
    assert choose_groups("0-7", topology, None) == [list(range(8))]
    assert spanning_groups([[0, 1], [2, 5], [6]], topology) == [[2, 5]]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("0|8", "this process may not use CPU 8, only 0-7"),
        ("0-1|1-2", "each CPU once"),
        ("0-1|", "a CPU in each group"),
        ("|", "a CPU in each group"),
        ("", "a CPU in each group"),
        ("0-1;2-3", "'1;2-3'|'0-1;2-3' is not a CPU number"),
        ("nobind", "'nobind' is not a CPU number"),
    ],
)
def test_groups_that_make_no_sense_are_refused(machine: Machine, text: str, said: str) -> None:
    with pytest.raises(DeviceError, match=f"--threads-bind.*({said})"):
        choose_groups(text, machine({0: "0-3", 1: "4-7"}), None)


def test_what_binding_by_hand_costs_is_pointed_out(
    machine: Machine, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    cpu: Any = importlib.import_module("tidewheel.engine.devices.cpu.device")
    topology = machine({0: "0-3", 1: "4-7"})
    monkeypatch.setattr(native, "topology", lambda: topology)
    with caplog.at_level(logging.WARNING):
        assert cpu.thread_groups("scalar", CpuOptions("0-3|4-7")) == [[0, 1, 2, 3], [4, 5, 6, 7]]
        assert not caplog.records
        cpu.thread_groups("scalar", CpuOptions("0-7"))
        assert "reserved" not in caplog.text
        cpu.thread_groups("scalar", CpuOptions("0-3", reserved_cpus=2))
    assert "CPUs 0-7 are of several NUMA nodes" in caplog.text
    assert "--reserved-cpus has no effect: --threads-bind 0-3 names the cores" in caplog.text


def test_tensor_parallelism_shares_the_cores_out() -> None:
    assert shared_out([[0, 1, 2], [4, 5]], 2, named=False) == [[0, 1, 2], [4, 5]]
    assert shared_out([[0, 1, 2, 3, 4]], 2, named=True) == [[0, 1], [2, 3, 4]]
    assert shared_out([[0, 1], [2, 3]], 4, named=False) == [[0], [1], [2], [3]]
    with pytest.raises(DeviceError, match=r"--tensor-parallel-size 3 needs as many cores .* there are 2"):
        shared_out([[0, 1]], 3, named=False)
    with pytest.raises(DeviceError, match=r"--tensor-parallel-size 3 and --threads-bind 0\|1 name different numbers"):
        shared_out([[0], [1]], 3, named=True)


@pytest.mark.parametrize(
    ("groups", "stages", "each", "named", "found"),
    [
        ("0|1|2|3", 2, 2, True, ["0|1", "2|3"]),  # all groups, stage by stage
        ("0-3|4-6", 2, 2, True, ["0-1|2-3", "4|5-6"]),  # a group is a stage
        ("0-7", 2, 2, True, ["0-1|2-3", "4-5|6-7"]),
        ("0-2|3-4", 2, 1, True, ["0-2", "3-4"]),
        ("0-1|2-3|4-5|6-7", 2, 2, False, ["0-1|2-3", "4-5|6-7"]),  # a group is a node
        ("0-3|4-6", 2, 2, False, ["0-1|2-3", "4|5-6"]),  # a stage is a node
        ("0-5|6-7|8-9", 2, 1, False, ["0-4", "5-9"]),
    ],
)
def test_stages_of_a_pipeline_have_groups(groups: str, stages: int, each: int, named: bool, found: list[str]) -> None:
    given = [native.parse_cpu_list(group) for group in groups.split("|")]
    assert [group_list(stage) for stage in groups_of_stages(given, stages, each, named=named)] == found


@pytest.mark.parametrize(
    ("groups", "stages", "each", "said"),
    [
        ([[0], [1], [2]], 2, 1, r"0\|1\|2 names 3 groups of cores: name 2, one for each stage of"),
        ([[0], [1], [2]], 2, 2, r"name 2, one for each stage of --pipeline-parallel-size, or 4: 2 for each stage"),
        ([[0, 1, 2]], 2, 2, r"--pipeline-parallel-size 2 and --tensor-parallel-size 2 need 4 cores, and there are 3"),
        ([[0, 1, 2], [3]], 2, 2, r"--tensor-parallel-size 2 needs as many cores in each stage .* only the CPUs 3"),
    ],
)
def test_groups_that_stages_cannot_have_are_refused(groups: list[list[int]], stages: int, each: int, said: str) -> None:
    with pytest.raises(DeviceError, match=said):
        groups_of_stages(groups, stages, each, named=True)


def test_stages_take_turns_on_too_few_cores() -> None:
    assert groups_in_turn([0, 1], 3, 1) == [[[0]], [[1]], [[0]]]
    assert groups_in_turn([0, 1, 2], 2, 2) == [[[0], [1]], [[2], [0]]]
    with pytest.raises(DeviceError, match=r"--tensor-parallel-size 3 needs as many cores .* there are 2"):
        groups_in_turn([0, 1], 2, 3)


def test_the_cores_of_a_stage_are_grouped_by_node(machine: Machine) -> None:
    topology = machine({0: "0,2,4,6", 1: "1,3,5,7"})
    assert groups_by_node([0, 1, 2, 3], 1, topology) == [[0, 1, 2, 3]]
    assert groups_by_node([0, 1, 2, 3, 4], 2, topology) == [[0, 2, 4], [1, 3]]
    assert groups_by_node([0, 1, 2, 3], 4, topology) == [[0], [2], [1], [3]]


@pytest.mark.parametrize(
    ("cores", "quota", "reserved", "threads"),
    [(8, None, None, 7), (8, None, 0, 8), (8, None, 2, 6), (4, None, 1, 3), (8, 3.0, 2, 3), (8, None, 7, 1)],
)
def test_cores_are_left_to_others(cores: int, quota: float | None, reserved: int | None, threads: int) -> None:
    assert default_threads(cores, quota, reserved) == threads


def test_reserving_every_core_is_refused() -> None:
    for reserved in (2, 5):
        with pytest.raises(DeviceError, match=rf"--reserved-cpus {reserved} .* may use 2, so reserve at most 1"):
            default_threads(2, None, reserved)
