"""The documentation names only what exists: files, headings, options, endpoints, models."""

from __future__ import annotations

import contextlib
import importlib
import inspect
import io
import re
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from server.scripted_engine import ScriptedEngine
from starlette.routing import Route

from tidewheel.server.api.docs import DOCS_PATHS
from tidewheel.server.api.web import web_routes
from tidewheel.server.app import build_app
from tidewheel.server.app_options import AppOptions
from tidewheel.server.commands import cli
from tidewheel.server.options.vllm_flags import CONVERTED, vllm_flags
from tidewheel.server.options.vllm_table import RENAMED

ROOT = Path(__file__).parents[1]
PAGES = sorted(
    page
    for pattern in ("*.md", "docs/**/*.md", "load_tests/*.md", "server/demo/*.md", "deploy/**/*.md")
    for page in ROOT.glob(pattern)
)
FOLDERS = "deploy|docs|engine|load_tests|monitoring|native|requirements|server|tests|tidewheel|tools|.ci"
PATH = re.compile(rf"(?<![\w./-])(?:{FOLDERS})/[\w./*-]*[\w*/]".replace(".ci", r"\.ci"))
VARIABLE = re.compile(r"\bTIDEWHEEL_([A-Z_]+[A-Z])\b")
FLAG = re.compile(r"(?<![\w-])--[a-z][\w-]*")
COMMANDS = ("serve", "bench", "eval", "quantize", "chat", "complete", "run-batch", "inspect", "pull", "list", "rm")
DOCKER_OPTIONS = {"--gpus", "--net", "--privileged", "--runtime"}
OF_OTHERS = {"tpu.md": {"--accelerator-type", "--force", "--runtime-version", "--xla"}}  # gcloud's, and how JAX's begin
VLLM_FLAGS = {*vllm_flags(), *RENAMED, *CONVERTED}
# Not in code, where brackets mean something else.
LINK = re.compile(r"!?\[[^\]]*\]\((?!https?:)([^)#]*)(?:#([^)]*))?\)")
FENCE = re.compile(r"^```.*?^```$", re.MULTILINE | re.DOTALL)

pages = pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))


def prose(page: Path) -> str:
    return FENCE.sub("", page.read_text("utf-8"))


def commands(page: Path) -> list[str]:
    """The lines of all shell blocks, continued ones joined."""
    blocks = re.findall(r"^```sh\n(.*?)^```$", page.read_text("utf-8"), re.MULTILINE | re.DOTALL)
    return [line for block in blocks for line in block.replace("\\\n", " ").splitlines()]


@cache
def anchors(page: Path) -> set[str]:
    """The anchors that GitHub makes of a page's headings."""
    headings = re.findall(r"^#+ (.*)$", prose(page), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@cache
def options_of(command: str) -> frozenset[str]:
    return _helped(cli.main, command)


@cache
def options_of_load_tests() -> frozenset[str]:
    sources = {path: path.read_text("utf-8") for path in (ROOT / "load_tests").glob("*.py")}
    commands = [path.stem for path, source in sources.items() if '__name__ == "__main__"' in source]
    users = re.findall(r'"(--[a-z][\w-]*)"', sources[ROOT / "load_tests" / "locustfile.py"])
    return frozenset(users).union(*(_helped(importlib.import_module(command).main) for command in commands))


def _helped(main: Callable[..., Any], *command: str) -> frozenset[str]:
    """The flags that a command lists when it is asked for help."""
    shown = io.StringIO()
    with contextlib.redirect_stdout(shown), contextlib.suppress(SystemExit), pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", [str(main), *command, "--help"])
        main(*[sys.argv[1:]] * len(inspect.signature(main).parameters))
    found = frozenset(FLAG.findall(shown.getvalue()))
    assert "--help" in found, shown.getvalue()
    return found


@pages
def test_links_lead_to_files_and_headings(page: Path) -> None:
    for name, anchor in LINK.findall(prose(page)):
        target = page.parent / name if name else page
        assert target.exists(), f"no file {name}"
        assert not anchor or anchor in anchors(target), f"no heading #{anchor} in {target.name}"


@pages
def test_paths_of_the_repository_exist(page: Path) -> None:
    missing = [path for path in PATH.findall(page.read_text("utf-8")) if not list(ROOT.glob(path.rstrip("/")))]
    assert missing == []


@pages
def test_options_exist(page: Path) -> None:
    """Code that begins with `--` is an option of Tidewheel's, or on some pages one of a load test or of Docker."""
    known = {flag for command in COMMANDS for flag in options_of(command)}
    if page.parent.name == "load_tests":
        known |= options_of_load_tests()
    if page.parent.name == "devices":
        known |= DOCKER_OPTIONS | OF_OTHERS.get(page.name, set())
    if page.name == "vllm.md":
        known |= VLLM_FLAGS
    named = {flag for code in re.findall(r"`(--[^`]*)`", prose(page)) for flag in FLAG.findall(code)}
    assert named - known == set()


@pages
def test_commands_use_options_that_exist(page: Path) -> None:
    for line in commands(page):
        for pattern in (rf"tidewheel ({'|'.join(COMMANDS)})\b(.*)", r"make (serve|bench)\b.* ARGS=(.*)"):
            for command, arguments in re.findall(pattern, line):
                known = options_of(command) | (VLLM_FLAGS if page.name == "vllm.md" else set())
                assert set(FLAG.findall(arguments)) <= known, line


@cache
def variables_in_sources() -> frozenset[str]:
    patterns = ("Dockerfile.cpu", "docker-compose.yml", "engine/**/*.py", "server/**/*.py", "native/**/*.cpp")
    files = [path for pattern in patterns for path in ROOT.glob(pattern)]
    return frozenset(name for path in files for name in VARIABLE.findall(path.read_text("utf-8", "ignore")))


@pages
def test_environment_variables_are_read(page: Path) -> None:
    for name in set(VARIABLE.findall(page.read_text("utf-8"))):
        flag = "--" + name.lower().replace("_", "-")
        assert flag in options_of("serve") or name in variables_in_sources(), name


def test_every_endpoint_is_listed(tmp_path: Path) -> None:
    page = (ROOT / "docs" / "serving.md").read_text("utf-8")
    section = page.partition("\n## Endpoints\n")[2].partition("\n## ")[0]
    listed = set(re.findall(r"`(/[^`]*)`", section))
    options = AppOptions(batch_dir=str(tmp_path))
    routes = [route for route in build_app(ScriptedEngine(), options).routes if isinstance(route, Route)]
    served = {re.sub(r":\w+}", "}", route.path) for route in routes}
    assert listed <= served
    assert served - DOCS_PATHS - {route.path_format for route in web_routes()} <= listed


def test_the_readme_takes_a_minute() -> None:
    assert len((ROOT / "README.md").read_text("utf-8").splitlines()) <= 120
