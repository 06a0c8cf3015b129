"""The errors that the engine raises on purpose. Each message says what was wrong and what would be right."""


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


class EngineDeadError(TidewheelError):
    """The engine thread has failed or stopped; no request will be served any more."""
