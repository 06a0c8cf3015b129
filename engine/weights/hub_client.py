"""The hub's client: how long it waits for an answer, where it logs, and the beginning of a file."""

from __future__ import annotations

import logging
from contextlib import ExitStack
from typing import Any

_CHUNK_BYTES = 2**16


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


def read_beginning(url: str, size: int) -> bytes:
    """The first `size` bytes of a file of the hub, or all of a shorter one. No more is read, whatever the hub sends.

    Raises what the client raises.
    """
    from huggingface_hub.utils import (  # type: ignore[attr-defined]  # documented, but not listed
        build_hf_headers,
        get_session,
        hf_raise_for_status,
    )

    prepare_client()
    session: Any = get_session()
    options = {"headers": {**build_hf_headers(), "Range": f"bytes=0-{size - 1}"}, "timeout": longest_wait_s()}
    content = b""
    with ExitStack() as stack:
        if hasattr(session, "event_hooks"):
            response = stack.enter_context(session.stream("GET", url, **options))
            chunks = response.iter_bytes(_CHUNK_BYTES)
        else:  # the HTTP library of versions before 1
            response = stack.enter_context(session.get(url, stream=True, **options))
            chunks = response.iter_content(_CHUNK_BYTES)
        hf_raise_for_status(response)
        for chunk in chunks:
            content += chunk
            if len(content) >= size:
                break
    return content[:size]


def _limit(request: Any) -> None:
    """Before each request. The HTTP library keeps its limits in the request, None for one that is not there."""
    limits = request.extensions.get("timeout", {})
    for what in ("connect", "read", "write"):
        if limits.get(what) is None:
            limits[what] = longest_wait_s()
    request.extensions["timeout"] = limits
