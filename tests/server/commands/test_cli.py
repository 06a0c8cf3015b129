"""The `tidewheel` command in a pipeline, and in an environment."""

from __future__ import annotations

import os
import subprocess

import pytest
from server.conftest import TIDEWHEEL

from tidewheel.server.commands.cli import main
from tidewheel.server.options.model import DEMO_MODEL

_COMMANDS = {
    "usage": ["--help"],
    "help": ["serve", "--help"],
    "inspect": ["inspect", str(DEMO_MODEL), "--device", "cpu"],
    "list": ["list", "--json"],
    "devices": ["devices"],
}


@pytest.mark.parametrize(
    ("name", "buffered"),
    [
        pytest.param(
            name, buffered, marks=() if name == "usage" or (buffered and name == "list") else pytest.mark.sweep
        )
        for name in _COMMANDS
        for buffered in (True, False)
    ],
)
def test_a_reader_that_leaves_ends_a_command_quietly(name: str, buffered: bool) -> None:
    read, write = os.pipe()
    os.close(read)
    environment = {**os.environ, "PYTHONUNBUFFERED": "" if buffered else "1"}
    with os.fdopen(write, "wb") as nobody:
        done = subprocess.run(
            [*TIDEWHEEL, *_COMMANDS[name]], stdout=nobody, stderr=subprocess.PIPE, text=True, env=environment
        )
    assert (done.returncode, done.stderr) in ((141, ""), (0, ""))


def test_one_who_reads_to_the_end_gets_all_of_it() -> None:
    done = subprocess.run([*TIDEWHEEL, "--version"], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith("tidewheel ")


@pytest.mark.parametrize("buffered", [True, False])
def test_a_full_disk_is_one_sentence(buffered: bool) -> None:
    environment = {**os.environ, "PYTHONUNBUFFERED": "" if buffered else "1"}
    with open("/dev/full", "wb") as full:
        done = subprocess.run([*TIDEWHEEL, "--help"], stdout=full, stderr=subprocess.PIPE, text=True, env=environment)
    said = "tidewheel: No space left on device where the output is written: make room, or write elsewhere\n"
    assert (done.returncode, done.stderr) == (1, said)


@pytest.mark.parametrize("command", [["bench"], ["run-batch", "-i", "in.jsonl", "-o", "out.jsonl"]])
def test_variables_that_mean_nothing_are_refused(
    command: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("TIDEWHEEL_PORT", "9000")  # an option of another command
    monkeypatch.setenv("TIDEWHEEL_MAX_MODEL_LENGTH", "5")
    with pytest.raises(SystemExit) as exit_info:
        main([*command, "--foo"])
    assert exit_info.value.code == 2
    said = capsys.readouterr().err
    assert "unknown option --foo; see --help" in said
    assert "$TIDEWHEEL_MAX_MODEL_LENGTH (did you mean TIDEWHEEL_MAX_MODEL_LEN?); see --help" in said
