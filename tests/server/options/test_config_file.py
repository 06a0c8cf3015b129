"""`--config`: options from a YAML file."""

from __future__ import annotations

from pathlib import Path

import pytest

from tidewheel.server.options.serve import ServeOptions, parse_options

FILE = """\
model: from-the-file
port: 81
max_model_len: 4k
disable-log-requests: true
no-enable-prefix-caching: true
enable-auto-tool-choice: false
served-model-name: [a, b]
seed: -3
api-key: [one, two]
revision: null
default-chat-template-kwargs: {enable_thinking: false}
default-chat-template-kwargs.depth: 2
swap-space: 4
"""


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "options.yaml"
    path.write_text(FILE)
    return path


def parse(*arguments: str | Path, **environment: str) -> ServeOptions:
    return parse_options([*map(str, arguments)], environment)


def test_keys_are_flags(file: Path) -> None:
    options = parse("--config", file)
    engine, app = options.engine, options.app
    assert (engine.model, engine.max_model_len, engine.seed, engine.revision) == ("from-the-file", 4000, -3, None)
    assert (options.http.port, app.log_requests, engine.enable_prefix_caching) == (81, False, False)
    assert (app.served_model_names, app.api_keys) == (("a", "b"), ("one", "two"))
    assert app.default_chat_template_kwargs == {"enable_thinking": False, "depth": 2}
    assert [note.split()[0] for note in options.notes] == ["--swap-space"]
    assert options.shown["config"] == str(file)


def test_the_command_line_goes_first_then_the_file_then_the_environment(file: Path) -> None:
    options = parse("mine", "--config", file, "--api-key", "three", TIDEWHEEL_PORT="82", TIDEWHEEL_MAX_NUM_SEQS="5")
    assert (options.engine.model, options.app.api_keys) == ("mine", ("three",))
    assert (options.http.port, options.engine.max_num_seqs) == (81, 5)
    assert parse("--model", "mine", "--config", file).engine.model == "mine"
    assert parse(TIDEWHEEL_CONFIG=str(file)).http.port == 81


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("port: [", "is not valid YAML: line 1, column 8: expected the node content"),
        ("port: 81\napi-key: secret: 2", "is not valid YAML: line 2, column 16: mapping values are not allowed here"),
        ("- port", "must have one option a line, such as max-model-len: 4096"),
        ("81: port", "must have one option a line"),
        ("port: 99999", "options.yaml: argument --port: must be between 0 and 65535"),
        ("seed: abc", "options.yaml: argument --seed: must be a whole number, got 'abc'"),
        (
            "ctx-size: 4096\nn_gpu_layers: 3",
            "options.yaml: unknown options --ctx-size (did you mean --max-model-len?), ",
        ),
        ("node-rank: 2", "options.yaml: --node-rank is not supported"),
        ("config: other.yaml", "give all options in one"),
        ("{" * 5000, "is not valid YAML"),
        ("\x00", "is not valid YAML"),
    ],
)
def test_a_bad_file_is_one_sentence(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, content: str, said: str
) -> None:
    (tmp_path / "options.yaml").write_text(content)
    with pytest.raises(SystemExit):
        parse("--config", tmp_path / "options.yaml")
    message = capsys.readouterr().err
    assert said in message
    assert "secret" not in message
    assert "<byte string>" not in message
    assert message.count("\n") == 1


def test_a_file_that_is_not_there_is_named(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    with pytest.raises(SystemExit):
        parse("--config", tmp_path / "missing.yaml")
    assert "missing.yaml does not exist" in capsys.readouterr().err
