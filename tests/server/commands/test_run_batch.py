"""`tidewheel run-batch`: the answers of the server's endpoints, row by row, and only once."""

from __future__ import annotations

import json
import resource
import signal
import subprocess
import time
from pathlib import Path
from typing import Any

import encoder_zoo as zoo
import pytest
from server.conftest import TIDEWHEEL, ServerProcess

from tidewheel.server.commands.cli import main

CHAT = {"messages": [{"role": "user", "content": "Spell the word tide."}], "max_tokens": 8, "seed": 5}
TEXT = {"prompt": "The wheel turns", "max_tokens": 8, "seed": 5}


@pytest.fixture(autouse=True)
def _logs_as_before(monkeypatch: pytest.MonkeyPatch) -> None:
    """For commands in this process: pytest has its own log."""
    monkeypatch.setattr("tidewheel.server.commands.run_batch.configure_logging", lambda *given: None)


def row(custom_id: str, url: str, body: Any, **fields: Any) -> dict[str, Any]:
    return {"custom_id": custom_id, "method": "POST", "url": url, "body": body, **fields}


def written(path: Path, rows: list[Any]) -> Path:
    path.write_text("".join(json.dumps(one) + "\n" for one in rows))
    return path


def run_batch(source: Path, target: Path, *options: str) -> subprocess.CompletedProcess[str]:
    command = [*TIDEWHEEL, "run-batch", "-i", str(source), "-o", str(target), *options]
    return subprocess.run(command, capture_output=True, text=True, timeout=250)


def answers(target: Path) -> dict[str, dict[str, Any]]:
    lines = [json.loads(line) for line in target.read_text().splitlines()]
    found = {line["custom_id"]: line for line in lines}
    assert len(found) == len(lines), "a request was answered twice"
    return found


