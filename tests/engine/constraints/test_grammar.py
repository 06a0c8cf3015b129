"""Grammars: every kind is compiled, what cannot be is refused saying where, and any vocabulary keeps its word."""

from __future__ import annotations

import asyncio
import contextlib
import copy
import gc
import json
import random
import re
import sys
import weakref
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import sentencepiece
from engine.constraints.grammars import EOS, VOCAB_SIZE, allowed, compiler, grammar
from engine.tiny_tokenizers import TEXT, tiny
from hypothesis import given, settings
from hypothesis import strategies as st
from waiting import wait_until

from tidewheel.engine.constraints import grammar as grammar_module
from tidewheel.engine.constraints.grammar import Grammar, GrammarCompiler, StructuredOutput
from tidewheel.engine.constraints.vocabulary import make_vocabulary
from tidewheel.engine.errors import InvalidRequestError
from tidewheel.engine.text.tokenizer import Tokenizer

pytest.importorskip("llguidance")  # not there on every machine

SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string"}, "age": {"type": "integer"}, "kind": {"enum": ["ebb", "flood"]}},
    "required": ["name", "age", "kind"],
    "additionalProperties": False,
}


def walk(of: Grammar, tokenizer: Tokenizer, seed: int, max_tokens: int, vocab_size: int) -> tuple[str, bool]:
    """A text of random tokens that the grammar allows, and whether the grammar ended it."""
    rng, matcher, ids = random.Random(seed), of.new_matcher(), list[int]()
    detokenizer = tokenizer.detokenizer((5,))
    text = ""
    while len(ids) < max_tokens:
        choices = sorted(allowed(np.frombuffer(matcher.compute_bitmask(), np.uint32), vocab_size + 1))
        token = rng.choice(choices)
        assert matcher.consume_token(token), matcher.get_error()
        ids.append(token)
        if token in EOS or token == vocab_size:
            return text + detokenizer.flush(), True
        text += detokenizer.push(token)
        if matcher.is_stopped():
            return text + detokenizer.flush(), True
    return text, False


@pytest.mark.parametrize(
    ("kind", "source", "pattern"),
    [
        ("regex", r"[0-9]{3}-(a|bc)+", r"[0-9]{3}-(a|bc)+"),
        ("regex", r"é/[^\n]{1,3}", r"é/[^\n]{1,3}"),
        ("choice", '["ebb", "flood", "ebb and \\"flow\\"", "wheel\\\\", "\\u00e9\\n"]',
         r'ebb|flood|ebb and "flow"|wheel\\|é\n'),
        ("grammar", 'start: word ("," word)*\nword: /[a-c]{1,4}/', r"[a-c]{1,4}(,[a-c]{1,4})*"),
        ("grammar", 'root ::= word ("," word)*\nword ::= [a-c]+ | "x"\n', r"([a-c]+|x)(,([a-c]+|x))*"),
        ("json_schema", '{"type": "integer", "minimum": -3, "maximum": 12}', r"-?[0-9]{1,2}"),
        ("json_schema", '{"type": "string", "pattern": "^[a-f]{2,5}$"}', r'"[a-f]{2,5}"'),
    ],
)  # fmt: skip
def test_every_kind(kind: str, source: str, pattern: str) -> None:
    texts = [walk(grammar(kind, source), tiny("byte-level"), seed, 200, VOCAB_SIZE) for seed in range(20)]
    assert all(re.fullmatch(pattern, text) for text, ended in texts if ended)
    assert any(ended for _, ended in texts)


def test_whitespace_in_json_has_a_bound_unless_the_schema_has_its_own() -> None:
    def longest(schema: dict[str, Any]) -> int:
        matcher = grammar("json_schema", json.dumps(schema)).new_matcher()
        (brace, space) = tiny("byte-level").encode("{", False)[0], tiny("byte-level").encode(" ", False)[0]
        assert matcher.consume_token(brace)
        return next(i for i in range(200) if not matcher.try_consume_tokens([space]))

    assert longest(SCHEMA) == 1
    assert longest({**SCHEMA, "x-guidance": {"whitespace_pattern": " {0,3}"}}) == 3
    assert longest({**SCHEMA, "x-guidance": {"whitespace_flexible": False}}) == 0


AB = {"a": {"type": "integer"}, "b": {"type": "null"}}


