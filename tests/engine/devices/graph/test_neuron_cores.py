"""A model that several Neuron cores share, on the software model of TorchNeuron, with gloo in AWS's place."""

from __future__ import annotations

import dataclasses
import os
import sys
from pathlib import Path

import pytest
from engine.devices.fakes.neuron import FakeNeuron
from engine.devices.graph.served import FEW_BUCKETS, MAX_LENGTH, MEMORY, load, reference, serve, storm

from tidewheel.engine.devices import get_device
from tidewheel.engine.devices.graph.ranks import variables_of
from tidewheel.engine.devices.parallel_options import ParallelOptions
from tidewheel.engine.errors import DeviceError

CORES = "NEURON_RT_VISIBLE_CORES"
ONE_EACH = dataclasses.replace(
    FEW_BUCKETS, prompt_bs_bucket_max=1, prompt_seq_bucket_min=MAX_LENGTH, decode_bs_bucket_min=4
)
SET = ("WORLD_SIZE", "RANK", "LOCAL_WORLD_SIZE", "LOCAL_RANK", CORES, "NEURON_RT_NUM_CORES")
FOLLOWER = """#!{python}
import runpy, sys
sys.path[:0] = {path}
import pytest
from engine.devices.fakes.neuron import FakeNeuron
with pytest.MonkeyPatch.context() as monkeypatch:
    FakeNeuron({memory}).install(monkeypatch)
    sys.argv = sys.argv[2:]
    runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
"""


@pytest.fixture(autouse=True)
def environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for variable in SET:  # so that what the device sets is taken back
        monkeypatch.setenv(variable, "")
        monkeypatch.delenv(variable)
    monkeypatch.setenv("TORCH_NEURONX_NEFF_CACHE_DIR", str(tmp_path / "neff"))


# The second process imports torch too. In `make test`, test_parallel.py has processes that share a model.
@pytest.mark.sweep
def test_two_cores_give_the_tokens_of_one(
    monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    expected = reference("graph-cpu", "bfloat16")[:2]
    fake = FakeNeuron(MEMORY).install(monkeypatch)
    fake.share(monkeypatch)
    request.addfinalizer(fake.accelerator.leave)
    python = tmp_path / "python"
    python.write_text(FOLLOWER.format(python=sys.executable, path=sys.path, memory=MEMORY))
    python.chmod(0o700)
    monkeypatch.setattr(sys, "executable", str(python))
    monkeypatch.setenv(CORES, "4-6")
    executor = load(get_device("neuron", [ONE_EACH, ParallelOptions(2)]), "bfloat16")
    try:
        assert len(executor.followers) == 1
        assert executor.limits.num_blocks > 1
        assert serve(executor, storm()[:2]) == expected
    finally:
        executor.close()
    assert os.environ[CORES] == "4"
    monkeypatch.setenv(CORES, "4-6")
    with pytest.raises(DeviceError, match="only the first model that it loads may be shared by several cores"):
        load(get_device("neuron", [ONE_EACH, ParallelOptions(2)]), "bfloat16")


def test_each_process_has_one_core_of_those_that_the_user_leaves(monkeypatch: pytest.MonkeyPatch) -> None:
    assert [variables_of("neuron", rank, 2)[CORES] for rank in range(2)] == ["0", "1"]
    monkeypatch.setenv(CORES, "1,4-6")
    assert [variables_of("neuron", rank, 4)[CORES] for rank in range(4)] == ["1", "4", "5", "6"]
    assert variables_of("neuron", 2, 4) == {
        "WORLD_SIZE": "4",
        "RANK": "2",
        "LOCAL_WORLD_SIZE": "4",
        "LOCAL_RANK": "2",
        CORES: "5",
        "NEURON_RT_NUM_CORES": "1",
    }
    with pytest.raises(DeviceError, match=f"{CORES}=1,4-6 names 4 accelerators, fewer than --tensor-parallel-size"):
        variables_of("neuron", 0, 5)


def test_one_model_does_not_take_all_cores_of_the_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    for visible, expected in ((None, "1"), ("2", None)):
        if visible is not None:
            monkeypatch.setenv(CORES, visible)
        monkeypatch.delenv("NEURON_RT_NUM_CORES", raising=False)
        monkeypatch.setitem(sys.modules, "torch_neuronx", None)  # so that loading ends early
        with pytest.raises(DeviceError, match="torch_neuronx is not installed"):
            load(get_device("neuron", [ONE_EACH]), "bfloat16")
        assert os.environ.get("NEURON_RT_NUM_CORES") == expected
