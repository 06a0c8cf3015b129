"""`tidewheel chat`: talk to a model from the terminal."""

from .command import run

__all__ = ["run"]
