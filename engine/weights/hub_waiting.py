"""How long the hub's client waits for an answer."""

from __future__ import annotations

from typing import Any


def longest_wait_s() -> float:
    """As long as the client itself waits for what the hub says of a file: HF_HUB_ETAG_TIMEOUT, by default 10 s."""
    from huggingface_hub import constants

    return float(constants.HF_HUB_ETAG_TIMEOUT)


def bound_waiting() -> None:
    """Ends the client's waiting for a hub that does not answer, where it has no limit of its own.

    It asks for a repository's list of files without one, and no argument of it gives it one.
    """
    from huggingface_hub.utils import get_session  # type: ignore[attr-defined]  # documented, but not listed

    hooks = getattr(get_session(), "event_hooks", None)  # versions before 1 have another HTTP library
    if hooks is not None and _limit not in hooks["request"]:
        hooks["request"].append(_limit)


def _limit(request: Any) -> None:
    """Before each request. The HTTP library keeps its limits in the request, None for one that is not there."""
    limits = request.extensions.get("timeout", {})
    for what in ("connect", "read", "write"):
        if limits.get(what) is None:
            limits[what] = longest_wait_s()
    request.extensions["timeout"] = limits
