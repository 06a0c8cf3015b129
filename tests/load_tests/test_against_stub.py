"""The load tests' own commands run against a server and report what it did."""

from __future__ import annotations

import base64
import io
import json
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import stall
from load_tests.stub import BOS_TOKENS, StubServer
from PIL import Image
from target import TargetError, discover, normalize_url

LOCUSTFILE = Path(stall.__file__).with_name("locustfile.py")


def run_locust(url: str, *options: str, seconds: int = 2) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "locust", "-f", str(LOCUSTFILE), "--host", url, "--headless"]
    command += ["--users", "3", "--spawn-rate", "3", "--run-time", f"{seconds}s", "--max-tokens", "8", *options]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)


# Locust is a process of its own that runs for two seconds, and again for longer if a user got no answer by then.
def test_locust_reports_every_kind_of_user(stub: StubServer, tmp_path: Path) -> None:
    summary_file = tmp_path / "summary.json"
    options = ("--prompt-tokens", "10", "--long-prompt-tokens", "50", "--summary-json", str(summary_file))
    kinds = ("chat", "completion", "mixed short")
    for seconds in (2, 10, 60):
        done = run_locust(stub.url, *options, seconds=seconds)
        assert done.returncode == 0, done.stderr
        summary: dict[str, Any] = json.loads(summary_file.read_text())
        if all(f"{request} TTFT" in summary for request in kinds):
            break
    for request in kinds:
        assert summary[f"{request} ITL"]["count"] == 3 * summary[f"{request} TTFT"]["count"] > 0
        assert summary[f"{request} tok/s"]["count"] == summary[f"{request} TTFT"]["count"]
        assert f"{request} TTFT" in done.stdout
    prompts = {len(body["prompt"].split()) for body in stub.requests if body.get("stream") and "prompt" in body}
    assert prompts <= {10 - BOS_TOKENS, 50 - BOS_TOKENS}


@pytest.mark.sweep  # as long again
def test_locust_counts_a_broken_stream_as_a_failure(stub: StubServer) -> None:
    done = run_locust(stub.url + "/v1", "--model", "broken", "CompletionUser")
    assert done.returncode == 1
    assert "out of memory" in done.stderr
    assert "no answer was read to its end" in done.stdout


def test_stall_reports_streams_newcomers_and_health(stub: StubServer, capsys: pytest.CaptureFixture[str]) -> None:
    options = "--streams 3 --long-prompts 2 --long-prompt-tokens 90 --quiet-seconds 0.2 --health-streams 4"
    assert stall.main([*f"--url {stub.url} --health-seconds 0.3 --json -".split(), *options.split()]) == 0
    result = json.loads(capsys.readouterr().out)
    assert result["newcomer_prompt_tokens"] == [90, 90]
    assert result["newcomer_ttft_ms"]["count"] == 2
    for row in ("steady_itl_before_ms", "steady_itl_while_prompts_run_ms", "health_ms", "itl_with_health_streams_ms"):
        assert result[row]["count"] > 0
    assert "newcomers' TTFT" in stall.report(result)


def test_stall_sends_pictures_in_place_of_long_prompts(stub: StubServer, capsys: pytest.CaptureFixture[str]) -> None:
    options = "--streams 2 --pictures 2 --picture-size 40x30 --quiet-seconds 0.1 --health-streams 0"
    assert stall.main(["--url", stub.url, *options.split()]) == 0
    assert "pictures of" in capsys.readouterr().out
    asked = [body["messages"][0]["content"] for body in stub.requests if "messages" in body]
    urls = {parts[0]["image_url"]["url"] for parts in asked}
    assert len(urls) == 2
    files = [base64.b64decode(url.removeprefix("data:image/jpeg;base64,")) for url in urls]
    assert [Image.open(io.BytesIO(file)).size for file in files] == [(40, 30)] * 2


def test_stall_writes_the_result_beside_the_table(
    stub: StubServer, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "stall.json"
    options = f"--streams 1 --long-prompts 1 --quiet-seconds 0.05 --health-streams 0 --json {file}"
    assert stall.main(["--url", stub.url, *options.split()]) == 0
    assert "1 streams" in capsys.readouterr().out
    assert "health_ms" not in json.loads(file.read_text())


@pytest.mark.parametrize(("model", "message"), [("broken", "out of memory"), ("refused", "404")])
def test_stall_says_why_a_server_cannot_be_measured(
    stub: StubServer, capsys: pytest.CaptureFixture[str], model: str, message: str
) -> None:
    assert stall.main(["--url", stub.url, "--model", model, "--quiet-seconds", "0.05"]) == 1
    assert message in capsys.readouterr().err


def test_a_prompt_has_the_tokens_that_were_asked_for(stub: StubServer) -> None:
    target = discover(stub.url)
    assert target.model == "stub"
    assert len(target.prompt(1200, random.Random(0)).split()) == 1200 - BOS_TOKENS


def test_a_server_that_is_not_there_is_named() -> None:
    with pytest.raises(TargetError, match=r"127\.0\.0\.1:9"):
        discover("http://127.0.0.1:9")


@pytest.mark.parametrize("url", ["http://host:1", "http://host:1/", "http://host:1/v1", "http://host:1/v1/"])
def test_the_url_may_be_given_with_or_without_its_version(url: str) -> None:
    assert normalize_url(url) == "http://host:1"
