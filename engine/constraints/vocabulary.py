"""A tokenizer's vocabulary in llguidance's form: the bytes of each token, and a function that tokenizes."""

from __future__ import annotations

from collections.abc import Collection
from typing import TYPE_CHECKING, NamedTuple

from ..machine.memory import release_free_memory

if TYPE_CHECKING:
    from llguidance import LLTokenizer

    from ..text.tokenizer import Tokenizer

_LONGEST_LEAD = 4  # tokens that a space and a line break may take

# Slices are parts of the vocabulary from which masks of text are combined. The first two of llguidance's own, white
# space and short text, save a tenth of the time of masks, and take as long and as much memory to make as the others.
_FIRST_SLICE = 2


class TokenTexts(NamedTuple):
    """The bytes of each of the model's tokens, and of one extra token that it never samples.

    Special tokens have no text. A grammar may ask for them by their names. `eos_ids` end an answer. If there are none,
    the extra token stands for the end.
    """

    texts: list[bytes]
    special_ids: list[int]
    eos_ids: list[int]


def token_texts(tokenizer: Tokenizer, vocab_size: int, eos_ids: Collection[int]) -> TokenTexts:
    """The texts of a vocabulary of `vocab_size` tokens, which may be more or fewer than the tokenizer has."""
    texts: list[bytes | None] = tokenizer.token_texts()[:vocab_size]
    texts += [b""] * (vocab_size + 1 - len(texts))
    ends = sorted(i for i in eos_ids if i < vocab_size)
    for i in ends:
        texts[i] = None
    special_ids = [i for i, text in enumerate(texts) if text is None]
    named = [(tokenizer.id_to_token(i) or "").encode() if text is None else text for i, text in enumerate(texts)]
    return TokenTexts(named, special_ids, ends)


class _Tokens:
    """The tokenizer for `llguidance.TokenizerWrapper`.

    If a grammar leaves no choice, llguidance asks for the tokens of the text that must follow. So the model gets the
    tokens that it was trained with.
    """

    bos_token_id = None

    def __init__(self, of: TokenTexts, tokenizer: Tokenizer | None) -> None:
        self.tokens = of.texts
        self.special_token_ids = of.special_ids
        self.eos_token_id = min(of.eos_ids, default=len(of.texts) - 1)
        self.greedy: LLTokenizer | None = None
        self._tokenizer = tokenizer
        self._vocab_size = len(of.texts) - 1
        self._eos_ids = of.eos_ids

    def __call__(self, text: bytes) -> list[int]:
        if self._tokenizer is not None:
            # Some tokenizers put a space before the text. A line break in front separates the two.
            for before in ("", "\n"):
                ids = self._tokenizer.encode(before + text.decode(), add_special_tokens=False)
                for start in range(min(len(ids), _LONGEST_LEAD)):
                    if self._text(ids[start:]) == text:
                        return ids[start:]
        ids = [] if self.greedy is None else self.greedy.greedy_tokenize(text.decode())
        return ids if self._text(ids) == text else []  # the tokenizer drops what no token spells

    def _text(self, ids: list[int]) -> bytes | None:
        if self._tokenizer is None:
            return b"" if self.greedy is None else self.greedy.decode_bytes(ids)
        if any(i >= self._vocab_size or i in self._eos_ids for i in ids):
            return None
        pieces = self._tokenizer.token_texts(ids)
        return None if None in pieces else b"".join(piece for piece in pieces if piece is not None)


class Vocabulary:
    """A vocabulary in llguidance's form. It calls back for tokens, and no collection of garbage sees this circle."""

    def __init__(self, tokens: _Tokens, llguidance: LLTokenizer) -> None:
        self.llguidance = llguidance
        self._tokens = tokens

    def free(self) -> None:
        """Let it be freed with the last grammar that needs it. Those that are computed yet may get fewer tokens."""
        self._tokens.greedy = None


def make_vocabulary(of: TokenTexts, tokenizer: Tokenizer | None = None) -> Vocabulary:
    """llguidance's form of a vocabulary. Without a tokenizer, a text is split into the longest tokens that fit.

    This takes some hundred milliseconds. llguidance holds the GIL twice, for 50 ms each with a vocabulary of 49,000
    tokens. One call for both parts would hold it for 100 ms.
    """
    from llguidance import LLTokenizer, TokenizerWrapper

    tokens = _Tokens(of, tokenizer)
    wrapper = TokenizerWrapper(tokens)
    whole = LLTokenizer(wrapper, eos_token=of.eos_ids or [len(of.texts) - 1], slices=[])
    tokens.greedy = whole.with_slices(LLTokenizer.general_slices()[_FIRST_SLICE:])
    # Temporary data takes more memory than the result.
    wrapper.tokens = tokens.tokens = []
    del whole
    release_free_memory()
    return Vocabulary(tokens, tokens.greedy)
