"""`tidewheel eval`: its figures are those of transformers and of numpy, on every kind of device and cache."""

from __future__ import annotations

import contextlib
import functools
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import encoder_zoo
import gguf
import gguf_files
import jax_processors
import models_zoo
import numpy as np
import pytest
from cores import one_core
from logits import run_with_logits
from numpy.typing import NDArray
from optional_packages import require_packages

from tidewheel.engine.devices.batch import SamplingBatch, StepBatch
from tidewheel.engine.loading.opened_model import open_model
from tidewheel.engine.text.tokenizer import Tokenizer
from tidewheel.server.commands.cli import main
from tidewheel.server.options.model import DEMO_MODEL, engine_options

pytest.importorskip("tidewheel._native")
torch = pytest.importorskip("torch")
require_packages("transformers")

TEXT = "The dog sleeps, and the quick brown fox jumps over it. Die Füchse sind müde; 犬も寝ている。\n" * 2
OTHER = "def jump(fox: Fox) -> Dog:\n    return fox.over(lazy=True)\n"
EXACT = ("--dtype", "float32", "--kv-cache-dtype", "float32")

Evaluate = Callable[..., dict[str, Any]]


@pytest.fixture
def evaluate(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Evaluate:
    """`tidewheel eval` of TEXT with windows of 40 tokens, on one core; returns the JSON, and the table under "text"."""
    text = tmp_path / "text.txt"
    text.write_text(TEXT)

    def run(*arguments: str, texts: tuple[Path, ...] = (text,), context: int = 40) -> dict[str, Any]:
        given = ("--text", *map(str, texts), "--context", str(context), "--threads-bind", one_core())
        assert main(["eval", *arguments, *given, "--json", "-"]) == 0
        printed = capsys.readouterr()
        report: dict[str, Any] = json.loads(printed.out)
        return {**report, "text": printed.err}

    return run


def windows(tokenizer: Tokenizer, text: str, context: int = 40) -> list[list[int]]:
    """The token ids, `context` at a time."""
    ids = tokenizer.encode(text, add_special_tokens=False)
    return [ids[start : start + context] for start in range(0, len(ids), context)]


def log_softmax(logits: NDArray[np.float32]) -> NDArray[np.float64]:
    """In float64, over the last axis."""
    exact = logits - logits.max(-1, keepdims=True).astype(np.float64)
    return exact - np.log(np.exp(exact).sum(-1, keepdims=True))


def of_transformers(ids: list[int]) -> NDArray[np.float64]:
    """Log-probabilities of the built-in model in float32 after each token but the last, `[T - 1, vocab]`."""
    with torch.no_grad():
        logits: NDArray[np.float32] = _built_in()(torch.tensor([ids])).logits[0, :-1].numpy()
    return log_softmax(logits)


@functools.cache
def _built_in() -> Any:
    from transformers import AutoModelForImageTextToText

    return AutoModelForImageTextToText.from_pretrained(DEMO_MODEL, dtype=torch.float32)


def nll(logprobs: NDArray[np.float64], ids: list[int]) -> list[float]:
    return [-float(row[token]) for row, token in zip(logprobs, ids[1:], strict=True)]


def test_perplexity_is_that_of_transformers(evaluate: Evaluate, tmp_path: Path) -> None:
    texts = {"a.txt": TEXT, "b.py": OTHER}
    for name, text in texts.items():
        (tmp_path / name).write_text(text)
    report = evaluate(*EXACT, texts=tuple(tmp_path / name for name in texts))
    tokenizer = Tokenizer.load(DEMO_MODEL)
    expected = {
        name: [value for ids in windows(tokenizer, text) if len(ids) > 1 for value in nll(of_transformers(ids), ids)]
        for name, text in texts.items()
    }
    assert [found["name"] for found in report["texts"]] == list(texts)
    for found in report["texts"]:
        assert found["scored"] == len(expected[found["name"]])
        assert found["perplexity"] == pytest.approx(np.exp(np.mean(expected[found["name"]])), rel=1e-4)
    together = [value for values in expected.values() for value in values]
    assert report["total"]["scored"] == len(together)
    assert report["total"]["perplexity"] == pytest.approx(np.exp(np.mean(together)), rel=1e-4)
    assert report["total"]["divergence"] is report["reference"] is None
    for shown in ("a.txt", "b.py", "all", f"{report['total']['perplexity']:.4f}", "32.00 bits a weight"):
        assert shown in report["text"]


def test_divergence_is_that_of_the_definition(evaluate: Evaluate) -> None:
    found = evaluate("--reference", "float32")
    model, total = found["model"], found["total"]
    assert (model["weights"], model["kv_cache_dtype"]) == ("int8-channel", "bfloat16")
    assert model["bits_per_weight"] == pytest.approx(8 * model["weight_bytes"] / model["parameters"])
    assert (found["reference"]["weights"], found["reference"]["kv_cache_dtype"]) == ("float32", "float32")
    tokenizer = Tokenizer.load(DEMO_MODEL)
    kl: list[float] = []
    same: list[bool] = []
    expected: list[float] = []
    for ids in windows(tokenizer, TEXT):
        p, q = of_transformers(ids), log_softmax(of_the_built_in_model(ids)[:-1])
        kl += (np.exp(p) * (p - q)).sum(-1).tolist()
        same += (p.argmax(-1) == q.argmax(-1)).tolist()
        expected += nll(p, ids)
    assert total["divergence"]["mean_kl"] == pytest.approx(np.mean(kl), rel=1e-3)
    assert total["divergence"]["p99_kl"] == pytest.approx(np.quantile(kl, 0.99), rel=1e-3)
    assert total["divergence"]["max_kl"] == pytest.approx(max(kl), rel=1e-3)
    assert total["divergence"]["same_top"] == pytest.approx(np.mean(same))
    assert total["divergence"]["reference_perplexity"] == pytest.approx(np.exp(np.mean(expected)), rel=1e-4)


def of_the_built_in_model(ids: list[int]) -> NDArray[np.float32]:
    """Its logits as it is served, after each token, `[T, vocab]`, in one step."""
    options = engine_options({"threads_bind": one_core()})
    executor = open_model(options).load(
        options, kv_cache_bytes=8 << 20, max_model_len=64, max_num_seqs=64, max_num_batched_tokens=64
    )
    places = np.arange(len(ids), dtype=np.int32)
    batch = StepBatch(
        token_ids=np.array(ids, np.int32),
        positions=places,
        query_start=np.array([0, len(ids)], np.int32),
        context_len=np.array([len(ids)], np.int32),
        block_tables=np.arange(4, dtype=np.int32)[None],
        logits_rows=places,
        sampling=SamplingBatch.greedy(places + 1),
    )
    _, logits = run_with_logits(executor, batch)
    executor.close()
    return logits


@pytest.mark.parametrize("reference", ["float32", str(DEMO_MODEL)])
def test_a_model_does_not_diverge_from_itself(evaluate: Evaluate, reference: str) -> None:
    divergence = evaluate(*EXACT, "--reference", reference)["total"]["divergence"]
    assert divergence["max_kl"] <= 1e-9
    assert divergence["same_top"] == 1.0


# JAX compiles each size of a step.
@pytest.mark.parametrize("device", ["torch", "graph-cpu", pytest.param("tpu", marks=pytest.mark.sweep)])
def test_every_device_gives_whole_distributions(evaluate: Evaluate, device: str) -> None:
    folder = str(models_zoo.folder("qwen3", tokenizer=True))
    expected = evaluate(folder, *EXACT)["total"]["perplexity"]
    options = {"graph-cpu": ["--enforce-eager", "--skip-warmup"]}.get(device, [])
    with jax_processors.asked_for() if device == "tpu" else contextlib.nullcontext():
        found = evaluate(folder, "--device", device, *EXACT, *options)
    assert found["model"]["device"] == device
    assert found["total"]["perplexity"] == pytest.approx(expected, rel=1e-4)


# More tokens than a window sees, and than a step has.
@pytest.mark.parametrize("name", ["mistral-window", "gemma3", "qwen3_5", "mamba2"])
def test_windows_and_states_are_those_of_transformers(evaluate: Evaluate, name: str) -> None:
    folder = models_zoo.folder(name, tokenizer=True)
    report = evaluate(str(folder), *EXACT, context=100)
    expected = [
        value
        for ids in windows(Tokenizer.load(folder), TEXT, 100)
        for value in nll(log_softmax(models_zoo.reference_logits(name, ids))[:-1], ids)
    ]
    assert len(expected) > 100
    assert report["total"]["scored"] == len(expected)
    assert report["total"]["perplexity"] == pytest.approx(np.exp(np.mean(expected)), rel=1e-4)


def test_the_reference_of_a_quantized_file_are_its_own_weights(evaluate: Evaluate, tmp_path: Path) -> None:
    quantize = gguf_files.quantized(gguf.GGMLQuantizationType.Q8_0)
    file = str(gguf_files.zoo_file(tmp_path / "model.gguf", "qwen2", quantize))
    found = evaluate(file, "--reference", "float32")
    assert "q8_0" in found["model"]["weights"]
    assert (found["reference"]["weights"], found["reference"]["bits_per_weight"]) == ("float32", 32.0)
    assert 0 < found["total"]["divergence"]["mean_kl"] < 1e-2
    dense = evaluate(file, "--device", "torch", *EXACT)  # which dequantizes all that it reads
    assert found["total"]["divergence"]["reference_perplexity"] == pytest.approx(dense["total"]["perplexity"], rel=1e-5)


def test_each_window_begins_with_the_models_bos(evaluate: Evaluate, tmp_path: Path) -> None:
    folder = tmp_path / "model"
    shutil.copytree(models_zoo.folder("qwen3", tokenizer=True), folder)
    tokenizer = json.loads((folder / "tokenizer.json").read_text())
    bos = {"SpecialToken": {"id": "<|im_start|>", "type_id": 0}}
    tokenizer["post_processor"] = {
        "type": "TemplateProcessing",
        "single": [bos, {"Sequence": {"id": "A", "type_id": 0}}],
        "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 0}}],
        "special_tokens": {"<|im_start|>": {"id": "<|im_start|>", "ids": [1], "tokens": ["<|im_start|>"]}},
    }
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    report = evaluate(str(folder), *EXACT)
    expected = [
        value
        for ids in windows(Tokenizer.load(folder), TEXT, 39)
        for value in nll(log_softmax(models_zoo.reference_logits("qwen3", [1, *ids]))[:-1], [1, *ids])
    ]
    assert report["added_tokens"] == 1
    assert report["total"]["scored"] == report["total"]["tokens"] == len(expected)
    assert report["total"]["perplexity"] == pytest.approx(np.exp(np.mean(expected)), rel=1e-4)


def test_without_a_text_there_are_those_of_the_package(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    target = tmp_path / "report.json"
    assert main(["eval", "--threads-bind", one_core(), "--json", str(target)]) == 0
    report = json.loads(target.read_text())
    names = {found["name"] for found in report["texts"]}
    assert {"prose.txt", "code.txt", "markdown.md", "chat.txt", "german.txt", "arabic.txt", "japanese.txt"} < names
    assert report["context"] == 512
    assert "perplexity" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("content", "arguments", "said"),
    [
        (b"", (), "has 0 tokens: at least 2 are needed"),
        (b"\xff\xfe", (), "is not UTF-8: its byte 0 is not part of a character"),
        (b"plain text", ("--context", "1000000"), "--context 1000000 is more than the"),
        (b"plain text", ("--context", "1"), "leaves no token to score"),
        (b"plain text", ("--pipeline-parallel-size", "2"), "leave --pipeline-parallel-size out"),
        (b"plain text", ("--speculative-config", '{"method": "ngram"}'), "leave --speculative-config out"),
        (b"plain text", ("--enable-lora",), "leave --enable-lora"),
        (b"plain text", ("--skip-tokenizer-init",), "leave --skip-tokenizer-init out"),
        (b"plain text", ("--text", "/nowhere.txt"), "/nowhere.txt does not exist"),
        (b"plain text", ("--json", "/nowhere/report.json"), "--json: there is no folder /nowhere"),
    ],
)
def test_refusals_say_what_to_do(
    content: bytes, arguments: tuple[str, ...], said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "text.txt").write_bytes(content)
    assert main(["eval", "--text", str(tmp_path / "text.txt"), *arguments]) == 1
    assert said in capsys.readouterr().err


def test_a_reference_with_other_tokens_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "text.txt").write_text(TEXT)
    text = ("--text", str(tmp_path / "text.txt"))
    other = models_zoo.folder("qwen3", tokenizer=True)
    assert main(["eval", *text, "--reference", str(other)]) == 1
    assert f"--reference {other} has another vocabulary than tidewheel-demo" in capsys.readouterr().err
    renamed = tmp_path / "renamed"
    shutil.copytree(other, renamed)
    tokenizer = (renamed / "tokenizer.json").read_text()
    (renamed / "tokenizer.json").write_text(tokenizer.replace("<|im_end|>", "<|over|>"))
    assert main(["eval", str(other), *text, "--reference", str(renamed)]) == 1
    assert "token 2 is '<|over|>' in it and '<|im_end|>' in the model" in capsys.readouterr().err


def test_an_encoder_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("onnxruntime")
    folder = encoder_zoo.folder("bert-prompts")
    assert main(["eval", str(folder)]) == 1
    assert f"{folder} is an encoder" in capsys.readouterr().err
