"""GPT-2's checkpoints and scales."""

from __future__ import annotations

from model_configs import GPT2

from tidewheel.engine.models import describe
from tidewheel.engine.models.tensor_ref import TensorRef


def test_gpt2_takes_query_key_and_value_out_of_one_transposed_matrix() -> None:
    tensors = describe(GPT2).tensors
    assert tensors["layers.1.k.weight"] == TensorRef("transformer.h.1.attn.c_attn.weight", True, (64, 128))
    assert tensors["layers.1.v.bias"] == TensorRef("transformer.h.1.attn.c_attn.bias", True, (128, 192))
    assert tensors["layers.1.up.weight"] == TensorRef("transformer.h.1.mlp.c_fc.weight", True)


def test_gpt2_attention_scales() -> None:
    def scales(**options: bool) -> list[float]:
        return [attention.scale for attention in describe({**GPT2, **options}).spec.attentions()]

    assert scales() == [0.25, 0.25]
    assert scales(scale_attn_weights=False) == [1.0, 1.0]
    assert scales(scale_attn_by_inverse_layer_idx=True) == [0.25, 0.125]
