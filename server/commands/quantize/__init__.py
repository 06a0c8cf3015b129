"""`tidewheel quantize`: a model written anew in fewer bits."""

from .command import run

__all__ = ["run"]
