"""Random ids."""

from __future__ import annotations

import os
import threading

_ID_BYTES, _POOL_BYTES = 16, 1 << 12


class _Pool(threading.local):
    """Random bytes of a thread. To ask the system for each id would give up the interpreter's lock each time."""

    data = b""
    at = 0


_pool = _Pool()


def new_id() -> str:
    """32 hexadecimal digits that cannot be guessed."""
    at = _pool.at
    if at == len(_pool.data):
        _pool.data, at = os.urandom(_POOL_BYTES), 0
    _pool.at = at + _ID_BYTES
    return _pool.data[at : at + _ID_BYTES].hex()
