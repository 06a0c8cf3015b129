"""pull, list, rm and inspect of a hub's models, as processes of their own."""

from __future__ import annotations

import itertools
import json
import os
import pty
import re
import shutil
import struct
import subprocess
import sys
from collections.abc import Iterable, Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

import eagle3_zoo
import encoder_zoo
import models_zoo
import numpy as np
import pytest
from engine.weights.quantized.checkpoint_formats import FORMATS, save
from fake_hub import COMMITS, Claimed, FakeHub, fake_hub
from samples import swept

import tidewheel
from tidewheel.engine.weights.checkpoint import shapes_in

NEEDED = ("gguf", "torch", "tidewheel._native")
pytestmark = pytest.mark.skipif(not all(map(find_spec, NEEDED)), reason=f"needs {', '.join(NEEDED)}")

QUANTIZED = ("gptq-3-order", "packed-4-zeros", "nf4-double")  # readers look at numbers of each
PICKLED = {
    "config.json": b"{}",
    "README.md": b"words",
    "training_args.bin": b"of training",
    "tf_model.h5": b"another format",
}
ENCODER = {"config.json": b"{}", "onnx/model.onnx": b"graph"}


@pytest.fixture(scope="module")
def hub(tmp_path_factory: pytest.TempPathFactory) -> Iterator[FakeHub]:
    """own/model has safetensors, own/gguf the same model in two types; both are longer than what is fetched of them."""
    import gguf
    import gguf_files
    import torch

    folder = tmp_path_factory.mktemp("made")
    model, tokenizer = models_zoo.model("llama-llama3"), models_zoo.train_tokenizer()
    files = {path.name: path.read_bytes() for path in models_zoo.folder("llama-llama3", tokenizer=True).iterdir()}
    q8 = gguf_files.write(
        folder / "q8.gguf", model, tokenizer, quantize=gguf_files.quantized(gguf.GGMLQuantizationType.Q8_0)
    )
    f32 = gguf_files.write(folder / "f32.gguf", model)
    torch.save({"a.weight": torch.ones(2, 3)}, folder / "weights.bin")
    pickled = PICKLED | {"weights.bin": (folder / "weights.bin").read_bytes()}
    converted = {"model-Q8_0.gguf": with_much_metadata(q8.read_bytes()), "model-F32.gguf": f32.read_bytes()}
    repositories = {"own/model": files, "own/gguf": converted, "own/pickled": pickled, "own/encoder": ENCODER}
    for kind in QUANTIZED:
        repositories[f"own/{kind}"] = quantized(kind, folder / kind)
    config = json.loads(files["config.json"]) | {"architectures": ["UnknownForCausalLM"], "model_type": "unknown"}
    repositories["own/unknown"] = {**files, "config.json": json.dumps(config).encode()}
    embedder = encoder_zoo.folder("bert-prompts")
    repositories["own/embedder"] = {
        str(path.relative_to(embedder)): path.read_bytes() for path in embedder.rglob("*") if path.is_file()
    }
    repositories["own/huge"] = files | {"model.safetensors": Claimed(files["model.safetensors"])}
    graph = repositories["own/embedder"]["onnx/model.onnx"]
    repositories["own/huge-embedder"] = repositories["own/embedder"] | {"onnx/model.onnx": Claimed(graph)}
    repositories["own/opt"] = of_pytorch("opt", folder / "opt")
    for name, made in zip(("own/llama", "own/eagle3"), eagle3_zoo.folders("llama"), strict=True):
        repositories[name] = {path.name: path.read_bytes() for path in made.iterdir()}
    with fake_hub(repositories) as running:
        yield running


def with_much_metadata(file: bytes) -> bytes:
    """The GGUF file with one more key, of 3 MiB, before the others: more than is fetched at first."""
    key, size = b"tests.padding", 3 << 20
    head = struct.pack(f"<Q{len(key)}sI", len(key), key, 8)
    entry = head + struct.pack("<Q", size - len(head) - 8) + bytes(size - len(head) - 8)  # tensors stay aligned
    count = struct.unpack_from("<Q", file, 16)[0]
    return file[:16] + struct.pack("<Q", count + 1) + entry + file[24:]


