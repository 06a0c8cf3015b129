"""Values that models write in other notations, as JSON text."""

from __future__ import annotations

import ast
import json
import re
import warnings
from typing import Any

from .json_scanner import is_json

_TOKEN = re.compile(
    r"""\s*(?:
        (?P<string>'''(?:[^\\]|\\.)*?'''|\"""(?:[^\\]|\\.)*?\"""|'(?:[^'\\\n]|\\.)*'|"(?:[^"\\\n]|\\.)*")
      | (?P<number>[-+]?(?:0[xX][0-9a-fA-F]+|(?:[0-9][0-9_]*\.?[0-9]*|\.[0-9]+)(?:[eE][-+]?[0-9]+)?))
      | (?P<name>True|False|None|true|false|null)\b
      | (?P<comma>,(?=\s*[\]}]))
      | (?P<mark>[][{},:])
    )\s*""",
    re.DOTALL | re.VERBOSE,
)
_NAMES = {"True": "true", "False": "false", "None": "null"}


def to_json(value: Any) -> str:
    """`value` as JSON text that UTF-8 can encode. Raises ValueError for what JSON has not: NaN and infinities."""
    text = json.dumps(value, ensure_ascii=False, allow_nan=False)
    # A lone surrogate, which an escape in a literal can make, has no UTF-8.
    return text if is_encodable(text) else json.dumps(value, allow_nan=False)


def is_encodable(text: str) -> bool:
    """Whether UTF-8 has this text."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def python_literal_to_json(source: str) -> str | None:
    """A Python literal (strings, numbers, True, False, None, lists and dicts of them) as JSON; None if it is none.

    JSON's own true, false and null are taken too. Works token by token: Python's parser is only given single tokens,
    so that no nesting can exhaust its stack.
    """
    parts: list[str] = []
    at = 0
    while at < len(source):
        match = _TOKEN.match(source, at)
        if match is None:
            return None
        at = match.end()
        text = match[match.lastgroup or 0].strip()
        follows_value = bool(parts) and parts[-1] not in ("[", "{", ", ", ": ")
        if match.lastgroup == "mark":
            parts.append({",": ", ", ":": ": "}.get(text, text))
        elif match.lastgroup == "comma":  # JSON has none before a bracket
            if not follows_value:
                return None
        elif follows_value:
            return None
        elif match.lastgroup == "name":
            parts.append(_NAMES.get(text, text))
        else:
            try:
                with warnings.catch_warnings():
                    warnings.simplefilter("ignore")  # of escapes that Python does not have
                    parts.append(to_json(ast.literal_eval(text)))
            except (ValueError, SyntaxError):
                return None
    result = "".join(parts)
    return result if is_json(result) else None
