"""The options of devices that size the KV cache by the accelerator's memory."""

from __future__ import annotations

import logging

from ..declaring.option import Options, option
from ..declaring.record import record
from ..declaring.values import number

logger = logging.getLogger(__name__)


def _positive_fraction(value: float) -> str | None:
    return None if 0 < value <= 1 else "must be above 0 and at most 1"


@record(frozen=True)
class MemoryOptions(Options):
    """How much of the memory the device takes."""

    gpu_memory_utilization: float = option(
        0.9,
        "how much of the device's memory that is free after loading and a trial step may be used",
        parse=number,
        check=_positive_fraction,
        metavar="FRACTION",
    )

    def warn_of_no_utilization(self, reason: str) -> None:
        """Say in the log that nothing is made of `gpu_memory_utilization`, if it was given."""
        for flag in self.given_flags():
            logger.warning("%s has no effect: %s", flag, reason)
