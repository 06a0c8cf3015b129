"""The log of a start: what was found and chosen. It is left out where the user is shown the same in another way."""

from __future__ import annotations

import logging

start_logger = logging.getLogger("tidewheel.start")
