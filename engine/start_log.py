"""The log of a start: what was found and chosen. Whoever shows a person the same in another way leaves it out."""

from __future__ import annotations

import logging

start_logger = logging.getLogger("tidewheel.start")
