"""Resolving models: local folders, and a hub that is a small server on this machine."""

from __future__ import annotations

import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from fake_hub import COMMITS, TOKEN, fake_hub, hub_environment, with_hub

from tidewheel.engine.errors import ModelError
from tidewheel.engine.weights import resolve
from tidewheel.engine.weights.gguf.choosing import find_mmproj
from tidewheel.engine.weights.hub import download_model, resolve_encoder, wanted_files

FILES = {
    "config.json": b'{"architectures": []}',
    "model.safetensors": b"weights",
    "tokenizer.model": b"pieces",
    "merges.txt": b"a b",
    "chat_template.jinja": b"{{ messages }}",
    "pytorch_model.bin": b"pickle",
    "consolidated.safetensors": b"the same again",
    "onnx/model.safetensors": b"another format",
    "onnx/model.onnx": b"a graph",
    "onnx/model.onnx_data": b"its weights",
    "onnx/model_quantized.onnx": b"another graph",
    "openvino/openvino_config.json": b"{}",
    "1_Pooling/config.json": b"{}",
    "README.md": b"words",
}
WANTED = {"config.json", "model.safetensors", "tokenizer.model", "merges.txt", "chat_template.jinja"}
ENCODER_WANTED = {"config.json", "1_Pooling/config.json", "onnx/model.onnx", "onnx/model.onnx_data"}
GGUF = {
    "config.json": b"{}",
    "model-Q4_K_M.gguf": b"four bits",
    "model-Q8_0.gguf": b"eight bits",
    "Q6_K/model-Q6_K-00001-of-00002.gguf": b"first",
    "Q6_K/model-Q6_K-00002-of-00002.gguf": b"second",
    "mmproj-F16.gguf": b"images",
}
MODULES = {
    "config.json": b"{}",
    "modules.json": b"[]",
    "model.safetensors": b"weights",
    "pytorch_model.bin": b"pickle",
    "1_Pooling/config.json": b"{}",
    "2_Dense/model.safetensors": b"weights",
    "openvino/openvino_config.json": b"{}",
}
NOWHERE = "http://127.0.0.1:9"
ALONE = {"README.md": b"words", "a-Q8_0.gguf": b"eight bits"}
OTHER_GGUF = {"a-Q5_K_M.gguf": b"", "b-Q5_K_M.gguf": b"", "c-IQ4_XS.gguf": b""}


@pytest.fixture(scope="module")
def hub() -> Iterator[str]:
    repositories = {
        "own/model": FILES,
        "own/gguf": GGUF,
        "own/others": OTHER_GGUF,
        "own/alone": ALONE,
        "own/modules": MODULES,
    }
    with fake_hub(repositories) as running:
        yield running.endpoint


def resolve_elsewhere(endpoint: str, home: Path, *calls: str, offline: bool = False) -> tuple[list[str], str]:
    """The output of each call in a fresh process, as the hub's client reads its environment once. Also the stderr."""
    code = ["from tidewheel.engine.weights import resolve", *(f"print(resolve({call}))" for call in calls)]
    environment = hub_environment(endpoint, home, offline=offline)
    result = subprocess.run(
        [sys.executable, "-c", "\n".join(code)], capture_output=True, text=True, check=True, env=environment
    )
    return result.stdout.splitlines(), result.stderr


def said(model: str, resolve: Callable[..., Path] = resolve, **options: Any) -> str:
    """Where a model is found, or the error."""
    try:
        return str(resolve(model, **options))
    except ModelError as error:
        return f"error: {error}"


def test_a_folder_and_a_gguf_file_are_used_as_they_are(tmp_path: Path) -> None:
    assert resolve(str(tmp_path)) == tmp_path
    (tmp_path / "model.gguf").touch()
    assert resolve(str(tmp_path / "model.gguf")) == tmp_path / "model.gguf"
    for name in ("sha256-of-a-blob", "MODEL.GGUF"):
        (tmp_path / name).write_bytes(b"GGUF and more")
        assert resolve(str(tmp_path / name)) == tmp_path / name


def test_one_of_a_folders_gguf_models_is_named_as_on_the_hub(tmp_path: Path) -> None:
    folder = tmp_path / "12:30"  # with a colon of its own
    for name, content in GGUF.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(content)
    for wanted, name in (
        ("q8_0", "model-Q8_0.gguf"),
        ("model-Q4_K_M.gguf", "model-Q4_K_M.gguf"),
        ("Q6_K", "Q6_K/model-Q6_K-00001-of-00002.gguf"),
    ):
        assert resolve(f"{folder}:{wanted}") == folder / name
    assert resolve(str(folder)) == folder
    with pytest.raises(ModelError, match=r"12:30 has no GGUF model 'Q2_K'; it has Q4_K_M, Q6_K, Q8_0"):
        resolve(f"{folder}:Q2_K")
    with pytest.raises(ModelError, match=r"names no quantization after the colon; name one, as in .*12:30:Q4_K_M"):
        resolve(f"{folder}:")
    (tmp_path / "empty").mkdir()
    with pytest.raises(ModelError, match=r"empty has no GGUF files for :Q8_0"):
        resolve(f"{tmp_path / 'empty'}:Q8_0")