@pytest.mark.parametrize(
    ("schema", "taken", "refused"),
    [
        # Keywords that demand nothing.
        ({"type": "object", "propertyNames": {"type": "string"}, "properties": AB}, ['{"a":1}'], ['{"a":""}']),
        ({"type": "array", "items": {"enum": [1, 2]}, "uniqueItems": False}, ["[1,1]"], ["[3]"]),
        ({"type": "string", "format": "color", "$comment": "", "examples": [1], "default": 2}, ['"a"'], ["1"]),
        ({"type": "string", "format": "uuid"}, [], ['"a"']),
        ({"type": "array", "contains": {}, "minContains": 0, "unevaluatedItems": True}, ["[]", "[1]"], ["{}"]),
        ({"type": "integer", "not": False, "if": {}, "dependentRequired": {"a": []}}, ["1"], ['"a"']),
        ({"type": "object", "properties": {"format": {"type": "null"}, "not": {"type": "null"}},
          "additionalProperties": False}, ['{"format":null,"not":null}'], ['{"format":1}']),
        # Keywords that can be said otherwise.
        ({"type": "object", "propertyNames": {"pattern": "^[xy]$"}, "additionalProperties": {"type": "null"}},
         ['{"x":null}'], ['{"z":null}', '{"x":1}']),
        ({"type": "object", "propertyNames": {"type": "string", "enum": ["x"]}, "required": ["x"]},
         ['{"x":1}'], ["{}", '{"y":1}']),
        ({"type": "array", "contains": True, "minContains": 2, "maxContains": 3}, ["[1,2]"], ["[1]", "[1,1,1,1]"]),
        ({"type": "object", "properties": AB, "unevaluatedProperties": False}, ['{"a":1}'], ['{"c":1}']),
        ({"$ref": "#/$defs/s", "$defs": {"s": {"type": "string", "format": "regex"}}}, ['"a"'], ["1"]),
        # Not enforced: that items differ, and that only one alternative matches.
        ({"type": "array", "items": {"enum": [1, 2]}, "uniqueItems": True}, ["[1,2]", "[1,1]"], ["[3]"]),
        ({"type": "object", "properties": AB, "oneOf": [{"required": ["a"]}, {"required": ["b"]}]},
         ['{"a":1}', '{"b":null}', '{"a":1,"b":null}'], ["{}"]),
    ],
)  # fmt: skip
def test_keywords_of_schemas(schema: dict[str, Any], taken: list[str], refused: list[str]) -> None:
    compiled = grammar("json_schema", json.dumps(schema))

    def takes(text: str) -> bool:
        matcher = compiled.new_matcher()
        ids = tiny("byte-level").encode(text, add_special_tokens=False)
        return bool(matcher.try_consume_tokens(ids) == len(ids) and matcher.is_accepting())

    assert [text for text in (*taken, *refused) if takes(text)] == taken


@pytest.mark.parametrize("keyword", ["contains", "not", "if", "dependentRequired", "propertyNames"])
def test_what_no_grammar_can_say_is_refused_by_its_keyword(keyword: str) -> None:
    demands = {
        "contains": {"type": "array", "contains": {"type": "integer"}},
        "not": {"not": {"type": "string"}},
        "if": {"if": {"required": ["a"]}, "then": {"required": ["b"]}},
        "dependentRequired": {"dependentRequired": {"a": ["b"]}},
        "propertyNames": {"type": "object", "propertyNames": {"minLength": 2}},
    }
    with pytest.raises(InvalidRequestError, match=keyword) as refusal:
        grammar("json_schema", json.dumps({"properties": {"x": demands[keyword]}}))
    assert "/properties/x" in str(refusal.value)


