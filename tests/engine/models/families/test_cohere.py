"""Command R's head and layers without positions."""

from __future__ import annotations

from model_configs import COHERE, COHERE2

from tidewheel.engine.models import describe
from tidewheel.engine.models.spec import HeadSpec


def test_command_r_multiplies_its_logits() -> None:
    assert describe(COHERE).spec.head == HeadSpec(tied=True, divisor=16.0)
    assert describe({**COHERE, "logit_scale": 0.5}).spec.head.divisor == 2.0


def test_cohere2_rotates_the_layers_with_a_window() -> None:
    config = {**COHERE2, "num_hidden_layers": 5, "sliding_window": 64}
    layers = list(describe(config).spec.attentions())
    assert [layer.rope is not None for layer in layers] == [True, True, True, False, True]
    assert [layer.sliding_window for layer in layers] == [64, 64, 64, None, 64]
    assert all(layer.rope and layer.rope.interleaved for layer in describe(COHERE).spec.attentions())
