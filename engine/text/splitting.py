"""How a text is cut into pieces before merges, by the names that `tokenizer.ggml.pre` has in GGUF files.

The names: https://github.com/ggml-org/llama.cpp/blob/master/src/llama-vocab.cpp. The patterns are from the models' own
tokenizer.json.
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

    def pre_tokenizer(self, add_prefix_space: bool = False) -> pre_tokenizers.PreTokenizer:
        """Cuts texts, and writes their bytes as the characters of byte-level vocabularies."""
        steps: list[pre_tokenizers.PreTokenizer] = []
        if self.punctuation:
            steps.append(pre_tokenizers.Punctuation("contiguous"))
        if self.digits:
            steps.append(pre_tokenizers.Digits(individual_digits=True))
        steps += [pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in self.patterns]
        steps.append(pre_tokenizers.ByteLevel(add_prefix_space=add_prefix_space, use_regex=not self.patterns))
        if self.punctuation:
            steps.append(pre_tokenizers.Digits(individual_digits=False))
            steps.append(pre_tokenizers.Split(Regex("[0-9][0-9][0-9]"), "isolated"))
        return pre_tokenizers.Sequence(steps)


_SHORT_FORMS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_SPACES = r"\s*[\r\n]+|\s+(?!\S)|\s+"


def _words(digits: str, letters: str = r"\p{L}", marks: str = "") -> str:
    """The pattern of GPT-4 (cl100k). `digits` says how many digits a piece has."""
    others = rf" ?[^\s\p{{L}}{marks}\p{{N}}]+[\r\n]*"
    return rf"{_SHORT_FORMS}|[^\r\n\p{{L}}\p{{N}}]?{letters}+|\p{{N}}{digits}|{others}|{_SPACES}"


def _cased_words(digits: str, after: str, but: str = "", line_ends: str = r"[\r\n/]*") -> str:
    """The pattern of GPT-4o (o200k): a word ends where a small letter is followed by a large one.

    `but` takes something away from a class of letters. `line_ends` may follow other characters.
    """
    upper, lower = rf"[\p{{Lu}}\p{{Lt}}\p{{Lm}}\p{{Lo}}\p{{M}}{but}]", rf"[\p{{Ll}}\p{{Lm}}\p{{Lo}}\p{{M}}{but}]"
    before = r"[^\r\n\p{L}\p{N}]?"
    return (
        rf"{before}{upper}*{lower}+{after}|{before}{upper}+{lower}*{after}|\p{{N}}{digits}|"
        rf" ?[^\s\p{{L}}\p{{N}}]+{line_ends}|{_SPACES}"
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
# Letters with a case, as DeepSeek's first tokenizer lists them.
_CASED_LETTERS = (
    "A-Za-z\u00b5\u00c0-\u00d6\u00d8-\u00f6\u00f8-\u01ba\u01bc-\u01bf\u01c4-\u0293\u0295-\u02af\u0370-\u0373"
    "\u0376\u0377\u037b-\u037d\u037f\u0386\u0388-\u038a\u038c\u038e-\u03a1\u03a3-\u03f5\u03f7-\u0481\u048a-\u052f"
    "\u0531-\u0556\u10a0-\u10c5\u13a0-\u13f5\u13f8-\u13fd\u1c90-\u1cba\u1cbd-\u1cbf\u1d00-\u1d2b\u1d6b-\u1d77"
    "\u1d79-\u1d9a\u1e00-\u1f15\u1f18-\u1f1d\u1f20-\u1f45\u1f48-\u1f4d\u1f50-\u1f57\u1f59\u1f5b\u1f5d"
    "\u1f5f-\u1f7d\u1f80-\u1fb4\u1fb6-\u1fbc\u1fbe\u1fc2-\u1fc4\u1fc6-\u1fcc\u1fd0-\u1fd3\u1fd6-\u1fdb"
    "\u1fe0-\u1fec\u1ff2-\u1ff4\u1ff6-\u1ffc\u2102\u2107\u210a-\u2113\u2115\u2119-\u211d\u2124\u2126\u2128"
    "\u212a-\u212d\u212f-\u2134\u2139\u213c-\u213f\u2145-\u2149\u214e\u2183\u2184\u2c00-\u2c7b\u2c7e-\u2ce4"
    "\u2ceb-\u2cee\u2cf2\u2cf3\ua640-\ua66d\ua680-\ua69b\ua722-\ua76f\ua771-\ua787\ua78b-\ua78e\uab70-\uabbf"
    "\ufb00-\ufb06\ufb13-\ufb17\uff21-\uff3a\uff41-\uff5a\U00010400-\U0001044f\U000104b0-\U000104d3"
    "\U000104d8-\U000104fb\U00010c80-\U00010cb2\U00010cc0-\U00010cf2\U000118a0-\U000118df\U0001e900-\U0001e943"
)
_DEEPSEEK_PUNCTUATION = r"\s?[!-/:-~" + "\uff01-\uff0f\uff1a-\uff5e\u2018-\u201f\u3000-\u3002" + "]+"
_KIMI = r"[\p{Han}]+|" + _cased_words("{1,3}", f"{_SHORT_FORMS}?", r"&&[^\p{Han}]", line_ends=r"[\r\n]*")
_BAILING = r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]++[\r\n]*|\s*[\r\n]|\s+(?!\S)|\s+"
_SEED = rf"{_SHORT_FORMS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{{1}}| ?[^\s\p{{L}}\p{{N}}\r\n]+|{_SPACES}"

# By tokenizer.ggml.pre.
SPLITTINGS = {
    "gpt-2": _GPT2,
    "phi-2": _GPT2,
    "exaone4": _GPT2,
    "trillion": _GPT2,
    "granite-docling": _GPT2,
    "a.x-4.0": _GPT2,
    "gigachat": _GPT2,
    "mellum": _GPT2,
    "roberta-bpe": _GPT2,
    "jina-v1-en": _GPT2,
    "jina-v2-code": _GPT2,
    "jina-v2-de": _GPT2,
    "jina-v2-es": _GPT2,
    "mpt": _NEOX,
    "olmo": _NEOX,
    "modern-bert": _NEOX,
    "llama-bpe": _LLAMA3,
    "llama3": _LLAMA3,
    "llama-v3": _LLAMA3,
    "falcon3": _LLAMA3,
    "falcon-h1": _LLAMA3,
    "lfm2": _LLAMA3,
    "pixtral": _LLAMA3,
    "midm-2.0": _LLAMA3,
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
    "kormo": _ONE_DIGIT,
    "gpt-4o": _GPT4O,
    "llama4": _GPT4O,
    "kanana2": _GPT4O,
    "tekken": Splitting((_cased_words("", ""),), whole_words=True, begins=True),
    "deepseek-v3": _DEEPSEEK3,
    "hunyuan-dense": _DEEPSEEK3,
    "joyai-llm": _DEEPSEEK3,
    # Words are not cut apart: only digits are, by threes from the right.
    "superbpe": Splitting((r"\p{N}+", r"(?=(\d{3})+(?!\d))")),
    "kimi-k2": Splitting((_KIMI,), whole_words=True),
    "deepseek-llm": Splitting(
        (r"[\r\n]", rf"\s?[{_CASED_LETTERS}]+", _DEEPSEEK_PUNCTUATION, r"\s+$", _EAST_ASIAN, r"\p{N}")
    ),
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
