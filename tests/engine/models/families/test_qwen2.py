"""Qwen2's windows."""

from __future__ import annotations

from model_configs import QWEN2, windows


def test_qwen_windows_by_depth_and_by_layer_types() -> None:
    on = {**QWEN2, "use_sliding_window": True, "sliding_window": 128}
    assert windows({**QWEN2, "sliding_window": 128}) == [None] * 3
    assert windows(on) == [None] * 3
    assert windows({**on, "max_window_layers": 2}) == [None, None, 128]
    assert windows({**on, "max_window_layers": 0}) == [128] * 3
    types = ["sliding_attention", "full_attention", "sliding_attention"]
    assert windows({**on, "layer_types": types}) == [128, None, 128]
    assert windows({**on, "sliding_window": None, "max_window_layers": 0}) == [None] * 3
