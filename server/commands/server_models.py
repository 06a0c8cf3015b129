"""`tidewheel ps` and `stop`, and downloads on a server that runs: its models, by its address."""

from __future__ import annotations

import argparse
import json
import logging
import os
import time
from collections.abc import Sequence
from datetime import datetime
from typing import Any

from tidewheel.engine.files.wording import in_bytes
from tidewheel.engine.progress import DownloadProgress

from .server_client import DEFAULT_URL, ServerClient
from .sizes import in_words, table

_FOR_EVER_S = 100 * 31_557_600  # servers that never unload a model name a year far away


def ps(arguments: Sequence[str]) -> int:
    """The `ps` command. Raises ClientError."""
    parser = argparse.ArgumentParser(
        prog="tidewheel ps", description="Show which models of a running server are loaded, and the memory they take."
    )
    parser.add_argument("-a", "--all", action="store_true", help="show the models that are not loaded, too")
    parser.add_argument("--json", action="store_true", help="print JSON")
    add_address(parser, DEFAULT_URL)
    given = parser.parse_args(list(arguments))
    client = ServerClient(given.url or DEFAULT_URL, api_key=given.api_key)
    loaded = {str(one["name"]): one for one in client.get("/api/ps").get("models") or []}
    rows = []
    for card in client.get("/models").get("data") or []:
        model = _Row(card, loaded)
        if given.all or model.state != "unloaded":
            rows.append(model)
    if given.json:
        print(json.dumps([row.fields() for row in rows], indent=2))
    elif rows:
        now = time.time()
        print(table([("NAME", "STATE", "SIZE", "CONTEXT", "UNTIL"), *(row.columns(now) for row in rows)]))
    return 0


def stop(arguments: Sequence[str]) -> int:
    """The `stop` command. Raises ClientError."""
    parser = argparse.ArgumentParser(
        prog="tidewheel stop",
        description="Unload models of a running server. The next request for a model loads it again.",
    )
    parser.add_argument("models", metavar="NAME", nargs="+", help="a name of the model")
    parser.add_argument("--wait", action="store_true", help="wait for the running requests of a model to end")
    add_address(parser, DEFAULT_URL)
    given = parser.parse_args(list(arguments))
    client = ServerClient(given.url or DEFAULT_URL, api_key=given.api_key)
    for model in given.models:
        client.post("/models/unload", {"model": model, "wait": given.wait})
        print(f"Unloaded {model}")
    return 0


def add_address(parser: argparse.ArgumentParser, default: str) -> None:
    """The options that say which server is asked. `default` tells which one without them."""
    parser.add_argument("--url", help=f"the server [{default}]")
    parser.add_argument(
        "--api-key",
        default=os.environ.get("TIDEWHEEL_API_KEY", "").partition(" ")[0],
        metavar="KEY",
        help="[$TIDEWHEEL_API_KEY]",
    )


def download_there(client: ServerClient, model: str) -> None:
    """Has a server download a model of the hub, with progress on this terminal. Raises ClientError."""
    logging.basicConfig(level=logging.WARNING, format="%(message)s")
    logging.getLogger("tidewheel").setLevel(logging.INFO)
    with DownloadProgress(model) as progress:
        for line in client.lines("/api/pull", {"model": model}):
            if "completed" in line:
                progress.report(int(line["completed"]), int(line["total"]))


class _Row:
    """A model as `ps` shows it, from its card and what /api/ps says of the loaded ones."""

    def __init__(self, card: dict[str, Any], loaded: dict[str, Any]) -> None:
        self.name = str(card["id"])
        status = card.get("status") or {"value": "loaded"}  # a server of one model says no more
        self.state = "failed" if status.get("failed") else str(status["value"])
        self.error = status.get("error")
        self.fraction = (status.get("progress") or {}).get("value")
        self._more = loaded.get(self.name if ":" in self.name else f"{self.name}:latest") or {}
        self.bytes = int(self._more.get("size") or card.get("memory_bytes") or 0)
        self.context = int(self._more.get("context_length") or card.get("max_model_len") or 0)

    def fields(self) -> dict[str, Any]:
        """For programs."""
        return {
            "name": self.name,
            "state": self.state,
            "progress": self.fraction,
            "error": self.error,
            "bytes": self.bytes,
            "context": self.context,
            "expires_at": self._more.get("expires_at"),
        }

    def columns(self, now: float) -> tuple[str, ...]:
        """For people."""
        state = f"{self.state} {100 * self.fraction:.0f} %" if self.fraction is not None else self.state
        size = in_bytes(self.bytes) if self.bytes else "-"
        until = self.error or "-"
        if (expires_at := self._more.get("expires_at")) is not None:
            left = datetime.fromisoformat(expires_at.replace("Z", "+00:00")).timestamp() - now
            until = "in " + in_words(max(left, 0)) if left < _FOR_EVER_S else "for ever"
        return self.name, state, size, str(self.context or "-"), until
