"""A draft model must fit the model that it drafts for; what does not is refused by name, and memory is counted."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import models_zoo
import pytest
from engine.tiny_tokenizers import tiny
from harness import make_device
from optional_packages import require_packages

from tidewheel.engine.declaring.option import OptionError
from tidewheel.engine.errors import DeviceError, ModelError
from tidewheel.engine.loading import memory_plan
from tidewheel.engine.loading.drafts import OpenedDraft, open_draft
from tidewheel.engine.loading.load import EngineLoad, load_engine
from tidewheel.engine.loading.opened_model import open_model
from tidewheel.engine.machine.memory import Memory
from tidewheel.engine.options import EngineOptions
from tidewheel.engine.speculation.options import DraftModel, SpeculativeOptions

require_packages("transformers")
pytest.importorskip("tidewheel._native")

MIB = 2**20


def options(model: str, draft: str | Path, **asked: Any) -> EngineOptions:
    config = {"method": "draft_model", "model": str(draft), **asked}
    return EngineOptions(
        str(models_zoo.folder(model)),
        skip_tokenizer_init=True,
        max_model_len=128,
        max_num_seqs=4,
        kv_cache_space=1 / 64,
        speculative=SpeculativeOptions(speculative_config=config),
    )


def opened(given: EngineOptions) -> OpenedDraft:
    asked = given.speculative.speculation
    assert isinstance(asked, DraftModel)
    return open_draft(given, asked, open_model(given))


@pytest.mark.parametrize(
    ("model", "draft", "said"),
    [
        ("llama", "mamba2", "mamba2-.* cannot be a draft model: it has recurrent layers"),
        ("llama", "mistral-window", "cannot be a draft model: none of its layers sees all tokens"),
        ("llama", "gemma2", "cannot be a draft model: some of its layers see only a window"),
        ("mistral-window", "llama", "mistral-window-.* cannot have a draft model: none of its layers sees all tokens"),
        ("mamba2", "llama", "mamba2-.* cannot have a draft model: none of its layers sees all tokens"),
    ],
)
def test_layers_that_cannot_share_blocks_are_refused(model: str, draft: str, said: str) -> None:
    with pytest.raises(ModelError, match=said):
        EngineLoad(options(model, models_zoo.folder(draft)))


def test_other_devices_and_sizes_are_refused() -> None:
    given = options("llama", models_zoo.folder("llama-tied"), draft_tensor_parallel_size=3)
    with pytest.raises(DeviceError, match="draft_tensor_parallel_size 3 must be 1 or that of the model, 1"):
        EngineLoad(given)
    asked = given.speculative.speculation
    assert isinstance(asked, DraftModel)
    with pytest.raises(DeviceError, match="the torch device has no draft models; take --device cpu"):
        open_draft(given, asked, replace(open_model(given), device=make_device("torch")))
    with pytest.raises(ModelError, match="nowhere"):
        EngineLoad(options("llama", "/nowhere"))
    with pytest.raises(OptionError, match="revision must be a string"):
        options("llama", "x", revision=3)


def test_other_tokens_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"has a different vocabulary.*: it has \d+ of them, and the model has 320"):
        load_engine(options("llama", Path(__file__).parents[3] / "server" / "demo"))
    for file in models_zoo.folder("llama-tied", tokenizer=True).iterdir():
        shutil.copy(file, tmp_path)
    draft = opened(options("llama", tmp_path))
    draft.require_vocabulary(own := draft.model.tokenizer(), own)
    with pytest.raises(ModelError, match=r"has a different vocabulary .*: token 0 is '<s>' in"):
        draft.require_vocabulary(tiny("byte-level"), own)


def test_its_weights_and_its_part_of_the_cache_count(monkeypatch: pytest.MonkeyPatch) -> None:
    given = options("llama", models_zoo.folder("llama-tied"))
    draft = opened(given)
    both = draft.target.kv_bytes_per_token + draft.model.kv_bytes_per_token
    engine = load_engine(given)
    try:
        assert engine.limits.num_blocks == MIB * 16 // (16 * both)
    finally:
        engine.close()
    fitting = draft.target.weight_bytes + draft.model.weight_bytes + MIB * 16
    monkeypatch.setattr(memory_plan, "read_memory", lambda: Memory(fitting, fitting, None, None))
    EngineLoad(given)
    monkeypatch.setattr(memory_plan, "read_memory", lambda: Memory(fitting - 1, fitting - 1, None, None))
    with pytest.raises(ModelError, match=r"and a KV cache of 0\.02 GiB do not fit"):
        EngineLoad(given)


def test_a_recurrent_model_gets_no_more_draft_tokens_than_its_state_can_go_back_behind(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with caplog.at_level("INFO"):
        load_engine(options("lfm2", models_zoo.folder("llama-tied"), num_speculative_tokens=50)).close()
    assert "drafts up to 4 tokens a step" in caplog.text


def test_weights_are_quantized_alike_unless_it_is_said() -> None:
    given = replace(options("llama", models_zoo.folder("llama-tied")), quantization="int8")
    assert str(opened(given).model.quantization) == "int8"
    other = replace(options("llama", models_zoo.folder("llama-tied"), quantization="int4"), quantization="int8")
    assert str(opened(other).model.quantization).startswith("int4")
