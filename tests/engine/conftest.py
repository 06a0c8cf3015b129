"""What holds for all tests of the engine."""

from __future__ import annotations

import pytest

from tidewheel.engine.constraints import masks
from tidewheel.engine.speculation import drafts


@pytest.fixture(autouse=True)
def _patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ask grammars however long they take.

    On a busy machine, the time of a step for draft tokens may be over at once.
    """
    for module in (masks, drafts):
        monkeypatch.setattr(module, "_LOOKAHEAD_S", 60.0)
