"""Which models a server of several has, and which of them share an engine."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path

import pytest

from tidewheel.engine.errors import ModelError
from tidewheel.server.hosting.catalog import Catalog, NotServedError, group_into_units
from tidewheel.server.hosting.near_names import near_names
from tidewheel.server.options.hosting import ModelSection
from tidewheel.server.options.serve import parse_options


def catalog(*arguments: str | Path, **sections: str) -> Catalog:
    return Catalog(parse_options([*map(str, arguments)], sections))


def of_file(folder: Path, content: str, *arguments: str) -> Catalog:
    path = folder / "options.yaml"
    path.write_text(content)
    return catalog("--config", path, *arguments)


def gguf(path: Path, content: bytes = b"GGUF") -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content)
    return path


def model_folder(path: Path, config: str = "{}") -> Path:
    path.mkdir(parents=True)
    (path / "config.json").write_text(config)
    (path / "model.safetensors").touch()
    return path


@pytest.fixture
def models(tmp_path: Path) -> Path:
    """Ten models, in all the forms that are found."""
    folder = tmp_path / "models"
    gguf(folder / "small-Q4_K_M.gguf")
    for part in (1, 2):
        gguf(folder / f"split-0000{part}-of-00002.gguf")
    model_folder(folder / "plain")
    model_folder(folder / "owner" / "name")
    gguf(folder / "single" / "anything.gguf")
    gguf(folder / "single" / "mmproj-anything.gguf")
    gguf(folder / "several" / "x-Q4_K_M.gguf")
    gguf(folder / "several" / "x-Q8_0.gguf")
    repository = folder / "models--hub--cached"
    blob = gguf(repository / "blobs" / "1234", b"{}")
    for commit in ("0" * 40, "f" * 40):
        (repository / "snapshots" / commit).mkdir(parents=True)
        (repository / "snapshots" / commit / "config.json").symlink_to(blob)
        (repository / "snapshots" / commit / "model.safetensors").symlink_to(blob)
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text("0" * 40)
    for tag in ("Q4_0", "Q8_0"):
        gguf(folder / "models--hub--quantized" / "snapshots" / "1" / tag / f"x-{tag}.gguf")
    model_folder(folder / ".hidden")
    (folder / "README.md").write_text("no model")
    return folder


def test_a_folder_has_models_in_all_their_forms(models: Path) -> None:
    found = catalog("--models-dir", models)
    assert {entry.name: Path(entry.where).relative_to(models).as_posix() for entry in found.entries} == {
        "hub/cached": f"models--hub--cached/snapshots/{'0' * 40}",
        "hub/quantized:Q4_0": "models--hub--quantized/snapshots/1/Q4_0/x-Q4_0.gguf",
        "hub/quantized:Q8_0": "models--hub--quantized/snapshots/1/Q8_0/x-Q8_0.gguf",
        "owner/name": "owner/name",
        "plain": "plain",
        "several:Q4_K_M": "several/x-Q4_K_M.gguf",
        "several:Q8_0": "several/x-Q8_0.gguf",
        "single": "single/anything.gguf",
        "small-Q4_K_M": "small-Q4_K_M.gguf",
        "split": "split-00001-of-00002.gguf",
    }
    assert all(entry.error is None and entry.is_found for entry in found.entries)
    entry = found.find("plain")
    assert (entry.options.engine.model, entry.options.app.served_model_names) == (str(models / "plain"), ("plain",))


def test_a_model_of_the_folder_has_the_options_of_its_section(tmp_path: Path, models: Path) -> None:
    sections = "models:\n  plain: {max-model-len: 2k, aliases: [p]}\n  gone: {max-model-len: 1k}\n"
    found = of_file(tmp_path, sections, f"--models-dir={models}", "--max-model-len=8k")
    entry = found.find("p")
    assert (entry.name, entry.where, entry.is_found) == ("plain", str(models / "plain"), False)
    assert (entry.options.engine.max_model_len, found.find("single").options.engine.max_model_len) == (2000, 8000)
    assert [one.name for one in found.entries[:2]] == ["plain", "gone"]
    assert f"{models} has no model of this name" in (found.find("gone").error or "")
    assert found.find(None) is entry


def test_hostile_names_and_broken_files_are_listed_with_what_is_wrong_with_them(tmp_path: Path, models: Path) -> None:
    outside = gguf(tmp_path / "outside" / "secret.gguf")
    (models / "link.gguf").symlink_to(outside)
    (models / "link").symlink_to(outside.parent)
    (models / "up.gguf").symlink_to("../outside/secret.gguf")
    (model_folder(models / "weights-out") / "model-2.safetensors").symlink_to(outside)
    (model_folder(models / "no-weights") / "model.safetensors").unlink()
    hub = models / "models--a--b" / "snapshots"
    hub.mkdir(parents=True)
    (hub / "1").symlink_to(outside.parent)
    (models / "alias.gguf").symlink_to("small-Q4_K_M.gguf")  # which is fine
    (models / "nowhere.gguf").symlink_to("gone")
    os.mkfifo(models / "pipe.gguf")
    (models / "folder.gguf").mkdir()
    gguf(models / "text.gguf", b"hello")
    gguf(models / "empty.gguf", b"")
    gguf(models / "pointer.gguf", b"version https://git-lfs.github.com/spec/v1\noid sha256:1\nsize 2\n")
    gguf(models / "half-00001-of-00002.gguf")
    gguf(models / "line\nbreak.gguf")
    gguf(models / "-flag.gguf")
    gguf(models / "back\\slash.gguf")
    Path(os.fsdecode(os.fsencode(models) + b"/not-utf8-\xff.gguf")).write_bytes(b"GGUF")
    model_folder(models / "not-json", "{")
    model_folder(models / "a-list", "[]")
    model_folder(models / "deep", "[" * 100_000)
    errors = {entry.name: entry.error for entry in catalog("--models-dir", models).entries if entry.error}
    said = {
        "link": "a link that leads out of",
        "link.gguf": "a link that leads out of",
        "up": "a link that leads out of",
        "no-weights": "no-weights has no weights: its download may not be finished",
        "weights-out": "a link that leads out of",
        "nowhere": "is a link to a file that does not exist",
        "pipe": "is a named pipe; it must be a regular file",
        "text": "is no GGUF file, or a broken one",
        "empty": "is no GGUF file, or a broken one",
        "pointer": "is a pointer of Git LFS",
        "half": "has 1 of the 2 parts",
        "line\ufffdbreak": "only characters that can be shown",
        "-flag": "must not look like a path",
        "back\\slash": "must not look like a path",
        "not-utf8-\ufffd": "only characters that can be shown",
        "not-json": "is not valid JSON",
        "a-list": "is not a JSON object",
        "deep": "is not valid JSON",
    }
    assert errors.keys() == said.keys()
    assert all(said[name] in (error or "") for name, error in errors.items()), errors
    assert not any(str(tmp_path) in (error or "") for error in errors.values())  # which clients read
    assert len(group_into_units(catalog("--models-dir", models).entries)) == 10  # those that are not broken


def test_projectors_belong_to_the_models_that_they_are_named_for(tmp_path: Path) -> None:
    for name in ("gemma-3-4b-it-Q4_K_M", "qwen3-4b-Q4_K_M", "mmproj-gemma-3-4b-it-F16"):
        gguf(tmp_path / f"{name}.gguf")
    found = catalog("--models-dir", tmp_path)
    blind = {entry.name: entry.options.engine.media.language_model_only for entry in found.entries}
    assert blind == {"gemma-3-4b-it-Q4_K_M": False, "qwen3-4b-Q4_K_M": True}


def test_a_thousand_models_are_found(tmp_path: Path) -> None:
    for number in range(1000):
        gguf(tmp_path / f"m{number}.gguf")
    found = catalog("--models-dir", tmp_path)
    assert (len(found.entries), len(group_into_units(found.entries))) == (1000, 1000)
    with pytest.raises(NotServedError, match=r"'' is not served here; served: m0, m1, .* and 984 more"):
        found.find("")


def test_too_many_models_and_a_folder_that_is_not_there_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(ModelError, match="gone cannot be read: No such file or directory"):
        catalog("--models-dir", tmp_path / "gone")
    with pytest.raises(ModelError, match="alone is a model itself"):
        catalog("--models-dir", model_folder(tmp_path / "alone"))
    for name in "abc":
        gguf(tmp_path / f"{name}.gguf")
    monkeypatch.setattr("tidewheel.server.hosting.models_folder.MAX_MODELS", 2)
    with pytest.raises(ModelError, match="has more than 2 models: name those to serve with --model"):
        catalog("--models-dir", tmp_path)


def test_entries_with_equal_engines_are_presets_of_one_unit(tmp_path: Path) -> None:
    path = gguf(tmp_path / "m.gguf")
    (tmp_path / "same.gguf").symlink_to(path)
    sections = f"""\
