"""A Lark grammar as one regular expression: for a string in JSON, no grammar but a regular expression can be told.

Rules are put in place of their names, so no rule may contain itself.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

_MAX_LENGTH = 2**16  # characters of an expression
_TOKEN = re.compile(
    r"""(?P<space>[ \t]+|//[^\n]*)|(?P<line>\r?\n)|(?P<string>"(?:[^"\\\n]|\\.)*"i?)
      | (?P<regex>/(?!/)(?:[^/\\\n]|\\.)+/[ims]*)|(?P<name>[A-Za-z_][A-Za-z0-9_]*)|(?P<number>[0-9]+)
      | (?P<directive>%[a-z]+)|(?P<mark>->|\.\.|[][()|?*+:~.!,])""",
    re.VERBOSE,
)
_COMMON = {
    "CNAME": "[A-Za-z_][A-Za-z_0-9]*",
    "CR": r"\r",
    "DECIMAL": r"(?:[0-9]+\.[0-9]*|\.[0-9]+)",
    "DIGIT": "[0-9]",
    "ESCAPED_STRING": r'"(?:[^"\\\n]|\\.)*"',
    "HEXDIGIT": "[0-9A-Fa-f]",
    "INT": "[0-9]+",
    "LCASE_LETTER": "[a-z]",
    "LETTER": "[A-Za-z]",
    "LF": r"\n",
    "NEWLINE": r"(?:\r?\n)+",
    "NUMBER": r"(?:[0-9]+(?:\.[0-9]*)?|\.[0-9]+)(?:[eE][-+]?[0-9]+)?",
    "SIGNED_INT": "[-+]?[0-9]+",
    "UCASE_LETTER": "[A-Z]",
    "WORD": "[A-Za-z]+",
    "WS": r"[ \t\f\r\n]+",
    "WS_INLINE": r"[ \t]+",
}
_Tokens = list[tuple[str, str]]  # of a kind and text


def lark_pattern(grammar: str) -> str:
    """The expression that the whole of a text must match. Raises ValueError for a grammar that has none."""
    try:
        return _Patterns(_rules(grammar)).of("start", ())
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


def _rules(grammar: str) -> dict[str, _Tokens | str]:
    """The meaning of each name: tokens of Lark, or an expression."""
    rules: dict[str, _Tokens | str] = {}
    for line in _statements(grammar):
        head = [text for _, text in line]
        if head[0] == "%import" and head[1:3] == ["common", "."] and len(head) in (4, 6) and head[3] in _COMMON:
            rules[head[-1]] = _COMMON[head[3]]
        elif head[0].startswith("%"):
            raise ValueError(f"{' '.join(head):.100} is not known: only some terminals of common can be imported")
        else:
            start = 1 if head[0] in ("?", "!") else 0
            at = start + 3 if head[start + 1 : start + 2] == ["."] else start + 1  # behind a priority
            if line[start][0] != "name" or head[at : at + 1] != [":"]:
                raise ValueError(f"{' '.join(head):.100} is no rule")
            rules[head[start]] = line[at + 1 :]
    return rules


def _statements(grammar: str) -> Iterator[_Tokens]:
    line: _Tokens = []
    is_new = False  # whether a line has ended, which goes on if the next one begins with a bar
    at, depth = 0, 0
    while at < len(grammar):
        match = _TOKEN.match(grammar, at)
        if match is None:
            raise ValueError(f"{grammar[at : at + 20]!r} is not understood")
        at, kind, text = match.end(), match.lastgroup or "", match[0]
        depth += (text in ("(", "[")) - (text in (")", "]")) if kind == "mark" else 0
        if kind == "line":
            is_new = not depth
        elif kind != "space":
            if is_new and text != "|" and line:
                yield line
                line = []
            is_new = False
            line.append((kind, text))
    if line:
        yield line


class _Patterns:
    """Expressions of rules. Each is made once."""

    def __init__(self, rules: dict[str, _Tokens | str]) -> None:
        self._rules = rules
        self._made: dict[str, str] = {}

    def of(self, name: str, within: tuple[str, ...]) -> str:
        """The expression of a rule that is needed `within` others."""
        if name in self._made:
            return self._made[name]
        if name in within:
            raise ValueError(f"the rule {name:.50} contains itself")
        rule = self._rules.get(name)
        if rule is None:
            raise ValueError(f"there is no rule {name:.50}")
        pattern = rule if isinstance(rule, str) else _Rule(self, rule, (*within, name)).pattern
        if len(pattern) > _MAX_LENGTH:
            raise _too_long()
        self._made[name] = pattern
        return pattern


class _Rule:
    """Reads one rule's tokens."""

    def __init__(self, patterns: _Patterns, tokens: _Tokens, within: tuple[str, ...]) -> None:
        self._patterns = patterns
        self._tokens = tokens
        self._within = within
        self._at = 0
        self._size = 0
        self.pattern = self._alternatives()
        if self._at < len(tokens):
            raise ValueError(f"{tokens[self._at][1]:.50} is out of place in the rule {within[-1]:.50}")

    def _peek(self) -> str:
        return self._tokens[self._at][1] if self._at < len(self._tokens) else ""

    def _take(self, wanted: str | None = None) -> str:
        """The next token, which must be of the wanted kind."""
        kind, text = self._tokens[self._at] if self._at < len(self._tokens) else ("", "the end")
        if not kind or wanted not in (None, kind):
            raise ValueError(f"{text:.50} is out of place in the rule {self._within[-1]:.50}")
        self._at += 1
        return text

    def _alternatives(self) -> str:
        ways = [self._sequence()]
        while self._peek() == "|":
            self._take()
            ways.append(self._sequence())
        return ways[0] if len(ways) == 1 else f"(?:{'|'.join(ways)})"

    def _sequence(self) -> str:
        parts = []
        while self._peek() not in ("", "|", ")", "]", "->"):
            parts.append(self._repeated())
        if self._peek() == "->":  # an alias, which names a tree
            self._take()
            self._take("name")
        return "".join(parts)

    def _repeated(self) -> str:
        part = self._part()
        if self._peek() in ("?", "*", "+"):
            part = f"(?:{part}){self._take()}"
        elif self._peek() == "~":
            self._take()
            counts = self._take("number")
            if self._peek() == "..":
                self._take()
                counts += "," + self._take("number")
            part = f"(?:{part}){{{counts}}}"
        self._size += len(part)
        if self._size > _MAX_LENGTH:
            raise _too_long()
        return part

    def _part(self) -> str:
        kind = self._tokens[self._at][0]
        text = self._take()
        if kind == "name":
            return f"(?:{self._patterns.of(text, self._within)})"
        if kind == "string":
            if self._peek() == "..":
                self._take()
                return f"[{re.escape(_literal(text))}-{re.escape(_literal(self._take('string')))}]"
            literal = re.escape(_literal(text.removesuffix("i")))
            return f"(?i:{literal})" if text.endswith("i") else literal
        if kind == "regex":
            body, _, flags = text[1:].rpartition("/")
            return f"(?{flags}:{body})" if flags else f"(?:{body})"
        if text in ("(", "["):
            inner = self._alternatives()
            if self._peek() != {"(": ")", "[": "]"}[text]:
                raise ValueError(f"a bracket is not closed in the rule {self._within[-1]:.50}")
            self._take()
            return f"(?:{inner})" if text == "(" else f"(?:{inner})?"
        raise ValueError(f"{text:.50} is out of place in the rule {self._within[-1]:.50}")


def _too_long() -> ValueError:
    return ValueError(f"its regular expression has more than {_MAX_LENGTH} characters")


def _literal(text: str) -> str:
    if "\\" not in text:
        return text[1:-1]
    try:
        value: str = ast.literal_eval(text)
    except (ValueError, SyntaxError):
        raise ValueError(f"{text:.50} is no string") from None
    return value
