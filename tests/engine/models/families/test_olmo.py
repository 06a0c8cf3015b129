"""OLMo's norms."""

from __future__ import annotations

from model_configs import OLMO

from tidewheel.engine.models import describe
from tidewheel.engine.models.spec import tensor_shapes


def test_olmos_norms_have_no_weights() -> None:
    shapes = tensor_shapes(describe(OLMO).spec)
    assert not any("norm" in name for name in shapes)
