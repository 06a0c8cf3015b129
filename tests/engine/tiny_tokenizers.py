"""Real tokenizers, trained in a moment: one of each kind that models come with."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path

import tokenizers
from tokenizers import decoders, models, normalizers, pre_tokenizers, processors, trainers

from tidewheel.engine.text.tokenizer import Tokenizer
from tidewheel.engine.text.tokenizer_backends import TokenizersBackend

TEXT = [
    "The tide turns the wheel, and the wheel grinds the corn.",
    "Grüße aus Köln! Ça va? Él está aquí — naïve café.",
    "潮車が回る。水車小屋の朝。",
    "Приливное колесо вращается 😀👍🏽 🇩🇪",
    "def f(x):\n    return {'a': [1, 2, 3]}  # ok",
] * 20
SPECIAL = ["<s>", "</s>", "<|im_start|>", "<pad>"]
BYTES = [f"<0x{byte:02X}>" for byte in range(256)]


def _special_tokens(tokenizer: tokenizers.Tokenizer) -> None:
    tokenizer.add_tokens(["plainly added", "▁odd", "é"])
    tokenizer.add_special_tokens(["<|late|>"])


def byte_level() -> tokenizers.Tokenizer:
    """As GPT-2, Llama 3 and Qwen have it."""
    tokenizer = tokenizers.Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=400, initial_alphabet=alphabet, special_tokens=SPECIAL, show_progress=False
    )
    tokenizer.train_from_iterator(TEXT, trainer)
    _special_tokens(tokenizer)
    return tokenizer


def byte_fallback() -> tokenizers.Tokenizer:
    """As Llama 2, Mistral and Gemma have it: metaspace by normalizer, unknown characters as byte tokens."""
    tokenizer = tokenizers.Tokenizer(models.BPE(byte_fallback=True, unk_token="<unk>", fuse_unk=True))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    trainer = trainers.BpeTrainer(
        vocab_size=460, special_tokens=["<unk>", *SPECIAL, *BYTES], limit_alphabet=60, show_progress=False
    )
    tokenizer.train_from_iterator(TEXT, trainer)
    # Byte tokens have text: only the first few are special.
    plain = tokenizers.Tokenizer.from_str(tokenizer.to_str().replace('"special":true', '"special":false'))
    plain.add_special_tokens(SPECIAL)
    plain.post_processor = processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", plain.token_to_id("<s>"))]
    )
    _special_tokens(plain)
    return plain


def metaspace() -> tokenizers.Tokenizer:
    """As T5 and many Unigram models have it."""
    tokenizer = tokenizers.Tokenizer(models.Unigram())
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Metaspace()
    trainer = trainers.UnigramTrainer(
        vocab_size=300, special_tokens=["<unk>", *SPECIAL], unk_token="<unk>", show_progress=False
    )
    tokenizer.train_from_iterator(TEXT, trainer)
    _special_tokens(tokenizer)
    return tokenizer


KINDS: dict[str, Callable[[], tokenizers.Tokenizer]] = {
    "byte-level": byte_level,
    "byte-fallback": byte_fallback,
    "metaspace": metaspace,
}


@functools.cache
def tiny(kind: str) -> Tokenizer:
    """The tokenizer of a kind, trained once a test run."""
    return Tokenizer(TokenizersBackend(KINDS[kind]()))


def save(kind: str, folder: Path) -> None:
    """Write the `tokenizer.json` of a kind."""
    KINDS[kind]().save(str(folder / "tokenizer.json"))
