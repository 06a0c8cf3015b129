"""`tidewheel bench`: what a model does on this machine, beside what the machine could do."""

from tidewheel.server.bench.command import run

__all__ = ["run"]
