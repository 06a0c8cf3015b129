"""Gemma 2's scales and caps, and the windows of both Gemmas."""

from __future__ import annotations

from model_configs import GEMMA2, GEMMA3, windows

from tidewheel.engine.models import describe
from tidewheel.engine.models.spec import HeadSpec


def test_gemma_scales_its_embedding_and_caps_scores_and_logits() -> None:
    spec = describe(GEMMA2).spec
    assert spec.embedding.scale == 8.0
    assert spec.head == HeadSpec(tied=True, softcap=30.0)
    assert [attention.softcap for attention in spec.attentions()] == [50.0] * 3
    assert [attention.scale for attention in spec.attentions()] == [1 / 16] * 3
    uncapped = describe({**GEMMA2, "attn_logit_softcapping": None, "final_logit_softcapping": None}).spec
    assert uncapped.head.softcap is None
    assert [attention.softcap for attention in uncapped.attentions()] == [None] * 3


def test_gemma_windows() -> None:
    assert windows(GEMMA2) == [4096, None, 4096]
    assert windows({**GEMMA3, "num_hidden_layers": 7}) == [4096] * 5 + [None, 4096]
    assert windows({**GEMMA3, "sliding_window_pattern": 2, "sliding_window": 64}) == [64, None, 64]
