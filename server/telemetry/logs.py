"""Logging to stderr, as lines for people or as JSON objects for collectors, one a line."""

from __future__ import annotations

import json
import logging
from dataclasses import dataclass
from datetime import datetime, timezone
from typing import Any

from tidewheel.engine.declaring.option import Options, option


@dataclass(frozen=True, kw_only=True)
class LogOptions(Options):
    """What is logged, and how."""

    log_level: str = option(
        "info",
        "what is logged",
        parse=str.lower,
        choices=("debug", "info", "warning", "error", "critical"),
        flag_aliases=("--uvicorn-log-level",),
        env_aliases=("VLLM_LOGGING_LEVEL",),
    )
    log_format: str = option(
        "text", "lines for people, or a JSON object a line for collectors", choices=("text", "json")
    )


class JsonFormatter(logging.Formatter):
    """`time` (UTC), `level`, `logger` and `message`, and whatever was logged with `extra={"fields": {...}}`."""

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


def configure_logging(level: str, log_format: str) -> None:
    """Send what is logged at `level` and above to stderr; `log_format` is text or json."""
    handler = logging.StreamHandler()
    if log_format == "json":
        handler.setFormatter(JsonFormatter())
    else:
        handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)-7s %(name)s: %(message)s"))
    logging.basicConfig(level=level.upper(), handlers=[handler])
