"""State that several replicas must share is refused without a store, and works with one. This does not need Ray."""

from __future__ import annotations

import pytest

from tidewheel.engine.errors import TidewheelError
from tidewheel.ray.options import parse_arguments
from tidewheel.ray.shared_state import without_own_state

KEPT = {
    "--max-stored-responses": ["--max-stored-responses", "10"],
    "--batch-dir": ["--batch-dir", "batches"],
    "--allow-runtime-lora-updating": ["--enable-lora", "--allow-runtime-lora-updating"],
}


@pytest.mark.parametrize("flag", KEPT)
def test_what_replicas_share_needs_a_store(flag: str) -> None:
    with pytest.raises(TidewheelError, match=rf"{flag}( 10)? needs a single replica or --shared-store"):
        without_own_state(parse_arguments(KEPT[flag], {}))
    options = parse_arguments(KEPT[flag], {"TIDEWHEEL_SHARED_STORE": "redis://somewhere/0"})
    assert without_own_state(options) == options


def test_responses_are_kept_with_a_store_alone() -> None:
    assert without_own_state(parse_arguments([], {})).app.max_stored_responses == 0
    kept = without_own_state(parse_arguments(["--shared-store", "folder"], {}))
    assert kept.app.max_stored_responses == 1000


def test_what_no_store_can_hold_is_refused_with_one() -> None:
    with pytest.raises(TidewheelError, match="--kv-offload needs a single replica:"):
        without_own_state(parse_arguments(["--shared-store", "folder", "--kv-offload", "kv"], {}))
