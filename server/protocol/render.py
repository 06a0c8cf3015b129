"""`/v1/chat/completions/render` and `/v1/completions/render`."""

from __future__ import annotations

import msgspec


class RenderedRequest(msgspec.Struct):
    """What a request's prompt becomes: its text, in which special tokens are spelt out, and its token ids."""

    request_id: str
    model: str
    prompt: str
    token_ids: list[int]
