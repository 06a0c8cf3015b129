"""Layers for drafts are loaded where they are asked for, as their authors publish them; others are refused by name."""

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
import mtp_zoo
import pytest
from optional_packages import require_packages

from tidewheel.engine.declaring.option import OptionError
from tidewheel.engine.errors import DeviceError, ModelError
from tidewheel.engine.loading.load import EngineLoad, load_engine
from tidewheel.engine.loading.opened_model import open_model
from tidewheel.engine.models.spec import tensor_shapes
from tidewheel.engine.options import EngineOptions
from tidewheel.engine.speculation.options import Eagle3, Mtp, SpeculativeOptions

require_packages("transformers")
pytest.importorskip("tidewheel._native")

MIB = 2**20
MTP = {"method": "mtp", "num_speculative_tokens": 2}


def eagle3(layer: Path) -> dict[str, Any]:
    return {"method": "eagle3", "model": str(layer), "num_speculative_tokens": 2}


def speculation(**asked: Any) -> Any:
    return SpeculativeOptions(speculative_config=asked).speculation


def options(folder: Path, asked: dict[str, Any] | None, **changed: Any) -> EngineOptions:
    given = EngineOptions(
        str(folder),
        skip_tokenizer_init=True,
        max_model_len=128,
        max_num_seqs=4,
        kv_cache_space=1 / 64,
        speculative=SpeculativeOptions(speculative_config=asked),
    )
    return replace(given, **changed)


def under_eagle3(folders: tuple[Path, Path], **changed: Any) -> EngineOptions:
    folder, layer = folders
    return options(folder, eagle3(layer), **changed)


def layer_and_model(name: str) -> EngineOptions:
    return options(mtp_zoo.folder("qwen3_5"), MTP) if name == "mtp" else under_eagle3(eagle3_zoo.folders(name))


@pytest.mark.parametrize("name", ["mtp", *eagle3_zoo.KINDS])
def test_its_weights_and_its_part_of_the_cache_count(name: str, caplog: pytest.LogCaptureFixture) -> None:
    given = layer_and_model(name)
    without = open_model(replace(given, speculative=SpeculativeOptions()))
    with_it = open_model(given)
    if name != "mtp":
        assert with_it.spec.eagle3 is not None
        assert with_it.spec.eagle3.layers == eagle3_zoo.KINDS[name].watched
    shapes = {n: shape for n, shape in tensor_shapes(with_it.spec).items() if n.startswith(("mtp.", "eagle3."))}
    assert with_it.weight_bytes - without.weight_bytes == 4 * sum(map(math.prod, shapes.values()))
    if name == "mtp":  # one of two layers has K and V
        assert with_it.kv_bytes_per_token == 2 * without.kv_bytes_per_token
    assert with_it.kv_bytes_per_token > without.kv_bytes_per_token
    with caplog.at_level("INFO"):
        engine = load_engine(given)
    try:
        states = engine.limits.num_states * with_it.slot_bytes
        assert engine.limits.num_blocks == (MIB * 16 - states) // (16 * with_it.kv_bytes_per_token)
    finally:
        engine.close()
    assert ("MTP layer" if name == "mtp" else "EAGLE3 layer") in caplog.text
    assert "drafts up to 2 tokens a step, in contexts of up to 128 tokens" in caplog.text
    assert "not loaded" not in caplog.text


@pytest.mark.parametrize("method", ["mtp", "qwen3_next_mtp", "deepseek_mtp", "qwen3_5_mtp"])
def test_vllms_names_mean_the_checkpoints_layer(method: str) -> None:
    assert speculation(method=method, num_speculative_tokens=5) == Mtp(num_tokens=5)
    assert speculation(method=method, disable_by_batch_size=3, max_model_len=9) == Mtp(3, 3, 9)


def test_keys_that_mtp_does_not_have_are_refused() -> None:
    with pytest.raises(
        OptionError, match="model is not supported with mtp; supported are method, num_speculative_tokens"
    ):
        speculation(method="mtp", model="other")
    with pytest.raises(OptionError, match="num_speculative_tokens must be a number of at least 1 and at most 64"):
        speculation(method="mtp", num_speculative_tokens=65)


