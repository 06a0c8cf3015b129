"""What adapters take in memory counts before it is taken."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import lora_files
import pytest

from tidewheel.engine.adapters.options import LoraModule, LoraOptions
from tidewheel.engine.adapters.reading import packed_bytes
from tidewheel.engine.errors import ModelError
from tidewheel.engine.loading.load import EngineLoad
from tidewheel.engine.loading.opened_model import open_model
from tidewheel.engine.machine.memory import Memory
from tidewheel.engine.options import EngineOptions

HEAD_BYTES = 320 * 64 * 4


def options(model: Path, adapters: Path, **more: object) -> EngineOptions:
    for seed, name in enumerate(("small", "large")):
        content = lora_files.tensors(seed) | (lora_files.head_of_its_own(seed) if name == "large" else {})
        lora_files.write(adapters / name, content, modules_to_save=["lm_head"])
    modules = tuple(LoraModule(name, str(adapters / name)) for name in ("small", "large"))
    lora = LoraOptions(enable_lora=True, lora_modules=modules)
    return replace(EngineOptions(str(model), load_format="dummy", lora=lora), **more)  # type: ignore[arg-type]


def test_a_start_counts_the_largest_that_may_be_in_memory(dummy_llama: Path, tmp_path: Path) -> None:
    given = options(dummy_llama, tmp_path)
    model = open_model(given)

    def size(lora: LoraOptions) -> int:
        return model.lora_bytes(replace(given, lora=lora))

    both, one = size(given.lora), size(replace(given.lora, max_cpu_loras=1))
    assert HEAD_BYTES < one < both < 2 * one
    assert size(replace(given.lora, lora_dtype="bfloat16")) == both // 2
    assert size(LoraOptions()) == 0


def test_a_start_without_room_for_them_says_so(
    dummy_llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    given = options(dummy_llama, tmp_path, kv_cache_space=0.01)
    model = open_model(given)
    room = model.weight_bytes + int(0.01 * 2**30) + HEAD_BYTES
    monkeypatch.setattr("tidewheel.engine.loading.memory_plan.read_memory", lambda: Memory(room, room, None, None))
    with pytest.raises(ModelError, match=r"weights and adapters of 0\.00 GiB and a KV cache of 0\.01 GiB do not fit"):
        EngineLoad(given)
    EngineLoad(replace(given, lora=LoraOptions()))


def test_one_that_is_loaded_later_needs_room_too(
    dummy_llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    given = options(dummy_llama, tmp_path)
    model = open_model(given)
    limits = model.lora_limits(given.lora)
    assert limits is not None
    monkeypatch.setattr(
        "tidewheel.engine.loading.opened_model.read_memory", lambda: Memory(HEAD_BYTES, HEAD_BYTES, None, None)
    )
    assert model.read_lora(tmp_path / "small", limits).rank == 4
    with pytest.raises(ModelError, match=r"large: the adapter takes .* lower --kv-cache-space or --max-cpu-loras"):
        model.read_lora(tmp_path / "large", limits)
    packed = packed_bytes(tmp_path / "small", model.description, 4)
    monkeypatch.setattr("tidewheel.engine.loading.opened_model.read_memory", lambda: Memory(packed, packed, None, None))
    with pytest.raises(ModelError, match=r"small: the adapter takes .* while it is loaded"):
        model.read_lora(tmp_path / "small", limits)


def test_a_step_of_high_ranks_needs_room(dummy_llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    given = options(dummy_llama, tmp_path, kv_cache_space=0.01)
    monkeypatch.setattr(
        "tidewheel.engine.loading.memory_plan.read_memory", lambda: Memory(16 << 20, 16 << 20, None, None)
    )
    EngineLoad(given)
    with pytest.raises(ModelError, match=r"a step of \d+ tokens takes .* or --max-lora-rank"):
        EngineLoad(replace(given, lora=replace(given.lora, max_lora_rank=512)))


def test_experts_have_room_for_adapters_if_one_that_is_served_from_the_start_changes_them(
    dummy_llama: Path, tmp_path: Path
) -> None:
    given = options(dummy_llama, tmp_path)
    of_experts = {name.replace("self_attn", "mlp.experts.0"): array for name, array in lora_files.tensors(3).items()}
    lora_files.write(tmp_path / "experts", of_experts)
    modules = (*given.lora.lora_modules, LoraModule("experts", str(tmp_path / "experts")))
    for served, expected in ((given.lora.lora_modules, False), (modules, True)):
        asked = replace(given, lora=replace(given.lora, lora_modules=served))
        made = open_model(asked).executor_options(
            asked, max_model_len=64, max_num_seqs=1, max_num_batched_tokens=16, num_blocks=8
        )
        assert made.lora is not None
        assert made.lora.of_experts == expected
