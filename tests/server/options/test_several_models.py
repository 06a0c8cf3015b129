"""Several models on one command line, or in one file."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tidewheel.engine.declaring.option import OptionError
from tidewheel.server.options.hosting import HostingOptions, ModelSection, split_named, wrong_name
from tidewheel.server.options.serve import ServeOptions, options_of_model, parse_options

FILE = """\
max-model-len: 4k
model: owner/first
models:
  coder:
    model: ./coder.gguf
    aliases: [gpt-4, gpt-4o]
    max_model_len: 16k
    kv-cache-dtype: fp8
    override-generation-config: {temperature: 0.2}
    pin: true
    preload: true
    idle: 0
  embedder: BAAI/bge-m3
  in-the-folder:
"""


def parse(*arguments: str | Path, **environment: str) -> ServeOptions:
    return parse_options([*map(str, arguments)], environment)


def refusal(capsys: pytest.CaptureFixture[str], *arguments: str | Path) -> str:
    with pytest.raises(SystemExit) as exit_info:
        parse(*arguments)
    assert exit_info.value.code == 2
    return capsys.readouterr().err


def file(folder: Path, content: str) -> Path:
    path = folder / "options.yaml"
    path.write_text(content)
    return path


def test_one_model_may_have_a_name_and_is_loaded_at_the_start_as_ever() -> None:
    for options in (
        parse("--model", "mine=owner/name"),
        parse("mine=owner/name"),
        parse(TIDEWHEEL_MODEL="mine=owner/name"),
    ):
        assert not options.hosts
        assert (options.engine.model, options.app.served_model_names) == ("owner/name", ("mine",))
    assert not parse("owner/name").hosts
    assert parse("--model", "m=n", "--served-model-name", "a").app.served_model_names == ("m", "a")


def test_several_models_are_named_on_the_command_line() -> None:
    options = parse("a=./one", "--model", "owner/two", "--model=c=three.gguf", "--max-model-len", "4k")
    assert options.hosts
    assert [(model.name, model.where) for model in options.models] == [
        ("a", "./one"),
        ("owner/two", "owner/two"),
        ("c", "three.gguf"),
    ]
    one = options_of_model(options, options.models[0], "./one")
    assert (one.engine.model, one.engine.max_model_len, one.app.served_model_names) == ("./one", 4000, ("a",))
    assert (one.shown["model"], one.http) == ("./one", options.http)


@pytest.mark.parametrize("option", ["--models-dir=models", "--memory=8", "--max-loaded-models=2"])
def test_a_single_model_is_hosted_if_that_is_asked_for(option: str) -> None:
    options = parse("owner/name", "--served-model-name", "a", "b", option) if "dir" not in option else parse(option)
    assert options.hosts
    if "dir" not in option:
        assert [(one.name, one.aliases) for one in options.models] == [("a", ("b",))]


def test_the_embedded_model_is_hosted_as_it_is_served_alone() -> None:
    options = parse("--model-idle-timeout", "60")
    (model,) = options.models
    hosted, alone = options_of_model(options, model, model.where or ""), parse()
    assert (hosted.engine, hosted.app) == (alone.engine, alone.app)


def test_a_path_may_have_an_equals_sign(tmp_path: Path) -> None:
    (tmp_path / "a=b").mkdir()
    for path in (str(tmp_path / "a=b"), "./a=b", "~/a=b", "../a=b"):
        assert split_named(path) == (None, path)
    assert split_named("a=b=c") == ("a", "b=c")
    assert split_named("owner/a=b") == ("owner/a", "b")


@given(st.text(st.sampled_from("./\\~a\x00\n -:é")))
def test_no_name_leads_out_of_a_folder(name: str) -> None:
    if wrong_name(name) is None:
        assert os.path.normpath(f"/models/{name}") == f"/models/{name}"
        assert name.isprintable()
        assert split_named(f"{name}=x") == (name, "x")


def test_a_file_has_a_section_for_each_model(tmp_path: Path) -> None:
    options = parse("--config", file(tmp_path, FILE), "--kv-cache-dtype", "float16", "--models-dir", tmp_path)
    first, coder, embedder, in_folder = options.models
    assert (first.name, embedder, in_folder.where) == (
        "owner/first",
        ModelSection(name="embedder", where="BAAI/bge-m3"),
        None,
    )
    assert (coder.name, coder.where, coder.aliases) == ("coder", "./coder.gguf", ("gpt-4", "gpt-4o"))
    assert (coder.pin, coder.preload, coder.idle_s, coder.has_idle) == (True, True, None, True)
    # What is outside holds for all, and a section's own goes first.
    own, others = options_of_model(options, coder, "./coder.gguf"), options_of_model(options, first, "owner/first")
    assert (own.engine.max_model_len, own.engine.kv_cache_dtype) == (16000, "fp8_e4m3")
    assert (others.engine.max_model_len, others.engine.kv_cache_dtype) == (4000, "float16")
    assert own.app.override_generation_config == {"temperature": 0.2}
    assert own.app.served_model_names == ("coder", "gpt-4", "gpt-4o")


def test_the_log_says_which_options_of_a_section_have_no_effect(tmp_path: Path) -> None:
    options = parse("--config", file(tmp_path, "models: {a: {model: x, enable-auto-tool-choice: true, swap-space: 4}}"))
    swap, choice = sorted(options.notes, key=lambda note: "--swap" not in note)
    assert swap.startswith("models: a: --swap-space has no effect: ")
    assert choice.startswith("models: a: --enable-auto-tool-choice has no effect: ")


def test_the_command_line_says_where_a_model_of_the_file_is(tmp_path: Path) -> None:
    options = parse("--config", file(tmp_path, FILE), "--model", "coder=./other.gguf")
    assert [model.name for model in options.models] == ["coder", "embedder", "in-the-folder"]
    assert (options.models[0].where, options.models[0].aliases) == ("./other.gguf", ("gpt-4", "gpt-4o"))


def test_embedding_models_are_models_as_all_others() -> None:
    options = parse("a=b", "--model", "c=d", "--embedding-model", "BAAI/bge-m3", "--served-embedding-model-name", "e")
    assert options.models[-1] == ModelSection(name="e", where="BAAI/bge-m3", given={"runner": "pooling"})
    assert options_of_model(options, options.models[-1], "BAAI/bge-m3").encoders.models == ()


def test_an_encoder_has_none_of_the_options_that_all_models_have_for_generating() -> None:
    shared = ["--enable-lora", "--max-model-len", "4k", "--quantization", "int4", "--kv-cache-dtype", "fp8"]
    options = parse("a=b", "--model", "c=d", *shared, "--download-dir", "kept", "--dtype", "bfloat16")
    own = ModelSection(name="c", where="d", given={"max_model_len": 512})
    engine = options_of_model(options, own, "d", is_encoder=True).engine
    assert (engine.lora.enable_lora, engine.max_model_len, engine.quantization) == (False, 512, None)
    assert (engine.download_dir, engine.dtype) == ("kept", "bfloat16")


def test_all_that_is_wrong_with_the_sections_is_told_with_the_models_names(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    content = """\
models:
  a: {model: x, port: 81, served-model-name: y, threads-bind: "0"}
  b: {model: x, max-model-lenn: 4}
  c: {model: x, aliases: [a, ../up]}
  d: [x]
  e: {model: x, enable-prefix-caching: false, kv-offload: folder}
  ../up: x
