"""A load that takes long says how far it is, and one that does not says nothing."""

from __future__ import annotations

import io
import logging
from collections.abc import Iterator

import pytest
from engine.devices.made_models import PLAIN, decoder

from tidewheel.engine.loading.load_progress import LoadProgress, ReportedWeights, WarmUpProgress
from tidewheel.engine.models.spec import tensor_shapes
from tidewheel.engine.progress import AnswerProgress, DownloadProgress
from tidewheel.engine.weights.hub_progress import bars_that_report
from tidewheel.engine.weights.tensor import WeightTensor

SPEC = decoder(PLAIN, PLAIN)
NAMES = list(tensor_shapes(SPEC))


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


class Weights:
    """Names in order. Reading each of them takes `seconds` of a clock."""

    dtype = "float32"
    identity = None

    def __init__(self, seconds: float) -> None:
        self.seconds, self.now = seconds, 0.0

    def __getitem__(self, name: str) -> WeightTensor:
        raise NotImplementedError

    def __iter__(self) -> Iterator[str]:
        for name in NAMES:
            self.now += self.seconds
            yield name


def read(weights: Weights, stderr: io.StringIO) -> None:
    with LoadProgress("a model", 3 << 30, stderr=stderr, clock=lambda: weights.now) as progress:
        assert list(ReportedWeights(weights, SPEC, progress)) == NAMES  # type: ignore[arg-type]


def test_without_a_terminal_the_log_says_it_at_intervals(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    stderr = io.StringIO()
    read(Weights(4.0), stderr)
    assert len(caplog.messages) == len(NAMES) * 4 // 12
    assert caplog.messages[0].startswith("Loading a model: ")
    shares = [int(message.partition("(")[2].partition(" %")[0]) for message in caplog.messages]
    assert shares == sorted(shares)
    assert all("of 3.0 GiB of weights" in message for message in caplog.messages)
    assert stderr.getvalue() == ""


def test_on_a_terminal_there_is_a_bar_to_the_end(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    terminal = Terminal()
    read(Weights(4.0), terminal)
    assert "Loading weights" in terminal.getvalue()
    assert "3.00G/3.00G" in terminal.getvalue()
    assert caplog.messages == []


def test_a_fast_load_is_quiet(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    terminal = Terminal()
    read(Weights(0.01), terminal)
    assert terminal.getvalue() == ""
    assert caplog.messages == []


def warm_up(stderr: io.StringIO) -> None:
    now = 0.0
    with WarmUpProgress(stderr=stderr, clock=lambda: now) as progress:
        for done in range(1, 7):
            now += 4.0
            progress.report(done, 6)


def test_a_long_warm_up_has_a_bar_on_a_terminal(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    terminal = Terminal()
    warm_up(terminal)
    assert "Warming up" in terminal.getvalue()
    assert "6/6" in terminal.getvalue()
    assert caplog.messages == []


def test_a_long_warm_up_has_lines_without_a_terminal(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    stderr = io.StringIO()
    warm_up(stderr)
    assert caplog.messages == ["Warmed up 3 of 6 kinds of steps", "Warmed up 6 of 6 kinds of steps"]
    assert stderr.getvalue() == ""


def answer(stderr: io.StringIO) -> None:
    now = 0.0
    with AnswerProgress("prompt", 12, 4, stderr=stderr, clock=lambda: now) as progress:
        for _ in range(4):
            now += 6.0
            progress.report(2)


def test_answers_have_a_bar_on_a_terminal(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    terminal = Terminal()
    answer(terminal)
    assert "Prompts: 100%" in terminal.getvalue()
    assert "12/12" in terminal.getvalue()
    assert caplog.messages == []


def test_answers_have_lines_without_a_terminal(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    stderr = io.StringIO()
    answer(stderr)
    assert caplog.messages == ["8 of 12 prompts are answered (67 %)", "12 of 12 prompts are answered (100 %)"]
    assert stderr.getvalue() == ""


def download(stderr: io.StringIO, *, bar: bool = True) -> None:
    """Two files of 1 GiB. The hub's client gets their progress while they come, and their sizes one by one."""
    now = 0.0
    with DownloadProgress("own/model", bar=bar, stderr=stderr, clock=lambda: now) as progress:
        bars = bars_that_report(progress.report)
        fetched = bars(desc="Fetching 2 files", total=2, name="huggingface_hub.files")
        written = bars(desc="Reconstructing", total=0, unit="B", unit_scale=True)
        network = bars(desc="Downloading bytes", total=0, unit="B", unit_scale=True)
        for _ in range(2):
            written.total += 1 << 30
            network.total += 1 << 30
            for _ in range(4):
                now += 4.0
                network.update(1 << 28)
                written.update(1 << 28)
            fetched.update(1)


def test_a_download_has_one_bar_on_a_terminal(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    terminal = Terminal()
    download(terminal)
    assert "Downloading: 100%" in terminal.getvalue()
    assert "2.00G/2.00G" in terminal.getvalue()
    assert "Fetching" not in terminal.getvalue()
    assert "\n" not in terminal.getvalue()
    assert caplog.messages == ["Downloaded own/model: 2.00 GiB in 32.0 s"]


@pytest.mark.parametrize(("stderr", "bar"), [(io.StringIO(), True), (Terminal(), False)])
def test_a_download_without_a_bar_is_told_in_the_log(
    caplog: pytest.LogCaptureFixture, stderr: io.StringIO, bar: bool
) -> None:
    caplog.set_level(logging.INFO)
    download(stderr, bar=bar)
    assert stderr.getvalue() == ""
    assert caplog.messages == [
        "Downloading own/model: 0.75 of 1.00 GiB (75 %)",
        "Downloading own/model: 1.50 of 2.00 GiB (75 %)",
        "Downloaded own/model: 2.00 GiB in 32.0 s",
    ]
