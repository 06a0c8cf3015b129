"""How a text is cut into pieces before merges: what `tokenizer.ggml.pre` means.

The names: https://github.com/ggml-org/llama.cpp/blob/master/src/llama-vocab.cpp. The patterns are those of the models'
own tokenizer.json.
"""

from __future__ import annotations

from typing import NamedTuple

from tokenizers import Regex, pre_tokenizers


class Splitting(NamedTuple):
    """A text is cut by each of the patterns, one after the other; without any, by GPT-2's own."""

    patterns: tuple[str, ...] = ()
    digits: bool = False  # each digit is cut off first
    punctuation: bool = False  # runs of it are cut off first, and digits by threes in the end, as for Falcon
    whole_words: bool = False  # a piece that is a token is taken whole, whatever the merges say
    nfc: bool = False
    begins: bool = False  # texts begin with bos where the file does not say

    def pre_tokenizer(self) -> pre_tokenizers.PreTokenizer:
        """What cuts texts, and writes their bytes as the characters that byte-level vocabularies have."""
        steps: list[pre_tokenizers.PreTokenizer] = []
        if self.punctuation:
            steps.append(pre_tokenizers.Punctuation("contiguous"))
        if self.digits:
            steps.append(pre_tokenizers.Digits(individual_digits=True))
        steps += [pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in self.patterns]
        steps.append(pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=not self.patterns))
        if self.punctuation:
            steps.append(pre_tokenizers.Digits(individual_digits=False))
            steps.append(pre_tokenizers.Split(Regex("[0-9][0-9][0-9]"), "isolated"))
        return pre_tokenizers.Sequence(steps)


_SHORT_FORMS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_SPACES = r"\s*[\r\n]+|\s+(?!\S)|\s+"


def _words(digits: str, letters: str = r"\p{L}", marks: str = "") -> str:
    """The pattern of GPT-4 (cl100k), with so many digits in a piece."""
    others = rf" ?[^\s\p{{L}}{marks}\p{{N}}]+[\r\n]*"
    return rf"{_SHORT_FORMS}|[^\r\n\p{{L}}\p{{N}}]?{letters}+|\p{{N}}{digits}|{others}|{_SPACES}"


def _cased_words(digits: str, after: str) -> str:
    """The pattern of GPT-4o (o200k): a word ends where a small letter is followed by a large one."""
    upper, lower = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
    before = r"[^\r\n\p{L}\p{N}]?"
    return (
        rf"{before}{upper}*{lower}+{after}|{before}{upper}+{lower}*{after}|\p{{N}}{digits}|"
        rf" ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{_SPACES}"
    )


_GPT2, _DIGITS = Splitting(), Splitting(digits=True)
_NEOX = Splitting(nfc=True)
_GPT4 = Splitting((_words("{1,3}"),))
_LLAMA3 = _GPT4._replace(whole_words=True, begins=True)
_ONE_DIGIT = Splitting((_words(""),))
_GPT4O = Splitting((_cased_words("{1,3}", f"{_SHORT_FORMS}?"),))
# Escaped, because some of them look like others.
_BLOOM = r" ?[^(\s|.,!?" + "\u2026\u3002\uff0c\u3001\u0964\u06d4\u060c" + ")]+"
_CHINESE_AND_KANA = "[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+"
_EAST_ASIAN = "[\u4e00-\u9fa5\u0800-\u4e00\uac00-\ud7ff]+"
_DEEPSEEK3 = Splitting((
    r"\p{N}{1,3}",
    _CHINESE_AND_KANA,
    r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+[\r\n]*|"
    + _SPACES,
))  # fmt: skip
_BAILING = r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]++[\r\n]*|\s*[\r\n]|\s+(?!\S)|\s+"
_SEED = rf"{_SHORT_FORMS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{{1}}| ?[^\s\p{{L}}\p{{N}}\r\n]+|{_SPACES}"

# By tokenizer.ggml.pre.
SPLITTINGS = {
    "gpt-2": _GPT2,
    "phi-2": _GPT2,
    "exaone4": _GPT2,
    "trillion": _GPT2,
    "granite-docling": _GPT2,
    "mpt": _NEOX,
    "olmo": _NEOX,
    "llama-bpe": _LLAMA3,
    "llama3": _LLAMA3,
    "llama-v3": _LLAMA3,
    "dbrx": _GPT4,
    "smaug-bpe": _GPT4,
    "glm4": _GPT4,
    "chatglm-bpe": _GPT4,
    "qwen2": _ONE_DIGIT._replace(nfc=True),
    "qwen35": Splitting((_words("", r"[\p{L}\p{M}]", r"\p{M}"),), nfc=True),
    "deepseek-r1-qwen": _ONE_DIGIT,
    "stablelm2": _ONE_DIGIT,
    "hunyuan": _ONE_DIGIT,
    "megrez": _ONE_DIGIT,
    "grok-2": _ONE_DIGIT,
    "gpt-4o": _GPT4O,
    "llama4": _GPT4O,
    "tekken": Splitting((_cased_words("", ""),), whole_words=True, begins=True),
    "deepseek-v3": _DEEPSEEK3,
    "hunyuan-dense": _DEEPSEEK3,
    "deepseek-coder": Splitting((r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", _EAST_ASIAN, r"\p{N}")),
    "bailingmoe": Splitting((_BAILING,)),
    "seed-coder": Splitting((_SEED,)),
    "smollm": _DIGITS,
    "refact": _DIGITS,
    "starcoder": _DIGITS,
    "codeshell": _DIGITS,
    "exaone": _DIGITS,
    "minerva-7b": _DIGITS,
    "command-r": _DIGITS._replace(nfc=True),
    "falcon": Splitting(punctuation=True),
    "bloom": Splitting((_BLOOM,)),
    "poro-chat": Splitting((_BLOOM,)),
    "gpt3-finnish": Splitting((_BLOOM,)),
    "viking": Splitting((_BLOOM, r"\p{N}")),
}
