"""`tidewheel chat` and `tidewheel complete`: ask a model from the terminal."""

from .command import chat, complete

__all__ = ["chat", "complete"]
