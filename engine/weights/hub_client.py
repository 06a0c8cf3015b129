"""Changes to the hub's client: how long it waits for an answer, and where it logs."""

from __future__ import annotations

import logging
from typing import Any


def longest_wait_s() -> float:
    """As long as the client itself waits for what the hub says of a file: HF_HUB_ETAG_TIMEOUT, by default 10 s."""
    from huggingface_hub import constants

    return float(constants.HF_HUB_ETAG_TIMEOUT)


def prepare_client() -> None:
    """Before a download: ends the waiting for a hub that does not answer, and has each line of the log once.

    The client asks for a repository's list of files without a time limit, and no argument of it sets one.
    """
    from huggingface_hub.utils import get_session  # type: ignore[attr-defined]  # documented, but not listed

    hooks = getattr(get_session(), "event_hooks", None)  # versions before 1 have another HTTP library
    if hooks is not None and _limit not in hooks["request"]:
        hooks["request"].append(_limit)
    if logging.getLogger().handlers:  # which have what the client writes to stderr by itself
        logging.getLogger("huggingface_hub").handlers.clear()


def _limit(request: Any) -> None:
    """Before each request. The HTTP library keeps its limits in the request, None for one that is not there."""
    limits = request.extensions.get("timeout", {})
    for what in ("connect", "read", "write"):
        if limits.get(what) is None:
            limits[what] = longest_wait_s()
    request.extensions["timeout"] = limits
