"""Resolving models: local folders, and a hub that is a small server on this machine."""

from __future__ import annotations

import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from fake_hub import COMMITS, TOKEN, fake_hub, hub_environment

from tidewheel.engine.errors import ModelError
from tidewheel.engine.weights import resolve

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
ALONE = {"README.md": b"words", "a-Q8_0.gguf": b"eight bits"}
OTHER_GGUF = {"a-Q5_K_M.gguf": b"", "b-Q5_K_M.gguf": b"", "c-IQ4_XS.gguf": b""}


@pytest.fixture(scope="module")
def hub() -> Iterator[str]:
    repositories = {"own/model": FILES, "own/gguf": GGUF, "own/others": OTHER_GGUF, "own/alone": ALONE}
    with fake_hub(repositories) as running:
        yield running.endpoint


def resolve_elsewhere(
    endpoint: str,
    home: Path,
    *calls: str,
    offline: bool = False,
    function: str = "resolve",
    timeout_s: float | None = None,
) -> tuple[list[str], str]:
    """What each call prints in a fresh process, as the hub's client reads its environment once. Also the stderr."""
    code = ["from pathlib import Path", "from tidewheel.engine.errors import ModelError"]
    code += ["from tidewheel.engine.weights.hub import resolve, resolve_encoder"]
    for call in calls:
        code += [f"try: print({function}({call}))", "except ModelError as error: print('error:', error)"]
    environment = hub_environment(endpoint, home, offline=offline)
    result = subprocess.run(
        [sys.executable, "-c", "\n".join(code)],
        capture_output=True,
        text=True,
        check=True,
        env=environment,
        timeout=timeout_s,
    )
    return result.stdout.splitlines(), result.stderr


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
    with pytest.raises(ModelError, match=r"names no quantization behind the colon; one would be .*12:30:Q4_K_M"):
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

    nowhere = "http://127.0.0.1:9"
    assert resolve_elsewhere(nowhere, tmp_path, "'own/model'", offline=True)[0] == [str(main)]
    assert resolve_elsewhere(nowhere, tmp_path, "'own/model'")[0] == [str(main)]


def test_dummy_weights_need_no_download_of_the_real_ones(hub: str, tmp_path: Path) -> None:
    (line,), _ = resolve_elsewhere(hub, tmp_path, "'own/model', with_weights=False")
    assert {path.name for path in Path(line).iterdir()} == WANTED - {"model.safetensors"}


def test_of_an_encoder_the_graph_and_its_configs_are_downloaded(hub: str, tmp_path: Path) -> None:
    calls = ("'own/model'", f"{str(tmp_path)!r}", "'own/none'")
    (downloaded, local, missing), _ = resolve_elsewhere(hub, tmp_path, *calls, function="resolve_encoder")
    folder = Path(downloaded)
    assert {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()} == ENCODER_WANTED
    assert local == str(tmp_path)
    assert "own/none is neither a folder here nor a model" in missing


def test_what_cannot_be_had_is_refused_with_the_reason(hub: str, tmp_path: Path) -> None:
    lines, _ = resolve_elsewhere(
        hub, tmp_path, "'own/none'", "'own/gated'", "'own/model', revision='v3'", "'not a model'", "'one/two/three'"
    )
    assert [line.split(":")[0] for line in lines] == ["error"] * 5
    missing, gated, revision, invalid, deep = lines
    assert f"own/none is neither a folder here nor a model at {hub}" in missing
    assert "gated" in gated
    assert "HF_TOKEN" in gated
    assert "no revision v3" in revision
    assert "neither a folder nor a hub id" in invalid
    assert "neither a folder nor a hub id" in deep


def test_a_token_may_come_from_a_file(hub: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "token").write_text(f"{TOKEN}\n")
    monkeypatch.setenv("HF_TOKEN_PATH", str(tmp_path / "token"))
    (line,), _ = resolve_elsewhere(hub, tmp_path / "home", "'own/gated', with_weights=False")
    assert (Path(line) / "config.json").exists()


