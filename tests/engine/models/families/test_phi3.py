"""Phi-3's checkpoints and LongRoPE."""

from __future__ import annotations

from model_configs import PHI3

from tidewheel.engine.models import describe
from tidewheel.engine.models.tensor_ref import TensorRef


def test_phi3_splits_its_fused_matrices() -> None:
    tensors = describe({**PHI3, "num_key_value_heads": 2}).tensors
    assert tensors["layers.1.v.weight"] == TensorRef("model.layers.1.self_attn.qkv_proj.weight", rows=(96, 128))
    assert tensors["layers.1.up.weight"] == TensorRef("model.layers.1.mlp.gate_up_proj.weight", rows=(96, 192))


def test_early_names_of_longrope() -> None:
    factors = {"short_factor": [1.5] * 8, "long_factor": [2.0] * 8}
    specs = [
        describe({**PHI3, "original_max_position_embeddings": 128, "rope_scaling": {"type": name, **factors}}).spec
        for name in ("longrope", "su", "yarn")
    ]
    assert specs[0] == specs[1] == specs[2]
    assert specs[0].max_positions == 128
