"""Sources: the text that llguidance compiles, made from a request's grammar; and the place of an error in a schema.

This takes time and stack that grow with the request. So it runs where both are bounded, in the process of
sandbox_process.py.
"""

from __future__ import annotations

import json
import re
import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from .depth import check_nesting, check_regex, check_rules, check_schema
from .json_schema import failing_part
from .schema_keywords import without_idle_keywords
from .structural_tag import compose, decode_format, schemas_in

if TYPE_CHECKING:
    from llguidance import LLMatcher

MAX_CHOICES = 10_000
_MAX_LOCATING_S = 0.5  # of processor time

# White space in JSON as people and models write it: a space, or a line break and an indentation. Without a limit, a
# weak model may write nothing else.
_JSON_WHITESPACE = r" |\r?\n[ \t]{0,32}"
_LIMITS = (
    (
        re.compile(r"Current row has (\d+) items; max is (\d+)"),
        "it is too large: {} possibilities are open at one place, of at most {} (an optional property counts as four)",
    ),
    (
        re.compile(r"Too many items \(limit (\d+)"),
        "it is too large or too ambiguous: one token takes more than {} steps of its rules",
    ),
    (
        re.compile("too many expressions constructed"),
        "it is too large: its regular expressions, or the lengths of its strings, take more than 200000 steps a token",
    ),
    (
        re.compile("fuel exhausted|precomputation failed"),
        "it is too large: its regular expressions, or the lengths of its strings, take more than 1000000 steps",
    ),
    (
        re.compile(r"too many states: \d+ >= (\d+)"),
        "it is too large: its regular expressions, or the lengths of its strings, take more than {} states",
    ),
    (re.compile(r"symbols\.len\(\) < u16::MAX"), "it is too large: it has more than 65525 rules and terminals"),
)
_EBNF_RULE = re.compile(r"^[ \t]*[\w-]+\s*::=", re.MULTILINE)


def grammar_source(kind: str, text: str, special_ids: Mapping[str, int]) -> str:
    """llguidance's form of a grammar of one of StructuredOutput's kinds.

    `special_ids` are special tokens, which texts of structural tags may contain. Raises ValueError or RecursionError.
    """
    if kind in ("regex", "grammar"):
        return _source(kind, text)
    value = json.loads(text)
    check_nesting(value)
    return compose(decode_format(text), special_ids, _source) if kind == "structural_tag" else _source(kind, value)


def choice_rules(choices: Sequence[str]) -> str:
    """A Lark grammar of one of these texts. It is one terminal, because a rule would follow each text separately."""
    return "start: CHOICE\nCHOICE: " + " | ".join(map(json.dumps, choices))  # JSON's escapes are Lark's


def located(kind: str, text: str, message: str) -> str:
    """The message. If it names no place in the schema, the place is added, if it is found in time."""
    if kind not in ("json_schema", "structural_tag"):
        return message
    from llguidance import LLMatcher

    until = time.process_time() + _MAX_LOCATING_S

    def error_of(part: dict[str, Any]) -> str:
        if time.process_time() > until:
            return ""
        try:
            return LLMatcher.validate_grammar(_json_source(part))
        except ValueError as error:
            return str(error)

    whole = json.loads(text)
    schemas = [("", whole)] if kind == "json_schema" else schemas_in(whole)
    for pointer, schema in schemas:
        if error_of(schema):
            pointer += failing_part(schema, error_of)
            return f"{message} (at {pointer})" if pointer else message
    return message


def is_ebnf(grammar: str) -> bool:
    """Whether a grammar is written in EBNF and not in Lark."""
    return _EBNF_RULE.search(grammar) is not None


def matcher_error(matcher: LLMatcher) -> str | None:
    """The error that has stopped a matcher for good, None if there is none."""
    if not matcher.is_error():
        return None
    message = matcher.get_error()
    if (limit := limit_in(message)) is not None:
        return limit
    message = message.partition("<backtrace>")[0].replace("<non-verbose/>", "").strip()
    return "no token of this model's can follow" if message == "NoExtensionBias" else message


def limit_in(message: str) -> str | None:
    """What is too large in a grammar, in plain words; None if llguidance's message is not about one of its limits."""
    for pattern, plain in _LIMITS:
        if (match := pattern.search(message)) is not None:
            return plain.format(*match.groups())
    return None


def _source(kind: str, value: Any) -> str:
    """The same for all kinds except structural tags. `value` is the schema, the text, or the list of choices."""
    from llguidance import LLMatcher

    if kind == "json_schema":
        return _json_source(value)
    if kind == "regex":
        check_regex(value)
        return LLMatcher.grammar_from_regex(value)
    if kind == "choice":
        if len(value) > MAX_CHOICES:
            raise ValueError(f"it has {len(value)} choices; at most {MAX_CHOICES} can be compiled")
        return LLMatcher.grammar_from_lark(choice_rules(value))
    check_rules(value)
    return LLMatcher.grammar_from_lark(_from_ebnf(value) if is_ebnf(value) else value)


def _json_source(schema: Any) -> str:
    from llguidance import LLMatcher

    options = schema.get("x-guidance", {}) if isinstance(schema, dict) else None
    if not isinstance(options, dict):
        raise ValueError("a JSON schema, and its x-guidance if it has one, must be objects")
    check_schema(schema)
    # Of the alternatives of a oneOf, more than one may match: a grammar cannot say that the others must not.
    bounded = "whitespace_flexible" not in options
    return LLMatcher.grammar_from_json_schema(
        without_idle_keywords(schema),
        defaults={"coerce_one_of": True, **({"whitespace_pattern": _JSON_WHITESPACE} if bounded else {})},
    )


def _from_ebnf(text: str) -> str:
    from llguidance.gbnf_to_lark import gbnf_to_lark

    try:
        return gbnf_to_lark(text)
    except Exception as error:  # the converter raises nothing narrower
        raise ValueError(f"it is not valid EBNF: {error}") from error
