"""The settings of replicas: docs/scale-out.md has all of them, and other names are options of the server."""

from __future__ import annotations

import re
from pathlib import Path

import msgspec
import pytest

from tidewheel.engine.errors import TidewheelError
from tidewheel.ray.options import command_line, parse_arguments
from tidewheel.ray.settings import ReplicaSettings, read_settings

PAGE = Path(__file__).parents[2] / "docs" / "scale-out.md"


def test_the_page_has_every_setting() -> None:
    section = PAGE.read_text("utf-8").partition("## Settings of the replicas")[2].partition("\n## ")[0]
    rows = re.findall(r"^\| ([a-z_, ]+) \|", section, re.MULTILINE)
    told = {name for row in rows for name in row.split(", ")} - {"setting"}
    assert told == {field.name for field in msgspec.structs.fields(ReplicaSettings)}


def test_the_time_limit_of_requests_is_an_option_of_the_server() -> None:
    settings, rest = read_settings({"num_replicas": "2", "request-timeout": "5", "request_timeout_s": "7"})
    assert settings == ReplicaSettings(num_replicas=2)
    options = parse_arguments(command_line({"request-timeout": rest.pop("request-timeout")}), {})
    assert options.app.admission.request_timeout_s == 5
    with pytest.raises(TidewheelError, match="unknown option --request-timeout-s"):
        parse_arguments(command_line(rest), {})