def of_pytorch(name: str, folder: Path) -> dict[str, bytes]:
    """The files of a model as repositories had them before safetensors and tokenizer.json."""
    import torch

    folder.mkdir()
    torch.save(models_zoo.model(name).state_dict(), folder / "pytorch_model.bin")
    made = models_zoo.folder(name, tokenizer=True)
    tokenizer = json.loads((made / "tokenizer.json").read_text())["model"]
    return {
        "config.json": (made / "config.json").read_bytes(),
        "pytorch_model.bin": (folder / "pytorch_model.bin").read_bytes(),
        "rust_model.ot": b"another format",
        "vocab.json": json.dumps(tokenizer["vocab"]).encode(),
        "merges.txt": "\n".join(" ".join(pair) for pair in tokenizer["merges"]).encode(),
        "tokenizer_config.json": b'{"tokenizer_class": "GPT2Tokenizer"}',
    }


def quantized(kind: str, folder: Path) -> dict[str, bytes]:
    """The files of the same model, whose layers have random weights of that format."""
    model, random, tensors = models_zoo.model("llama-llama3"), np.random.default_rng(0), {}
    for name, weight in model.state_dict().items():
        if ".layers." in name and weight.ndim == 2:
            layer, _ = FORMATS[kind].make(random, *weight.shape)
            tensors |= {name.removesuffix("weight") + part: array for part, array in layer.items()}
        else:
            tensors[name] = weight.numpy()
    config = json.loads((models_zoo.folder("llama-llama3") / "config.json").read_text())
    save(folder, {**config, "quantization_config": FORMATS[kind].config}, tensors)
    models_zoo.train_tokenizer().save_pretrained(folder)
    return {path.name: path.read_bytes() for path in folder.iterdir()}


# Each new process imports all of the hub's client, so several commands share one. Without an argument it runs each line
# of commands in a fork, which begins with what is imported and with nothing of the commands before.
_SCRIPT = """
import contextlib, io, json, os, sys
from tidewheel.server.commands.cli import main
def run(commands):
    for arguments in commands:
        out, err = io.StringIO(), io.StringIO()
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            code = main(arguments)
        print(json.dumps([code, out.getvalue(), err.getvalue()]), flush=True)
if len(sys.argv) > 1:
    run(json.loads(sys.argv[1]))
    sys.exit()
import huggingface_hub.file_download, huggingface_hub.hf_api, tidewheel.server.commands.serve
for line in sys.stdin:
    if not (child := os.fork()):
        run(json.loads(line))
        os._exit(0)
    os.waitpid(child, 0)
    print(flush=True)
"""


class Ran(NamedTuple):
    """What a command left."""

    code: int
    out: str
    err: str


def ran(lines: Iterable[str]) -> list[Ran]:
    return [Ran(*json.loads(line)) for line in lines]


class Shell:
    """Runs commands against a hub, with a cache of its own, which `clear` empties."""

    def __init__(self, hub: FakeHub, home: Path) -> None:
        self.hub, self.home = hub, home
        self._process: subprocess.Popen[str] | None = None

    def __call__(self, *commands: str, stdin: int | None = None, offline: bool = False, **variables: str) -> list[Ran]:
        given = json.dumps([command.split() for command in commands])
        if stdin is None and not offline and not variables:
            return self._forked(given)
        done = subprocess.run(
            [sys.executable, "-c", _SCRIPT, given],
            stdin=subprocess.DEVNULL if stdin is None else stdin,
            capture_output=True,
            check=False,
            **self._options(offline=offline, **variables),
        )
        assert done.returncode == 0, done.stderr
        return ran(done.stdout.splitlines())

    def clear(self) -> None:
        shutil.rmtree(self.home, ignore_errors=True)
        self.home.mkdir()

    def close(self) -> None:
        if self._process is not None:
            self._process.communicate()

    def _forked(self, given: str) -> list[Ran]:
        if self._process is None:
            command = [sys.executable, "-c", _SCRIPT]
            pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
            self._process = subprocess.Popen(command, **pipes, **self._options(offline=False))
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(given + "\n")
        self._process.stdin.flush()
        done = ran(itertools.takewhile(lambda line: line != "\n", self._process.stdout))
        assert len(done) == len(json.loads(given)), done
        return done

    def _options(self, *, offline: bool, **variables: str) -> dict[str, Any]:
        path = {"PYTHONPATH": os.pathsep.join(sys.path)}
        environment = {**self.hub.environment(self.home, offline=offline), **path, **variables}
        return {"text": True, "cwd": self.home.parent, "env": environment}


