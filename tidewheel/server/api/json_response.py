"""A struct as a JSON response."""

from __future__ import annotations

import msgspec
from starlette.responses import Response

from tidewheel.server.streaming import encode_json


def json_response(payload: msgspec.Struct) -> Response:
    """`payload` with status 200."""
    return Response(encode_json(payload), media_type="application/json")
