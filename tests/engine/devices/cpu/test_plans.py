"""Native plans take their fields by name, and say what is wrong with one."""

from __future__ import annotations

from typing import Any

import pytest

native: Any = pytest.importorskip("tidewheel._native")


def test_a_plan_has_what_it_is_given_and_else_its_defaults() -> None:
    norm = native.NormPlan(kind="layer", eps=0.5)
    assert (norm.kind, norm.eps, norm.bias, norm.weight) == ("layer", 0.5, False, True)
    plan = native.AttentionPlan(num_heads=4, qk_norm=norm, qk_norm_over="each", alibi_slopes=(0.25, 0.5))
    assert (plan.num_heads, plan.qk_norm.kind, plan.qk_norm_over) == (4, "layer", "each")
    assert (plan.alibi_slopes, plan.rope, plan.shared_layer, plan.kv_scales.k) == ([0.25, 0.5], None, -1, 1.0)


def test_plans_are_nested() -> None:
    mlp = native.ResidualBlockPlan(
        mixer=native.MlpPlan(intermediate_size=8, activation="relu2", cutoff=0.5), scale=0.25
    )
    both = native.ResidualBlockPlan(
        mixer=native.ParallelPlan(residuals=[mlp, native.ResidualBlockPlan(mixer=native.ShortConvPlan())])
    )
    formats = {"head.weight": native.WeightFormat("int8")}
    plan = native.DecoderPlan(layers=[[], [both]], formats=formats, input_orders={"head.weight": [1, 0]})
    ((), (residual,)) = plan.layers
    first, second = residual.mixer.residuals
    assert (first.mixer.activation, first.mixer.cutoff, first.scale) == ("relu2", 0.5, 0.25)
    assert isinstance(second.mixer, native.ShortConvPlan)
    assert (list(plan.formats), plan.input_orders) == (["head.weight"], {"head.weight": [1, 0]})


def test_each_plan_can_be_made_without_fields() -> None:
    for name, fields in native.plan_fields().items():
        plan = getattr(native, name)()
        assert all(hasattr(plan, field) for field in fields)


@pytest.mark.parametrize(
    ("plan", "fields", "said"),
    [
        ("NormPlan", {"epsilon": 1e-5}, "NormPlan has no field epsilon"),
        ("NormPlan", {"eps": "small"}, "NormPlan.eps must be float, not str"),
        ("EmbeddingPlan", {"norm": 1}, "EmbeddingPlan.norm must be NormPlan | None, not int"),
        ("LaurelPlan", {"norm": None}, "LaurelPlan.norm must be NormPlan, not NoneType"),
        ("RopePlan", {"inv_freq": 1.0}, "RopePlan.inv_freq must be Sequence[float], not float"),
        ("Mamba2Plan", {"input_scales": [1.0]}, "Mamba2Plan.input_scales must be Sequence[float], not list"),
        ("MlpPlan", {"activation": 1}, "MlpPlan.activation must be str, not int"),
    ],
)
def test_a_wrong_field_is_named(plan: str, fields: dict[str, Any], said: str) -> None:
    with pytest.raises(TypeError) as raised:
        getattr(native, plan)(**fields)
    assert str(raised.value) == said


@pytest.mark.parametrize(
    ("plan", "field", "said"),
    [
        ("NormPlan", "kind", "a norm must be rms or layer, not none"),
        ("MlpPlan", "activation", "activation must be silu, gelu, gelu_tanh, gelu_quick, relu or relu2, not none"),
        ("AttentionPlan", "qk_norm_over", "queries and keys are normalized over head, each or whole, not none"),
    ],
)
def test_a_wrong_word_is_refused_with_the_right_ones(plan: str, field: str, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        getattr(native, plan)(**{field: "none"})


def test_fields_are_neither_given_by_place_nor_changed() -> None:
    with pytest.raises(TypeError):
        native.HeadPlan(True)
    with pytest.raises(AttributeError):
        native.HeadPlan().tied = True
    with pytest.raises(AttributeError, match="HeadPlan has no field tie"):
        _ = native.HeadPlan().tie