models:
  chat: {{model: {path}, max-model-len: 4k, idle: 60}}
  coder: {{model: {tmp_path}/./m.gguf, max-model-len: 16k, override-generation-config: {{temperature: 0}}, idle: 90}}
  link: {{model: {tmp_path}/same.gguf, chat-template: "x", preload: true}}
  small: {{model: {path}, kv-cache-dtype: fp8}}
  other: {{model: owner/name}}
  again: {{model: owner/name, kv-cache-dtype: auto, pin: true}}
"""
    found = of_file(tmp_path, sections, "--model-idle-timeout=300", "--max-model-len=8k")
    units = group_into_units(found.entries)
    assert [[entry.name for entry in unit.entries] for unit in units] == [
        ["chat", "coder", "link"],
        ["small"],
        ["other", "again"],
    ]
    first, small, other = units
    assert (first.name, first.options.engine.max_model_len, first.idle_s) == ("chat", 16000, 300)
    assert [entry.max_model_len for entry in first.entries] == [4000, 16000, 8000]
    assert (first.preload, first.pinned, other.pinned, small.preload) == (True, False, True, False)


def test_a_context_that_is_left_open_is_the_longest_and_never_is_the_longest_time(tmp_path: Path) -> None:
    sections = "models:\n  a: {model: m, max-model-len: 4k, idle: 5}\n  b: {model: m, idle: 0}\n"
    (unit,) = group_into_units(of_file(tmp_path, sections).entries)
    assert (unit.options.engine.max_model_len, unit.idle_s) == (None, None)


def test_a_model_is_found_by_all_its_names(tmp_path: Path) -> None:
    sections = """\