@pytest.mark.parametrize(
    ("kind", "source", "words"),
    [
        ("json_schema", '{"type": "objekt"}', ["objekt"]),
        ("json_schema", '{"properties": {"a/b": {"items": {"type": "objekt"}}}}', ["objekt", "/properties/a~1b/items"]),
        ("json_schema", '{"anyOf": [{"type": "null"}, {"not": {}}]}', ["not", "/anyOf/1"]),
        ("json_schema", '{"$ref": "#/$defs/x", "$defs": {"x": {"type": "string", "pattern": "("}}}',
         ["unclosed group", "/$defs/x"]),
        ("json_schema", '{"properties": {"a": {"$ref": "#/$defs/b"}}, "$defs": {}}', ["/$defs/b", "/properties/a"]),
        ("json_schema", '{"properties": {"a": {"$ref": "#/$defs/b"}}, "$defs": {"b": {"items": {"type": "objekt"}}}}',
         ["objekt (at /$defs/b/items)"]),
        ("json_schema", '{"$ref": "https://example.com/schema"}', ["example.com"]),
        ("json_schema", '{"x-guidance": {"whitespace": 1}}', ["whitespace"]),
        ("json_schema", '{"x-guidance": 1}', ["x-guidance"]),
        ("json_schema", "false", ["object"]),
        ("json_schema", '{"enum": []}', ["nsatisfiable"]),
        ("json_schema", '{"properties": {"a": {"x-guidance": 1, "type": "objekt"}}}', ["objekt"]),
        ("regex", "a(b", ["unclosed group"]),
        ("regex", "(?=a)b", ["look-around"]),
        ("grammar", "start: word", ["word"]),
        ("grammar", "verb: 'a'", []),
        ("grammar", 'start: start "a"', ["no token"]),
        ("grammar", "root ::= word", ["word"]),
        ("grammar", 'root ::= "a', ["EBNF"]),
        ("grammar", "(" * 5000, []),
    ],
)  # fmt: skip
def test_what_cannot_be_compiled_is_refused_saying_where(kind: Any, source: str, words: list[str]) -> None:
    with pytest.raises(InvalidRequestError) as refusal:
        grammar(kind, source)
    assert refusal.value.param == "field"
    assert str(refusal.value).startswith("field cannot be compiled: ")
    assert len(str(refusal.value)) < 1000
    for word in words:
        assert word in str(refusal.value)


def test_a_grammar_has_a_largest_size() -> None:
    with pytest.raises(InvalidRequestError, match="262144 can be compiled"):
        grammar("regex", "a" * (256 * 1024 + 1))


def test_a_missing_llguidance_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "llguidance", None)
    with pytest.raises(InvalidRequestError, match="field needs the llguidance package"):
        asyncio.run(
            GrammarCompiler(tiny("byte-level"), VOCAB_SIZE, EOS).compile(StructuredOutput("regex", "a", "field"))
        )


# 73 grammars are compiled, each first tried in a process of its own.
def test_grammars_are_compiled_once_and_failures_name_the_field_of_each() -> None:
    async def compile_all() -> None:
        one = compiler()
        first = StructuredOutput("regex", "once", "guided_regex")
        grammars = await asyncio.gather(*(one.compile(first) for _ in range(5)))
        assert len(set(map(id, grammars))) == 1
        assert await one.compile(StructuredOutput("regex", "once", "other")) is grammars[0]
        assert await one.compile(StructuredOutput("choice", '["once"]')) is not grammars[0]
        broken = [one.compile(StructuredOutput("regex", "(", name)) for name in ("a", "b", "a")]
        errors = await asyncio.gather(*broken, return_exceptions=True)
        assert [error.param for error in errors if isinstance(error, InvalidRequestError)] == ["a", "b", "a"]
        for i in range(70):  # more than are kept
            await one.compile(StructuredOutput("regex", f"{i}"))
        assert await one.compile(first) is not grammars[0]

    asyncio.run(compile_all())


def test_warming_up_leaves_nothing_for_the_first_grammar_to_wait_for(monkeypatch: pytest.MonkeyPatch) -> None:
    made = list[int]()

    def counted(*arguments: Any) -> Any:
        made.append(1)
        return make_vocabulary(*arguments)

    monkeypatch.setattr(grammar_module, "make_vocabulary", counted)
    one = GrammarCompiler(tiny("byte-level"), VOCAB_SIZE, EOS)
    for _ in range(3):
        one.warm_up()
    asyncio.run(one.compile(StructuredOutput("regex", "ebb")))
    assert len(made) == 1
    one.close()


def test_a_vocabulary_is_freed_with_its_compiler() -> None:
    tokenizer = copy.copy(tiny("byte-level"))
    one, gone = GrammarCompiler(tokenizer, VOCAB_SIZE, EOS), weakref.ref(tokenizer)
    asyncio.run(one.compile(StructuredOutput("regex", "ebb")))
    one.free()
    del one, tokenizer

    def is_gone() -> bool:
        gc.collect()
        return gone() is None

    wait_until(is_gone, 20)  # its threads end first


def test_without_llguidance_warming_up_does_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "llguidance", None)
    one = GrammarCompiler(tiny("byte-level"), VOCAB_SIZE, EOS)
    one.warm_up()
    with pytest.raises(InvalidRequestError, match="needs the llguidance package"):
        asyncio.run(one.compile(StructuredOutput("regex", "ebb")))
    one.close()


def test_a_client_that_leaves_does_not_take_the_grammar_with_it() -> None:
    async def leave() -> None:
        one = GrammarCompiler(tiny("byte-level"), VOCAB_SIZE, EOS)
        wanted = StructuredOutput("json_schema", json.dumps(SCHEMA))
        leaving, staying = (asyncio.create_task(one.compile(wanted)) for _ in range(2))
        await asyncio.sleep(0)
        leaving.cancel()
        assert isinstance(await staying, Grammar)
        one.close()

    asyncio.run(leave())


