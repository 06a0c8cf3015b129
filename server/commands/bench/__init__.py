"""`tidewheel bench`: what a model does on this machine, beside what the machine could do."""

from .command import run

__all__ = ["run"]
