"""`tidewheel bench`: its counts, its refusals, and the shape of its reports. Speed is not tested."""

from __future__ import annotations

import json
import re
import subprocess
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import models_zoo
import numpy as np
import pytest
from server.conftest import TIDEWHEEL

from tidewheel.engine.declaring.mistakes import Mistakes
from tidewheel.engine.devices.batch import StepBatch, StepOutput
from tidewheel.engine.devices.bucket_stats import BucketStats, BucketUse
from tidewheel.engine.devices.bucketing import Bucket
from tidewheel.engine.devices.cache_split import StateSplit
from tidewheel.engine.devices.executor import Executor, OnWait
from tidewheel.engine.devices.limits import ExecutorLimits
from tidewheel.engine.errors import ModelError
from tidewheel.server.commands.bench import device_runs, kernels
from tidewheel.server.commands.bench.device_runs import DeviceRuns
from tidewheel.server.commands.bench.measure import serve_arguments
from tidewheel.server.commands.bench.model import LoadedModel, Plan
from tidewheel.server.commands.bench.model import load as load_model
from tidewheel.server.commands.bench.padding import BucketResult, padding_of, render_padding
from tidewheel.server.commands.bench.spread import Spread
from tidewheel.server.commands.bench.startup import measure_startup
from tidewheel.server.commands.bench.workload import (
    QUICK,
    Decode,
    Prefill,
    Room,
    Workload,
    decodes_of,
    parse_counts,
    parse_prefills,
)
from tidewheel.server.commands.cli import main
from tidewheel.server.options.model import model_parser, read_model_options

pytest.importorskip("tidewheel._native")

_SHORT = ("--batch-sizes", "1,2", "--contexts", "8", "--prefill", "1x8", "--decode-tokens", "2")

RunJson = Callable[..., dict[str, Any]]


