"""Vocabularies and grammars for the tests."""

from __future__ import annotations

import asyncio
import functools
from typing import Any

import numpy as np
from engine.tiny_tokenizers import tiny
from numpy.typing import NDArray

from tidewheel.engine.constraints.grammar import Grammar, GrammarCompiler, StructuredOutput

VOCAB_SIZE = 403  # of the byte-level tokenizer
EOS = frozenset({1, 3})


@functools.cache
def compiler(vocab_size: int = VOCAB_SIZE, eos_ids: frozenset[int] = EOS) -> GrammarCompiler:
    """Compiles for the byte-level tokenizer."""
    return GrammarCompiler(tiny("byte-level"), vocab_size, eos_ids)


@functools.cache
def grammar(kind: Any, text: str, vocab_size: int = VOCAB_SIZE, eos_ids: frozenset[int] = EOS) -> Grammar:
    """The grammar of a text. Raises InvalidRequestError."""
    return asyncio.run(compiler(vocab_size, eos_ids).compile(StructuredOutput(kind, text, "field")))


def allowed(mask: NDArray[np.uint32], vocab_size: int = VOCAB_SIZE) -> set[int]:
    """The tokens that a mask lets through."""
    return set(np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little")[:vocab_size]).tolist())