def test_paths_that_are_no_folders_are_refused_without_asking_the_hub(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").touch()
    with pytest.raises(ModelError, match=r"model.safetensors is a file"):
        resolve(str(tmp_path / "model.safetensors"))
    with pytest.raises(ModelError, match="none does not exist"):
        resolve(str(tmp_path / "none"))
    for name in ("none.gguf", "in/a/none.gguf"):
        with pytest.raises(ModelError, match=f"^{name} does not exist"):
            resolve(name)


# Two processes import the hub's client.
def test_what_serving_needs_is_downloaded_and_then_found_offline(hub: str, tmp_path: Path) -> None:
    elsewhere = tmp_path / "elsewhere"
    lines, stderr = resolve_elsewhere(
        hub, tmp_path, "'own/model'", "'own/model', revision='v2'", f"'own/model', download_dir={str(elsewhere)!r}"
    )
    main, v2, other = map(Path, lines)
    assert {str(path.relative_to(main)) for path in main.rglob("*") if path.is_file()} == WANTED
    assert (main / "model.safetensors").read_bytes() == b"weights"
    assert main.is_relative_to(tmp_path)
    assert (main.name, v2.name) == (COMMITS["main"], COMMITS["v2"])
    assert other.is_relative_to(elsewhere)
    assert "Fetching" not in stderr  # the client's own bars

    assert resolve_elsewhere(NOWHERE, tmp_path, "'own/model'", offline=True)[0] == [str(main)]
    with with_hub(NOWHERE, tmp_path):
        assert resolve("own/model") == main


# A process imports the hub's client.
def test_a_load_format_has_its_kind_of_weights_downloaded(hub: str, tmp_path: Path) -> None:
    (line,), _ = resolve_elsewhere(hub, tmp_path, "'own/model', load_format='pt'")
    names = {str(path.relative_to(line)) for path in Path(line).rglob("*") if path.is_file()}
    assert names == WANTED - {"model.safetensors"} | {"pytorch_model.bin"}


def test_dummy_weights_need_no_download_of_the_real_ones(hub: str, tmp_path: Path) -> None:
    with with_hub(hub, tmp_path):
        folder = resolve("own/model", with_weights=False)
    assert {path.name for path in folder.iterdir()} == WANTED - {"model.safetensors"}


def test_of_an_encoder_the_graph_and_its_configs_are_downloaded(hub: str, tmp_path: Path) -> None:
    with with_hub(hub, tmp_path):
        folder = resolve_encoder("own/model")
        assert {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()} == ENCODER_WANTED
        assert resolve_encoder(str(tmp_path)) == tmp_path
        with pytest.raises(ModelError, match="own/none is neither a folder here nor a model"):
            resolve_encoder("own/none")
        files = [resolve_encoder(model).name for model in ("own/gguf:Q8_0", "own/gguf", "own/alone")]
        assert files == ["model-Q8_0.gguf", "model-Q4_K_M.gguf", "a-Q8_0.gguf"]
    assert wanted_files("own/gguf:Q8_0", None, [*GGUF], is_encoder=True) == ["model-Q8_0.gguf"]


def test_modules_lie_in_folders_of_their_own(hub: str, tmp_path: Path) -> None:
    modules = {"config.json", "modules.json", "model.safetensors", "1_Pooling/config.json", "2_Dense/model.safetensors"}
    with with_hub(hub, tmp_path):
        folder = download_model("own/modules")
    assert {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()} == modules
    assert {*wanted_files("own/modules", None, [*MODULES], is_encoder=None)} == modules


def test_what_cannot_be_had_is_refused_with_the_reason(hub: str, tmp_path: Path) -> None:
    with with_hub(hub, tmp_path):
        for model, why in (
            ("own/none", f"own/none is neither a folder here nor a model at {hub}"),
            ("own/gated", r"own/gated is gated: .*HF_TOKEN"),
            ("not a model", "neither a folder nor a hub id"),
            ("one/two/three", "neither a folder nor a hub id"),
        ):
            with pytest.raises(ModelError, match=why):
                resolve(model)
        with pytest.raises(ModelError, match="no revision v3"):
            resolve("own/model", revision="v3")


def test_a_token_may_come_from_a_file(hub: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "token").write_text(f"{TOKEN}\n")
    monkeypatch.setenv("HF_TOKEN_PATH", str(tmp_path / "token"))
    with with_hub(hub, tmp_path / "home"):
        assert (resolve("own/gated", with_weights=False) / "config.json").exists()


def test_without_a_network_the_error_says_whether_that_was_wanted(tmp_path: Path) -> None:
    for offline, why in ((False, "cannot be reached"), (True, "HF_HUB_OFFLINE")):
        with with_hub(NOWHERE, tmp_path, offline=offline):
            assert why in said("own/model")


def test_a_hub_that_never_answers_is_not_waited_for_without_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_ETAG_TIMEOUT", 0.1)
    with socket.create_server(("127.0.0.1", 0)) as silent:  # which the system accepts connections for
        endpoint = f"http://127.0.0.1:{silent.getsockname()[1]}"
        with with_hub(endpoint, tmp_path):
            for answer in (said("own/model"), said("own/model:Q8_0"), said("own/model", resolve_encoder)):
                assert answer == f"error: own/model is not in the cache, and {endpoint} cannot be reached"


def test_what_the_client_logs_comes_once(hub: str, tmp_path: Path) -> None:
    code = (
        "import logging; logging.basicConfig(); from tidewheel.engine.weights import resolve; resolve('own/model'); "
        "logging.getLogger('huggingface_hub.file_download').warning('trying again')"
    )
    ran = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, env=hub_environment(hub, tmp_path)
    )
    assert ran.stderr == "WARNING:huggingface_hub.file_download:trying again\n"


