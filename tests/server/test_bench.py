"""`tidewheel bench`: what it counts, what it refuses, and the shape of what it reports. How fast is nobody's test."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from server.conftest import TIDEWHEEL

from tidewheel.engine.batch import StepBatch, StepOutput
from tidewheel.engine.devices.base import ExecutorLimits
from tidewheel.engine.errors import ModelError
from tidewheel.engine.models import describe
from tidewheel.server.bench.costs import Costs
from tidewheel.server.bench.device_runs import DeviceRuns
from tidewheel.server.bench.measure import serve_arguments
from tidewheel.server.bench.spread import Spread
from tidewheel.server.bench.startup import measure_startup
from tidewheel.server.bench.workload import Prefill, Workload, check_fits, parse_counts, parse_prefills
from tidewheel.server.cli import main
from tidewheel.server.options import ModelOptions

pytest.importorskip("tidewheel._native")

RunJson = Callable[..., dict[str, Any]]


@pytest.fixture
def bench(dummy_model: Path, capsys: pytest.CaptureFixture[str]) -> RunJson:
    """`tidewheel bench --quick` of the dummy model; returns the JSON, and the table under "text"."""

    def run(*arguments: str, model: Path = dummy_model) -> dict[str, Any]:
        assert main(["bench", str(model), "--load-format", "dummy", "--quick", *arguments, "--json", "-"]) == 0
        printed = capsys.readouterr()
        report: dict[str, Any] = json.loads(printed.out)
        return {**report, "text": printed.err}

    return run


def test_a_whole_run(bench: RunJson, dummy_model: Path) -> None:
    report = bench("--repeats", "2", "--batch-sizes", "3,1", "--contexts", "40,16", "--prefill", "2x64,1x100")
    model, machine = report["model"], report["machine"]
    assert (model["name"], model["family"], model["dtype"]) == (str(dummy_model), "llama", "float32")
    assert (model["num_layers"], model["hidden_size"], model["vocab_size"]) == (2, 64, 320)
    assert model["weight_bytes"] >= 4 * model["parameters"] - 4 * 64 * 320
    assert machine["device"] == "cpu"
    assert machine["threads"] == len(machine["cpus"])
    assert report["notes"] in (
        [],
        ["more was read than memory can give: the model, or much of it, comes from the caches"],
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


def test_the_torch_device(bench: RunJson) -> None:
    pytest.importorskip("torch")
    sizes = ("--prefill", "1x8", "--contexts", "8", "--batch-sizes", "1", "--decode-tokens", "2")
    report = bench("--device", "torch", "--skip", "startup", "--dtype", "bfloat16", *sizes)
    machine = report["machine"]
    assert (machine["device"], machine["isa"], machine["cpus"]) == ("torch", None, None)
    assert report["model"]["weight_bytes"] == 4 * report["model"]["parameters"]
    assert report["compute_ceiling"] == "float32_flops"


def test_the_command_writes_a_file(dummy_model: Path, tmp_path: Path) -> None:
    target = tmp_path / "report.json"
    command = [*TIDEWHEEL, "bench", str(dummy_model), "--load-format", "dummy", "--quick"]
    done = subprocess.run(
        [*command, "--skip", "startup", "--json", str(target)], capture_output=True, text=True, check=True
    )
    assert json.loads(target.read_text())["model"]["name"] == str(dummy_model)
    assert "Decode, 8 tokens a sequence" in done.stdout


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--contexts", "600"], "a sequence of 608 tokens does not fit in the context of 512: lower --contexts"),
        (["--max-model-len", "64"], "a sequence of 72 tokens does not fit in the context of 64"),
        (["--prefill", "1x513"], "a sequence of 513 tokens does not fit"),
        (["--kv-cache-space", "0.0001"], "more than the 0.00 GiB of --kv-cache-space: raise it, or lower"),
        (["--batch-sizes", "100m"], "of memory is available: lower --batch-sizes"),
        (["--load-format", "auto"], "safetensors"),
        (["--threads-bind", "1000"], "CPU 1000 is not one this process may use"),
        (["--json", "/nowhere/report.json"], "--json: there is no folder /nowhere"),
    ],
)
def test_what_does_not_fit_is_refused(
    dummy_model: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], message: str
) -> None:
    assert main(["bench", str(dummy_model), "--load-format", "dummy", "--quick", *arguments]) == 1
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--prefill", "512"], "'512' is not PROMPTSxTOKENS, such as 4x512"),
        (["--batch-sizes", "1,0"], "must be at least 1"),
        (["--batch-sizes", "1,a"], "'a' is not a number"),
        (["--decode-tokens", "1"], "--decode-tokens must be at least 2"),
        (["--repeats", "0"], "must be at least 1"),
        (["--context", "9"], "unknown option --context; did you mean --contexts?"),
        (["--port", "9"], "unknown option --port"),
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


def test_the_cache_is_as_large_as_the_largest_part_needs() -> None:
    workload = Workload(prefills=(Prefill(4, 512),), batch_sizes=(1, 8), contexts=(100,), decode_tokens=8)
    assert (workload.longest, workload.most_sequences) == (512, 8)
    assert workload.kv_tokens == 4 * 640  # more than 8 sequences of 100 + 8 tokens
    assert replace(workload, batch_sizes=(64,)).kv_tokens == 64 * 128
    limits = {"longest_context": 512, "kv_bytes_per_token": 10, "weight_bytes": 1000}
    kv_bytes = check_fits(workload, **limits, kv_cache_limit_bytes=25600, available_bytes=26600)
    assert kv_bytes == 25600
    with pytest.raises(ModelError, match=r"only 0\.00 GiB of memory is available"):
        check_fits(workload, **limits, kv_cache_limit_bytes=None, available_bytes=26599)


def shape(**changes: Any) -> Any:
    config = {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 8, "intermediate_size": 24,
        "num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 2, "vocab_size": 50,
        "max_position_embeddings": 64, "rms_norm_eps": 1e-5, "rope_theta": 10000.0, "hidden_act": "silu",
        "tie_word_embeddings": True,
    }  # fmt: skip
    return describe({**config, **changes}).spec


LAYER = 8 * 8 + 2 * 4 * 8 + 8 * 8 + 3 * 8 * 24


@pytest.mark.parametrize("tied", [True, False])
def test_flops(tied: bool) -> None:
    costs = Costs(shape(tie_word_embeddings=tied), weight_bytes=1, kv_bytes_per_token=1)
    assert costs.parameters == 3 * (LAYER + 16) + 8 + 50 * 8 * (1 if tied else 2)
    # Tokens at positions 5 and 6 attend to 6 and 7 tokens, with 4 heads of 2 dimensions in 3 layers.
    assert costs.flops(5, 2, 1) == 2 * (2 * 3 * LAYER + 50 * 8) + 4 * (6 + 7) * 4 * 2 * 3


def test_bytes_of_a_decode_step() -> None:
    tied = Costs(shape(), weight_bytes=6000, kv_bytes_per_token=48)
    assert tied.decode_bytes(10, 1, 5) == 6000 + 5 * 11 * 48
    assert tied.decode_bytes(10, 2, 5) == 2 * 6000 + 5 * (11 + 12) * 48
    untied = Costs(shape(tie_word_embeddings=False), weight_bytes=0, kv_bytes_per_token=48)
    whole = Costs(shape(tie_word_embeddings=False), weight_bytes=2 * untied.parameters, kv_bytes_per_token=48)
    assert whole.weight_bytes_read == 2 * (whole.parameters - 50 * 8)  # the embedding is looked up, not read


def test_a_sliding_window_bounds_both() -> None:
    mistral = shape(architectures=["MistralForCausalLM"], model_type="mistral", sliding_window=4)
    costs = Costs(mistral, weight_bytes=0, kv_bytes_per_token=48)
    assert costs.decode_bytes(10, 1, 1) == 4 * 48
    assert costs.flops(0, 6, 0) == 2 * 6 * 3 * LAYER + 4 * (1 + 2 + 3 + 4 + 4 + 4) * 4 * 2 * 3


class RecordingExecutor:
    """Checks that a batch is one that the contract allows, and that a context is there before it is decoded."""

    def __init__(self) -> None:
        self.limits = ExecutorLimits(block_size=16, num_blocks=64, max_num_seqs=8, max_num_batched_tokens=32)
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

    def copy_blocks(self, pairs: Any) -> None:
        """Copies what is known to be written."""
        for source, target in pairs.tolist():
            self._filled |= {(target, slot) for block, slot in self._filled if block == source}

    def close(self) -> None:
        """Nothing to free."""


def test_prefill_fills_the_steps_and_samples_a_prompt_once() -> None:
    executor = RecordingExecutor()
    seconds = DeviceRuns(executor, vocab_size=100, seed=0).prefill(Prefill(3, 40), repeats=2)
    assert len(seconds) == 2
    assert executor.steps[-4:] == [(32, 0), (32, 1), (32, 1), (24, 1)]


def test_decode_goes_on_from_its_context() -> None:
    executor = RecordingExecutor()
    seconds = DeviceRuns(executor, vocab_size=100, seed=0).decode(3, context=20, num_tokens=5, repeats=2)
    assert len(seconds) == 2
    assert executor.steps[0] == (20, 1)
    assert executor.steps[-10:] == [(3, 3)] * 10


def test_the_server_that_is_started_gets_the_same_options() -> None:
    options = ModelOptions(model="m", dtype="float32", max_model_len=4096, enable_prefix_caching=False)
    expected = ["m", "--dtype", "float32", "--max-model-len", "4096", "--no-enable-prefix-caching"]
    assert serve_arguments(options) == expected
    assert serve_arguments(ModelOptions()) == []


def test_the_environment_does_not_change_the_server_that_is_started(
    dummy_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TIDEWHEEL_MAX_MODEL_LEN", "nonsense")
    startup = measure_startup([str(dummy_model), "--load-format", "dummy"], 1)
    assert startup.seconds.min == startup.seconds.max > 0


def test_spread() -> None:
    assert Spread.of([3.0, 1.0, 2.0]) == Spread(2.0, 1.0, 3.0)
