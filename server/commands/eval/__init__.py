"""`tidewheel eval`: how well a model predicts a text, and how far it is from a reference."""

from .command import run

__all__ = ["run"]
