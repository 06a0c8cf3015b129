"""A model that several Gaudi cards share, on the software model of Intel's package, with gloo in place of HCCL."""

from __future__ import annotations

import dataclasses
import os
import sys
from pathlib import Path

import pytest
from engine.devices.fakes.hpu import FakeHpu
from engine.devices.graph.served import FEW_BUCKETS, MAX_LENGTH, MEMORY, load, reference, serve, storm

from tidewheel.engine.devices import get_device
from tidewheel.engine.devices.executor import Executor
from tidewheel.engine.devices.graph.options import GraphOptions
from tidewheel.engine.devices.graph.ranks import variables_of
from tidewheel.engine.devices.parallel_options import ParallelOptions
from tidewheel.engine.errors import DeviceError

COLLECTIVES = "PT_HPU_ENABLE_LAZY_COLLECTIVES"
ONE_EACH = dataclasses.replace(
    FEW_BUCKETS, prompt_bs_bucket_max=1, prompt_seq_bucket_min=MAX_LENGTH, decode_bs_bucket_min=4
)
EAGER = dataclasses.replace(FEW_BUCKETS, enforce_eager=True)
SET = ("WORLD_SIZE", "RANK", "LOCAL_RANK", "HABANA_VISIBLE_MODULES", "HLS_MODULE_ID", COLLECTIVES)
FOLLOWER = """#!{python}
import runpy, sys
sys.path[:0] = {path}
import pytest
from engine.devices.fakes.hpu import FakeHpu
with pytest.MonkeyPatch.context() as monkeypatch:
    FakeHpu({memory}, lazy={lazy}).install(monkeypatch)
    sys.argv = sys.argv[2:]
    runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
"""


@pytest.fixture(autouse=True)
def environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for variable in SET:  # so that what the device sets is taken back
        monkeypatch.setenv(variable, "")
        monkeypatch.delenv(variable)


@pytest.fixture
def share(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest, tmp_path: Path):
    def make(lazy: bool) -> Executor:
        fake = FakeHpu(MEMORY, lazy=lazy).install(monkeypatch)
        request.addfinalizer(fake.accelerator.leave)
        python = tmp_path / "python"
        python.write_text(FOLLOWER.format(python=sys.executable, path=sys.path, memory=MEMORY, lazy=lazy))
        python.chmod(0o700)
        monkeypatch.setattr(sys, "executable", str(python))
        return load(get_device("hpu", [ONE_EACH, ParallelOptions(2)]))

    return make


# The second process imports torch too. In `make test`, test_parallel.py has processes that share a model.
@pytest.mark.sweep
@pytest.mark.parametrize("lazy", [True, False], ids=["graphs", "compiled"])
def test_two_cards_give_the_tokens_of_one(share, lazy: bool, caplog: pytest.LogCaptureFixture) -> None:
    expected = reference("torch", "float32")[:2]  # before all operations are looked at
    with caplog.at_level("INFO"):
        executor = share(lazy)
    try:
        assert len(executor.followers) == 1
        assert executor.limits.num_blocks > 1
        assert serve(executor, storm()[:2]) == expected
    finally:
        executor.close()
    assert (f"{COLLECTIVES} is set to true: HPU graphs of several cards need it" in caplog.text) == lazy
    assert os.environ.get(COLLECTIVES) == ("true" if lazy else None)


@pytest.mark.parametrize(
    ("lazy", "options", "is_refused"), [("1", FEW_BUCKETS, True), ("1", EAGER, False), ("0", FEW_BUCKETS, False)]
)
def test_graphs_are_refused_where_collectives_are_not_lazy(
    monkeypatch: pytest.MonkeyPatch, lazy: str, options: GraphOptions, is_refused: bool
) -> None:
    monkeypatch.setenv("PT_HPU_LAZY_MODE", lazy)
    monkeypatch.setenv(COLLECTIVES, "False")
    monkeypatch.setattr(sys, "executable", "/bin/false")  # what is not refused ends here
    refused = f"{COLLECTIVES}=False does not allow HPU graphs on 2 cards: unset it, or take --enforce-eager"
    with pytest.raises(DeviceError, match=refused if is_refused else "the process of accelerator 1 has ended"):
        load(get_device("hpu", [options, ParallelOptions(2)]))
    assert os.environ[COLLECTIVES] == "False"


def test_each_process_has_its_own_module_of_a_list_that_all_share(monkeypatch: pytest.MonkeyPatch) -> None:
    assert [variables_of("hpu", rank, 2)["HLS_MODULE_ID"] for rank in range(2)] == ["0", "1"]
    monkeypatch.setenv("HABANA_VISIBLE_MODULES", "4,6,7")
    assert variables_of("hpu", 1, 2) == {
        "WORLD_SIZE": "2",
        "RANK": "1",
        "LOCAL_RANK": "1",
        "HABANA_VISIBLE_MODULES": "4,6",
        "HLS_MODULE_ID": "6",
    }


def test_more_cards_than_the_user_leaves_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HABANA_VISIBLE_MODULES", "4,6,7")
    refused = "HABANA_VISIBLE_MODULES=4,6,7 names 3 accelerators, fewer than --tensor-parallel-size"
    with pytest.raises(DeviceError, match=refused):
        load(get_device("hpu", [FEW_BUCKETS, ParallelOptions(4)]))
