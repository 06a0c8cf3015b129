"""`tidewheel chat`, `complete` and `run`: ask a model from the terminal."""

from .command import chat, complete, run

__all__ = ["chat", "complete", "run"]
