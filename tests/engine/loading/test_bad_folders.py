"""`tidewheel serve FOLDER` on folders that are broken or hostile: one line that says what is wrong, and exit code 1."""

from __future__ import annotations

import gc
import json
import logging
import os
import shutil
import struct
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import tidewheel
import tidewheel.engine.loading.load  # before a test captures stderr, which progress is written to
from tidewheel.server.commands.cli import main
from tidewheel.server.options.model import DEMO_MODEL

pytest.importorskip("tidewheel._native")

MAIN = Path(tidewheel.__file__).with_name("__main__.py")
WEIGHTS = "model.safetensors"
JSON_FILES = [f"{name}config.json" for name in ("", "generation_", "preprocessor_", "tokenizer_")]
INDEX = "model.safetensors.index.json"
NORM = "language_model.model.norm.weight"
Change = Callable[[Path], object]
Fails = Callable[..., str]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """The embedded model; its weights are a link."""
    made = tmp_path / "model"
    made.mkdir()
    for name in (*JSON_FILES, "tokenizer.json"):
        shutil.copyfile(DEMO_MODEL / name, made / name)
    (made / WEIGHTS).symlink_to(DEMO_MODEL / WEIGHTS)
    return made


@pytest.fixture
def fails(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Fails:
    """The stderr of a start, which must be one line. The start must neither serve nor wait for ever."""
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(logging.getLogger(), "handlers", [])  # so that what is logged comes on stderr
    monkeypatch.setattr(gc, "freeze", lambda: None)  # what a start leaves behind is freed, as the process goes on

    def start(*arguments: str) -> str:
        assert main(["serve", "--port", "0", "--log-level", "error", *arguments]) == 1
        return one_line(capsys.readouterr().err)

    return start


def one_line(stderr: str) -> str:
    assert stderr.startswith("tidewheel serve: ")
    assert stderr.count("\n") == 1, stderr
    assert len(stderr) < 1000
    return stderr


def fields(name: str, **values: Any) -> Change:
    def change(folder: Path) -> None:
        known = json.loads((folder / name).read_text())
        (folder / name).write_text(json.dumps(known | values))

    return change


def text_fields(**values: Any) -> Change:
    """Fields of the language model."""

    def change(folder: Path) -> None:
        known = json.loads((folder / "config.json").read_text())
        fields("config.json", text_config=known["text_config"] | values)(folder)

    return change


def pipe(name: str) -> Change:
    def change(folder: Path) -> None:
        (folder / name).unlink(missing_ok=True)
        os.mkfifo(folder / name)

    return change


def link(name: str, target: str) -> Change:
    def change(folder: Path) -> None:
        (folder / name).unlink(missing_ok=True)
        (folder / name).symlink_to(target)

    return change


def weights(content: bytes) -> Change:
    def change(folder: Path) -> None:
        (folder / WEIGHTS).unlink()
        (folder / WEIGHTS).write_bytes(content)

    return change


def template(text: str) -> Change:
    return lambda folder: (folder / "chat_template.jinja").write_text(text)


def index(**weight_map: str) -> Change:
    def change(folder: Path) -> None:
        (folder / WEIGHTS).rename(folder / "a.safetensors")
        (folder / INDEX).write_text(json.dumps({"weight_map": weight_map}))

    return change


def poisoned(tensor: str, value: float) -> Change:
    def change(folder: Path) -> None:
        content = bytearray((folder / WEIGHTS).read_bytes())
        (length,) = struct.unpack_from("<Q", content)
        start = json.loads(content[8 : 8 + length])[tensor]["data_offsets"][0]
        bits = int(np.array(value, np.float32).view(np.uint32)) >> 16
        struct.pack_into("<H", content, 8 + length + start + 10, bits)
        weights(bytes(content))(folder)

    return change


BAD: dict[str, tuple[Change, str]] = {
    "head_dim": (text_fields(head_dim=10**9), "config.json: a head has 1000000000 dimensions, more than"),
    "hidden_size": (text_fields(hidden_size=2**30, head_dim=64), "which does not fit config.json"),
    "positions": (text_fields(max_position_embeddings=10**12), "max_position_embeddings must be a positive"),
    "temperature": (
        fields("generation_config.json", temperature=float("nan")),
        "generation_config.json: temperature must be between 0 and 100, got nan",
    ),
    "top_k": (fields("generation_config.json", top_k=-7), "generation_config.json: top_k must be between 1 and"),
    "end tokens": (
        fields("generation_config.json", eos_token_id=[*range(10**5)]),
        "100000 tokens, more than the 1000",
    ),
    "pipe for a config": (pipe("config.json"), "config.json is a named pipe; it must be a regular file"),
    "pipe for weights": (pipe(WEIGHTS), "model.safetensors is a named pipe"),
    "pipe for a tokenizer": (pipe("tokenizer.json"), "tokenizer.json is a named pipe"),
    "pipe for a template": (pipe("chat_template.jinja"), "chat_template.jinja is a named pipe"),
    "endless tokenizer": (link("tokenizer.json", "/dev/zero"), "tokenizer.json is a device"),
    "link to nowhere": (link("generation_config.json", "nowhere"), "generation_config.json is a link to a file that"),
    "header": (weights(struct.pack("<Q", 2**60) + b"{}"), "not a valid safetensors file"),
    "path outside": (index(**{NORM: "../../etc/passwd"}), "'../../etc/passwd', which is not a file name"),
    "many lines": (index(**{NORM: "a\nb\x1b[31m"}), r"'a\nb\x1b[31m', which is not a file name"),
    "many names": (index(**{f"{NORM}{i}": "a.safetensors" for i in range(10**4)}), "lacks tensor"),
    "nested template": (template("{% if a %}" * 9_000 + "{% endif %}" * 9_000), "the chat template does not compile"),
    "long expression": (template("{{ 1" + "+1" * 20_000 + " }}"), "the chat template does not compile"),
    "long template": (template("a" * 300_000), "chat_template.jinja has 300000 bytes; a file of its kind may have"),
    "long template inside": (
        fields("tokenizer_config.json", chat_template="a" * 300_000),
        "the chat template 'default' has more than 262144 characters",
    ),
    "nan": (
        poisoned("language_model.model.layers.3.mlp.up_proj.weight", float("nan")),
        "model.safetensors: tensor model.layers.3.mlp.up_proj.weight has 1 value that is not finite (infinite or NaN)",
    ),
}


@pytest.mark.parametrize("name", BAD)
def test_a_bad_folder_is_refused_in_one_line(name: str, folder: Path, fails: Fails) -> None:
    change, said = BAD[name]
    change(folder)
    assert said in fails(str(folder))


def test_the_command_ends_with_that_line(folder: Path) -> None:
    change, said = BAD["head_dim"]
    change(folder)
    done = subprocess.run(
        [sys.executable, str(MAIN), "serve", "--port", "0", "--log-level", "error", str(folder)],
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 1, done.stderr
    assert said in one_line(done.stderr)


def test_weights_that_would_be_rounded_to_numbers_are_refused_too(folder: Path, fails: Fails) -> None:
    poisoned("language_model.model.embed_tokens.weight", float("inf"))(folder)
    assert "tensor model.embed_tokens.weight has 1 value" in fails(str(folder), "--quantization", "int8-channel")


def test_random_weights_that_no_machine_could_hold_are_refused_before_they_are_made(folder: Path, fails: Fails) -> None:
    text_fields(hidden_size=2**30)(folder)
    assert "do not fit into" in fails(str(folder), "--load-format", "dummy")


def test_a_step_that_no_machine_has_the_memory_for_is_refused(folder: Path, fails: Fails) -> None:
    text_fields(hidden_size=2, intermediate_size=2**27, num_hidden_layers=1)(folder)
    said = fails(str(folder), "--load-format", "dummy", "--max-num-batched-tokens", "65536")
    assert "a step of 65536 tokens takes" in said
    assert "lower --max-num-batched-tokens" in said


def test_defaults_of_another_folder_are_within_the_engines_ranges(folder: Path, tmp_path: Path, fails: Fails) -> None:
    (tmp_path / "generation_config.json").write_text('{"top_p": NaN}')
    said = fails(str(folder), "--generation-config", str(tmp_path))
    assert "--generation-config: " in said
    assert "generation_config.json: top_p must be above 0 and at most 1, got nan" in said


@pytest.mark.parametrize("name", ["a" * 5000, "~nobody-has-this-name/model"])
def test_names_that_can_be_no_folder(name: str, fails: Fails) -> None:
    assert "cannot be looked for" in fails(name)
