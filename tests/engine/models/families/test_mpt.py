"""MPT's ALiBi slopes."""

from __future__ import annotations

from model_configs import MPT

from tidewheel.engine.models import describe


def test_mpts_slopes_halve_from_head_to_head() -> None:
    def slopes(num_heads: int) -> tuple[float, ...] | None:
        return next(describe({**MPT, "n_heads": num_heads, "d_model": 48}).spec.attentions()).alibi_slopes

    assert slopes(8) == tuple(2.0**-i for i in range(1, 9))
    # Of the 8 slopes for the next power of two the second, fourth, sixth and eighth come first.
    assert slopes(6) == tuple(2.0**-i for i in (2, 4, 6, 8, 1, 3))
