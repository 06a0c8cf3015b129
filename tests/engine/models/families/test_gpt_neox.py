"""GPT-NeoX's checkpoints."""

from __future__ import annotations

from model_configs import NEOX

from tidewheel.engine.models import describe
from tidewheel.engine.models.tensor_ref import TensorRef


def test_neox_takes_query_key_and_value_out_of_each_head() -> None:
    tensors = describe(NEOX).tensors
    name = "gpt_neox.layers.1.attention.query_key_value"
    assert tensors["layers.1.k.weight"] == TensorRef(f"{name}.weight", each=(48, 16, 32))
    assert tensors["layers.1.v.bias"] == TensorRef(f"{name}.bias", each=(48, 32, 48))
    assert describe({**NEOX, "tie_word_embeddings": False}).tensors["head.weight"].name == "embed_out.weight"
