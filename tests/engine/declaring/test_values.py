"""Numbers as people write them."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tidewheel.engine.declaring.values import count, number_or_none


@settings(deadline=None)
@given(st.integers(0, 10**9))
def test_counts(number: int) -> None:
    assert count(str(number)) == number
    assert count(f"{number}k") == number * 1000
    assert count(f"{number}K") == number * 1024
    assert count(f"{number}.5k") == number * 1000 + 500


@pytest.mark.parametrize("text", ["", "-1", "4q", "0.5", "1.0001k", "1 2", "inf"])
def test_what_is_no_count(text: str) -> None:
    with pytest.raises(ValueError, match="is not a"):
        count(text)


def test_zero_is_none() -> None:
    assert [number_or_none(text) for text in ("0", "0.0", "2.5")] == [None, None, 2.5]