def test_of_gguf_files_those_of_one_quantization_are_downloaded(
    hub: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with with_hub(hub, tmp_path):
        eight, split, default, named, alone, in_folder = map(
            resolve,
            (
                *("own/gguf:q8_0", "own/gguf:Q6_K", "own/gguf", "own/gguf:model-Q8_0.gguf", "own/alone"),
                "own/gguf:Q6_K/model-Q6_K-00001-of-00002.gguf",
            ),
        )
    assert in_folder == split
    assert (alone.name, caplog.text) == ("a-Q8_0.gguf", "")  # no warning that own/alone has no config.json
    assert (eight.read_bytes(), default.read_bytes(), named) == (b"eight bits", b"four bits", eight)
    assert split.name == "model-Q6_K-00001-of-00002.gguf"
    assert {path.read_bytes() for path in split.parent.iterdir()} == {b"first", b"second"}
    assert not (default.parent / "mmproj-F16.gguf").exists()

    for offline in (True, False):
        with with_hub(NOWHERE, tmp_path, offline=offline):
            assert (resolve("own/gguf:Q8_0"), resolve("own/gguf")) == (eight, default)


def test_what_makes_a_gguf_model_see_comes_with_it(hub: str, tmp_path: Path) -> None:
    with with_hub(hub, tmp_path):
        path = resolve("own/gguf:Q6_K", with_mmproj=True)
    assert (path.read_bytes(), path.parent.name) == (b"first", "Q6_K")
    mmproj = find_mmproj(path)
    assert mmproj is not None
    assert (mmproj.read_bytes(), mmproj.parent) == (b"images", path.parents[1])
    with with_hub(NOWHERE, tmp_path, offline=True):
        assert resolve("own/gguf:Q6_K", with_mmproj=True) == path
    for options in ({"with_mmproj": True}, {"is_encoder": None}):  # the latter is what is pulled
        wanted = wanted_files("own/gguf:Q8_0", None, [*GGUF], **options)
        assert wanted == ["model-Q8_0.gguf", "mmproj-F16.gguf"]


@pytest.mark.parametrize(
    ("model", "why"),
    [
        ("own/gguf:Q2_K", ["has no GGUF model 'Q2_K'; it has Q4_K_M, Q6_K, Q8_0"]),
        ("own/others:Q5_K_M", ["several GGUF models (a-Q5_K_M.gguf, b-Q5_K_M.gguf)", "as in own/others:a-Q5_K_M.gguf"]),
        ("own/others", ["several GGUF models (IQ4_XS, a-Q5_K_M.gguf, b-Q5_K_M.gguf): name one"]),
        ("own/model:Q8_0", ["own/model has no GGUF files for :Q8_0"]),
        ("own/gguf:", ["names no quantization after the colon"]),
    ],
)
def test_a_gguf_model_that_is_not_there_or_not_the_only_one_is_refused_with_those_that_are(
    hub: str, tmp_path: Path, model: str, why: list[str]
) -> None:
    with with_hub(hub, tmp_path):
        answer = said(model)
    assert answer.startswith("error: ")
    assert all(part in answer for part in why)
