"""OPT and its variant of 350M parameters."""

from __future__ import annotations

from model_configs import OPT

from tidewheel.engine.models import describe
from tidewheel.engine.models.spec import tensor_shapes


def test_opt_350m_projects_its_embedding_and_normalizes_last() -> None:
    spec = describe({**OPT, "do_layer_norm_before": False, "word_embed_proj_dim": 32}).spec
    assert [(residual.norm, residual.sum_norm is None) for residual in spec.layers[0]] == [(None, False)] * 2
    assert spec.final_norm is None
    assert tensor_shapes(spec)["embed.project_out.weight"] == (32, 64)
    assert describe({**OPT, "_remove_final_layer_norm": True}).spec.final_norm is None
    assert "layers.0.up.bias" not in tensor_shapes(describe({**OPT, "enable_bias": False}).spec)