def test_without_the_option_mtp_is_left_out_and_the_log_names_it(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("INFO"):
        open_model(options(mtp_zoo.folder("qwen3_5"), None))
    assert (
        'tensors of layers that predict further tokens (MTP) are not loaded; --speculative-config \'{"method": "mtp"}\''
        in caplog.text
    )


def test_models_and_devices_without_mtp_are_refused(tmp_path: Path) -> None:
    folder = mtp_zoo.folder("qwen3_5")
    with pytest.raises(DeviceError, match=r"the torch device does not run layers that .*; take --device cpu"):
        open_model(options(folder, MTP, device="torch"))
    with pytest.raises(ModelError, match="a model of type llama has no layer that predicts further tokens"):
        EngineLoad(options(models_zoo.folder("llama"), MTP))
    with pytest.raises(ModelError, match=r"qwen3_5.* has no layer that .*take a checkpoint that"):
        EngineLoad(options(models_zoo.folder("qwen3_5"), MTP))
    with pytest.raises(OptionError, match="--kv-offload does not go with --speculative-config"):
        EngineLoad(options(folder, MTP, kv_offload=str(tmp_path)))
    copied = tmp_path / "none"
    shutil.copytree(folder, copied)
    config = json.loads((copied / "config.json").read_text())
    (copied / "config.json").write_text(json.dumps({**config, "mtp_num_hidden_layers": 0}))
    with pytest.raises(ModelError, match="a model of type qwen3_5 has no layer that predicts"):
        EngineLoad(options(copied, MTP))


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


def test_the_options_of_eagle3_are_vllms() -> None:
    asked = speculation(method="eagle3", model="folder", num_speculative_tokens=5, draft_tensor_parallel_size=1)
    assert asked == Eagle3("folder", 5)
    asked = speculation(method="eagle3", model="a/b", revision="main", disable_by_batch_size=3)
    assert asked == Eagle3("a/b", 3, "main", 3)
    with pytest.raises(OptionError, match="eagle3 needs a model: the folder or hub id of an EAGLE3 checkpoint"):
        speculation(method="eagle3")
    with pytest.raises(OptionError, match="draft_tensor_parallel_size must be 1 with eagle3"):
        speculation(method="eagle3", model="x", draft_tensor_parallel_size=2)
    with pytest.raises(OptionError, match="prompt_lookup_max is not supported with eagle3"):
        speculation(method="eagle3", model="x", prompt_lookup_max=2)
    for method in ("eagle", "medusa", "mlp_speculator"):
        with pytest.raises(OptionError, match=f"the method '{method}' is not supported; .*eagle3"):
            speculation(method=method, model="x")


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
        ({"eagle_aux_hidden_state_layer_ids": [2, 3]}, r"fc.weight has shape \(64, 192\), but .* requires \(64, 128\)"),
        ({"hidden_size": 48}, "its hidden size is 48 and the model's 64: it needs embed_tokens.weight"),
        ({"draft_vocab_size": 100}, "d2t must be 100 integers"),
        ({"intermediate_size": 80}, "gate_proj.weight has shape"),
        ({"model_type": "qwen3"}, "its layer is of the type 'qwen3'"),
    ],
    ids=str,
)
def test_eagle3_layers_that_do_not_fit_are_refused(
    fields: dict[str, Any], said: str, changed: Callable[..., Path]
) -> None:
    with pytest.raises(ModelError, match=said):
        open_model(under_eagle3((eagle3_zoo.folders("llama")[0], changed(**fields))))


def test_eagle3_checkpoints_that_are_broken_are_refused(changed: Callable[..., Path]) -> None:
    from safetensors.torch import load_file, save_file

    folder = changed()
    whole = load_file(folder / "model.safetensors")

    def refused(said: str, **tensors: Any) -> None:
        kept = {name: tensor for name, tensor in {**whole, **tensors}.items() if tensor is not None}
        save_file(kept, folder / "model.safetensors")
        with pytest.raises(ModelError, match=said):
            open_model(under_eagle3((eagle3_zoo.folders("llama")[0], folder)))

    refused("tensor d2t is missing, which says what its 200 tokens are", d2t=None)
    refused("tensor d2t names tokens that the model does not have", d2t=whole["d2t"] + 200)
    refused("tensor lm_head.weight is missing", **{"lm_head.weight": None})
    refused("tensor fc.weight is stored as I8; supported are", **{"fc.weight": whole["fc.weight"].char()})


def test_what_does_not_go_with_eagle3_is_refused(tmp_path: Path) -> None:
    folder, layer = eagle3_zoo.folders("llama")
    with pytest.raises(DeviceError, match=r"the torch device does not run layers that .*EAGLE3\); take --device cpu"):
        open_model(under_eagle3((folder, layer), device="torch"))
    for other in ("mistral-window", "gemma2"):
        with pytest.raises(ModelError, match=r"no EAGLE3 layer can draft for a .* model: all of the model's layers"):
            open_model(under_eagle3((models_zoo.folder(other), layer)))
    with pytest.raises(ModelError, match="nowhere"):
        open_model(under_eagle3((folder, Path("/nowhere"))))
    with pytest.raises(OptionError, match=r'--kv-offload does not go with .*"method": "eagle3"'):
        EngineLoad(under_eagle3((folder, layer), kv_offload=str(tmp_path)))
    with pytest.raises(ModelError, match="must name eagle_aux_hidden_state_layer_ids for a model of 2 layers"):
        open_model(under_eagle3((models_zoo.folder("llama"), layer)))
