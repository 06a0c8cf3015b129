"""`tidewheel inspect` says of a model what serving it does."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import gguf_files
import models_zoo
import mtp_zoo
import pytest

from tidewheel.engine.devices.coverage import DEVICES_WITH
from tidewheel.engine.loading.opened_model import open_model
from tidewheel.engine.options import EngineOptions
from tidewheel.engine.weights.measured_quality import MEASURED_ON, mean_divergence
from tidewheel.server.commands.cli import main
from tidewheel.server.options.model import DEMO_MODEL

pytest.importorskip("tidewheel._native")

Inspect = Callable[..., dict[str, Any]]


@pytest.fixture
def inspect(capsys: pytest.CaptureFixture[str]) -> Inspect:
    def run(model: Path, *options: str, code: int = 0) -> dict[str, Any]:
        assert main(["inspect", str(model), "--json", "--device", "cpu", *options]) == code
        found: dict[str, Any] = json.loads(capsys.readouterr().out)
        return found

    return run


@pytest.fixture
def changed(tmp_path: Path) -> Callable[..., Path]:
    """The demo model with other values in its config.json, and the same weights."""

    def change(**fields: Any) -> Path:
        config = {**json.loads((DEMO_MODEL / "config.json").read_text()), **fields}
        config["text_config"] |= {name: value for name, value in fields.items() if name != "architectures"}
        (tmp_path / "config.json").write_text(json.dumps(config))
        if not (tmp_path / "model.safetensors").exists():
            for name in ("model.safetensors", "tokenizer.json", "tokenizer_config.json"):
                (tmp_path / name).symlink_to(DEMO_MODEL / name)
        return tmp_path

    return change


def test_it_says_what_serving_would_take(inspect: Inspect) -> None:
    found = inspect(DEMO_MODEL, "--quantization", "int4", "--kv-cache-dtype", "int8")
    opened = open_model(EngineOptions(model=str(DEMO_MODEL), device="cpu", quantization="int4", kv_cache_dtype="int8"))
    (chosen,) = [kept for kept in found["weights"] if kept["chosen"]]
    assert chosen == {
        "kept_as": "int4",
        "bytes": opened.weight_bytes,
        "chosen": True,
        "divergence": mean_divergence("int4"),
    }
    context = found["shape"]["context"]
    assert found["kv_cache"][-1]["tokens"] == context == opened.spec.max_positions
    assert found["kv_cache"][-1]["bytes"]["int8"] == context * opened.kv_bytes_per_token
    assert found["kv_cache_dtype"] == "int8"
    stored = found["contents"]["formats"]
    assert sum(kept["bytes"] for kept in stored) < (DEMO_MODEL / "model.safetensors").stat().st_size
    parameters = found["shape"]["parameters"] + found["vision"]["parameters"]
    assert parameters * 2 == sum(kept["bytes"] for kept in stored)


def test_it_says_what_formats_cost_where_that_is_known(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["inspect", str(DEMO_MODEL)]) == 0
    printed = capsys.readouterr().out
    assert f" as int4 (KL {mean_divergence('int4'):g})\n" in printed
    assert f"KL: nats a token that the format cost {MEASURED_ON}: docs/performance.md\n" in printed
    kind = gguf.GGMLQuantizationType.Q8_0
    path = tmp_path / "model.gguf"
    gguf_files.write(path, models_zoo.model("llama"), models_zoo.train_tokenizer(), quantize=gguf_files.quantized(kind))
    assert main(["quantize", str(path), str(tmp_path / "q4_0.gguf"), "--type", "q4_0"]) == 0
    assert main(["inspect", str(tmp_path / "q4_0.gguf")]) == 0
    assert f"(KL {mean_divergence('q4_0'):g}), on the cpu device" in capsys.readouterr().out


def test_a_model_that_serving_refuses_is_described_and_the_error_quoted(
    inspect: Inspect, changed: Callable[..., Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for fields, said in (
        ({"architectures": ["ImaginaryForCausalLM"]}, "ImaginaryForCausalLM"),
        ({"num_hidden_layers": 7}, "tensor model.layers.6.input_layernorm.weight is missing"),
        ({"quantization_config": {"quant_method": "imaginary", "bits": 3}}, "quantized by 'imaginary'"),
    ):
        found = inspect(changed(**fields), code=1)
        assert said in found["refusal"]
        assert found["contents"]["formats"]
    assert found["quantization"] == "imaginary (bits 3)"
    (changed() / "tokenizer.json").unlink()
    assert "tokenizer" in inspect(tmp_path, code=1)["refusal"]
    assert inspect(tmp_path, "--tokenizer", str(DEMO_MODEL))["refusal"] is None
    assert main(["inspect", str(changed(vocab_size=100))]) == 1
    assert re.search("^served +no: ", capsys.readouterr().out, re.MULTILINE)


def test_a_device_that_lacks_a_kind_of_layer_is_named(
    inspect: Inspect, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(DEVICES_WITH, "mlp", ("cpu", "torch"))
    verdicts = {verdict["device"]: verdict for verdict in inspect(DEMO_MODEL)["verdicts"]}
    assert [name for name, verdict in verdicts.items() if verdict["runs"]] == ["cpu", "torch"]
    assert verdicts["tpu"]["reason"].startswith("the tpu device has no mlp")
    assert main(["inspect", str(DEMO_MODEL), "--device", "torch"]) == 0
    assert "yes, on cpu, torch\n" in capsys.readouterr().out


def test_windows_bound_the_cache(inspect: Inspect) -> None:
    pytest.importorskip("torch")
    folder = models_zoo.folder("mistral-window", tokenizer=True)
    (longest,) = inspect(folder)["kv_cache"]
    opened = open_model(EngineOptions(model=str(folder), device="cpu"))
    assert longest["tokens"] == opened.spec.max_positions
    assert longest["bytes"]["float32"] <= longest["tokens"] * opened.kv_bytes_per_token


def test_experts_that_a_token_is_not_sent_to_are_not_active(inspect: Inspect) -> None:
    transformers = pytest.importorskip("transformers")
    folder = models_zoo.folder("olmoe", tokenizer=True)
    config = transformers.AutoConfig.from_pretrained(folder)
    expert = 3 * config.intermediate_size * config.hidden_size
    idle = config.num_hidden_layers * (config.num_experts - config.num_experts_per_tok) * expert
    shape = inspect(folder)["shape"]
    assert shape["parameters"] == models_zoo.model("olmoe").num_parameters()
    assert shape["active"] == shape["parameters"] - idle


def test_what_is_no_model_is_an_error(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["inspect", str(tmp_path)]) == 1
    output = capsys.readouterr()
    assert output.out == ""
    assert output.err.startswith("tidewheel inspect: ")
    with pytest.raises(SystemExit) as exited:
        main(["inspect"])
    assert exited.value.code == 2


def test_a_latent_is_cached_once(inspect: Inspect) -> None:
    pytest.importorskip("transformers")
    config = models_zoo.CASES["deepseek-v3"].config
    numbers = config["num_hidden_layers"] * (config["kv_lora_rank"] + config["qk_rope_head_dim"])
    longest = inspect(models_zoo.folder("deepseek-v3", tokenizer=True), "--device", "torch")["kv_cache"][-1]
    assert longest["bytes"]["float16"] == 2 * numbers * longest["tokens"]


def test_a_layer_for_drafts_is_named_and_counted_where_it_is_asked_for(
    inspect: Inspect, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("transformers")
    folder = mtp_zoo.folder("qwen3_5")
    options = ("--skip-tokenizer-init", "--dtype", "float32")
    without = inspect(folder, *options)
    with_it = inspect(folder, *options, "--speculative-config", '{"method": "mtp"}')
    takes = [[kept["bytes"] for kept in found["weights"] if kept["chosen"]] for found in (without, with_it)]
    assert takes[1][0] - takes[0][0] == without["mtp_bytes"] == with_it["mtp_bytes"] > 0
    assert with_it["kv_cache"][-1]["bytes"]["float32"] > without["kv_cache"][-1]["bytes"]["float32"]
    assert main(["inspect", str(folder), "--device", "cpu", *options]) == 0
    assert re.search("^MTP layer takes +.*speculative-config", capsys.readouterr().out, re.MULTILINE)
    assert inspect(models_zoo.folder("qwen3_5"), *options)["mtp_bytes"] is None
