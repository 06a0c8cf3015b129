"""The room on the nodes of a cluster, and the table of it in `tidewheel devices`."""

from __future__ import annotations

import sys
from types import ModuleType

import msgspec
import pytest
from ports import free_port

from tidewheel.engine.loading.opened_model import open_model
from tidewheel.engine.loading.stages.split import stage_bytes
from tidewheel.engine.models.spec import StageSpec
from tidewheel.engine.options import EngineOptions
from tidewheel.server.commands.cli import main
from tidewheel.server.options.model import DEMO_MODEL


def test_the_nodes_are_a_table_with_what_keeps_them_apart() -> None:
    from tidewheel.ray.node_room import Takes
    from tidewheel.ray.nodes import Findings, Node, render_nodes

    here = Findings("1.0", "Imaginary (x86_64)", "avx2", "cpu", 64 * 2**30, 40 * 2**30)
    other = msgspec.structs.replace(here, isa="avx512", auto="cuda")
    nodes = [
        Node("10.0.0.1", 16, here, takes=Takes(8, None)),
        Node("10.0.0.2", 8, other, takes=Takes(4, None)),
        Node("10.0.0.3", 8, None, "no Tidewheel there"),
    ]
    assert [line.split()[0] for line in render_nodes(nodes[:1]).splitlines()] == ["node", "10.0.0.1"]
    text = render_nodes(nodes)
    assert [line.split() for line in text.splitlines()[2:4]] == [
        ["10.0.0.2", "8", "64.00", "GiB", "40.00", "GiB", "avx512", "cuda", "1.0", "4", "Imaginary", "(x86_64)"],
        ["10.0.0.3", "8", "-", "-", "-", "-", "-", "-", "no", "Tidewheel", "there"],
    ]
    assert "need the same ISA level: set TIDEWHEEL_ISA" in text
    assert "same version" not in text


def test_a_node_takes_the_layers_that_a_stage_can_load() -> None:
    from tidewheel.ray.node_room import Takes, render_size, size_of, takes

    options = EngineOptions(model=str(DEMO_MODEL), device="cpu")
    size, model = size_of(options), open_model(options)
    layers = size.num_layers

    def room_for(count: int) -> int:
        """The least memory for `count` layers, wherever they are."""
        stages = [StageSpec(begin, begin + count, layers) for begin in range(layers - count + 1)]
        return -(-min(stage_bytes(model.spec, stage, model.plan.formats) for stage in stages) * 9 // 8)

    for count in range(1, layers):
        assert takes(4, room_for(count), 1, size).layers == count
        assert takes(4, room_for(count) - 9, 1, size).layers == count - 1
    whole = -(-model.weight_bytes * 9 // 8)
    assert takes(4, whole, 1, size).layers == layers
    assert takes(4, 3 * whole, 1, size).replicas == 3
    assert takes(4, 9 * whole, 1, size).replicas == 4
    assert takes(3, 9 * whole, 2, size).replicas == 1
    assert takes(1, whole, 2, size) == Takes(0, None)
    half, third = (takes(4, room_for(count), 1, size) for count in (layers // 2, layers // 3))
    assert "at least 2 of these nodes" in render_size(size, [third, half, half])
    assert "not have the memory for all layers" in render_size(size, [third, third])
    assert render_size(size, [third, takes(4, whole, 1, size)]).endswith("KV cache.")


def test_an_address_where_nobody_answers_is_named(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "ray", ModuleType("ray"))  # it is there, and is not used
    nowhere = f"127.0.0.1:{free_port()}"
    assert main(["devices", "--ray-address", nowhere]) == 1
    said = capsys.readouterr().err
    assert f"nobody answers at {nowhere}" in said
    assert "ray start --head" in said
