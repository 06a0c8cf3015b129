"""Logging to stderr, as lines for people or as JSON objects for collectors, one a line."""

from __future__ import annotations

import json
import logging
import os
import sys
from datetime import datetime, timezone
from typing import Any

from tidewheel.engine.declaring.option import Options, option
from tidewheel.engine.declaring.record import record
from tidewheel.engine.start_log import start_logger


@record(frozen=True, kw_only=True)
class LogOptions(Options):
    """What is logged, and how."""

    log_level: str = option(
        "info",
        "what is logged",
        parse=lambda text: {"trace": "debug", "notset": "debug"}.get(text.lower(), text.lower()),
        choices=("debug", "info", "warning", "error", "critical"),
        flag_aliases=("--uvicorn-log-level",),
        env_aliases=("VLLM_LOGGING_LEVEL",),
    )
    log_format: str = option(
        "text", "lines for people, or a JSON object a line for collectors", choices=("text", "json")
    )


class JsonFormatter(logging.Formatter):
    """`time` (UTC), `level`, `logger` and `message`, and all that was logged with `extra={"fields": {...}}`."""

    def format(self, record: logging.LogRecord) -> str:
        entry: dict[str, Any] = {
            "time": datetime.fromtimestamp(record.created, timezone.utc).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
            **getattr(record, "fields", {}),
        }
        if record.exc_info:
            entry["exception"] = self.formatException(record.exc_info)
        return json.dumps(entry, default=str)


class TerminalFormatter(logging.Formatter):
    """Lines for people, with dim times and names, and with colours for what went wrong."""

    def format(self, record: logging.LogRecord) -> str:
        line = super().format(record)
        colour = next((code for level, code in _COLOURS.items() if record.levelno >= level), None)
        time, _, rest = line.partition(f" {record.levelname}")
        if not rest:
            return line
        level = record.levelname if colour is None else f"\x1b[{colour}m{record.levelname}\x1b[0m"
        return f"{dim(time)} {level}{rest}"


class _UvicornFilter(logging.Filter):
    """Leaves out that uvicorn starts and ends, which the server's own lines say; its logger is named uvicorn.error."""

    def filter(self, record: logging.LogRecord) -> bool:
        if record.name != "uvicorn.error":
            return True
        return record.levelno != logging.INFO or not str(record.msg).startswith(_STAGES)


_STAGES = ("Started server process", "Waiting for application", "Application ", "Finished server process")
_CHATTY = ("httpx", "httpx2", "httpcore")  # the hub client's requests, a line each
_COLOURS = {logging.ERROR: 31, logging.WARNING: 33}


def on_terminal() -> bool:
    """Whether stderr is a terminal that a person looks at."""
    return sys.stderr.isatty()


def dim(text: str) -> str:
    """`text` in a dim colour, if stderr shows colours. NO_COLOR (https://no-color.org) turns them off."""
    return f"\x1b[2m{text}\x1b[0m" if _shows_colours() else text


def _shows_colours() -> bool:
    return on_terminal() and not os.environ.get("NO_COLOR") and os.environ.get("TERM", "dumb") != "dumb"


def configure_logging(level: str, log_format: str, *, quiet_start: bool = False) -> None:
    """Send what is logged at `level` and above to stderr; `log_format` is text or json.

    With `quiet_start` what a start finds and chooses is left out.
    """
    handler = logging.StreamHandler()
    if log_format == "json":
        handler.setFormatter(JsonFormatter())
    else:
        formatter = TerminalFormatter if _shows_colours() else logging.Formatter
        handler.setFormatter(formatter("%(asctime)s %(levelname)-7s %(name)s: %(message)s"))
    handler.addFilter(_UvicornFilter())
    logging.basicConfig(level=level.upper(), handlers=[handler])
    if level != "debug":
        for name in _CHATTY:
            logging.getLogger(name).setLevel(logging.WARNING)
    if quiet_start:
        start_logger.setLevel(logging.WARNING)
