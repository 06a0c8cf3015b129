"""vLLM's modules: imports of them find Tidewheel's own names, or an error that says what to do instead.

Imported when a module has been asked for that is in no folder, because the server starts without.
"""

from __future__ import annotations

import functools
import importlib
import sys
from importlib.machinery import ModuleSpec
from importlib.util import spec_from_file_location
from pathlib import Path
from types import ModuleType

from .names import COMMANDS, MODULES, SOURCES
from .refused import refuse_import, refuse_name

_PACKAGE = "tidewheel"


def install() -> None:
    """Let imports find vLLM's modules from now on."""
    if _Finder not in sys.meta_path:
        sys.meta_path.append(_Finder)


class _Finder:
    """The last finder of modules."""

    @staticmethod
    def find_spec(name: str, path: object = None, target: object = None) -> ModuleSpec | None:
        package, _, place = name.partition(".")
        if package != _PACKAGE or not place:
            return None
        if place in COMMANDS:
            return spec_from_file_location(name, Path(__file__).with_name(COMMANDS[place]))
        if place not in MODULES:
            refuse_import(name)
            return None
        is_package = any(other.startswith(f"{place}.") for other in (*MODULES, *COMMANDS))
        return ModuleSpec(name, _Loader, is_package=is_package)  # type: ignore[arg-type]  # a class does what it needs


class _Loader:
    """Makes a module of the names in the table."""

    @staticmethod
    def create_module(spec: ModuleSpec) -> None:
        return None

    @staticmethod
    def exec_module(module: ModuleType) -> None:
        names = MODULES[module.__name__.partition(".")[2]].split()
        for name in names:
            source = importlib.import_module(f"{_PACKAGE}.{SOURCES[name]}" if name in SOURCES else _PACKAGE)
            setattr(module, name, getattr(source, name))
        module.__dict__["__all__"] = names
        if not hasattr(module, "__path__"):  # a package's other names are modules to the finder
            module.__dict__["__getattr__"] = functools.partial(refuse_name, module.__name__)
