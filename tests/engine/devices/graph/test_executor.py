"""The graph executor's promises in addition to right tokens: padding harms nothing, and nothing compiles later."""

from __future__ import annotations

import logging
from functools import partial
from typing import Any

import models_zoo
import numpy as np
import pytest
from engine.devices.made_models import PLAIN, RandomWeights, decoder
from harness import Harness, Running, check_greedy
from logits import run_with_logits
from optional_packages import require_packages

from tidewheel.engine.cancellation import Cancellation, LoadCancelledError
from tidewheel.engine.devices.batch import SamplingBatch, StepBatch, TokenMasks
from tidewheel.engine.devices.graph.options import GraphOptions
from tidewheel.engine.devices.memory_options import MemoryOptions
from tidewheel.engine.devices.sampling import sample
from tidewheel.engine.errors import DeviceError

torch = pytest.importorskip("torch")
require_packages("transformers")

from engine.devices.graph.loading import EAGER, FEW, load  # noqa: E402

from engine.devices.graph import adapters  # noqa: E402

LONG, SHORT = models_zoo.prompts()[-1], models_zoo.prompts()[4]
BLOCK = 16


@pytest.fixture(scope="module", autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture
def caches(monkeypatch: pytest.MonkeyPatch) -> list[torch.Tensor]:
    """The K and V of all layers that a test loads, `[blocks, block_size, ...]` each, in the layers' order."""
    made: list[torch.Tensor] = []
    zeros = torch.zeros

    def recording(*shape: Any, **options: Any) -> torch.Tensor:
        tensor = zeros(*shape, **options)
        if tensor.dim() == 3 and len(tensor):
            made.append(tensor.view(-1, BLOCK, *tensor.shape[1:]))
        return tensor

    monkeypatch.setattr(torch, "zeros", recording)
    return made


@pytest.mark.parametrize("name", ["llama", "qwen2-window", "gemma3", "mpt"])
def test_a_cache_full_of_nan_changes_nothing_and_padding_writes_to_its_own_block(
    name: str, caches: list[torch.Tensor]
) -> None:
    executor = load(models_zoo.folder(name))
    assert caches
    assert executor.limits.block_size == BLOCK
    for cache in caches:
        cache.fill_(torch.nan)
    harness = Harness(executor)
    sequences = [harness.start(prompt, 40) for prompt in models_zoo.prompts()]
    while running := [s for s in sequences if len(s.output) < 40]:
        harness.step(running, chunk=7)
    check_greedy(name, sequences)
    for cache in caches:
        # Groups have caches of different sizes.
        ((number, group),) = (it for it in enumerate(executor.limits.groups) if it[1].num_blocks + 1 == len(cache))
        used = {block for sequence in sequences for block in sequence.tables[number]}
        unused = [block for block in range(group.num_blocks) if block not in used]
        assert unused
        assert cache[unused].isnan().all()
        assert not cache[group.padding_block].isnan().all(), "nothing was padded"


@pytest.mark.parametrize("name", ["llama", "qwen2-window", "gemma3", "opt", "mpt"])
def test_whole_prompts_run_together(name: str) -> None:
    executor = load(models_zoo.folder(name))
    check_greedy(name, Harness(executor, seed=1).generate(models_zoo.prompts(), 8))
    assert executor.stats().num_outside == 0
    prompts = [use for use in executor.stats().uses if use.phase == "prompt"]
    assert any(use.bucket.batch_size > 1 for use in prompts)


def test_a_window_that_was_left_behind_may_hold_anything(caches: list[torch.Tensor]) -> None:
    executor = load(models_zoo.folder("mistral-window"))
    harness = Harness(executor)
    sequence = harness.start(LONG, 32)
    while len(sequence.output) < 32:
        harness.step([sequence], chunk=9)
        for block in range((sequence.cached - 20) // executor.limits.block_size):
            for cache in caches:
                cache[sequence.blocks[block]] = torch.nan
            sequence.blocks[block] = executor.limits.padding_block
    check_greedy("mistral-window", [sequence])


def test_a_prompt_goes_on_from_blocks_of_another() -> None:
    executor = load(models_zoo.folder("llama"))
    harness = Harness(executor)
    first = harness.start(LONG, 16)
    harness.step([first])
    second = harness.start(LONG, 16)
    second.tables[0][:2], second.cached = first.blocks[:2], 32
    harness.step([second, harness.start(SHORT, 4), first])
    np.testing.assert_allclose(second.logits[0], first.logits[0], atol=1e-4)
    assert ("prompt", (1, 32, 4)) in [(use.phase, use.bucket) for use in executor.stats().uses]


@pytest.mark.parametrize("count", [1, 5, 100])
def test_copied_blocks_continue_like_the_original(count: int, caches: list[torch.Tensor]) -> None:
    executor = load(models_zoo.folder("llama"), num_blocks=300)
    rest = range(300)
    for cache in caches:
        cache.copy_(torch.arange(len(cache)).view(-1, 1, 1, 1).expand_as(cache))
    pairs = np.random.default_rng(2).permutation(rest)[: 2 * count].reshape(2, count).T
    executor.copy_blocks(np.ascontiguousarray(pairs, np.int32))
    expected = np.arange(300)
    expected[pairs[:, 1]] = pairs[:, 0]
    for cache in caches:
        assert (cache[:300] == torch.from_numpy(expected).view(-1, 1, 1, 1)).all()


def test_groups_are_copied_apart(caches: list[torch.Tensor]) -> None:
    executor = load(models_zoo.folder("gemma3"))
    for cache in caches:
        cache.copy_(torch.arange(len(cache)).view(-1, 1, 1, 1).expand_as(cache))
    executor.copy_blocks(np.array([[3, 5]], np.int32), 1)
    # The first layer has a window, the second sees everything.
    assert [int(cache[5, 0, 0, 0]) for cache in caches] == [3, 3, 5, 5]


def test_a_step_larger_than_all_buckets_runs_unpadded_which_is_said_once(caplog: pytest.LogCaptureFixture) -> None:
    options = GraphOptions(enforce_eager=True, prompt_seq_bucket_max=32, decode_seq_bucket_max=48)
    executor = load(models_zoo.folder("llama"), options)
    harness = Harness(executor)
    with caplog.at_level(logging.WARNING):
        sequences = harness.generate([LONG, SHORT], 12)
    check_greedy("llama", sequences)
    (record,) = [record for record in caplog.records if "larger than all buckets" in record.message]
    assert "A prompt of 1 sequences, 48 tokens" in record.message
    assert "--prompt-seq-bucket-max" in record.message
    assert executor.stats().num_outside == 12  # the long prompt, and its decodes
    assert sum(use.num_tokens for use in executor.stats().uses) == len(SHORT) + 11


def test_uses_count_tokens_and_padding() -> None:
    executor = load(models_zoo.folder("llama"))
    harness = Harness(executor)
    harness.generate([SHORT, SHORT, LONG], 3)
    uses = {(use.phase, use.bucket): use for use in executor.stats().uses}
    prompts, decodes = uses["prompt", (2, 32, 2)], uses["decode", (4, 1, 4)]
    assert (prompts.num_launches, prompts.num_tokens, prompts.num_padded_tokens) == (1, 2 * len(SHORT), 64)
    assert (decodes.num_launches, decodes.num_tokens, decodes.num_padded_tokens) == (2, 6, 8)


def rows_batch(executor: Any, sampling: SamplingBatch, rows: list[int]) -> StepBatch:
    """A prompt of 20 tokens in the first blocks."""
    return StepBatch(
        token_ids=np.array(LONG[:20], np.int32),
        positions=np.arange(20, dtype=np.int32),
        query_start=np.array([0, 20], np.int32),
        context_len=np.array([20], np.int32),
        block_tables=np.array([[0, 1, executor.limits.padding_block]], np.int32),
        logits_rows=np.array(rows, np.int32),
        sampling=sampling,
    )


def test_rows_may_ask_for_anything() -> None:
    executor = load(models_zoo.folder("llama"))
    rows = [19, 3, 19, 7, 19, 19, 12, 19, 5]
    count = len(rows)
    sampling = SamplingBatch.greedy(np.array(rows) + 1)
    sampling.temperature[[2, 3, 4]] = 0.9
    sampling.seed[:] = np.arange(count)
    sampling.num_logprobs[[1, 4]] = (3, 0)
    sampling.history_start = np.array([0] * 6 + [4] * (count - 5), np.int32)
    sampling.history_ids = np.array([1, 2, 3, 3], np.int32)
    sampling.repetition_penalty[5] = 5
    sampling.bias_start = np.array([0] * 7 + [1] * (count - 6), np.int32)
    sampling.bias_ids, sampling.bias_values = np.array([11], np.int32), np.array([100.0], np.float32)
    sampling.target = np.full(count, -1, np.int32)
    sampling.target[8] = 17
    sampling.num_logprobs[8] = 2
    bits = np.zeros((1, 10), np.uint32)
    written: list[bool] = []

    def write() -> None:
        bits[0, 1] = 1 << 4
        written.append(True)

    sampling.masks = TokenMasks(bits, np.array([-1] * 7 + [0, -1], np.int32), write)
    output = executor.start(rows_batch(executor, sampling, rows)).wait()
    assert written
    assert output.token_ids[[6, 7, 8]].tolist() == [11, 36, 17]
    _, logits = run_with_logits(executor, rows_batch(executor, sampling, rows))
    expected = sample(logits, sampling)
    assert output.token_ids.tolist() == expected.token_ids.tolist()
    np.testing.assert_allclose(output.logprobs, expected.logprobs, atol=1e-5)
    np.testing.assert_array_equal(output.top_ids, expected.top_ids)
    np.testing.assert_array_equal(output.ranks, expected.ranks)


def test_more_rows_than_a_head_takes_are_several_launches() -> None:
    executor = load(models_zoo.folder("llama"), max_num_seqs=8)
    rows = [i % 20 for i in range(50)]
    for temperature in (0.0, 0.8):
        sampling = SamplingBatch.greedy(np.array(rows) + 1)
        sampling.temperature[:], sampling.seed[:] = temperature, np.arange(50)
        tokens = executor.start(rows_batch(executor, sampling, rows)).wait().token_ids
        output, _ = run_with_logits(executor, rows_batch(executor, sampling, rows))
        assert tokens.tolist() == output.token_ids.tolist()


def test_a_step_without_rows_gives_none() -> None:
    executor = load(models_zoo.folder("llama"))
    output = executor.start(rows_batch(executor, SamplingBatch.greedy([]), [])).wait()
    assert output.token_ids.size == 0


# Torch traces each size of a launch, of layers of two kinds. In `make test`, test_served.py has warm-ups after which
# nothing compiles, and test_flex_attention.py has torch compile.
@pytest.mark.sweep
def test_compiled_launches_give_the_same_tokens_and_nothing_compiles_after_the_warm_up() -> None:
    from torch._dynamo.utils import counters

    make_device = partial(adapters.device, adapters.GuardedAdapter, False)
    executor = load(models_zoo.folder("gemma3"), FEW, make_device=make_device, max_num_seqs=4, max_model_len=64)
    progress: list[tuple[int, int]] = []
    executor.warm_up(lambda done, steps: progress.append((done, steps)))
    assert progress[-1][0] == progress[-1][1] > 0
    graphs = counters["stats"]["unique_graphs"]
    prompts = models_zoo.prompts()[3:7]
    for chunk in (9, 2048):
        check_greedy("gemma3", Harness(executor, seed=chunk).generate(prompts, 12, chunk))
    sampling = SamplingBatch.greedy([20])
    sampling.temperature[:] = 0.7
    batch = rows_batch(executor, sampling, [19])
    batch.window_tables = (batch.block_tables,)
    assert executor.start(batch).wait().token_ids[0] >= 0
    executor.copy_blocks(np.array([[1, 2], [3, 4]], np.int32), 0)
    assert executor.stats().num_compilations == executor.stats().num_outside == 0
    assert counters["stats"]["unique_graphs"] == graphs


@pytest.mark.sweep
def test_there_may_be_many_buckets() -> None:
    from torch._dynamo.utils import counters

    options = GraphOptions(
        prompt_bs_bucket_max=1, prompt_seq_bucket_min=160, decode_bs_bucket_min=8, decode_seq_bucket_min=16
    )
    make_device = partial(adapters.device, adapters.GuardedAdapter, False)
    model = decoder(PLAIN), RandomWeights(decoder(PLAIN))
    executor = load(model, options, make_device=make_device, max_num_seqs=8, max_model_len=160)
    executor.warm_up(lambda done, steps: None)
    graphs = counters["stats"]["unique_graphs"]
    prompts = [[i] for i in range(9, 13)]
    sequences = Harness(executor).generate(prompts, 155)
    assert len({use.bucket for use in executor.stats().uses if use.phase == "decode"}) > 8
    assert counters["stats"]["unique_graphs"] == graphs
    eager = Harness(load(model)).generate(prompts, 155)
    assert [s.output for s in sequences] == [s.output for s in eager]


# Torch compiles three functions. In `make test`, test_served.py has an HPU that tells of such compilations.
@pytest.mark.sweep
def test_without_a_warm_up_sizes_are_compiled_when_they_are_needed() -> None:
    make_device = partial(adapters.device, adapters.TracingAdapter, False)
    executor = load(models_zoo.folder("llama"), GraphOptions(skip_warmup=True), make_device=make_device)
    executor.warm_up(lambda done, steps: None)
    check_greedy("llama", Harness(executor).generate([SHORT], 3))
    assert executor.stats().num_compilations == 3  # of a prompt, a decode, and the head that returns logits


class TestOwnMemory:
    """A device with memory of its own, in bfloat16."""

    @pytest.fixture(autouse=True)
    def _no_calls(self) -> None:
        adapters.ScriptedAdapter.calls.clear()

    def load(self, **changes: Any) -> Any:
        make_device = partial(adapters.device, adapters.ScriptedAdapter, True)
        options = GraphOptions(graph_reserved_mem=0.25, prompt_bs_bucket_max=1)
        memory = MemoryOptions(gpu_memory_utilization=0.5)
        arguments = {"dtype": "bfloat16", "num_blocks": None, "kv_cache_bytes": None, "max_num_batched_tokens": 1024}
        return load(models_zoo.folder("llama"), options, memory=memory, make_device=make_device, **arguments | changes)

    def test_the_cache_gets_what_weights_and_graphs_leave(self) -> None:
        limits = self.load().limits
        block_bytes = 2 * 2 * 32 * 2 * 16  # layers, K and V, KV heads and their size, bytes, tokens
        assert limits.num_blocks == (1 << 30) * 3 // 8 // block_bytes
        assert not limits.mixed_steps
        assert not limits.chunked_prefill
        assert limits.max_prefill_seqs == 1

    def test_whole_prompts_bound_the_buckets(self, caplog: pytest.LogCaptureFixture) -> None:
        caplog.set_level(logging.INFO)
        self.load(max_model_len=4096)
        assert "seq:[16, 16, 1024]" in caplog.text
        assert "a sequence has at most 64 blocks" in caplog.text

    def test_the_largest_launches_are_run_before_the_memory_is_measured(self) -> None:
        self.load()
        assert "compile" not in adapters.ScriptedAdapter.calls
        assert adapters.ScriptedAdapter.calls.count("run") >= 4
        assert adapters.ScriptedAdapter.calls[-1] == "synchronize"

    def test_a_given_size_bounds_it(self) -> None:
        assert self.load(kv_cache_bytes=4096 * 100).limits.num_blocks == 100

    def test_steps_replay_graphs(self) -> None:
        executor = self.load(num_blocks=100)
        executor.warm_up(lambda done, steps: None)
        calls = adapters.ScriptedAdapter.calls
        calls.clear()
        prompt = models_zoo.prompts()[3]
        harness = Harness(executor)
        harness.generate([prompt], 8)
        assert "replay" in calls
        assert "compile" not in calls
        assert "run" not in calls

    def test_what_does_not_fit_is_said(self, monkeypatch: pytest.MonkeyPatch) -> None:
        from tidewheel.engine.devices.graph.decoder import GraphDecoder

        original = GraphDecoder.allocate

        def allocate(decoder: GraphDecoder, num_blocks: list[int], num_states: int) -> None:
            if num_blocks != [1]:  # not the trial's
                raise torch.OutOfMemoryError
            original(decoder, num_blocks, num_states)

        monkeypatch.setattr(GraphDecoder, "allocate", allocate)
        with pytest.raises(DeviceError, match="no memory for a KV cache of 7 blocks: lower --num-gpu-blocks-override"):
            self.load(num_blocks=7)

    def test_a_type_that_it_cannot_compute_is_refused(self) -> None:
        with pytest.raises(DeviceError, match="does not compute in float32: take --dtype bfloat16"):
            self.load(dtype="float32")
        device = adapters.device(adapters.ScriptedAdapter, True, GraphOptions())
        assert device.default_dtype("float32") == "bfloat16"


def test_without_memory_of_its_own_no_part_of_it_can_be_given(caplog: pytest.LogCaptureFixture) -> None:
    load(models_zoo.folder("llama"), memory=MemoryOptions(gpu_memory_utilization=0.5))
    assert "--gpu-memory-utilization has no effect: the device has no memory of its own" in caplog.messages


def test_without_a_compiler_there_is_a_way_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler")
    with pytest.raises(DeviceError, match=r"no-such-compiler, which is not installed: install it, .* --enforce-eager"):
        load(models_zoo.folder("llama"), FEW)
    load(models_zoo.folder("llama"), EAGER).close()


def test_a_compiler_that_fails_is_one_sentence_with_a_way_out(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise RuntimeError("no code\nfor this\n\nand much that helps nobody")

    def compiled(_: object, function: Any) -> Any:
        return torch.compile(function, backend=fail, fullgraph=True)

    monkeypatch.setattr("tidewheel.engine.devices.graph.cpu.CpuAdapter.compile", compiled)
    executor = load(models_zoo.folder("llama"), FEW)
    with pytest.raises(DeviceError, match=r"graph-cpu device: RuntimeError: no code for this\. .* --enforce-eager"):
        executor.warm_up(lambda *_: None)
    executor.close()


def test_eight_bit_caches_are_refused() -> None:
    with pytest.raises(DeviceError, match="not int8: choose one"):
        load(models_zoo.folder("llama"), kv_cache_dtype="int8")


def test_the_cache_may_have_a_type_of_its_own() -> None:
    exact = Harness(load(models_zoo.folder("llama"))).logits(LONG)
    executor = load(models_zoo.folder("llama"), kv_cache_dtype="bfloat16")
    logits = Harness(executor).logits(LONG)
    assert 0 < np.sqrt(np.mean((logits - exact) ** 2)) <= 2.0**-7 * np.abs(exact).max()


def test_loading_can_be_cancelled() -> None:
    from tidewheel.engine.devices.graph.device import graph_cpu
    from tidewheel.engine.devices.limits import ExecutorOptions

    spec, cancellation = decoder(PLAIN), Cancellation()
    cancellation.cancel()
    options = ExecutorOptions("float32", 1 << 22, max_model_len=64, max_num_seqs=1, max_num_batched_tokens=64)
    with pytest.raises(LoadCancelledError):
        graph_cpu(EAGER).load(spec, RandomWeights(spec), options, cancellation)


def test_a_closed_executor_says_so() -> None:
    executor = load(models_zoo.folder("llama"))
    executor.close()
    executor.close()
    with pytest.raises(DeviceError, match="closed"):
        executor.copy_blocks(np.zeros((0, 2), np.int32))


def test_sequences_do_not_depend_on_their_company() -> None:
    executor = load(models_zoo.folder("llama"), max_num_seqs=64, num_blocks=600)
    harness = Harness(executor)
    prompts = [models_zoo.prompts(64, seed=5)[i] for i in range(48)]
    together = harness.generate(prompts, 8, chunk=20)
    alone: list[Running] = [harness.generate([prompt], 8)[0] for prompt in prompts]
    assert [s.output for s in together] == [s.output for s in alone]