@pytest.fixture(scope="module")
def shells(hub: FakeHub, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Shell]:
    shell = Shell(hub, tmp_path_factory.mktemp("shell") / "home")
    yield shell
    shell.close()


@pytest.fixture
def shell(shells: Shell) -> Shell:
    shells.clear()
    return shells


def typed(text: str) -> int:
    """A terminal where `text` was typed."""
    keyboard, terminal = pty.openpty()
    os.write(keyboard, text.encode())
    return terminal


def test_a_model_is_pulled_listed_and_removed(shell: Shell) -> None:
    model, eight, _, as_json, table, unasked = shell(
        "pull own/model", "pull own/gguf:q8_0", "pull own/gguf:F32", "list --json", "list", "rm own/model"
    )
    assert (Path(model.out.strip()) / "model.safetensors").exists()
    assert Path(eight.out.strip()).name == "model-Q8_0.gguf"
    assert "Downloaded own/model: 0.00 GiB in " in model.err
    assert "Fetching" not in model.err
    assert "\r" not in model.err
    listed = {model["name"]: model for model in json.loads(as_json.out)}
    assert {*listed} == {"own/model", "own/gguf:Q8_0", "own/gguf:F32"}
    sizes = {name: len(content) for name, content in shell.hub.repositories["own/gguf"].items()}
    assert listed["own/gguf:Q8_0"]["bytes"] == sizes["model-Q8_0.gguf"]
    assert listed["own/gguf:F32"]["bytes"] == sizes["model-F32.gguf"]
    head, *rows = table.out.splitlines()
    assert head.split() == ["NAME", "SIZE", "MODIFIED", "REVISION"]
    assert all("just now" in row and COMMITS["main"][:12] in row for row in rows)
    assert unasked.code == 1
    assert "add --yes" in unasked.err

    no, removed, fewer, yes, last, empty, missing = shell(
        "rm own/model",
        "rm own/gguf:Q8_0 --yes",
        "list",
        "rm own/model",
        "rm -y own/gguf:F32",
        "list",
        "rm -y own/model",
        stdin=typed("n\ny\n"),
    )
    assert (no.code, no.err) == (1, "Nothing was deleted.\n")
    assert removed.out.startswith("Deleted own/gguf:Q8_0: ")
    assert "own/model" in fewer.out
    assert "own/gguf:Q8_0" not in fewer.out
    assert (yes.code, last.code, last.err, empty.out) == (0, 0, "", "")
    assert [path for path in shell.home.rglob("*") if path.suffix in (".gguf", ".safetensors")] == []
    assert (missing.code, "own/model is not in the cache" in missing.err) == (1, True)


def test_the_progress_for_programs_only_grows(shell: Shell) -> None:
    pulled, again, missing = shell("pull own/gguf:Q8_0 --json", "pull own/gguf:Q8_0 --json", "pull own/none --json")
    *progress, last = map(json.loads, pulled.out.splitlines())
    size = len(shell.hub.repositories["own/gguf"]["model-Q8_0.gguf"])
    assert progress
    assert [one["completed"] for one in progress] == sorted(one["completed"] for one in progress)
    assert progress[-1] == {"completed": size, "total": size}
    assert last == {"path": str(Path(last["path"]).parent / "model-Q8_0.gguf")}
    assert Path(last["path"]).stat().st_size == size
    assert [json.loads(line) for line in again.out.splitlines()] == [last]
    assert (pulled.err, missing.out, missing.code) == ("", "", 1)
    assert missing.err.startswith("tidewheel pull: own/none is neither")


def test_a_disk_that_gets_full_leaves_nothing_begun(shell: Shell) -> None:
    main = str(Path(tidewheel.__file__).with_name("__main__.py"))
    pull = ["sh", "-c", 'ulimit -f 8; exec "$@"', "sh", sys.executable, main, "pull", "own/model", "--json"]
    environment = shell.hub.environment(shell.home)
    done = subprocess.run(pull, env=environment, cwd=shell.home, capture_output=True, text=True, check=False)
    assert (done.returncode, "path" in done.stdout) == (1, False)
    assert re.fullmatch(r"tidewheel pull: own/model could not be downloaded from .*File too large.*\n", done.stderr)
    assert [path for path in shell.home.rglob("*") if path.suffix in (".incomplete", ".safetensors")] == []


