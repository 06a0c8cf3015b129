"""NoTokenizer: stands in for a model's tokenizer where `--skip-tokenizer-init` leaves it out."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import NoReturn

from ..errors import InvalidRequestError
from .detokenizer import Detokenizer
from .tokenizer import Tokenizer


class NoTokenizer(Tokenizer):
    """The tokenizer of a model of `vocab_size` tokens that has none. Answers have no text, and methods that need text
    raise InvalidRequestError.
    """

    has_text = False

    def __init__(self, vocab_size: int) -> None:
        super().__init__(_NoBackend(vocab_size))

    def require_text(self, param: str) -> NoReturn:
        """See Tokenizer."""
        _refuse(param)

    def detokenizer(
        self,
        prompt: Sequence[int] = (),
        skip_special_tokens: bool = True,
        shown: Collection[int] = (),
        spaces_between_special_tokens: bool = True,
    ) -> Detokenizer:
        """One that makes no text."""
        return _NO_TEXT


def _refuse(param: str) -> NoReturn:
    raise InvalidRequestError(
        f"{param} needs a tokenizer, which --skip-tokenizer-init leaves out: send prompts as token ids and read "
        "token_ids, or start without that option",
        param,
    )


class _NoBackend:
    token_bytes: Callable[[int], bytes] | None = None

    def __init__(self, vocab_size: int) -> None:
        self.vocab_size = vocab_size

    def encode(self, text: str, add_special_tokens: bool) -> NoReturn:
        _refuse("text")

    def decode(self, ids: Sequence[int], skip_special_tokens: bool) -> NoReturn:
        _refuse("text")

    def id_to_token(self, token_id: int) -> None:
        return None

    def token_to_id(self, token: str) -> None:
        return None

    def is_special(self, token_id: int) -> bool:
        return False

    def is_byte(self, token_id: int) -> bool:
        return False


class _NoText:
    known: Mapping[int, str] = {}
    is_whole = True

    def push(self, token: int) -> str:
        return ""

    def flush(self) -> str:
        return ""

    def copied(self) -> Detokenizer:
        return self


_NO_TEXT = _NoText()
