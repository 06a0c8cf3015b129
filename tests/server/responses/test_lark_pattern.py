"""Lark grammars as regular expressions: the grammars of coding agents, what is refused, and bounds."""

from __future__ import annotations

import re

import pytest

from tidewheel.server.responses.lark_pattern import lark_pattern

EDITS = """
// Edits of files.
start: "<edits>" LF edit+ "</edits>" LF?
edit: create | delete
    | change
create: "create " path LF ("+" /(.*)/ LF)+ -> new
delete: "delete " path LF
?change.2: "change " path LF (("@@" | "@@ " /(.+)/) LF)? line~1..2
!line: ("+" | "-" | " ") /(.*)/ LF
path: /[a-z]+/ [ "." LETTER+ ]
LETTER: "a".."z" | "X"i
%import common.LF
%import common.WS_INLINE -> GAP
"""


@pytest.mark.parametrize(
    ("text", "matches"),
    [
        ("<edits>\ncreate a.py\n+x\n+\n</edits>", True),
        ("<edits>\ndelete a\nchange b.x\n@@ def f(x):\n-a\n+b\n</edits>\n", True),
        ("<edits>\nchange b.X\n@@\n a\n</edits>", True),
        ("<edits>\n</edits>", False),
        ("<edits>\ncreate a.py\n+x\nrest\n</edits>", False),
        ("<edits>\nchange b\n-a\n-a\n-a\n</edits>", False),
        ("<edits>\ndelete a.1\n</edits>", False),
    ],
)
def test_a_grammar_and_its_pattern_match_the_same(text: str, matches: bool) -> None:
    assert bool(re.fullmatch(lark_pattern(EDITS), text)) is matches


@pytest.mark.parametrize(
    ("grammar", "complaint"),
    [
        ("", "no rule start"),
        ('start: "(" start ")" | "x"', "contains itself"),
        ("start: word", "no rule word"),
        ('start: ("a"', "not closed"),
        ('start: "a" ~', "the end is out of place"),
        ('start: "a" .. /b/', "out of place"),
        ('start: ) "a"', "out of place"),
        ('start: "\\x"', "no string"),
        ('start "a"', "no rule"),
        ('start: "a" %', "not understood"),
        ('%ignore " "\nstart: "a"', "not known"),
        ("%import common.SQL_COMMENT\nstart: SQL_COMMENT", "not known"),
        ("start: " + "(" * 5000, "nested too deeply"),
        ("start: a0\n" + "\n".join(f"a{i}: a{i + 1}" for i in range(3000)) + "\na3000: " + '"x"', "nested too deeply"),
        (
            "start: a0\n" + "\n".join(f"a{i}: a{i + 1} a{i + 1}" for i in range(60)) + "\na60: " + '"x"',
            "more than 65536",
        ),
        ("start: " + '"x" ' * 70_000, "more than 65536"),
    ],
)
def test_grammars_without_a_pattern_are_refused(grammar: str, complaint: str) -> None:
    with pytest.raises(ValueError, match=complaint):
        lark_pattern(grammar)
