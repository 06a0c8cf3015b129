"""TokenizerHelper: the process that has made a tokenizer in place of this one, and how it is asked about a text."""

from __future__ import annotations

import logging
from collections.abc import Callable

from ..errors import ModelError
from ..sandboxing.helper import Helper
from .tokenizer_backends import LONG_TEXT

logger = logging.getLogger(__name__)

_DONE, _FAILED = b"\0", b"\1"  # what an answer begins with
_LONGEST_S, _LEAST_CHARACTERS_PER_S = 10.0, 50_000.0


class TokenizerHelper:
    """The process of a lent tokenizer. See Helper for the module and its argument."""

    def __init__(self, module: str, argument: str) -> None:
        """Raises ModelError if the process does not start."""
        try:
            self._helper = Helper(module, argument)
        except OSError as error:
            raise ModelError(f"the process that makes a tokenizer does not start: {error}") from error
        self.close = self._helper.close

    def receive(self) -> bytes:
        """A message of what it tells first. Raises ModelError if it could not make the tokenizer."""
        try:
            return self._helper.receive()
        except (OSError, EOFError) as error:
            raise ModelError("the process that makes a tokenizer has ended") from error

    def ask(self, kind: bytes, text: str) -> bytes | None:
        """What `answer_of` has there for this byte and text; None if the process is gone, or was too slow and so is
        ended. Raises RuntimeError with what went wrong there.
        """
        longest_s = _LONGEST_S + len(text) / _LEAST_CHARACTERS_PER_S
        try:
            answer = self._helper.ask(kind + text.encode(), longest_s, is_long=len(text) > LONG_TEXT)
        except (OSError, EOFError) as error:
            if not self._helper.is_closed:
                logger.warning("A tokenizer is made anew, because its process has ended: %s", error)
                self.close()  # an answer may still come, which would be taken for the next one
            return None
        if answer[:1] != _DONE:
            raise RuntimeError(answer[1:].decode())
        return answer[1:]


def answer_of(request: bytes, compute: Callable[[bytes, str], bytes]) -> bytes:
    """In the process: the answer to a request, with what `compute` makes of its first byte and text."""
    try:
        return _DONE + compute(request[:1], request[1:].decode())
    except BaseException as error:  # the tokenizers library's panics are no Exceptions
        return _FAILED + str(error).encode(errors="replace")
