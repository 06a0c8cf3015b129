"""Limits on the depth of grammars: nesting, and chains of definitions. Nothing here recurses, for any input.

llguidance recurses into nested parts, and into each definition at its first reference. A grammar that might need more
stack than there is gets refused here, with a plain message. The limits are generous: schemas that people write are
rarely nested 20 deep.
"""

from __future__ import annotations

import re
from collections.abc import Hashable, Iterable, Mapping
from typing import Any, TypeVar

K = TypeVar("K", bound=Hashable)

MAX_NESTING = 100  # objects and lists in JSON (llguidance reads 128, with its own around them), groups in a grammar
MAX_CHAIN = 256  # definitions or rules that each refer to the next

# These take time that is linear in the text, whatever it is: what is never closed is read to its end, so that no part
# of it is read again, and only one part of an expression can read a run of white space.
_CLASS_OR_GROUP = re.compile(r"\\.|\[\^?\]?(?:\\.|[^\]\\])*\]?|([()])", re.DOTALL)
_LARK = re.compile(
    r'//[^\n]*|"(?:\\.|[^"\\\n])*"?|/(?:\\.|[^/\\\n])+/?'
    r"|^[ \t]*[?!]*(?P<rule>\w+)[ \t]*(?:\[[^\]\n]*\][ \t]*)?(?:\.-?\d+[ \t]*)?:|(?P<name>\w+)|(?P<group>[()\[\]])",
    re.MULTILINE,
)
_EBNF = re.compile(
    r'\#[^\n]*|"(?:\\.|[^"\\])*"?|\[(?:\\.|[^\]\\])*\]?'
    r"|^[ \t]*(?P<rule>[\w-]+)\s*::=|(?P<name>[\w-]+)|(?P<group>[()])",
    re.MULTILINE,
)
TEXT_KEYS = ("const", "enum", "default", "examples")  # their values may look like schemas but are not
DEFINITIONS = ("$defs", "definitions")


def nesting(value: Any, most: int = MAX_NESTING) -> int:
    """The nesting depth of objects and lists; `most` + 1 if it is more than `most`."""
    level, depth = [value] if isinstance(value, dict | list) else [], 0
    while level and depth <= most:
        level = [child for part in level for child in _children(part) if isinstance(child, dict | list)]
        depth += 1
    return depth


def check_nesting(value: Any) -> None:
    """Raises ValueError for JSON that is nested deeper than MAX_NESTING."""
    if nesting(value) > MAX_NESTING:
        raise ValueError(f"it is nested too deeply: at most {MAX_NESTING} levels of objects and lists are allowed")


def check_schema(schema: dict[str, Any]) -> None:
    """Raises ValueError for a JSON schema that is nested too deeply, in itself or through its references."""
    check_nesting(schema)
    if longest_chain(_references(schema)) > MAX_CHAIN:
        raise ValueError(f"it has a chain of more than {MAX_CHAIN} definitions, each of which refers to the next")


def check_regex(pattern: str) -> None:
    """Raises ValueError for a regular expression whose groups are nested deeper than MAX_NESTING."""
    _check_groups(_CLASS_OR_GROUP.findall(pattern))


def check_rules(grammar: str) -> None:
    """Raises ValueError for a grammar in Lark or EBNF whose groups or rules are nested too deeply."""
    rules: dict[str, list[str]] = {}
    names: list[str] = []
    for match in (_EBNF if "::=" in grammar else _LARK).finditer(grammar):
        if match.lastgroup == "rule":
            names = rules.setdefault(match["rule"], [])
        elif match.lastgroup == "name":
            names.append(match["name"])
        elif match.lastgroup == "group":
            names.append(match["group"])  # not the name of a rule
    for names in rules.values():
        _check_groups(names)
    if longest_chain(rules) > MAX_CHAIN:
        raise ValueError(f"it has a chain of more than {MAX_CHAIN} rules, each of which refers to the next")


def longest_chain(references: Mapping[K, Iterable[K]]) -> int:
    """How many definitions are open at once, if each is read at its first reference, starting with the first one.

    References to anything else do not count.
    """
    seen = set[K]()
    longest = 0
    for first in references:
        path = [] if first in seen else [iter(references[first])]
        seen.add(first)
        while path:
            longest = max(longest, len(path))
            following = next((name for name in path[-1] if name in references and name not in seen), None)
            if following is None:
                path.pop()
            else:
                seen.add(following)
                path.append(iter(references[following]))
    return longest


def resolve(reference: str, root: dict[str, Any]) -> Any:
    """The part of a schema that a reference like `#/$defs/a` points to, None if there is none."""
    target: Any = root if reference == "#" or reference.startswith("#/") else None
    for part in reference.split("/")[1:]:
        if not isinstance(target, dict):
            return None
        target = target.get(part.replace("~1", "/").replace("~0", "~"))
    return target


def _references(schema: dict[str, Any]) -> dict[int, list[int]]:
    """The references in the schema, and in each definition that it refers to. Keys are the `id` of a part."""
    references: dict[int, list[int]] = {}
    waiting = [schema]
    while waiting:
        part = waiting.pop()
        if id(part) not in references:
            targets = [target for name in _names(part) if isinstance(target := resolve(name, schema), dict)]
            references[id(part)] = [id(target) for target in targets]
            waiting += targets
    return references


def _names(part: dict[str, Any]) -> list[str]:
    """The references in a part of a schema, in order, without those in its own definitions."""
    names: list[str] = []
    waiting: list[Any] = [part]
    while waiting:
        value = waiting.pop()
        if isinstance(value, dict):
            if isinstance(name := value.get("$ref"), str):
                names.append(name)
            waiting += [child for key, child in reversed(value.items()) if key not in (*TEXT_KEYS, *DEFINITIONS)]
        elif isinstance(value, list):
            waiting += reversed(value)
    return names


def _children(part: dict[str, Any] | list[Any]) -> Iterable[Any]:
    return part.values() if isinstance(part, dict) else part


def _check_groups(pieces: Iterable[str]) -> None:
    depth = 0
    for piece in pieces:
        if piece in ("(", "["):
            depth += 1
            if depth > MAX_NESTING:
                raise ValueError(f"it is nested too deeply: at most {MAX_NESTING} levels of groups are allowed")
        elif piece in (")", "]"):
            depth -= 1
