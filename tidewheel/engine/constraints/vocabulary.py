"""A tokenizer's vocabulary as llguidance wants it: the bytes of every token, and a function that tokenizes."""

from __future__ import annotations

from collections.abc import Collection
from typing import TYPE_CHECKING

from tidewheel.engine.memory import release_free_memory
from tidewheel.engine.text import Tokenizer

if TYPE_CHECKING:
    from llguidance import LLTokenizer

_LONGEST_LEAD = 4  # tokens that a space and a line break may take

# Slices are parts of the vocabulary that masks of text are put together from. The first two of llguidance's own, white
# space and short text, save a tenth of the time of masks, and take as long and as much memory to make as the others.
_FIRST_SLICE = 2


class _Tokens:
    """What `llguidance.TokenizerWrapper` wraps. The model's own number of tokens, and one more that it never samples.

    llguidance asks for the tokens of text that a grammar leaves no choice about, so that a model is led along the
    tokens that it was trained with.
    """

    bos_token_id = None

    def __init__(self, tokenizer: Tokenizer, vocab_size: int, eos_ids: Collection[int]) -> None:
        texts: list[bytes | None] = tokenizer.token_texts()[:vocab_size]
        texts += [b""] * (vocab_size + 1 - len(texts))
        for i in eos_ids:
            texts[i] = None
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._eos_ids = eos_ids
        self.special_token_ids = [i for i, text in enumerate(texts) if text is None]
        # Special tokens have names, by which a grammar may ask for them, and no text.
        self.tokens = [
            (tokenizer.id_to_token(i) or "").encode() if text is None else text for i, text in enumerate(texts)
        ]
        self.eos_token_id = min(eos_ids, default=vocab_size)
        self.greedy: LLTokenizer | None = None

    def __call__(self, text: bytes) -> list[int]:
        # Some tokenizers put a space before the text; a line break ahead of it keeps that apart.
        for before in ("", "\n"):
            ids = self._tokenizer.encode(before + text.decode(), add_special_tokens=False)
            for start in range(min(len(ids), _LONGEST_LEAD)):
                if self._text(ids[start:]) == text:
                    return ids[start:]
        ids = [] if self.greedy is None else self.greedy.greedy_tokenize(text.decode())
        return ids if self._text(ids) == text else []  # it leaves out what no token spells

    def _text(self, ids: list[int]) -> bytes | None:
        if any(i >= self._vocab_size or i in self._eos_ids for i in ids):
            return None
        pieces = self._tokenizer.token_texts(ids)
        return None if None in pieces else b"".join(piece for piece in pieces if piece is not None)


def make_vocabulary(tokenizer: Tokenizer, vocab_size: int, eos_ids: Collection[int]) -> LLTokenizer:
    """llguidance's form of a vocabulary: `vocab_size` tokens and one that stands for the end where `eos_ids` is empty.

    Takes some hundred milliseconds. llguidance holds the GIL, for 50 ms and then for 50 more where the vocabulary has
    49,000 tokens; making both parts in one call would hold it for as long as both.
    """
    from llguidance import LLTokenizer, TokenizerWrapper

    tokens = _Tokens(tokenizer, vocab_size, [i for i in eos_ids if i < vocab_size])
    eos = sorted(i for i in eos_ids if i < vocab_size) or [vocab_size]
    wrapper = TokenizerWrapper(tokens)
    whole = LLTokenizer(wrapper, eos_token=eos, slices=[])
    tokens.greedy = whole.with_slices(LLTokenizer.general_slices()[_FIRST_SLICE:])
    # What was only needed on the way takes more memory than what stays.
    wrapper.tokens = tokens.tokens = []
    del whole
    release_free_memory()
    return tokens.greedy
