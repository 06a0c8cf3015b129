"""What holds for all tests of draft tokens."""

from __future__ import annotations

import pytest

from tidewheel.engine.constraints import costs


@pytest.fixture(autouse=True)
def _grammars_at_any_cost(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let masks take as long, and the process as much memory, as the machine wants: here no grammar is hostile."""
    for limit in ("_MAX_BEHIND_S", "_MAX_BEHIND_IN_SLOW_STEP_S", "_MAX_GROWN_BYTES"):
        monkeypatch.setattr(costs, limit, 2**62)