@pytest.fixture(scope="module")
def sentencepiece_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("sentencepiece")
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter([*TEXT, '{"name": "tide", "age": 12}'] * 5),
        model_prefix=str(folder / "tokenizer"),
        vocab_size=450,
        character_coverage=0.98,
        byte_fallback=True,
        model_type="bpe",
        minloglevel=2,
    )
    return folder


# 12 walks of up to 400 tokens, with all allowed tokens at each.
@pytest.mark.parametrize("kind", ["byte-level", "byte-fallback", "metaspace", "sentencepiece"])
def test_with_any_tokenizer_the_shown_text_is_what_the_grammar_saw(kind: str, sentencepiece_folder: Path) -> None:
    """Whole characters only where tokens are no plain bytes; and no special token is ever taken for text."""
    tokenizer = Tokenizer.load(sentencepiece_folder) if kind == "sentencepiece" else tiny(kind)
    texts = tokenizer.token_texts()
    for eos_ids, vocab_size in ((EOS, tokenizer.vocab_size + 70), (frozenset[int](), tokenizer.vocab_size - 5)):
        one = GrammarCompiler(tokenizer, vocab_size, eos_ids)
        wanted = StructuredOutput("json_schema", json.dumps(SCHEMA))
        if kind == "metaspace":  # it has no quotation marks
            wanted = StructuredOutput("regex", "the wheel( turns| grinds|, naïve){3,9}")
        compiled = asyncio.run(one.compile(wanted))
        ended = 0
        for seed in range(6):
            text, has_ended = walk(compiled, tokenizer, seed, 400, vocab_size)
            if has_ended:
                ended += 1
                if kind == "metaspace":
                    assert re.fullmatch(wanted.text, text), text
                else:
                    assert set(json.loads(text)) == {"name", "age", "kind"}, text
        assert ended
        matcher = asyncio.run(one.compile(StructuredOutput("regex", "[^x]+"))).new_matcher()
        first = allowed(np.frombuffer(matcher.compute_bitmask(), np.uint32), vocab_size + 1)
        assert first
        assert all(texts[token] for token in first), "only tokens that have text"


def test_text_that_spells_a_special_token_is_spelt() -> None:
    """`<|late|>` is a token of the vocabulary, but a regex is about text."""
    tokenizer = tiny("byte-level")
    (late,) = tokenizer.encode("<|late|>", add_special_tokens=False)
    text, ended = walk(grammar("regex", r"<\|late\|>"), tokenizer, 0, 50, VOCAB_SIZE)
    assert (text, ended) == ("<|late|>", True)
    by_name = grammar("grammar", 'start: "a" <|late|>').new_matcher()
    (a,) = tokenizer.encode("a", add_special_tokens=False)
    assert by_name.consume_tokens([a, late])


_schemas = st.recursive(
    st.sampled_from([{}, {"type": "string"}, {"type": "objekt"}, {"not": {}}, {"enum": [1, "a"]}, {"pattern": "("}])
    | st.dictionaries(st.sampled_from(["type", "minimum", "maxLength", "items", "$ref", "format", "required"]),
                      st.sampled_from([1, -1, 1e300, "a", "#", "string", None, [], {}, True])),
    lambda parts: st.dictionaries(st.sampled_from(["a", "b/", "$ref"]), parts).map(lambda p: {"properties": p})
    | st.lists(parts, max_size=3).map(lambda p: {"anyOf": p})
    | st.tuples(st.sampled_from(["items", "additionalProperties", "$defs", "x-guidance"]), parts).map(
        lambda p: {p[0]: p[1]}
    ),
    max_leaves=5,
)  # fmt: skip


# Each grammar is first tried in a process of its own.
@settings(max_examples=40, deadline=None)
@given(_schemas | st.text(max_size=30) | st.text("start:|\"'/()[]a \n<>%{}*+?", max_size=40), st.sampled_from(
    ["json_schema", "regex", "grammar", "choice"]))  # fmt: skip
def test_whatever_is_sent_is_compiled_or_refused(source: Any, kind: Any) -> None:
    if kind in ("json_schema", "choice"):
        source = json.dumps(source if kind == "json_schema" else [str(source)])
    elif not isinstance(source, str):
        source = json.dumps(source)
    with contextlib.suppress(InvalidRequestError):
        grammar(kind, source).new_matcher().compute_bitmask()