def test_without_a_network_the_error_says_whether_that_was_wanted(tmp_path: Path) -> None:
    nowhere = "http://127.0.0.1:9"
    assert "cannot be reached" in resolve_elsewhere(nowhere, tmp_path, "'own/model'")[0][0]
    assert "HF_HUB_OFFLINE" in resolve_elsewhere(nowhere, tmp_path, "'own/model'", offline=True)[0][0]


def test_a_hub_that_never_answers_is_not_waited_for_without_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_HUB_ETAG_TIMEOUT", "1")
    with socket.create_server(("127.0.0.1", 0)) as silent:  # which the system accepts connections for
        endpoint = f"http://127.0.0.1:{silent.getsockname()[1]}"
        lines, _ = resolve_elsewhere(endpoint, tmp_path, "'own/model'", "'own/model:Q8_0'", timeout_s=60)
        assert lines == [f"error: own/model is not in the cache, and {endpoint} cannot be reached"] * 2
        (encoder,), _ = resolve_elsewhere(endpoint, tmp_path, "'own/encoder'", function="resolve_encoder", timeout_s=60)
        assert encoder == f"error: own/encoder is not in the cache, and {endpoint} cannot be reached"


def test_what_the_client_logs_comes_once(hub: str, tmp_path: Path) -> None:
    code = (
        "import logging; logging.basicConfig(); from tidewheel.engine.weights import resolve; resolve('own/model'); "
        "logging.getLogger('huggingface_hub.file_download').warning('trying again')"
    )
    ran = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, env=hub_environment(hub, tmp_path)
    )
    assert ran.stderr == "WARNING:huggingface_hub.file_download:trying again\n"


def test_of_gguf_files_those_of_one_quantization_are_downloaded(hub: str, tmp_path: Path) -> None:
    calls = ("'own/gguf:q8_0'", "'own/gguf:Q6_K'", "'own/gguf'", "'own/gguf:model-Q8_0.gguf'", "'own/alone'")
    lines, stderr = resolve_elsewhere(hub, tmp_path, *calls, "'own/gguf:Q6_K/model-Q6_K-00001-of-00002.gguf'")
    eight, split, default, named, alone, in_folder = map(Path, lines)
    assert in_folder == split
    assert (alone.name, stderr) == ("a-Q8_0.gguf", "")  # no warning that own/alone has no config.json
    assert (eight.read_bytes(), default.read_bytes(), named) == (b"eight bits", b"four bits", eight)
    assert split.name == "model-Q6_K-00001-of-00002.gguf"
    assert {path.read_bytes() for path in split.parent.iterdir()} == {b"first", b"second"}
    assert not (default.parent / "mmproj-F16.gguf").exists()

    nowhere = "http://127.0.0.1:9"
    for offline in (True, False):
        found, _ = resolve_elsewhere(nowhere, tmp_path, "'own/gguf:Q8_0'", "'own/gguf'", offline=offline)
        assert found == [str(eight), str(default)]


def test_a_gguf_model_that_is_not_there_or_not_the_only_one_is_refused_with_those_that_are(
    hub: str, tmp_path: Path
) -> None:
    lines, _ = resolve_elsewhere(
        hub, tmp_path, "'own/gguf:Q2_K'", "'own/others:Q5_K_M'", "'own/others'", "'own/model:Q8_0'", "'own/gguf:'"
    )
    absent, twice, unnamed, none, empty = lines
    assert "has no GGUF model 'Q2_K'; it has Q4_K_M, Q6_K, Q8_0" in absent
    assert "several GGUF models (a-Q5_K_M.gguf, b-Q5_K_M.gguf)" in twice
    assert "name one, as in own/others:a-Q5_K_M.gguf" in twice
    assert "several GGUF models (IQ4_XS, a-Q5_K_M.gguf, b-Q5_K_M.gguf): name one" in unnamed
    assert "own/model has no GGUF files for :Q8_0" in none
    assert "names no quantization behind the colon" in empty
