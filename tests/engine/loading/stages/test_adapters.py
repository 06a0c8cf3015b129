"""LoRA adapters in a pipeline: the tokens of one process, also when stages have started again."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import lora_files
import models_zoo
import numpy as np
import pytest
from engine.driving import Driver, Job
from engine.pipeline.loaded import load_stages
from engine.pipeline.processes import children_of
from waiting import wait_until

from tidewheel import LLM, LoRARequest, SamplingParams
from tidewheel.engine.adapters.lora import Lora
from tidewheel.engine.adapters.options import LoraOptions
from tidewheel.engine.errors import DeviceError
from tidewheel.engine.loading.opened_model import open_model
from tidewheel.engine.options import EngineOptions
from tidewheel.engine.pipeline.executor import PipelineExecutor
from tidewheel.engine.pipeline.stages import Stages
from tidewheel.engine.pipeline_options import PipelineOptions
from tidewheel.engine.sampling_params import SamplingParams as EngineParams
from tidewheel.engine.weights.lora import LoraAdapter, LowRankUpdate

PROMPTS = [[5, 6, 7, *range(40, 60)], [9, 8], [*range(30, 80)], [5, 6, 7, *range(40, 60)]]
PARAMS = SamplingParams(max_tokens=12, temperature=0.8, seed=3, logprobs=2, ignore_eos=True)


KV = {"llama": 32, "llama-tied": 64}  # outputs of the values


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """By model, a folder with adapters: of its layers alone, of all, and with an embedding and a head of their own."""
    found = {}
    for model, kv in KV.items():
        root = found[model] = tmp_path_factory.mktemp(model)
        lora_files.write(root / "layers", lora_files.tensors(1, kv=kv))
        tables = {**lora_files.embedding(3), **lora_files.head(4)}
        lora_files.write(root / "tables", {**lora_files.tensors(2, kv=kv), **tables})
        own = {**lora_files.embedding_of_its_own(6), **lora_files.head_of_its_own(7)}
        lora_files.write(root / "own", {**lora_files.tensors(5, kv=kv), **own})
    return found


@contextmanager
def loaded(model: str, **options: Any) -> Iterator[LLM]:
    folder = str(models_zoo.folder(model, tokenizer=True))
    with LLM(folder, device="cpu", max_model_len=128, max_num_seqs=4, enable_lora=True, **options) as llm:
        yield llm


def answers(llm: LLM, folder: Path) -> list[Any]:
    names = ["layers", None, "tables", "own"]
    requests = [name and LoRARequest(name, 1 + names.index(name), str(folder / name)) for name in names]
    outputs = llm.generate(PROMPTS, PARAMS, use_tqdm=False, lora_request=requests)
    return [(output.outputs[0].token_ids, output.outputs[0].logprobs) for output in outputs]


# Three processes start.
@pytest.mark.parametrize(
    ("model", "stages", "max_loras"),
    [
        ("llama", 3, 1),
        *(
            pytest.param(*others, marks=pytest.mark.sweep)
            for others in [("llama", 2, 1), ("llama", 3, 3), ("llama-tied", 2, 1), ("llama-tied", 2, 3)]
        ),
    ],
)
def test_stages_give_the_bits_of_one_process(model: str, stages: int, max_loras: int, folders: dict[str, Path]) -> None:
    """Also where one adapter makes way for another, and where a stage has nothing that they change."""
    options: dict[str, Any] = {"max_loras": max_loras, "max_cpu_loras": max_loras}
    if stages > 2:
        options |= {"load_format": "dummy", "hf_overrides": {"num_hidden_layers": stages}}
    found, folder = [], folders[model]
    for count in (1, stages):
        with loaded(model, pipeline_parallel_size=count, **options) as llm:
            found.append([answers(llm, folder), answers(llm, folder)])
    assert found[0] == found[1]
    assert len({str(answer) for answer in found[0][0]}) == len(PROMPTS), "adapters change answers"


# Two processes start, and start again.
def test_adapters_are_there_when_stages_have_started_again(folders: dict[str, Path]) -> None:
    with loaded("llama", max_loras=3, pipeline_parallel_size=2) as llm:
        folder = folders["llama"]
        expected = answers(llm, folder)
        before = children_of(os.getpid())
        os.kill(before[1], signal.SIGKILL)
        wait_until(lambda: len(now := children_of(os.getpid())) == 2 and not {*now} & {*before})
        assert answers(llm, folder) == expected


@contextmanager
def pipeline() -> Iterator[PipelineExecutor]:
    """Two stages of a layer each."""
    given = EngineOptions(
        str(models_zoo.folder("llama")),
        device="cpu",
        lora=LoraOptions(enable_lora=True),
        pipeline=PipelineOptions(pipeline_parallel_size=2),
    )
    model = open_model(given)
    wanted = model.executor_options(given, max_model_len=128, max_num_seqs=4, max_num_batched_tokens=64, num_blocks=32)
    executor = load_stages(given, model, wanted)
    try:
        yield executor
    finally:
        executor.close()


def updates(*layers: int, rows: int = 64) -> LoraAdapter:
    """What changes the queries of these layers."""
    a, b = np.ones((2, 64), np.float32), np.ones((rows, 2), np.float32)
    return LoraAdapter(tuple(LowRankUpdate(f"layers.{layer}.q", a, b, 1.0) for layer in layers))


def run_with_adapters(executor: PipelineExecutor, *loras: Lora | None) -> list[int]:
    """How many tokens a request with each of these has."""
    driver = Driver(executor, 128)
    for lora in loras:
        driver.add(Job((5, 6, 7), EngineParams(max_tokens=5, temperature=0.0), seed=1, lora=lora))
    driver.run()
    return [len(sampled) for sampled in driver.sampled.values()]


def test_an_adapter_that_one_stage_refuses_harms_nobody() -> None:
    with pipeline() as executor:
        with pytest.raises(DeviceError, match="cannot load this adapter"):
            executor.load_lora(0, updates(1, rows=7777))
        executor.load_lora(1, updates(0))
        assert run_with_adapters(executor, None, Lora(1, "digest")) == [5, 5]


@pytest.mark.sweep
def test_adapters_that_come_while_stages_start_again_wait_for_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whether the stages then take them or not."""
    begin, loading = PipelineExecutor._begin_again, dict[int, Future[None]]()

    def begin_later(self: PipelineExecutor, stages: Stages) -> None:
        """When both adapters have come."""
        for number, adapter in ((1, updates(0)), (2, updates(1, rows=7777))):
            loading[number] = pool.submit(self.load_lora, number, adapter)
        wait_until(lambda: all(future.running() for future in loading.values()))
        assert not any(future.done() for future in loading.values())
        begin(self, stages)

    with pipeline() as executor, ThreadPoolExecutor(2) as pool:
        executor.load_lora(0, updates(0, 1))
        monkeypatch.setattr(PipelineExecutor, "_begin_again", begin_later)
        os.kill(children_of(os.getpid())[1], signal.SIGKILL)
        with pytest.raises(DeviceError) as caught:
            run_with_adapters(executor, None)
        executor.restart(caught.value)
        assert loading[1].result(timeout=60) is None
        with pytest.raises(DeviceError, match="cannot load this adapter"):
            loading[2].result(timeout=60)
        assert run_with_adapters(executor, None, Lora(0, "digest"), Lora(1, "other digest")) == [5, 5, 5]
        with pytest.raises(DeviceError, match="there is no adapter"):
            run_with_adapters(executor, Lora(2, "third digest"))


@pytest.mark.sweep
def test_an_adapter_with_which_a_stage_ended_is_not_given_to_the_next_ones() -> None:
    with pipeline() as executor, ThreadPoolExecutor(1) as pool:
        executor.load_lora(0, updates(0, 1))
        pid = children_of(os.getpid())[1]
        os.kill(pid, signal.SIGSTOP)
        loading = pool.submit(executor.load_lora, 1, updates(0, 1))
        os.kill(pid, signal.SIGKILL)
        with pytest.raises(DeviceError, match=r"pipeline stage 2 of 2 \(layer 1\) was killed by SIGKILL") as caught:
            loading.result(timeout=60)
        executor.restart(caught.value)
        assert run_with_adapters(executor, Lora(0, "digest")) == [5]
        with pytest.raises(DeviceError, match="there is no adapter"):
            run_with_adapters(executor, Lora(1, "other digest"))