def test_what_cannot_be_pulled_is_refused(shell: Shell) -> None:
    folder = shell.home / "elsewhere"
    pickled, none, here, encoder, there = shell(
        "pull own/pickled",
        "pull own/none",
        f"pull {shell.home}",
        "pull own/encoder",
        "list --json",
        TIDEWHEEL_DOWNLOAD_DIR=str(folder),
    )
    assert [model["name"] for model in json.loads(there.out)] == ["own/encoder"]
    assert Path(encoder.out.strip()).is_relative_to(folder)
    assert (pickled.code, "pickle (weights.bin)" in pickled.err) == (1, True)
    assert (none.code, "own/none is neither a folder here nor a model" in none.err) == (1, True)
    assert (here.code, "is here already" in here.err) == (1, True)
    assert Path(encoder.out.strip(), "onnx", "model.onnx").read_bytes() == b"graph"


def test_pytorchs_files_are_pulled_where_there_are_no_others(shell: Shell) -> None:
    refused, pulled, inspected, listed, served = shell(
        "inspect own/opt",
        "pull own/opt",
        "inspect own/opt --json",
        "list",
        "serve own/opt --port 0 --device cpu --max-model-len 1000000",  # refused after the model was found
    )
    assert "tidewheel pull own/opt" in refused.err
    assert {path.name for path in Path(pulled.out.strip()).iterdir()} == {*shell.hub.repositories["own/opt"]} - {
        "rust_model.ot"
    }
    found = json.loads(inspected.out)
    assert (found["refusal"], found["contents"]["files"]) == (None, ["pytorch_model.bin"])
    assert "own/opt" in listed.out
    assert "max-model-len" in served.err


# The command that is told runs, and imports torch.
@pytest.mark.sweep
def test_the_command_for_pickles_fetches_and_converts_them(shell: Shell) -> None:
    (refused,) = shell("pull own/pickled --revision v2")
    command = refused.err.partition("serves it: ")[2].rstrip()
    assert command.endswith(" && tidewheel serve ./pickled")
    subprocess.run(
        ["sh", "-c", command.removesuffix(" && tidewheel serve ./pickled")],
        check=True,
        cwd=shell.home,
        env={**shell.hub.environment(shell.home), "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"},
    )
    folder = shell.home / "pickled"
    made = {path.name for path in folder.iterdir() if path.is_file()}
    assert made == {"config.json", "weights.bin", "model.safetensors"}
    assert dict(shapes_in(folder / "model.safetensors", 1)) == {"a.weight": (2, 3)}


# Models are inspected, downloaded and inspected again.
@pytest.mark.parametrize("kinds", [QUANTIZED[:1], swept(QUANTIZED[1:])])
def test_of_a_hub_model_headers_alone_are_inspected(shell: Shell, kinds: tuple[str, ...]) -> None:
    names = ["own/model", "own/gguf:Q8_0", *(f"own/{kind}" for kind in kinds)]
    inspected = [f"inspect {name} --device cpu --json" for name in names]
    shell.hub.sent.clear()
    *remote, kept, missing = shell(*inspected[:2], "list", "inspect own/none")
    assert kept.out == ""
    size = len(shell.hub.repositories["own/model"]["model.safetensors"])
    assert shell.hub.sent["model.safetensors"] <= 100_000 < size
    assert (missing.code, "neither a folder here nor a model" in missing.err) == (1, True)
    assert [json.loads(ran.out)["contents"]["files"] for ran in remote] == [["model.safetensors"], ["model-Q8_0.gguf"]]

    ran = shell(*inspected, *(f"pull {name}" for name in names))
    found = [json.loads(one.out) for one in ran[: len(names)]]
    assert [model["refusal"] for model in found] == [None] * len(names)
    whole = [json.loads(one.out) for one in shell(*inspected, offline=True)]
    assert found == whole


@pytest.mark.sweep
def test_nothing_is_downloaded_to_be_inspected_from_a_hub_that_sends_no_files(shell: Shell) -> None:
    shell.hub.may_send.clear()
    try:
        (ran,) = shell("inspect own/model", HF_HUB_ETAG_TIMEOUT="1")
    finally:
        shell.hub.may_send.set()
    assert ran.code == 1
    assert ran.err == f"tidewheel inspect: own/model is not in the cache, and {shell.hub.endpoint} cannot be reached\n"
    assert not [path for path in shell.home.rglob("*") if path.is_file()]


