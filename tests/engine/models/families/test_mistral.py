"""Mistral's windows."""

from __future__ import annotations

from model_configs import LLAMA, MISTRAL, windows


def test_mistral_has_a_window_unless_it_is_null() -> None:
    assert windows(MISTRAL) == [4096] * 3
    assert windows({**MISTRAL, "sliding_window": 128}) == [128] * 3
    assert windows({**MISTRAL, "sliding_window": None}) == [None] * 3
    assert windows({**LLAMA, "sliding_window": 128}) == [None] * 3