def test_what_vllms_command_has_alone(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source, target = written(tmp_path / "in.jsonl", [row("chat", "/v1/chat/completions", CHAT)]), tmp_path / "out.jsonl"
    line = "--url 0.0.0.0 --port 8000 --enable-metrics --output-tmp-dir /tmp --enable-log-requests --response-role mill"
    done = run_batch(source, target, *line.split())
    assert done.returncode == 0, done.stderr
    for flag in ("--url", "--port", "--enable-metrics", "--output-tmp-dir", "--no-disable-log-requests"):
        assert done.stderr.count(f" {flag} has no effect: ") == 1
    assert answers(target)["chat"]["response"]["body"]["choices"][0]["message"]["role"] == "mill"
    with pytest.raises(SystemExit):
        main(["run-batch", "-i", "in.jsonl", "-o", "out.jsonl", "--config", "options.yaml"])
    assert "--config is not supported: give the file's options on the command line" in capsys.readouterr().err
    for files in (
        ("-i", "https://mill/in.jsonl", "-o", str(target)),
        ("-i", str(source), "-o", "http://mill/out.jsonl"),
    ):
        assert main(["run-batch", *files]) == 1
        assert "must be a file of this machine, not a URL" in capsys.readouterr().err


def test_a_model_that_generates_nothing_answers_what_it_can(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = [
        row("chat", "/v1/chat/completions", CHAT),
        row("vector", "/v1/embeddings", {"input": "the tide"}),
        row("rank", "/v1/rerank", {"query": "the tide", "documents": ["corn", "the tide"]}),
    ]
    source, target = written(tmp_path / "in.jsonl", rows), tmp_path / "out.jsonl"
    assert main(["run-batch", "-i", str(source), "-o", str(target), str(zoo.folder("bert"))]) == 1
    assert "3 requests answered, 1 of them with an error" in capsys.readouterr().err
    found = answers(target)
    assert found["chat"]["error"]["message"].startswith("this server has no chat model")
    assert found["vector"]["response"]["body"]["model"] == zoo.folder("bert").name
    assert [one["index"] for one in found["rank"]["response"]["body"]["results"]] == [1, 0]


def test_answers_are_those_of_the_server_and_are_kept(
    tmp_path: Path, demo_server: ServerProcess, capsys: pytest.CaptureFixture[str]
) -> None:
    import httpx

    rows = [
        row("chat", "/v1/chat/completions", CHAT),
        row("text", "/v1/completions", TEXT),
        row("vector", "/v1/embeddings", {"model": "embed", "input": "the tide"}),
        row("score", "/v1/score", {"model": "embed", "text_1": "the tide", "text_2": ["the tide", "corn"]}),
        row("no model", "/v1/chat/completions", {**CHAT, "model": "gpt-9"}),
        row("no field", "/v1/completions", {**TEXT, "n_predict": 1}),
        row("no body", "/v1/completions", 5),
        row("no url", "/v1/images", {}),
        row("no stream", "/v1/completions", {**TEXT, "stream": True}),
        row("no post", "/v1/completions", TEXT, method="GET"),
    ]
    source, target = written(tmp_path / "in.jsonl", rows), tmp_path / "out.jsonl"
    encoders = ("--embedding-model", str(zoo.folder("bert")), "--served-embedding-model-name", "embed")
    done = run_batch(source, target, *encoders, "--swap-space", "4")
    assert done.returncode == 1, done.stderr
    assert "--swap-space has no effect" in done.stderr
    assert "10 requests answered, 6 of them with an error" in done.stderr
    assert "\r" not in done.stderr  # no bar without a terminal
    found = answers(target)
    assert {name for name, line in found.items() if line["error"] is None} == {"chat", "text", "vector", "score"}
    assert all(line["response"]["status_code"] == 200 for line in found.values() if line["error"] is None)
    for name, body in (("chat", CHAT), ("text", TEXT)):
        asked = httpx.post(demo_server.url + rows[0 if name == "chat" else 1]["url"], json=body, trust_env=False)
        assert found[name]["response"]["body"]["choices"] == asked.json()["choices"]
    assert len(found["vector"]["response"]["body"]["data"]) == 1
    assert len(found["score"]["response"]["body"]["data"]) == 2
    complaints = {name: line["error"]["message"] for name, line in found.items() if line["error"]}
    assert "gpt-9" in complaints["no model"]
    assert "n_predict is not supported by this server: send max_tokens" in complaints["no field"]
    assert "must be a JSON object" in complaints["no body"]
    assert "/v1/chat/completions" in complaints["no url"]
    assert "stream" in complaints["no stream"]
    assert "method must be POST" in complaints["no post"]
    assert found["no model"]["response"]["status_code"] == 404

    before = target.read_bytes()
    again = ["run-batch", "-i", str(source), "-o", str(target)]
    assert (main(again), target.read_bytes()) == (1, before)
    assert f"All 10 requests are answered in {target}, 6 of them with an error: " in capsys.readouterr().err
    written(source, rows[:2])  # an output may have more
    assert (main(again), target.read_bytes()) == (0, before)
    assert capsys.readouterr().err.endswith(f"All 2 requests are answered in {target}\n")


# Two processes load the model.
def test_one_that_was_stopped_goes_on(tmp_path: Path) -> None:
    rows = [
        row(f"row-{i}", "/v1/completions", {**TEXT, "seed": i, "ignore_eos": True, "max_tokens": 200})
        for i in range(60)
    ]
    source, target = written(tmp_path / "in.jsonl", rows), tmp_path / "out.jsonl"
    command = [*TIDEWHEEL, "run-batch", "-i", str(source), "-o", str(target), "--max-num-seqs", "8"]
    process = subprocess.Popen(command, stderr=subprocess.DEVNULL)
    deadline = time.monotonic() + 200
    while not (target.exists() and target.stat().st_size) and time.monotonic() < deadline:
        time.sleep(0.02)
    process.send_signal(signal.SIGKILL)
    process.wait()
    before = answers(target)
    assert 0 < len(before) < 60
    with target.open("ab") as output:
        output.write(b'{"id": "batch_req_cut", "custom_id": "row-59", "resp')
    # The rest of the rows are short, so that the test is.
    written(source, [{**one, "body": {**one["body"], "max_tokens": 2}} for one in rows])
    done = run_batch(source, target)
    assert done.returncode == 0, done.stderr
    after = answers(target)
    assert len(after) == 60
    assert all(after[name] == line for name, line in before.items())


# Two processes load the model.
@pytest.mark.sweep
def test_one_whose_disk_is_full_says_so_and_goes_on_later(tmp_path: Path) -> None:
    rows = [row(f"row-{i}", "/v1/completions", {**TEXT, "max_tokens": 2}) for i in range(12)]
    source, target = written(tmp_path / "in.jsonl", rows), tmp_path / "out.jsonl"
    most = 3000  # bytes of a file: some lines, and a part of one
    command = [*TIDEWHEEL, "run-batch", "-i", str(source), "-o", str(target)]
    full = subprocess.run(
        command,
        stderr=subprocess.PIPE,
        text=True,
        timeout=250,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (most, most)),
    )
    before = answers(target)
    assert full.returncode == 1
    assert 0 < len(before) < 12
    assert full.stderr.splitlines()[-1] == (
        f"tidewheel run-batch: --output-file {target} can no longer be written: File too large. {len(before)} of 12 "
        "requests are answered in it; make room, and run the same command again for the others"
    )
    assert "Traceback" not in full.stderr
    done = run_batch(source, target)
    assert done.returncode == 0, done.stderr
    after = answers(target)
    assert len(after) == 12
    assert all(after[name] == line for name, line in before.items())


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("{", "line 1 is not a batch request"),
        ('{"custom_id": "a", "url": "/v1/completions"}\n', "missing required field `body`"),
        ('{"custom_id": "a", "url": "/x", "body": {}}\n' * 2, "'a' occurs twice"),
        ('{"custom_id": "", "url": "/x", "body": {}}\n', "line 1: custom_id"),
        ("\n\n", "it contains no requests"),
        (None, "in.jsonl does not exist"),
    ],
)
def test_files_that_are_no_batch(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], text: str | None, complaint: str
) -> None:
    source = tmp_path / "in.jsonl"
    if text is not None:
        source.write_text(text)
    assert main(["run-batch", "-i", str(source), "-o", str(tmp_path / "out.jsonl")]) == 1
    said = capsys.readouterr().err
    assert complaint in said
    assert "Traceback" not in said
    assert not (tmp_path / "out.jsonl").exists()


@pytest.mark.parametrize(
    ("target", "complaint"),
    [
        ("none/out.jsonl", "none/out.jsonl cannot be written: the folder {}/none does not exist"),
        ("in.jsonl", "in.jsonl is the input file: name another one for the answers"),
        (".", "is a folder: name a file in it"),
        ("/dev/full", "/dev/full is not a regular file: name one, because a stopped run reads it to continue"),
        ("/proc/out.jsonl", "/proc/out.jsonl cannot be written: No such file or directory"),  # where none can be made
    ],
)
def test_outputs_that_cannot_be_written(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], target: str, complaint: str
) -> None:
    source = written(tmp_path / "in.jsonl", [row("a", "/v1/completions", TEXT)])
    before = source.read_bytes()
    assert main(["run-batch", "no/such-model", "-i", str(source), "-o", str(tmp_path / target)]) == 1
    said = capsys.readouterr().err
    assert said.startswith(f"tidewheel run-batch: --output-file {tmp_path / target} ")
    assert said.endswith(complaint.format(tmp_path) + "\n")
    assert source.read_bytes() == before
