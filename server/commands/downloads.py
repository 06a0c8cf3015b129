"""`tidewheel pull`, `list` and `rm`: the models in the Hugging Face Hub's cache."""

from __future__ import annotations

import fcntl
import json
import logging
import os
import re
import signal
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import asdict
from types import FrameType
from typing import Any

from tidewheel.engine.declaring.mistakes import Mistakes
from tidewheel.engine.declaring.option import options_of
from tidewheel.engine.encoders.description import is_native
from tidewheel.engine.errors import ModelError
from tidewheel.engine.files.wording import in_bytes
from tidewheel.engine.options import EngineOptions
from tidewheel.engine.progress import Report, watched_downloads
from tidewheel.engine.weights.hub import download_model, local_model
from tidewheel.engine.weights.hub_cache import CachedModel, cached_models, remove_model, size_of
from tidewheel.engine.weights.hub_room import Download, check_room

from ..options.parser import OptionParser, add_option, read_given
from .sizes import in_words_ago, table

_HUB_OPTIONS = [option for option in options_of(EngineOptions) if option.field in ("revision", "download_dir")]
_TELL_EVERY_S = 0.1
# As the hub's client names what it is writing. Older versions go on with what is there, and have no number in the name.
_OF_THIS_PROCESS = re.compile(r"\.[0-9a-f]{8}\.incomplete$")
_ID = "a hub id, such as owner/name, or owner/name:Q4_K_M for one of a repository's GGUF models"


def pull(arguments: Sequence[str]) -> int:
    """The `pull` command. Raises ModelError if the model cannot be had."""
    parser = _parser("pull", "Download a model from the Hugging Face Hub, or update it.", "revision")
    parser.add_argument("id", metavar="ID", help=_ID)
    parser.add_argument("--json", action="store_true", help="print the progress, and then the path, as lines of JSON")
    given = _given(parser, arguments)
    model = given["id"]
    if local_model(model, ".gguf") is not None:
        raise ModelError(f"{model} is here already: pull takes a hub id, such as owner/name")
    logging.basicConfig(level=logging.WARNING, format="%(message)s")
    logging.getLogger("tidewheel").setLevel(logging.WARNING if given["json"] else logging.INFO)
    revision, folder = given.get("revision"), given.get("download_dir")
    with _tidy_end():
        progress = _JsonProgress(check_room([Download(model, revision, is_encoder=None)], folder))
        with watched_downloads(progress.begin) if given["json"] else nullcontext():
            path = download_model(model, revision, folder, is_native=is_native)
    print(json.dumps({"path": str(path)}) if given["json"] else path)
    return 0


def list_models(arguments: Sequence[str]) -> int:
    """The `list` command. Raises ModelError if the cache cannot be read."""
    parser = _parser("list", "List the models that were downloaded, the newest first.")
    parser.add_argument("--json", action="store_true", help="print JSON")
    given = _given(parser, arguments)
    listing = cached_models(given.get("download_dir"))
    for warning in listing.warnings:
        print(f"tidewheel list: {warning}", file=sys.stderr)
    if given["json"]:
        print(json.dumps([asdict(model) for model in listing.models], indent=2))
    elif listing.models:
        print(_table(listing.models, time.time()))
    else:
        print("No models were downloaded yet: tidewheel pull ID", file=sys.stderr)
    return 0


def remove(arguments: Sequence[str]) -> int:
    """The `rm` command. Raises ModelError if a model is not there, before any is deleted."""
    parser = _parser("rm", "Delete downloaded models with all their revisions.")
    parser.add_argument("ids", metavar="ID", nargs="+", help=_ID)
    parser.add_argument("-y", "--yes", action="store_true", help="do not ask for confirmation")
    given = _given(parser, arguments)
    names, folder = list(dict.fromkeys(given["ids"])), given.get("download_dir")
    sizes = {name: size_of(name, folder) for name in names}
    if not given["yes"] and not _agreed(sizes):
        print("Nothing was deleted.", file=sys.stderr)
        return 1
    for name in names:
        print(f"Deleted {name}: freed {in_bytes(remove_model(name, folder))}")
    return 0