enable-lora: true
models:
  coder: {model: x, aliases: [gpt-4], lora-modules: [sql=adapters/sql]}
  chat: {model: y, lora-modules: [sql=adapters/other, coder=adapters/hides-nothing]}
"""
    found = of_file(tmp_path, sections)
    coder, chat = found.entries
    assert [found.find(name) for name in ("coder", "gpt-4", "sql", "coder:latest", "gpt-4:latest")] == [coder] * 5
    assert (found.find("chat"), found.find(None)) == (chat, coder)
    found.know_adapter("mine", chat)
    assert found.find("mine") is chat
    for taken in ("coder", "gpt-4"):
        with pytest.raises(ModelError, match="names a model already"):
            found.know_adapter(taken, chat)
    found.forget_adapter("mine")
    with pytest.raises(NotServedError):
        found.find("mine")


def test_a_model_is_found_by_adapters_in_its_folder(tmp_path: Path) -> None:
    (tmp_path / "adapters" / "poems").mkdir(parents=True)
    section = f"{{model: y, enable-lora: true, lora-resolver-cache-dir: {tmp_path}/adapters}}"
    found = of_file(tmp_path, f"models:\n  chat: x\n  poet: {section}\n")
    assert found.find("poems").name == "poet"
    for name in ("prose", "../adapters", "..", "poems/../poems", ".", "poems\x00"):
        with pytest.raises(NotServedError):
            found.find(name)


def test_an_unknown_name_is_a_404_with_near_ones() -> None:
    found = catalog("qwen2.5-coder-7b=x", "--model", "Llama-3.1-8B-Instruct=y", "--model", "bge-m3=z")
    with pytest.raises(NotServedError) as failure:
        found.find("qwen-2.5-coder")
    error = failure.value
    assert (error.status, error.code, error.param) == (404, "model_not_found", "model")
    assert error.message == "the model 'qwen-2.5-coder' is not served here; did you mean qwen2.5-coder-7b?"
    with pytest.raises(NotServedError, match=r"served: qwen2.5-coder-7b, Llama-3.1-8B-Instruct, bge-m3$"):
        found.find("../../etc/passwd")
    with pytest.raises(NotServedError) as failure:
        found.find("x" * 10**6)
    assert len(failure.value.message) < 1000
    assert catalog("a=x", "--model", "b=y", "--skip-model-name-validation").find("gone").name == "a"


def test_near_names_are_near_whatever_their_case_and_punctuation() -> None:
    served = ["gpt-4", "GPT-4o", "llama3:8b", "Qwen3-0.6B"]
    assert near_names("gpt4", served) == ["gpt-4", "GPT-4o"]
    assert near_names("Llama-3-8B", served) == ["llama3:8b"]
    assert near_names("qwen3:0.6b", served) == ["Qwen3-0.6B"]
    assert near_names("mistral", served) == near_names("", served) == near_names("\x00/..", served) == []


def test_the_folder_is_looked_at_again(models: Path) -> None:
    found = catalog("--models-dir", models)
    before = {entry.name: entry for entry in found.entries}
    gguf(models / "new.gguf")
    gguf(models / "split-00002-of-00002.gguf", b"GGUF, another one")
    (models / "small-Q4_K_M.gguf").unlink()
    changes = asyncio.run(found.rescan())
    assert [entry.name for entry in changes.added] == ["new", "split"]
    assert [entry.name for entry in changes.removed] == ["small-Q4_K_M", "split"]
    assert all(found.find(name) is entry for name, entry in before.items() if name not in ("small-Q4_K_M", "split"))
    assert changes.removed[1] is before["split"]
    again = asyncio.run(found.rescan())
    assert (again.added, again.removed) == ([], [])


def test_models_come_and_go_while_the_server_runs(models: Path) -> None:
    found = catalog("--models-dir", models)
    added = found.add(ModelSection(name="added", where="owner/more"))
    copied = found.copy("plain", "copy")
    assert (found.find("added"), found.find("copy").where) == (added, found.find("plain").where)
    assert [unit.name for unit in group_into_units(found.entries) if copied in unit.entries] == ["plain"]
    assert {
        entry.name for unit in group_into_units(found.entries) for entry in unit.entries if len(unit.entries) > 1
    } == {
        "copy",
        "plain",
    }
    for name in ("plain", "added", "copy", "../up", "/etc", "a\x00b", "x" * 300, ""):
        with pytest.raises(ModelError):
            found.add(ModelSection(name=name, where="x"))
    assert found.remove("added") is added
    with pytest.raises(NotServedError):
        found.find("added")
    with pytest.raises(NotServedError):
        found.remove("added")
    assert found.find("copy") is copied
    assert found.default is found.entries[0] is not copied
    found.remove("plain")
    assert [entry.name for entry in asyncio.run(found.rescan()).added] == ["plain"]
