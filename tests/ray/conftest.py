"""Ray has no wheels for some machines; the tests that need it say so and are skipped."""

from __future__ import annotations

import os
from importlib.metadata import PackageNotFoundError, version

import pytest


def _has_ray() -> bool:
    """Checks without importing it, and not only by its name, because this folder has the same name."""
    try:
        version("ray")
    except PackageNotFoundError:
        return False
    return True


HAS_RAY = _has_ray()
_PARTS = (
    "application",
    "cluster",
    "command",
    "direct",
    "files",
    "hosting_replicas",
    "nodes",
    "replicas",
    "ray_pipelines",
    "router",
)
_NEED_RAY = {f"test_{name}.py" for name in (*_PARTS, "stage_places")}
LACK = "Skipped: the tests of replicas and stages on Ray need ray, which has no build for this machine"


def pytest_ignore_collect(collection_path: os.PathLike[str]) -> bool | None:
    return None if HAS_RAY or os.path.basename(collection_path) not in _NEED_RAY else True


def pytest_report_header() -> str | None:
    return None if HAS_RAY else LACK


@pytest.fixture(scope="session", autouse=True)
def _no_reports() -> None:
    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