class _JsonProgress:
    """Several downloads of one model as one progress, in lines of JSON. Neither of its numbers ever shrinks.

    `total` is what is known to come, in bytes.
    """

    def __init__(self, total: int) -> None:
        self._lock = threading.Lock()
        self._parts: list[tuple[int, int]] = []
        self._completed, self._total = 0, total
        self._told_at = -_TELL_EVERY_S

    def begin(self) -> Report:
        """One more download; see `watched_downloads`."""
        part = len(self._parts)
        self._parts.append((0, 0))

        def report(done: int, whole: int) -> None:
            with self._lock:
                self._parts[part] = done, whole
                self._tell()

        return report

    def _tell(self) -> None:
        done, whole = (sum(numbers) for numbers in zip(*self._parts, strict=True))
        before = self._completed, self._total
        self._total = max(self._total, whole)
        self._completed = max(self._completed, min(done, self._total))
        now, is_whole = time.monotonic(), self._completed == self._total
        if before != (self._completed, self._total) and (is_whole or now - self._told_at >= _TELL_EVERY_S):
            self._told_at = now
            print(json.dumps({"completed": self._completed, "total": self._total}), flush=True)


@contextmanager
def _tidy_end() -> Iterator[None]:
    """On SIGTERM, deletes the files that are being downloaded and that no later download would go on with."""

    def leave(number: int, frame: FrameType | None) -> None:
        for descriptor in map(int, os.listdir("/dev/fd")):
            with suppress(OSError):
                path = _path_of(descriptor)
                if _OF_THIS_PROCESS.search(path):
                    os.unlink(path)
        os._exit(128 + number)  # the client's threads would go on for as long as what they wait for

    before = signal.signal(signal.SIGTERM, leave)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _path_of(descriptor: int) -> str:
    """Of an open file. Raises OSError if it has none."""
    if sys.platform == "darwin":
        return os.fsdecode(fcntl.fcntl(descriptor, fcntl.F_GETPATH, bytes(1024)).rstrip(b"\0"))
    else:
        return os.readlink(f"/dev/fd/{descriptor}")


def _parser(command: str, description: str, *options: str) -> OptionParser:
    parser = OptionParser(prog=f"tidewheel {command}", description=description, allow_abbrev=False)
    group = parser.add_argument_group("hub")
    for option in _HUB_OPTIONS:
        if option.field in ("download_dir", *options):
            add_option(group, option)
    return parser


def _given(parser: OptionParser, arguments: Sequence[str]) -> dict[str, Any]:
    """A command line, and what the environment says of the hub: `serve` looks there too."""
    mistakes = Mistakes()
    parsed = parser.read(arguments, mistakes)
    given = parsed | read_given(_HUB_OPTIONS, parsed, os.environ, mistakes)
    parser.refuse(mistakes)
    return given


def _agreed(sizes: dict[str, int]) -> bool:
    """Asks the user. Raises ModelError if there is no terminal to ask on."""
    what = ", ".join(f"{name} ({in_bytes(size)})" for name, size in sizes.items())
    if not sys.stdin.isatty():
        raise ModelError(f"this would delete {what}, and there is no terminal to confirm it on: add --yes")
    try:
        return input(f"Delete {what}? [y/N] ").strip().lower() in ("y", "yes")
    except EOFError:
        return False


def _table(models: Sequence[CachedModel], now: float) -> str:
    return table(
        [
            ("NAME", "SIZE", "MODIFIED", "REVISION"),
            *(
                (
                    model.name,
                    in_bytes(model.bytes),
                    in_words_ago(now - model.modified),
                    ", ".join(commit[:12] for commit in model.revisions),
                )
                for model in models
            ),
        ]
    )
