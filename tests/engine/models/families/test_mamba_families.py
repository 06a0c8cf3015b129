"""Families with Mamba2 layers: what of their configs is refused, and what older configs say."""

from __future__ import annotations

from typing import Any

import pytest
from model_configs import FALCON_H1, MAMBA2, NEMOTRON_H

from tidewheel.engine.errors import ModelError
from tidewheel.engine.models import describe
from tidewheel.engine.models.spec import AttentionSpec, ExpertsSpec, Mamba2Spec, MixerSpec, MlpSpec, mixers


def layers(config: dict[str, Any]) -> list[MixerSpec]:
    return [mixer for layer in describe(config).spec.layers for mixer in mixers(layer)]


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({**FALCON_H1, "ssm_multipliers": [1.0, 2.0]}, "ssm_multipliers must be a list of 5 numbers"),
        ({**FALCON_H1, "mlp_multipliers": [1.0, 0]}, "mlp_multipliers must be a positive number"),
        ({**FALCON_H1, "projectors_bias": True}, "projectors_bias must be false, as mamba_proj_bias is"),
        ({**FALCON_H1, "attention_bias": True, "attention_in_multiplier": 0.5}, "attention_in_multiplier = 0.5 is not"),
        (
            {**FALCON_H1, "mamba_proj_bias": True, "projectors_bias": True, "ssm_in_multiplier": 2.0},
            "ssm_in_multiplier = 2.0 is not supported",
        ),
        ({**FALCON_H1, "mamba_d_ssm": 100}, "are not the width of a layer, 100"),
        ({**NEMOTRON_H, "hybrid_override_pattern": "M?"}, "hybrid_override_pattern must be a text of M, "),
        ({**NEMOTRON_H, "layers_block_type": ["mamba", "other"]}, "layers_block_type must be a list of mamba, "),
        ({**NEMOTRON_H, "moe_latent_size": 64}, "moe_latent_size = 64 is not supported"),
        ({**NEMOTRON_H, "attention_bias": True}, "attention_bias = True is not supported"),
        ({**NEMOTRON_H, "n_shared_experts": 2}, "n_shared_experts = 2 is not supported"),
        ({**MAMBA2, "head_dim": 32}, "num_heads 128 of head_dim 32 are not expand"),
        ({**MAMBA2, "time_step_limit": [0.5, 0.1]}, "time_step_limit must be a list of two ascending numbers"),
    ],
)
def test_what_would_change_the_results_is_refused_by_name(config: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelError, match=message):
        describe(config)


def test_a_pattern_has_a_letter_for_each_layer() -> None:
    kinds = [type(mixer) for mixer in layers({**NEMOTRON_H, "hybrid_override_pattern": "M-ME*"})]
    assert kinds == [Mamba2Spec, MlpSpec, Mamba2Spec, ExpertsSpec, AttentionSpec]
    named = {**NEMOTRON_H, "layers_block_type": ["mamba", "mlp", "linear_attention", "moe", "attention"]}
    assert [type(mixer) for mixer in layers(named)] == kinds


def test_steps_have_the_limits_that_the_config_gives_and_not_those_of_training() -> None:
    (mamba, *_) = layers({**NEMOTRON_H, "time_step_min": 0.001, "time_step_max": 0.1, "time_step_floor": 1e-4})
    assert isinstance(mamba, Mamba2Spec)
    assert mamba.dt_limits == (0.0, float("inf"))
    (mamba, *_) = layers({**NEMOTRON_H, "time_step_limit": [0.01, {"__float__": "Infinity"}]})
    assert isinstance(mamba, Mamba2Spec)
    assert mamba.dt_limits == (0.01, float("inf"))


def test_a_model_without_positions_serves_what_is_asked_for() -> None:
    assert describe(MAMBA2).spec.max_positions == 1 << 18
    assert describe(MAMBA2, 1 << 20).spec.max_positions == 1 << 20
    assert describe(MAMBA2).spec.windows() == [None]


def test_older_configs_have_a_name_of_their_own_for_the_size_of_heads() -> None:
    config = {**NEMOTRON_H, "hybrid_override_pattern": "*", "attention_head_dim": 40}
    (attention,) = layers(config)
    assert isinstance(attention, AttentionSpec)
    assert attention.head_dim == 40
