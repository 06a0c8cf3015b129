"""How texts are cut before merges, against transformers' tokenizers and the patterns of tokenizer.json files."""

from __future__ import annotations

import unicodedata
from typing import Any

import pytest

from tidewheel.engine.text.splitting import SPLITTINGS

regex = pytest.importorskip("regex")

TEXTS = [
    "The tide turns. I'll say IT'S we'VE",
    "12345 67 x9 v1.23",
    "  two spaces,   three\n\n\n lines \t\r\n\u00a0",
    "camelCase HTTPServer /path/to#x {a+b=c} <|x|> $5 ~`",
    "Ko\u0308ln nai\u0308ve \u01c5x",
    "\u6f6e\u8eca\u304c\u56de\u308b\u3002 \ud55c\uad6d\uc5b4 \u0939\u093f\u0928\u094d\u0926\u0940\u0964 \u0663\u0664",
]
SPACES = r"\s*[\r\n]+|\s+(?!\S)|\s+"
CASED = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+END|"
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*END|"
)
# The patterns as their authors write them, one after the other.
PATTERNS = {
    "gpt-2": [r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"],
    "dbrx": [r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|" + SPACES],
    "gpt-4o": [
        CASED.replace("END", "(?i:'s|'t|'re|'ve|'m|'ll|'d)?") + r"\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|" + SPACES
    ],
    "tekken": [CASED.replace("END", "") + r"\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|" + SPACES],
    "deepseek-v3": [
        r"\p{N}{1,3}",
        "[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+",
        r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+|"""
        r" ?[\p{P}\p{S}]+[\r\n]*|" + SPACES,
    ],
    # Intersections of classes need the newer version of this library's patterns.
    "kimi-k2": [
        r"(?V1)[\p{Han}]+|"
        + CASED.replace("END", "(?i:'s|'t|'re|'ve|'m|'ll|'d)?").replace(r"\p{M}]", r"\p{M}&&[^\p{Han}]]")
        + r"\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|"
        + SPACES
    ],
    "deepseek-llm": [
        r"[\r\n]",
        # All that TEXTS have of its letters with a case.
        r"\s?[A-Za-z\u00c0-\u00d6\u00d8-\u00f6\u00f8-\u01ba\u01c4-\u0293]+",
        r"\s?[!-/:-~\uff01-\uff0f\uff1a-\uff5e\u2018-\u201f\u3000-\u3002]+",
        r"\s+$",
        "[\u4e00-\u9fa5\u0800-\u4e00\uac00-\ud7ff]+",
        r"\p{N}",
    ],
    "deepseek-coder": [
        r"[\r\n]",
        r"\s?\p{L}+",
        r"\s?\p{P}+",
        "[\u4e00-\u9fa5\u0800-\u4e00\uac00-\ud7ff]+",
        r"\p{N}",
    ],
    "bailingmoe": [
        r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]++[\r\n]*|\s*[\r\n]|\s+(?!\S)|\s+"
    ],
    "seed-coder": [r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1}| ?[^\s\p{L}\p{N}\r\n]+|" + SPACES],
    "bloom": [" ?[^(\\s|.,!?\u2026\u3002\uff0c\u3001\u0964\u06d4\u060c)]+"],
    "viking": [" ?[^(\\s|.,!?\u2026\u3002\uff0c\u3001\u0964\u06d4\u060c)]+", r"\p{N}"],
    "starcoder": [r"\p{N}", r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"],
}


def cut(pattern: str, text: str) -> list[str]:
    """The pattern's matches, and the texts between them, in order."""
    pieces, end = [], 0
    for match in regex.finditer(pattern, text):
        pieces += [text[end : match.start()], match.group()]
        end = match.end()
    return [piece for piece in [*pieces, text[end:]] if piece]


def ours(pre: str, text: str) -> list[str]:
    cuts = [span for _, span in SPLITTINGS[pre].pre_tokenizer().pre_tokenize_str(text)]
    return [text[begin:end] for begin, end in cuts]


@pytest.mark.parametrize("pre", PATTERNS)
def test_texts_are_cut_by_the_models_own_patterns(pre: str) -> None:
    for text in TEXTS:
        pieces = [text]
        for pattern in PATTERNS[pre]:
            pieces = [part for piece in pieces for part in cut(pattern, piece)]
        assert ours(pre, text) == pieces


def tokenizer_class(pre: str) -> Any:
    transformers = pytest.importorskip("transformers")
    from transformers.models.qwen3_5.tokenization_qwen3_5 import Qwen3_5Tokenizer

    return {
        "command-r": transformers.CohereTokenizer,
        "olmo": transformers.GPTNeoXTokenizer,
        "qwen2": transformers.Qwen2Tokenizer,
        "qwen35": Qwen3_5Tokenizer,
    }[pre]


@pytest.mark.parametrize("pre", ["command-r", "olmo", "qwen2", "qwen35"])
def test_texts_are_cut_as_by_transformers(pre: str) -> None:
    theirs = tokenizer_class(pre)().backend_tokenizer
    assert SPLITTINGS[pre].nfc == ("NFC" in repr(theirs.normalizer))
    for text in TEXTS:
        assert SPLITTINGS[pre].pre_tokenizer().pre_tokenize_str(text) == theirs.pre_tokenizer.pre_tokenize_str(text)


def test_names_of_one_splitting_are_taken_alike() -> None:
    """Models whose words are cut as another's have names of their own."""
    for pre in ("falcon3", "falcon-h1", "lfm2", "pixtral", "midm-2.0"):
        assert SPLITTINGS[pre] == SPLITTINGS["llama-bpe"]
    for pre, other in (
        ("gigachat", "gpt-2"),
        ("kormo", "hunyuan"),
        ("kanana2", "gpt-4o"),
        ("joyai-llm", "deepseek-v3"),
    ):
        assert SPLITTINGS[pre] == SPLITTINGS[other]


def test_superbpe_cuts_digits_alone_by_threes_from_the_right() -> None:
    assert ours("superbpe", "in 2024, 1234567 of x12.\n") == [
        "in ",
        "2",
        "024",
        ", ",
        "1",
        "234",
        "567",
        " of x",
        "12",
        ".\n",
    ]
    assert ours("superbpe", "123456 words") == ["123", "456", " words"]


def test_falcon_cuts_off_punctuation_first_and_digits_by_threes() -> None:
    assert ours("falcon", "ab, cd!? 12345 x") == ["ab", ",", " cd", "!?", " ", "123", "45", " x"]


def test_deepseeks_first_tokenizer_lists_letters_that_have_a_case() -> None:
    (letters,) = [pattern for pattern in SPLITTINGS["deepseek-llm"].patterns if "A-Z" in pattern]
    listed = regex.compile(letters.replace(r"\s?", "").rstrip("+"))
    for letter in map(chr, range(0x110000)):
        if listed.fullmatch(letter):
            assert unicodedata.category(letter) in ("Lu", "Ll", "Lt", "Cn"), hex(ord(letter))
        elif letter < "\u0530":  # some of later scripts are not in it
            assert unicodedata.category(letter) not in ("Lu", "Ll", "Lt"), hex(ord(letter))