@pytest.mark.parametrize(
    ("name", "options", "said"),
    [
        ("own/model", "--kv-cache-space 1000000", "do not fit into the "),
        ("own/gguf:Q8_0", "--kv-cache-space 1000000", "do not fit into the "),
        ("own/model", "--max-model-len 64 --kv-cache-space 0.000001", "less than one sequence of 64"),
        ("own/unknown", "", "UnknownForCausalLM"),
    ],
)
def test_what_cannot_be_served_is_refused_before_it_is_downloaded(
    shell: Shell, name: str, options: str, said: str
) -> None:
    shell.hub.sent.clear()
    (ran,) = shell(f"serve {name} --device cpu --port 0 {options}")
    assert ran.code == 1
    assert said in ran.err
    assert "/tmp/" not in ran.err  # where its headers lay
    assert "HTTP Request" not in ran.err  # the log of the hub's client
    assert [path for path in shell.home.rglob("*") if path.suffix in (".gguf", ".safetensors")] == []
    if name != "own/gguf:Q8_0":  # whose metadata is most of it
        whole = len(shell.hub.repositories[name]["model.safetensors"])
        assert 0 < shell.hub.sent["model.safetensors"] < whole


def test_what_the_disk_has_no_room_for_is_not_downloaded(shell: Shell) -> None:
    pytest.importorskip("onnxruntime")
    shell.hub.sent.clear()
    draft = '--speculative-config {"model":"own/huge","num_speculative_tokens":2}'
    whole, beside, drafted, pulled = shell(
        "serve own/huge --port 0",
        "serve own/model --port 0 --embedding-model own/huge-embedder",
        f"serve own/model --port 0 {draft}",
        "pull own/huge",
    )
    cache = shell.home / "hub"
    needed = rf"1048576\.00 GiB are still to be downloaded, and the disk of {cache} has [0-9.]+ GiB free: "
    advice = "delete models with tidewheel rm .*, or name a folder on a larger disk with HF_HOME or --download-dir"
    for ran, names in (
        (whole, "own/huge"),
        (beside, "own/huge-embedder, own/model"),
        (drafted, "own/model, own/huge"),
        (pulled, "own/huge"),
    ):
        assert ran.code == 1
        assert re.search(f": {names}: {needed}{advice}", ran.err)
    assert {*shell.hub.sent} <= {"config.json"}  # which says whether it is an encoder
    blobs = cache / "models--own--huge" / "blobs"
    (blobs / b"model.safetensors".hex()).write_bytes(shell.hub.repositories["own/huge"]["model.safetensors"])
    assert shell("pull own/huge")[0].code == 0  # the weights are there already
    assert "model.safetensors" not in shell.hub.sent


@pytest.mark.sweep
def test_what_drafts_counts_before_anything_is_downloaded(shell: Shell) -> None:
    """The cache has room for a sequence of the model, and not for one of the draft model's beside it."""
    shell.hub.sent.clear()
    (kv,) = json.loads(shell("inspect own/model --json")[0].out)["kv_cache"]
    space = 1.5 * 128 * kv["bytes"]["float32"] / kv["tokens"] / 2**30
    small, layer = shell(
        f"serve own/model --port 0 --device cpu --kv-cache-dtype float32 --max-model-len 128 --kv-cache-space {space} "
        '--speculative-config {"model":"own/packed-4-zeros","num_speculative_tokens":2}',
        'serve own/llama --port 0 --device cpu --kv-cache-space 1000000 --speculative-config {"model":"own/eagle3"}',
    )
    assert "less than one sequence of 128" in small.err
    assert "do not fit into the" in layer.err
    assert "/tmp/" not in small.err + layer.err
    assert [path for path in shell.home.rglob("*") if path.suffix == ".safetensors"] == []


@pytest.mark.sweep
def test_of_a_hub_encoder_its_words_alone_are_inspected(shell: Shell) -> None:
    pytest.importorskip("onnxruntime")
    shell.hub.sent.clear()
    remote, _, whole = shell("inspect own/embedder --json", "pull own/embedder", "inspect own/embedder --json")
    assert json.loads(remote.out) == json.loads(whole.out)
    assert json.loads(whole.out)["prompts"] == encoder_zoo.PROMPTS
    assert json.loads(whole.out)["bytes"] == len(shell.hub.repositories["own/embedder"]["onnx/model.onnx"])