"""
    said = refusal(capsys, "--config", file(tmp_path, content), "--lora-modules", "x=y")
    for sentence in (
        "models: a: port: it is for the whole server: give it outside models",
        "models: a: served-model-name: a section's key is the model's name, and aliases has more names",
        "models: a: threads-bind: it is for the whole server",
        "models: b: unknown option --max-model-lenn (did you mean --max-model-len?)",
        "models: c: the alias a is a name of a",
        "models: c: aliases: a name must not look like a path: it begins with a letter or digit, as in owner/name, got "
        "'../up'",
        "models: d: must be a folder, a file or a hub id, or have one option a line",
        "models: e: --kv-offload keeps cached prefixes",
        "models: ../up: the name must not look like a path",
        "--lora-modules is for one model: give it in the model's section of models: in the --config file",
    ):
        assert sentence in said


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("models: [a, b]", "models: must have a section for each model"),
        ("models: {4: x}", "with its name as the key (in quotes if it is a number)"),
        ("models: {a: x, b: x, c: x, d: x}", "models: has 4 sections, and a server has at most 3 models"),
        ('models: {"a\\nb": x}', "must have only characters that can be shown"),
    ],
)
def test_sections_that_are_none(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path, content: str, said: str
) -> None:
    monkeypatch.setattr("tidewheel.server.options.model_sections.MAX_MODELS", 3)
    assert said in refusal(capsys, "--config", file(tmp_path, content))


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("--model ./x/m --model ./y/m", "two models are named m: give each its own name, as in --model NAME=./y/m"),
        ("a=b --model c=d --served-model-name x", "--served-model-name is for one model"),
        ("a=b --model c=d --pipeline-parallel-size 2", "--pipeline-parallel-size is for a server of one model"),
        ("--allow-model-management", "--allow-model-management needs --models-dir"),
        ("--memory 0", "must be GiB such as 48, or a share of the memory such as 80%"),
        ("--memory 101%", "must be GiB such as 48"),
        ("--memory much", "must be GiB such as 48"),
        ("m --model n", "two models are given: m and --model n; leave one out"),
    ],
)
def test_what_does_not_go_together(capsys: pytest.CaptureFixture[str], line: str, said: str) -> None:
    assert said in refusal(capsys, *line.split())


@pytest.mark.parametrize(
    ("text", "num_bytes"),
    [("80%", 80 << 30), ("48", 48 << 30), ("0.5", 1 << 29), ("8g", 8 << 30), ("8GiB", 8 << 30), ("512M", 1 << 29)],
)
def test_memory_is_gib_or_a_share_of_what_is_available(text: str, num_bytes: int) -> None:
    assert HostingOptions(memory=text).memory_bytes(100 << 30) == num_bytes
    with pytest.raises(OptionError):
        HostingOptions(memory=f"{text}x")


def test_no_limit_is_none() -> None:
    options = parse("--models-dir", "m", "--max-loaded-models", "0", "--model-idle-timeout", "0").hosting
    assert (options.max_loaded_models, options.model_idle_timeout_s) == (None, None)


@pytest.mark.parametrize(
    ("flag", "meant"),
    [
        ("--models-max", "--max-loaded-models"),  # llama.cpp
        ("--sleep-idle-seconds", "--model-idle-timeout"),
        ("--models-preset", "models: in the file of --config has a section for each model"),
        ("--models-autoload", "a model is loaded when a request names it"),
        ("--keepalive", "--model-idle-timeout"),  # Ollama
        ("--max-active-backends", "--max-loaded-models"),  # LocalAI
        ("--vram-budget", "--memory"),
    ],
)
def test_other_servers_flags_are_hinted_at(capsys: pytest.CaptureFixture[str], flag: str, meant: str) -> None:
    assert meant in refusal(capsys, f"{flag}=1")
