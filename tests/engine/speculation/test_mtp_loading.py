"""A model's own layer for drafts is loaded where it is asked for, and what does not fit it is refused by name."""

from __future__ import annotations

import json
import math
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import models_zoo
import mtp_zoo
import pytest
from optional_packages import require_packages

from tidewheel.engine.declaring.option import OptionError
from tidewheel.engine.errors import DeviceError, ModelError
from tidewheel.engine.load import EngineLoad, load_engine
from tidewheel.engine.models.spec import tensor_shapes
from tidewheel.engine.opened_model import open_model
from tidewheel.engine.options import EngineOptions
from tidewheel.engine.speculative_options import Mtp, SpeculativeOptions

require_packages("transformers")
pytest.importorskip("tidewheel._native")

MIB = 2**20


def speculative(**asked: Any) -> SpeculativeOptions:
    return SpeculativeOptions(speculative_config={"method": "mtp", **asked})


def options(folder: Path, **changed: Any) -> EngineOptions:
    given = EngineOptions(
        str(folder),
        skip_tokenizer_init=True,
        max_model_len=128,
        max_num_seqs=4,
        kv_cache_space=1 / 64,
        speculative=speculative(num_speculative_tokens=2),
    )
    return replace(given, **changed)


@pytest.mark.parametrize("method", ["mtp", "qwen3_next_mtp", "deepseek_mtp", "qwen3_5_mtp"])
def test_vllms_names_mean_the_checkpoints_layer(method: str) -> None:
    asked = SpeculativeOptions(speculative_config={"method": method, "num_speculative_tokens": 5}).speculation
    assert asked == Mtp(num_tokens=5)
    assert speculative(disable_by_batch_size=3, max_model_len=9).speculation == Mtp(3, 3, 9)


def test_keys_that_it_does_not_have_are_refused() -> None:
    with pytest.raises(OptionError, match="model is not supported with mtp; there are method, num_speculative_tokens"):
        speculative(model="other")
    with pytest.raises(OptionError, match="num_speculative_tokens must be a number of at least 1 and at most 64"):
        speculative(num_speculative_tokens=65)


def test_its_weights_and_its_part_of_the_cache_count(caplog: pytest.LogCaptureFixture) -> None:
    given = options(mtp_zoo.folder("qwen3_5"))
    without = open_model(replace(given, speculative=SpeculativeOptions()))
    with_it = open_model(given)
    shapes = {name: shape for name, shape in tensor_shapes(with_it.spec).items() if name.startswith("mtp.")}
    assert with_it.weight_bytes - without.weight_bytes == 4 * sum(map(math.prod, shapes.values()))
    assert with_it.kv_bytes_per_token == 2 * without.kv_bytes_per_token  # one of two layers has K and V
    with caplog.at_level("INFO"):
        engine = load_engine(given)
    try:
        states = engine.limits.num_states * with_it.slot_bytes
        assert engine.limits.num_blocks == (MIB * 16 - states) // (16 * with_it.kv_bytes_per_token)
    finally:
        engine.close()
    assert "MTP layer guesses up to 2 tokens a step, in contexts of up to 128 tokens" in caplog.text
    assert "not loaded" not in caplog.text


def test_without_the_option_it_is_left_out_and_the_log_says_what_would_use_it(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("INFO"):
        open_model(options(mtp_zoo.folder("qwen3_5"), speculative=SpeculativeOptions()))
    assert (
        'tensors of layers that predict further tokens (MTP); --speculative-config \'{"method": "mtp"}\'' in caplog.text
    )


def test_models_and_devices_without_it_are_refused(tmp_path: Path) -> None:
    folder = mtp_zoo.folder("qwen3_5")
    with pytest.raises(DeviceError, match=r"the torch device does not run layers that .*; take --device cpu"):
        open_model(options(folder, device="torch"))
    with pytest.raises(ModelError, match="a model of type llama has no layer that predicts further tokens"):
        EngineLoad(options(models_zoo.folder("llama")))
    with pytest.raises(ModelError, match=r"qwen3_5.* has no layer that .*take a checkpoint that"):
        EngineLoad(options(models_zoo.folder("qwen3_5")))
    with pytest.raises(OptionError, match="--kv-offload does not go with --speculative-config"):
        EngineLoad(options(folder, kv_offload=str(tmp_path)))
    copied = tmp_path / "none"
    shutil.copytree(folder, copied)
    config = json.loads((copied / "config.json").read_text())
    (copied / "config.json").write_text(json.dumps({**config, "mtp_num_hidden_layers": 0}))
    with pytest.raises(ModelError, match="a model of type qwen3_5 has no layer that predicts"):
        EngineLoad(options(copied))
