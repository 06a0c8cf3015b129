"""EAGLE3 checkpoints are read as their authors publish them, and what does not fit a model is refused by name."""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import eagle3_zoo
import models_zoo
import pytest
from optional_packages import require_packages

from tidewheel.engine.declaring.option import OptionError
from tidewheel.engine.errors import DeviceError, ModelError
from tidewheel.engine.load import EngineLoad, load_engine
from tidewheel.engine.models.spec import tensor_shapes
from tidewheel.engine.opened_model import open_model
from tidewheel.engine.options import EngineOptions
from tidewheel.engine.speculative_options import Eagle3, SpeculativeOptions

require_packages("transformers")
pytest.importorskip("tidewheel._native")

MIB = 2**20


def speculative(**asked: Any) -> SpeculativeOptions:
    return SpeculativeOptions(speculative_config={"method": "eagle3", **asked})


def options(folder: Path, layer: Path, **changed: Any) -> EngineOptions:
    given = EngineOptions(
        str(folder),
        skip_tokenizer_init=True,
        max_model_len=128,
        max_num_seqs=4,
        kv_cache_space=1 / 64,
        speculative=speculative(model=str(layer), num_speculative_tokens=2),
    )
    return replace(given, **changed)


@pytest.fixture
def changed(tmp_path: Path) -> Callable[..., Path]:
    """A copy of the layer of `llama` with other fields in its config; those that are None are left out."""

    def copy(**fields: Any) -> Path:
        folder = tmp_path / "changed"
        shutil.copytree(eagle3_zoo.folders("llama")[1], folder)
        config = {**json.loads((folder / "config.json").read_text()), **fields}
        config = {name: value for name, value in config.items() if value is not None}
        (folder / "config.json").write_text(json.dumps(config))
        return folder

    return copy


def test_the_options_are_vllms() -> None:
    asked = speculative(model="folder", num_speculative_tokens=5, draft_tensor_parallel_size=1).speculation
    assert asked == Eagle3("folder", 5)
    assert speculative(model="a/b", revision="main", disable_by_batch_size=3).speculation == Eagle3("a/b", 3, "main", 3)
    with pytest.raises(OptionError, match="eagle3 needs a model: the folder or hub id of an EAGLE3 checkpoint"):
        speculative()
    with pytest.raises(OptionError, match="draft_tensor_parallel_size must be 1 with eagle3"):
        speculative(model="x", draft_tensor_parallel_size=2)
    with pytest.raises(OptionError, match="prompt_lookup_max is not supported with eagle3"):
        speculative(model="x", prompt_lookup_max=2)
    for method in ("eagle", "medusa", "mlp_speculator"):
        with pytest.raises(OptionError, match=f"the method '{method}' is not supported; .*eagle3"):
            SpeculativeOptions(speculative_config={"method": method, "model": "x"})


