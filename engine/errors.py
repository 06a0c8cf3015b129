"""The errors that the engine raises on purpose. Each message says what was wrong and what would be right.

What a client sent is repeated in them by `quoted` and `shortened`, which bound its length.
"""

from __future__ import annotations

import reprlib

MAX_QUOTED = 100  # characters of what a client sent, in an error, a header or a line of the log

_repr = reprlib.Repr()  # looks at no more of a list or an object than it shows
_repr.maxstring = _repr.maxother = MAX_QUOTED


class TidewheelError(Exception):
    """Base of every error that is meant to be read by a person."""


class ModelError(TidewheelError):
    """A model folder, checkpoint or tokenizer that cannot be served."""


class DeviceError(TidewheelError):
    """A device that is not there, or that cannot do what was asked of it."""


class InvalidRequestError(TidewheelError):
    """A request that can never be served.

    `param` is the request's field that is at fault, in OpenAI's spelling.
    """

    def __init__(self, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.param = param


class BusyError(TidewheelError):
    """Too much of something is being done now. A later request may succeed."""


class EngineDeadError(TidewheelError):
    """The engine thread has failed or stopped; no request will be served any more."""


def shortened(text: str, most: int = MAX_QUOTED) -> str:
    """The first characters of what a client sent, `most` of them."""
    return text if len(text) <= most else text[: most - 1] + "…"


def quoted(value: object) -> str:
    """A value that a client sent, as Python writes it, without its middle if it is long."""
    return shortened(_repr.repr(value))
