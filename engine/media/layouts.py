"""Layouts as plain values, for the way from a decoder's process to the server.

The server does not unpickle them: a decoder that an image has taken over could then run code in it.
"""

from __future__ import annotations

import sys
from typing import Any

_PACKAGE = __name__.rpartition(".")[0]
_NAME, _VALUES = "name", "values"


def plain_layout(layout: Any) -> Any:
    """A layout as JSON has it: of tuples, named tuples of this package, numbers and texts.

    Raises TypeError for anything else.
    """
    kind = type(layout)
    if layout is None or kind in (bool, int, float, str):
        return layout
    if kind is not tuple and not _is_record(kind):
        raise TypeError(f"a layout has no {kind.__module__}.{kind.__qualname__}")
    values = [plain_layout(value) for value in layout]
    return values if kind is tuple else {_NAME: [kind.__module__, kind.__name__], _VALUES: values}


def layout_of(plain: Any) -> Any:
    """The layout of `plain_layout`'s result. Raises TypeError, ValueError and KeyError for anything else."""
    if isinstance(plain, list):
        return tuple(map(layout_of, plain))
    if not isinstance(plain, dict):
        return plain
    module, name = plain[_NAME]
    kind: Any = getattr(sys.modules.get(module), name, None)
    if not _is_record(kind):
        raise TypeError(f"a layout has no {module}.{name}")
    return kind(*map(layout_of, plain[_VALUES]))


def _is_record(kind: Any) -> bool:
    if not isinstance(kind, type) or not f"{kind.__module__}.".startswith(f"{_PACKAGE}."):
        return False
    return issubclass(kind, tuple) and hasattr(kind, "_fields")