@pytest.fixture(autouse=True)
def _ceilings_of_little(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ceilings are measured before and after each phase; here they need not be right for the machine."""
    monkeypatch.setattr("tidewheel.server.commands.bench.command.QUICK", replace(QUICK, ceilings_s=0.01))
    monkeypatch.setattr("tidewheel.server.commands.bench.ceilings._MIN_MEGABYTES", 8)
    monkeypatch.setattr("tidewheel.server.commands.bench.ceilings._MEGABYTES_PER_THREAD", 4)


@pytest.fixture
def bench(dummy_model: Path, capsys: pytest.CaptureFixture[str]) -> RunJson:
    """`tidewheel bench --quick` of the dummy model; returns the JSON, and the table under "text"."""

    def run(*arguments: str, model: Path = dummy_model) -> dict[str, Any]:
        assert main(["bench", str(model), "--load-format", "dummy", "--quick", *arguments, "--json", "-"]) == 0
        printed = capsys.readouterr()
        report: dict[str, Any] = json.loads(printed.out)
        return {**report, "text": printed.err}

    return run


# Two servers start, to have their start measured.
@pytest.mark.sweep
def test_a_whole_run(bench: RunJson, dummy_model: Path) -> None:
    report = bench(
        "--repeats",
        "2",
        "--decode-tokens",
        "4",
        "--batch-sizes",
        "3,1",
        "--contexts",
        "40,16",
        "--prefill",
        "2x64,1x100",
    )
    model, machine = report["model"], report["machine"]
    shape = model["shape"]
    assert (model["name"], shape["family"], model["dtype"]) == (str(dummy_model), "llama", "float32")
    assert (shape["layers"], shape["hidden_size"], shape["vocab_size"]) == (2, 64, 320)
    assert model["weight_bytes"] >= 4 * shape["parameters"]
    assert machine["device"] == "cpu"
    assert machine["threads"] == len(machine["cpus"])
    assert report["notes"] in (
        [],
        ["more was read than memory can deliver: the model, or much of it, was in the caches"],
    )
    assert set(report["ceilings"]) == {"read_bytes_per_second", "bfloat16_flops", "int8_ops", "float32_flops"}
    assert report["compute_ceiling"] == "float32_flops"
    assert [(p["prompts"], p["tokens"]) for p in report["prefill"]] == [(2, 64), (1, 100)]
    cases = [(d["batch_size"], d["context"]) for d in report["decode"]]
    assert cases == [(1, 16), (3, 16), (1, 40), (3, 40)]
    spreads = [*report["ceilings"].values(), report["startup"]["seconds"]]
    for result in (*report["prefill"], *report["decode"]):
        spreads.append(result["tokens_per_second"])
        assert result["flops_per_second"] > 0
        assert result["compute_fraction"] > 0
    for result in report["decode"]:
        if result["engine_tokens_per_second"] is not None:  # on a busy machine all tokens may arrive at once
            spreads.append(result["engine_tokens_per_second"])
        assert result["bytes_per_second"] > 0
        assert result["memory_fraction"] > 0
    assert all(0 < spread["min"] <= spread["median"] <= spread["max"] for spread in spreads)
    assert 0 < report["memory"]["server_ready"] <= report["memory"]["server_peak"]
    assert report["memory"]["bench_peak"] > 0
    for shown in (
        "2 x 64",
        "memory read ceiling",
        "with the engine",
        "start-up",
        "memory resident",
        report["bytes_counted"],
    ):
        assert shown in report["text"]


def test_parts_can_be_left_out(bench: RunJson) -> None:
    report = bench("--skip", "engine", "startup")
    assert report["startup"] is None
    assert report["memory"]["server_ready"] is report["memory"]["server_peak"] is None
    assert all(d["engine_tokens_per_second"] is None for d in report["decode"])


def test_a_shape_without_a_tokenizer_is_measured_as_far_as_it_goes(
    bench: RunJson, dummy_model: Path, tmp_path: Path
) -> None:
    (tmp_path / "config.json").write_bytes((dummy_model / "config.json").read_bytes())
    report = bench(model=tmp_path)
    assert report["decode"][0]["tokens_per_second"]["median"] > 0
    assert report["startup"] is None
    first, second, *_ = report["notes"]
    assert first.startswith("start-up was not measured: the server did not start: tidewheel serve: ")
    assert second.startswith("the engine was not measured: it needs a tokenizer, but ")


def test_long_contexts_that_do_not_fit_are_named(bench: RunJson, monkeypatch: pytest.MonkeyPatch) -> None:
    quick = replace(QUICK, ceilings_s=0.01, long_decodes=(Decode(1, 100), Decode(2, 800)))
    monkeypatch.setattr("tidewheel.server.commands.bench.command.QUICK", quick)
    report = bench("--skip", "engine", "startup")
    assert [(d["batch_size"], d["context"]) for d in report["decode"]] == [(1, 64), (4, 64), (1, 100)]
    assert "left out, because they do not fit: decodes of batch 2, context 800" in report["notes"]


# Torch is imported.
def test_the_torch_device(bench: RunJson) -> None:
    pytest.importorskip("torch")
    sizes = ("--prefill", "1x8", "--contexts", "8", "--batch-sizes", "1", "--decode-tokens", "2")
    report = bench("--device", "torch", "--skip", "startup", "--dtype", "bfloat16", *sizes)
    machine = report["machine"]
    assert (machine["device"], machine["isa"], machine["cpus"]) == ("torch", None, None)
    assert report["model"]["weight_bytes"] == 4 * report["model"]["shape"]["parameters"]
    assert report["compute_ceiling"] == "float32_flops"


@pytest.mark.sweep
def test_a_device_with_graphs(bench: RunJson) -> None:
    pytest.importorskip("torch")
    sizes = ("--prefill", "3x20", "--contexts", "16", "--batch-sizes", "3", "--decode-tokens", "2")
    few = ("--max-model-len", "64", "--max-num-seqs", "4", "--max-num-batched-tokens", "256", "--enforce-eager")
    report = bench("--device", "graph-cpu", "--skip", "startup", "--dtype", "bfloat16", *sizes, *few)
    assert (report["machine"]["device"], report["machine"]["cpus"]) == ("graph-cpu", None)
    assert report["model"]["weight_bytes"] == 2 * report["model"]["shape"]["parameters"]
    assert set(report["ceilings"]) == {"copy_bytes_per_second", "bfloat16_flops"}
    assert report["compute_ceiling"] == "bfloat16_flops"
    assert report["prefill"][0]["compute_fraction"] > 0
    assert report["decode"][0]["memory_fraction"] > 0
    padding = report["padding"]
    assert (padding["outside"], padding["compilations"]) == (0, 0)
    prompts = [used for used in padding["buckets"] if (used["phase"], used["sequences"]) == ("prompt", 4)]
    assert [(used["query_tokens"], used["waste"]) for used in prompts] == [(32, pytest.approx(1 - 60 / 128))]
    for shown in ("memory copy ceiling", "bfloat16 ceiling", "Padding by bucket"):
        assert shown in report["text"]


# The command is a process of its own.
@pytest.mark.sweep
def test_the_command_writes_a_file(dummy_model: Path, tmp_path: Path) -> None:
    target = tmp_path / "report.json"
    command = [*TIDEWHEEL, "bench", str(dummy_model), "--load-format", "dummy", "--quick"]
    options = [*_SHORT, "--skip", "startup", "engine", "--json", str(target)]
    done = subprocess.run([*command, *options], capture_output=True, text=True, check=True)
    assert json.loads(target.read_text())["model"]["name"] == str(dummy_model)
    assert "Decode, 2 tokens a sequence" in done.stdout


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--contexts", "600"], "a sequence of 608 tokens does not fit in the context of 512: lower --contexts"),
        (["--max-model-len", "64"], "a sequence of 72 tokens does not fit in the context of 64"),
        (["--prefill", "1x513"], "a sequence of 513 tokens does not fit"),
        (["--kv-cache-space", "0.0001"], "more than the 0.00 GiB of --kv-cache-space: raise it, or lower"),
        (["--batch-sizes", "100m"], "of memory is available: lower --batch-sizes"),
        (["--load-format", "auto"], "safetensors"),
        (["--threads-bind", "1000"], "this process may not use CPU 1000"),
        (["--json", "/nowhere/report.json"], "--json: there is no folder /nowhere"),
    ],
)
def test_what_does_not_fit_is_refused(
    dummy_model: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], message: str
) -> None:
    assert main(["bench", str(dummy_model), "--load-format", "dummy", "--quick", *arguments]) == 1
    assert message in capsys.readouterr().err


@pytest.mark.parametrize("name", ["deepseek-v3", "qwen3_next-experts"])
def test_experts_latents_and_recurrent_layers(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("transformers")
    folder = models_zoo.folder(name, tokenizer=True)
    arguments = ["--quick", "--skip", "startup", "--profile", "--batch-sizes", "1,3", "--json", "-"]
    assert main(["bench", str(folder), *arguments]) == 0
    printed = capsys.readouterr()
    report: dict[str, Any] = json.loads(printed.out)
    shape = report["model"]["shape"]
    assert shape["active"] < shape["parameters"]
    assert report["experts_counted"] in printed.err
    assert f"{shape['active'] / 1e6:.1f} M of them for each token" in printed.err
    for phase in (*report["prefill"], *report["decode"]):
        counted = {k["name"] for k in phase["profile"]["kernels"] if k["flops_per_second"] is not None}
        recurrent = {"convolution", "recurrence"} if shape["state_bytes"] else set()
        assert counted >= {"qkv", "attention", "out", "route", "up", "down", "head"} | recurrent


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--prefill", "512"], "'512' is not PROMPTSxTOKENS, such as 4x512"),
        (["--batch-sizes", "1,0"], "must be at least 1"),
        (["--batch-sizes", "1,a"], "'a' is not a number"),
        (["--decode-tokens", "1"], "--decode-tokens must be at least 2"),
        (["--repeats", "0"], "must be at least 1"),
        (["--context", "9"], "unknown option --context (did you mean --contexts?)"),
        (["--port", "9"], "unknown option --port"),
        (["serve", "--model", "m"], "there is no bench serve: tidewheel bench MODEL measures"),
    ],
)
def test_a_wrong_command_line_ends_with_2(
    capsys: pytest.CaptureFixture[str], arguments: list[str], message: str
) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["bench", *arguments])
    assert ended.value.code == 2
    assert message in capsys.readouterr().err


def test_lists_of_numbers() -> None:
    assert parse_prefills("4x512,1x4k") == (Prefill(4, 512), Prefill(1, 4000))
    assert parse_counts("32, 1,8,8") == (1, 8, 32)


def room(**changes: int | None) -> Room:
    limits: dict[str, Any] = {"longest_context": 512, "kv_bytes_per_token": 10, "state_bytes": 0, "weight_bytes": 1000}
    return Room(**{**limits, "kv_cache_limit_bytes": None, "available_bytes": None, **changes})


def test_the_cache_is_as_large_as_the_largest_part_needs() -> None:
    decodes = decodes_of((1, 8), (100,))
    workload = Workload(prefills=(Prefill(4, 512),), decodes=decodes, long_decodes=(), decode_tokens=8)
    assert (workload.longest, workload.max_sequences) == (512, 8)
    assert workload.kv_tokens == 4 * 640  # more than 8 sequences of 100 + 8 tokens
    assert replace(workload, decodes=(Decode(64, 100),)).kv_tokens == 64 * 128
    assert room(kv_cache_limit_bytes=25600, available_bytes=26600).kv_bytes(workload) == 25600
    with pytest.raises(ModelError, match=r"only 0\.00 GiB of memory is available"):
        room(available_bytes=26599).kv_bytes(workload)


def test_the_cache_has_room_for_states() -> None:
    workload = Workload(prefills=(Prefill(4, 100),), decodes=(Decode(5, 100),), long_decodes=(), decode_tokens=8)
    cache_bytes = room(state_bytes=1000).kv_bytes(workload)
    states = StateSplit.within(cache_bytes, 1000, workload.max_sequences)
    assert states.max_num_seqs == workload.max_sequences
    assert cache_bytes - states.num_bytes >= room().kv_bytes(workload)


def test_long_contexts_are_measured_where_they_fit() -> None:
    workload = Workload()
    assert workload.long_decodes == decodes_of((1, 8), (2000, 8000))
    assert room(longest_context=8192).fit(workload) == workload
    assert room(longest_context=2048).fit(workload).long_decodes == decodes_of((1, 8), (2000,))
    assert room(longest_context=512).fit(workload).long_decodes == ()
    tight: dict[str, Any] = {"longest_context": 8192, "kv_bytes_per_token": 1, "weight_bytes": 0}
    all_but_the_largest = (Decode(1, 2000), Decode(8, 2000), Decode(1, 8000))
    tokens = 8 * 2048
    assert room(**tight, kv_cache_limit_bytes=tokens).fit(workload).long_decodes == all_but_the_largest
    assert room(**tight, available_bytes=2 * tokens).fit(workload).long_decodes == all_but_the_largest


@pytest.mark.parametrize(
    ("arguments", "decodes", "long_decodes"),
    [
        ([], decodes_of((1, 8, 32), (128,)), decodes_of((1, 8), (2000, 8000))),
        (["--batch-sizes", "1,64"], decodes_of((1, 64), (128,)), decodes_of((1,), (2000, 8000))),
        (["--contexts", "4k"], decodes_of((1, 8, 32), (4000,)), ()),
        (["--quick"], decodes_of((1, 4), (64,)), ()),
        (["--quick", "--batch-sizes", "8"], decodes_of((8,), (64,)), ()),
    ],
)
def test_what_is_decoded(
    monkeypatch: pytest.MonkeyPatch,
    arguments: list[str],
    decodes: tuple[Decode, ...],
    long_decodes: tuple[Decode, ...],
) -> None:
    asked: list[Workload] = []

    def measure(given: Mapping[str, Any], workload: Workload, *rest: Any) -> None:
        asked.append(workload)
        raise ModelError("not measured")

    monkeypatch.setattr("tidewheel.server.commands.bench.command.measure", measure)
    assert main(["bench", *arguments]) == 1
    assert (asked[0].decodes, asked[0].long_decodes) == (decodes, long_decodes)


class RecordingExecutor(Executor):
    """Checks that a batch is one that the contract allows, and that a context is there before it is decoded."""

    def __init__(self, **limits: Any) -> None:
        self.limits = ExecutorLimits(block_size=16, num_blocks=64, max_num_seqs=8, max_num_batched_tokens=32, **limits)
        self.steps: list[tuple[int, int]] = []
        self._filled: set[tuple[int, int]] = set()

    def step(self, batch: StepBatch) -> StepOutput:
        """Writes the tokens' slots."""
        assert len(batch.token_ids) == batch.query_start[-1] <= self.limits.max_num_batched_tokens
        assert batch.token_ids.max() < 100
        for sequence, (start, end) in enumerate(zip(batch.query_start, batch.query_start[1:], strict=False)):
            positions = batch.positions[start:end]
            assert positions.tolist() == list(range(positions[0], positions[-1] + 1))
            assert batch.context_len[sequence] == positions[-1] + 1
            slots = [(int(batch.block_tables[sequence, p // 16]), p % 16) for p in range(positions[-1] + 1)]
            self._filled |= set(slots[positions[0] :])
            assert set(slots) <= self._filled
        assert len(set(batch.block_tables.ravel().tolist())) == batch.block_tables.size
        rows = len(batch.logits_rows)
        assert batch.sampling.position.tolist() == (batch.positions[batch.logits_rows] + 1).tolist()
        self.steps.append((len(batch.token_ids), rows))
        return StepOutput(np.zeros(rows, np.int32))

    def copy_blocks(self, pairs: Any, group: int = 0) -> None:
        """Copies what is known to be written."""
        for source, target in pairs.tolist():
            self._filled |= {(target, slot) for block, slot in self._filled if block == source}

    def warm_up(self, progress: Callable[[int, int], None]) -> None:
        """Nothing to compile."""

    def start(self, batch: StepBatch) -> OnWait:
        return OnWait(partial(self.step, batch))

    def close(self) -> None:
        """Nothing to free."""


class StatefulExecutor(RecordingExecutor):
    """Checks that a sequence goes on from its own state, at the position that this has come to, or repeats the last."""

    def __init__(self) -> None:
        super().__init__(num_states=16)
        self._come_to: dict[int, int] = {}

    def step(self, batch: StepBatch) -> StepOutput:
        assert batch.state_slots is not None
        assert len(set(batch.state_slots.tolist())) == len(batch.context_len)
        for slot, first, last in zip(batch.state_slots.tolist(), batch.query_start, batch.context_len, strict=False):
            start = int(batch.positions[first])
            assert start == 0 or start <= self._come_to[slot]
            self._come_to[slot] = int(last)
        return super().step(batch)

    def copy_states(self, pairs: Any) -> None:
        """Copies how far the states have come."""
        for source, target in pairs.tolist():
            self._come_to[target] = self._come_to[source]


def test_each_sequence_has_a_state_of_its_own() -> None:
    runs = DeviceRuns(StatefulExecutor(), vocab_size=100, seed=0)
    runs.prefill(Prefill(3, 40), repeats=2)
    for decode in (Decode(1, 20), Decode(3, 20), Decode(5, 70)):
        assert len(runs.decode(decode, num_tokens=3, repeats=2).seconds) == 2


def test_prefill_fills_the_steps_and_samples_a_prompt_once() -> None:
    executor = RecordingExecutor()
    times = DeviceRuns(executor, vocab_size=100, seed=0).prefill(Prefill(3, 40), repeats=2)
    assert len(times.seconds) == 2
    assert times.kernels is None
    assert executor.steps[-4:] == [(32, 0), (32, 1), (32, 1), (24, 1)]


def test_prefill_obeys_the_device() -> None:
    executor = RecordingExecutor(chunked_prefill=False)
    runs = DeviceRuns(executor, vocab_size=100, seed=0)
    runs.prefill(Prefill(3, 15), repeats=1)
    assert executor.steps[-2:] == [(30, 2), (15, 1)]
    runs.decode(Decode(1, 20), num_tokens=2, repeats=1)
    runs.decode(Decode(1, 30), num_tokens=2, repeats=1)
    assert [tokens for tokens, _ in executor.steps[-8:]] == [20, 1, 1, 1, 30, 1, 1, 1]
    executor = RecordingExecutor(max_prefill_seqs=1)
    DeviceRuns(executor, vocab_size=100, seed=0).prefill(Prefill(2, 40), repeats=1)
    assert executor.steps[-4:] == [(32, 0), (8, 1), (32, 0), (8, 1)]


def test_a_long_context_repeats_its_first_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device_runs, "_COMPUTED_TOKENS", 40)
    executor = RecordingExecutor()
    runs = DeviceRuns(executor, vocab_size=100, seed=0)
    assert len(runs.decode(Decode(2, 150), num_tokens=3, repeats=2).seconds) == 2
    assert executor.steps[0] == (32, 1)  # two blocks of 16
    assert {tokens for tokens, _ in executor.steps[1:]} == {2}


def test_decode_goes_on_from_its_context() -> None:
    executor = RecordingExecutor()
    times = DeviceRuns(executor, vocab_size=100, seed=0).decode(Decode(3, 20), num_tokens=5, repeats=2)
    assert len(times.seconds) == 2
    assert executor.steps[0] == (20, 1)
    assert executor.steps[-10:] == [(3, 3)] * 10


def test_a_longer_context_goes_on_from_a_shorter_one() -> None:
    executor = RecordingExecutor()
    runs = DeviceRuns(executor, vocab_size=100, seed=0)
    for decode in (Decode(1, 20), Decode(3, 20), Decode(3, 70)):
        runs.decode(decode, num_tokens=2, repeats=1)
    filled = [tokens for tokens, rows in executor.steps if tokens not in (1, 3)]
    assert filled == [20, 32, 18]


class PaddingExecutor(RecordingExecutor):
    """Says what a device of static shapes says."""

    def stats(self) -> BucketStats:
        """Two launches of one bucket, with half of the second one empty."""
        return BucketStats((BucketUse("prompt", Bucket(2, 16, 1), 2, 48),), num_outside=1, num_compilations=3)


def test_padding_is_shown_by_bucket() -> None:
    assert padding_of(RecordingExecutor()) is None
    padding = padding_of(PaddingExecutor())
    assert padding is not None
    assert padding.buckets == [BucketResult("prompt", 2, 16, 1, 2, 48, 64, 0.25)]
    shown = render_padding(padding)
    assert re.search(r"prompt +2 +16 +1 +2 +0\.25\n", shown)
    assert "1 launches were larger than all buckets, 3 compilations after the warm-up" in shown


class CountingProfiler:
    """Says that each kernel was called once a step, which took what the test says."""

    def __init__(self, executor: RecordingExecutor, seconds: dict[str, float]) -> None:
        self.recording = False
        self._executor = executor
        self._seconds = seconds
        self._steps_before = 0

    def start_profile(self) -> None:
        """Counts from here."""
        self.recording, self._steps_before = True, len(self._executor.steps)

    def profile(self) -> dict[str, tuple[int, float]]:
        """The steps so far."""
        assert self.recording
        steps = len(self._executor.steps) - self._steps_before
        return {name: (steps, steps * seconds) for name, seconds in self._seconds.items()}

    def stop_profile(self) -> None:
        """Counts no more."""
        self.recording = False


def test_kernels_are_recorded_in_runs_of_their_own() -> None:
    executor = RecordingExecutor()
    profiler = CountingProfiler(executor, {"qkv": 0.25, "attention": 0.5})
    times = DeviceRuns(executor, vocab_size=100, seed=0, profiler=profiler).decode(Decode(2, 20), 4, repeats=3)
    assert len(times.seconds) == 3
    assert times.kernels is not None
    assert times.kernels.steps == 4
    assert times.kernels.kernels == {"qkv": (4, 1.0), "attention": (4, 2.0)}
    assert not profiler.recording
    assert executor.steps[-24:] == [(2, 2)] * 24


def test_a_profile_is_held_against_the_ceilings(bench: RunJson, monkeypatch: pytest.MonkeyPatch) -> None:
    class FixedProfiler:
        """Every phase took the same."""

        def start_profile(self) -> None:
            """Nothing to forget."""

        def profile(self) -> dict[str, tuple[int, float]]:
            """Names with and without known work, and one that took no time."""
            return {"embed": (8, 1e-6), "qkv": (16, 2e-6), "attention": (16, 1e-6), "head": (8, 0.0)}

        def stop_profile(self) -> None:
            """Nothing to stop."""

    def load(planned: Plan) -> LoadedModel:
        without = replace(planned, workload=replace(planned.workload, profile=False))
        return replace(load_model(without), profiler=FixedProfiler())

    monkeypatch.setattr("tidewheel.server.commands.bench.measure.load", load)
    report = bench("--profile", "--skip", "engine", "startup", "--batch-sizes", "4")
    (decode,) = report["decode"]
    profile = decode["profile"]
    assert profile["steps"] == 8
    embed, qkv, attention, head = profile["kernels"]
    assert (qkv["name"], qkv["calls_per_step"], qkv["ms_per_step"]) == ("qkv", 2, pytest.approx(2e-6 / 8 * 1e3))
    assert embed["flops_per_second"] is head["flops_per_second"] is None
    assert qkv["flops_per_second"] == pytest.approx(2 * 2 * 64 * (64 + 2 * 32) * 4 * 8 / 2e-6)
    assert qkv["compute_fraction"] > 0
    assert attention["memory_fraction"] > 0
    assert sum(k["ms_per_step"] for k in profile["kernels"]) + profile["other_ms_per_step"] == pytest.approx(
        profile["ms_per_step"]
    )
    assert report["prefill"][0]["profile"]["kernels"][2]["bytes_per_second"] is None
    for title in ("Kernels of prefill 2 x 64, a step", "Kernels of decode batch 4, context 64, a step"):
        assert title in report["text"]


def test_a_device_without_a_profile_is_named(dummy_model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("torch")
    arguments = ["--load-format", "dummy", "--device", "torch", "--quick", "--skip", "startup", "--profile"]
    assert main(["bench", str(dummy_model), *arguments]) == 1
    assert "--profile is not supported by the torch device" in capsys.readouterr().err


def test_the_cpu_device_times_its_kernels(bench: RunJson) -> None:
    report = bench("--profile", "--skip", "engine", "startup")
    for phase in (*report["prefill"], *report["decode"]):
        kernels = {kernel["name"]: kernel for kernel in phase["profile"]["kernels"]}
        assert {"qkv", "attention", "out", "up", "down", "head"} <= set(kernels)
        assert kernels["qkv"]["calls_per_step"] == 2
        assert sum(kernel["share"] for kernel in kernels.values()) < 1


def test_the_kernels_of_a_model(bench: RunJson) -> None:
    report = bench("--kernels", *_SHORT)
    assert (report["shape"]["layers"], report["shape"]["hidden_size"]) == (2, 64)
    together, *alone = report["runs"]
    assert together["weights"] == "float32"
    assert [run["machine"]["threads"] for run in alone] == [1] * (together["machine"]["threads"] > 1)
    names = ["qkv", "attention", "out", "up", "down", "head"]
    phases = ["prefill 1 x 8", "decode 1 after 8", "decode 2 after 8"]
    for run in report["runs"]:
        assert [(r["phase"], r["kernel"]) for r in run["rates"]] == [(p, name) for p in phases for name in names]
        assert all(r["ops_per_second"] > 0 and r["compute_fraction"] > 0 for r in run["rates"])
        decodes = [r for r in run["rates"] if r["phase"].startswith("decode")]
        assert all(r["memory_fraction"] > 0 for r in decodes)
        # Attention is of the floats' ceiling, here as all else.
        assert run["compute_ceiling"] == "float32_flops"
    for shown in ("2 layers, hidden size 64", "decode 2 after 8", "1 thread;", report["ops_counted"]):
        assert shown in report["text"]


def test_the_kernels_of_a_built_in_shape_in_each_format(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    tiny = {"hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 2, "num_key_value_heads": 1}
    for name, value in {**tiny, "vocab_size": 320}.items():
        monkeypatch.setitem(kernels._CONFIG, name, value)

    def formats(*arguments: str) -> list[str]:
        assert main(["bench", "--kernels", "--quick", "--threads-bind", "0", *_SHORT, *arguments, "--json", "-"]) == 0
        return [run["weights"].partition(" ")[0] for run in json.loads(capsys.readouterr().out)["runs"]]

    assert formats() == ["bfloat16", "int8", "int8-channel", "int4", "int4-fast"]
    assert formats("--quantization", "q4_k_m") == ["q4_k_m"]


def test_only_kernels_of_the_cpu_device_are_measured(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "--kernels", "--device", "torch"]) == 1
    assert "--kernels measures the kernels of the cpu device: drop --device" in capsys.readouterr().err


@pytest.mark.parametrize("method", ["int8", "int8-channel", "int4"])
def test_integer_weights_are_held_against_the_integer_ceiling(bench: RunJson, method: str) -> None:
    report = bench("--skip", "engine", "startup", "--quantization", method)
    assert report["compute_ceiling"] == "int8_ops"
    assert report["model"]["dtype"].startswith(method)
    assert report["model"]["weight_bytes"] < 2 * report["model"]["shape"]["parameters"]
    assert report["decode"][0]["memory_fraction"] > 0


def test_the_server_that_is_started_gets_the_same_options() -> None:
    arguments = ["--model", "m", "--dtype", "float32", "--cache-dir", "kept", "--max-model-len", "4096"]
    arguments += ["--no-enable-prefix-caching", "--threads-bind", "0", "--step-timeout", "0"]
    parser = model_parser("bench", "")
    given = read_model_options(parser.parse_known(arguments), Mistakes(), {})
    assert serve_arguments(given) == arguments
    assert serve_arguments({}) == []


def test_the_environment_does_not_change_the_server_that_is_started(
    dummy_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TIDEWHEEL_MAX_MODEL_LEN", "nonsense")
    startup = measure_startup([str(dummy_model), "--load-format", "dummy"], 1)
    assert startup.seconds.min == startup.seconds.max > 0


def test_spread() -> None:
    assert Spread.of([3.0, 1.0, 2.0]) == Spread(2.0, 1.0, 3.0)
