"""From options to a running engine."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import models_zoo
import pytest
from waiting import wait_until

from tidewheel.engine.core.request import Request
from tidewheel.engine.devices.cache_split import GroupBytes
from tidewheel.engine.errors import ModelError
from tidewheel.engine.loading.load import load_engine
from tidewheel.engine.loading.memory_plan import plan_kv_cache
from tidewheel.engine.machine.memory import Memory
from tidewheel.engine.options import EngineOptions
from tidewheel.engine.outputs import FinishReason
from tidewheel.engine.sampling_params import SamplingParams
from tidewheel.engine.weights.quantization import Method

GIB = 2**30
PER_TOKEN = 2**14  # bytes: 65,536 tokens a GiB


def plan(
    available: int | None = 64 * GIB,
    model_limit: int = 8192,
    weights: int = 0,
    group: int | None = None,
    groups: Sequence[GroupBytes] = (GroupBytes(None, PER_TOKEN),),
    smaller: Callable[[], Mapping[Method, int]] = dict,
    **options: float | None,
) -> tuple[int, int]:
    """On a machine of 64 GiB, in a control group that may have `group` bytes."""
    return plan_kv_cache(
        EngineOptions("m", **options),  # type: ignore[arg-type]
        model_limit=model_limit,
        groups=groups,
        weight_bytes=weights,
        memory=Memory(64 * GIB, available, group, None if group is None else 0),
        smaller=smaller,
    )


def test_the_default_cache_has_room_for_all_sequences_within_4_gib_and_half_of_the_memory() -> None:
    assert plan(max_num_seqs=8) == (8192, 8 * 8192 * PER_TOKEN)
    assert plan(max_num_seqs=128) == (8192, 4 * GIB)
    assert plan(2 * GIB) == (8192, GIB)
    assert plan(None) == (8192, 4 * GIB)
    assert plan(2 * GIB, weights=GIB) == (8192, GIB // 2)
    assert plan(2 * GIB, weights=GIB, group=2 * GIB) == (8192, GIB // 2)


def shared_plan(num_bytes: int, weights: int, **options: float) -> tuple[int, int]:
    """In memory of which other models may take some."""
    return plan_kv_cache(
        EngineOptions("m", **options),  # type: ignore[arg-type]
        model_limit=8192,
        groups=[GroupBytes(None, PER_TOKEN)],
        weight_bytes=weights,
        memory=Memory.of_budget(num_bytes),
    )


def test_a_model_leaves_memory_to_others_that_share_it() -> None:
    assert shared_plan(9 * GIB, GIB) == (8192, 2 * GIB)
    assert shared_plan(2 * GIB, GIB, kv_cache_space=0.9) == (8192, int(0.9 * GIB))
    with pytest.raises(ModelError, match=r"into the 2\.00 GiB of memory that all models may take \(--memory\)"):
        shared_plan(2 * GIB, 3 * GIB)
    with pytest.raises(ModelError, match=r"all models may take 1\.25 GiB \(--memory\), and the weights take 1\.00 GiB"):
        shared_plan(GIB + GIB // 4, GIB, max_model_len=8192)


def test_windows_hold_longer_contexts_in_the_same_memory() -> None:
    window = [GroupBytes(1024, PER_TOKEN)]
    assert plan(kv_cache_space=0.125, model_limit=131072, groups=window) == (131072, GIB // 8)
    half = [GroupBytes(None, PER_TOKEN // 2), GroupBytes(1024, PER_TOKEN // 2)]
    length, _ = plan(kv_cache_space=0.5, model_limit=131072, groups=half, max_num_seqs=4)
    assert 32768 < length < 65536


def test_a_context_that_nobody_asked_for_is_cut_to_the_cache(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING)
    assert plan(kv_cache_space=0.5, model_limit=131072) == (32768, GIB // 2)
    assert "cut from the model's 131072 tokens to 32768" in caplog.text
    assert plan(GIB, model_limit=131072) == (32768, GIB // 2)


def test_a_context_that_was_asked_for_and_does_not_fit_is_an_error() -> None:
    with pytest.raises(ModelError, match=r"holds 16384 tokens.*: lower --max-model-len to 16384, or raise --kv"):
        plan(kv_cache_space=0.25, max_model_len=20_000)
    assert plan(kv_cache_space=0.25, max_model_len=16_384) == (16_384, GIB // 4)
    with pytest.raises(ModelError, match="holds 0 tokens"):
        plan(kv_cache_space=0.0001)
    with pytest.raises(ModelError, match="holds 0 tokens"):
        plan(0)
    with pytest.raises(ModelError, match=r"lower --max-model-len to 16384$"):  # for more there is no memory
        plan(GIB // 4, kv_cache_space=0.25, max_model_len=20_000)
    with pytest.raises(
        ModelError, match=r"0\.12 GiB \(1\.00 GiB of the control group's 2\.00 GiB of memory is available"
    ):
        plan(GIB, weights=GIB, group=2 * GIB)


@pytest.mark.parametrize(
    ("sizes", "said"),
    [
        (
            {"weights": 3 * GIB, "group": 2 * GIB},
            r"weights of 3\.00 GiB and a KV cache of 0\.00 GiB do not fit into the 2\.00 GiB of memory that its "
            r"control group allows this process, 1\.00 GiB of it available: take fewer bits for the weights with "
            r"--quantization, or raise that",
        ),
        (
            {"weights": GIB // 2, "group": 2 * GIB, "kv_cache_space": 1.75},
            r"cache of 1\.75 GiB do not fit into the 2\.00 GiB of memory that its.*: lower --kv-cache-space: 0\.50 GiB",
        ),
        ({"num_gpu_blocks_override": 2**40}, r"lower --num-gpu-blocks-override: 4096 would fit"),
        (
            {"available": 63 * GIB, "weights": 60 * GIB, "kv_cache_space": 5},
            r"64\.00 GiB of memory that this machine has, 63\.00 GiB of it available: lower --kv-cache-space: 3\.00",
        ),
    ],
)
def test_what_could_never_fit_is_refused_before_the_weights_are_read(sizes: dict[str, float], said: str) -> None:
    with pytest.raises(ModelError, match=said):
        plan(**{"available": GIB, **sizes})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("int4", "said"),
    [
        (3, r"with --quantization \(int8 would take 7\.00 GiB, int4 would take 3\.00 GiB\), or raise that limit"),
        (9, r"take fewer bits for the weights with --quantization \(int8 would take 7\.00 GiB\)"),
    ],
)
def test_what_weights_would_take_in_fewer_bits_is_said(int4: int, said: str) -> None:
    with pytest.raises(ModelError, match=said):
        plan(8 * GIB, weights=14 * GIB, group=8 * GIB, smaller=lambda: {"int8": 7 * GIB, "int4": int4 * GIB})


def test_weights_that_are_too_large_in_any_format_are_said_to_be() -> None:
    with pytest.raises(ModelError, match=r"smaller model: even with --quantization int4 the weights take 9\.00 GiB"):
        plan(8 * GIB, weights=14 * GIB, group=8 * GIB, smaller=lambda: {"int8": 14 * GIB, "int4": 9 * GIB})


def test_what_does_not_fit_now_is_said(caplog: pytest.LogCaptureFixture) -> None:
    assert plan(GIB, weights=GIB, kv_cache_space=1) == (8192, GIB)
    assert "There is less memory than weights of 1.00 GiB and a KV cache of 1.00 GiB may need later" in caplog.text


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    pytest.importorskip("transformers")
    made = models_zoo.folder("llama", tokenizer=True)
    copy = tmp_path_factory.mktemp("launch") / "llama"
    copy.mkdir()
    for path in made.iterdir():
        (copy / path.name).write_bytes(path.read_bytes())
    (copy / "generation_config.json").write_text(json.dumps({"temperature": 0.5, "top_k": 7, "eos_token_id": [5, 6]}))
    return copy


def test_a_folder_is_served(folder: Path) -> None:
    async def main() -> None:
        engine = load_engine(EngineOptions(str(folder), device="torch", max_model_len=64, max_num_seqs=2))
        assert engine.model_name == str(folder)
        assert engine.max_model_len == 64
        assert engine.generation_defaults == {"temperature": 0.5, "top_k": 7}
        assert engine.stats().kv_blocks_total == 16  # 2 sequences, rounded up to 128 tokens each
        engine.start()
        prompt = engine.tokenizer.encode("Hello")
        stream = engine.submit(Request("r", prompt, SamplingParams(max_tokens=4, temperature=0.0)))
        outputs = [output async for output in stream]
        assert outputs[-1].finish_reason in (FinishReason.LENGTH, FinishReason.STOP)
        await engine.stop()

    asyncio.run(main())


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux has a priority for each thread")
def test_threads_that_compute_have_the_priority_of_the_caller(folder: Path) -> None:
    pytest.importorskip("tidewheel._native")

    def threads() -> set[int]:
        return {int(name) for name in os.listdir("/proc/self/task")}

    async def main() -> None:
        before, own = threads(), os.getpriority(os.PRIO_PROCESS, 0)
        engine = load_engine(EngineOptions(str(folder), device="cpu", max_model_len=64, max_num_seqs=2))
        computing = threads() - before

        def keeps_priority(thread: int) -> bool:
            try:
                return os.getpriority(os.PRIO_PROCESS, thread) == own
            except ProcessLookupError:  # the thread that loaded the model may have been ending
                return True

        wait_until(lambda: all(map(keeps_priority, computing)))
        engine.start()
        await engine.stop()

    asyncio.run(main())


@pytest.mark.parametrize("device", ["cpu", "torch"])
@pytest.mark.parametrize("name", ["llama", "gemma2", "mamba2"])
def test_a_number_of_blocks_goes_before_all_sizes(name: str, device: str, caplog: pytest.LogCaptureFixture) -> None:
    pytest.importorskip("transformers")
    options = EngineOptions(
        str(models_zoo.folder(name)),
        device=device,
        num_gpu_blocks_override=3,
        kv_cache_space=1,
        max_num_seqs=2,
        skip_tokenizer_init=True,
    )

    async def main() -> None:
        engine = load_engine(options)
        assert engine.limits.num_blocks == 3
        if name == "llama":
            assert engine.max_model_len == 48
        engine.start()
        stream = engine.submit(Request("r", [1, 2, 3], SamplingParams(max_tokens=20, temperature=0.0, ignore_eos=True)))
        assert sum([len(output.token_ids) async for output in stream]) == 20
        await engine.stop()
        with pytest.raises(ModelError, match="more blocks with --num-gpu-blocks-override"):
            load_engine(replace(options, max_model_len=64))

    asyncio.run(main())
    assert "--kv-cache-space has no effect: --num-gpu-blocks-override is the size of the KV cache" in caplog.text


def test_options_that_name_what_is_not_there(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="no tokenizer"):
        load_engine(EngineOptions(str(folder), device="torch", tokenizer=str(tmp_path)))