@pytest.mark.parametrize("name", [*eagle3_zoo.KINDS])
def test_its_weights_and_its_part_of_the_cache_count(name: str, caplog: pytest.LogCaptureFixture) -> None:
    given = options(*eagle3_zoo.folders(name))
    without = open_model(replace(given, speculative=SpeculativeOptions()))
    with_it = open_model(given)
    assert with_it.spec.eagle3 is not None
    assert with_it.spec.eagle3.layers == eagle3_zoo.KINDS[name].watched
    shapes = {name: shape for name, shape in tensor_shapes(with_it.spec).items() if name.startswith("eagle3.")}
    assert with_it.weight_bytes - without.weight_bytes == 4 * sum(map(math.prod, shapes.values()))
    assert with_it.kv_bytes_per_token > without.kv_bytes_per_token
    with caplog.at_level("INFO"):
        engine = load_engine(given)
    try:
        assert engine.limits.num_blocks == MIB * 16 // (16 * with_it.kv_bytes_per_token)
    finally:
        engine.close()
    assert "EAGLE3 layer" in caplog.text
    assert "guesses up to 2 tokens a step, in contexts of up to 128 tokens" in caplog.text
    assert "not loaded" not in caplog.text


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"architectures": ["LlamaForCausalLM"], "draft_vocab_size": None}, "'LlamaForCausalLM' is not an EAGLE3"),
        ({"architectures": ["MedusaModel"]}, "'MedusaModel' is not an EAGLE3 checkpoint of a kind that is supported"),
        ({"target_hidden_size": 128}, "made for a model of hidden size 128 with 320 tokens, and this one has 64"),
        ({"vocab_size": 400}, "made for a model of hidden size 64 with 400 tokens"),
        ({"num_hidden_layers": 2}, "num_hidden_layers must be 1: layers behind the first"),
        ({"norm_before_fc": True}, "norm_before_fc = True is not supported"),
        ({"eagle_config": {"use_aux_hidden_state": False}}, "use_aux_hidden_state = False is not supported"),
        ({"eagle_aux_hidden_state_layer_ids": [2, 3, 7]}, "must be numbers of the model's 6 layers, got"),
        ({"eagle_aux_hidden_state_layer_ids": [2, 3]}, r"fc.weight has shape \(64, 192\), and .* must be \(64, 128\)"),
        ({"hidden_size": 48}, "its hidden size is 48 and the model's 64: it needs embed_tokens.weight"),
        ({"draft_vocab_size": 100}, "d2t must be 100 integers"),
        ({"intermediate_size": 80}, "gate_proj.weight has shape"),
        ({"model_type": "qwen3"}, "its layer is of the type 'qwen3'"),
    ],
    ids=str,
)
def test_a_layer_that_does_not_fit_is_refused(fields: dict[str, Any], said: str, changed: Callable[..., Path]) -> None:
    with pytest.raises(ModelError, match=said):
        open_model(options(eagle3_zoo.folders("llama")[0], changed(**fields)))


def test_checkpoints_that_are_broken_are_refused(changed: Callable[..., Path]) -> None:
    from safetensors.torch import load_file, save_file

    folder = changed()
    whole = load_file(folder / "model.safetensors")

    def refused(said: str, **tensors: Any) -> None:
        kept = {name: tensor for name, tensor in {**whole, **tensors}.items() if tensor is not None}
        save_file(kept, folder / "model.safetensors")
        with pytest.raises(ModelError, match=said):
            open_model(options(eagle3_zoo.folders("llama")[0], folder))

    refused("tensor d2t is missing, which says what its 200 tokens are", d2t=None)
    refused("tensor d2t names tokens that the model does not have", d2t=whole["d2t"] + 200)
    refused("tensor lm_head.weight is missing", **{"lm_head.weight": None})
    refused("tensor fc.weight is stored as I8; supported are", **{"fc.weight": whole["fc.weight"].char()})


def test_models_devices_and_other_options_that_do_not_go_with_it_are_refused(tmp_path: Path) -> None:
    folder, layer = eagle3_zoo.folders("llama")
    with pytest.raises(DeviceError, match=r"the torch device does not run layers that .*EAGLE3\); take --device cpu"):
        open_model(options(folder, layer, device="torch"))
    for other in ("mistral-window", "gemma2"):
        with pytest.raises(ModelError, match=r"no EAGLE3 layer can guess for a .* model: it needs layers"):
            open_model(options(models_zoo.folder(other), layer))
    with pytest.raises(ModelError, match="nowhere"):
        open_model(options(folder, Path("/nowhere")))
    with pytest.raises(OptionError, match=r'--kv-offload does not go with .*"method": "eagle3"'):
        EngineLoad(options(folder, layer, kv_offload=str(tmp_path)))
    with pytest.raises(ModelError, match="must name eagle_aux_hidden_state_layer_ids for a model of 2 layers"):
        open_model(options(models_zoo.folder("llama"), layer))
