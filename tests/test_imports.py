"""Imports run one way: server, engine, native; and within a package no circle of imports, not even an indirect one."""

from __future__ import annotations

import ast
import functools
import subprocess
import sys
from collections import defaultdict
from collections.abc import Iterator
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

import tidewheel

ROOT = Path(__file__).parents[1]
PACKAGES = ("server", "engine")

Module = tuple[str, ...]  # ("engine", "cache", "blocks")


def module_of(path: Path) -> Module:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return parts[:-1] if parts[-1] == "__init__" else parts


SOURCES = {module_of(path): path for package in PACKAGES for path in sorted((ROOT / package).rglob("*.py"))}


@functools.cache
def import_statements(path: Path) -> list[ast.Import | ast.ImportFrom]:
    nodes = ast.walk(ast.parse(path.read_text("utf-8")))
    return [node for node in nodes if isinstance(node, ast.Import | ast.ImportFrom)]


def imports_of(path: Path) -> Iterator[Module]:
    """The modules of tidewheel that a file imports, also where only types are needed."""
    package = path.parent.relative_to(ROOT).parts
    for node in import_statements(path):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        else:
            outer = ".".join(("tidewheel", *package[: len(package) - node.level + 1])) if node.level else ""
            base = ".".join(filter(None, (outer, node.module)))
            names = [f"{base}.{alias.name}" for alias in node.names]
        for name in names:
            first, *rest = name.split(".")
            if first == "tidewheel" and rest:
                module = tuple(rest)
                yield module if module in SOURCES else module[:-1] or module


@functools.cache
def imports() -> dict[Module, set[Module]]:
    """The modules of tidewheel that each module imports."""
    return {module: {*imports_of(path)} - {module} for module, path in SOURCES.items()}


# All sources are parsed, once for all tests here.
def test_the_sources_are_found() -> None:
    assert ("engine", "core", "engine") in imports()
    assert ("engine", "errors") in imports()["engine", "core", "engine"]
    assert ("engine", "core", "engine") in imports()["server", "app"]


def test_the_engine_knows_no_server() -> None:
    assert [
        module for module, used in imports().items() if module[0] == "engine" and any(u[0] == "server" for u in used)
    ] == []


def test_nobody_knows_the_offline_ways_in() -> None:
    assert [module for module, used in imports().items() if any(u[0] == "offline" for u in used)] == []


def test_nobody_uses_what_is_for_scripts() -> None:
    names = {*tidewheel.__all__, "compat"}
    assert [module for module, used in imports().items() if names & {u[0] for u in used}] == []


def test_a_server_starts_without_the_names_of_vllm() -> None:
    code = "import sys, tidewheel.server.commands.serve; print('tidewheel.compat' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"


def test_devices_know_no_sequences() -> None:
    allowed = {"cancellation", "declaring", "devices", "errors", "files", "install_hint", "machine", "models"}
    allowed |= {"start_log", "weights"}
    for module, used in imports().items():
        if module[:2] == ("engine", "devices"):
            assert {u[1] for u in used if u[0] == "engine" and len(u) > 1} <= allowed, module


def test_a_package_imports_others_by_their_full_names_and_itself_relatively() -> None:
    for module, path in SOURCES.items():
        for node in import_statements(path):
            if isinstance(node, ast.ImportFrom) and not node.level:
                assert (node.module or "").split(".")[:2] != ["tidewheel", module[0]], f"{path}:{node.lineno}"


@pytest.mark.parametrize("folder", sorted({module[:end] for module in SOURCES for end in range(len(module))}))
def test_what_lies_in_a_folder_imports_without_circles(folder: Module) -> None:
    depth = len(folder)
    graph = defaultdict(set)
    for module, used in imports().items():
        for other in used:
            if module[:depth] == other[:depth] == folder and len(module) > depth < len(other):
                graph[module[depth]].add(other[depth])
    try:
        TopologicalSorter({name: others - {name} for name, others in graph.items()}).prepare()
    except CycleError as circle:
        pytest.fail(f"a circle in {'/'.join(folder) or 'the package'}: {' -> '.join(circle.args[1])}")
