"""Options that say something else than a model's config: --hf-overrides, --rope-scaling and --rope-theta."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest
from model_configs import CONFIGS

from tidewheel.engine.errors import ModelError
from tidewheel.engine.loading.opened_model import open_model
from tidewheel.engine.models import describe
from tidewheel.engine.models.overrides import idle_fields, overridden
from tidewheel.engine.models.rope import rope_type
from tidewheel.engine.options import EngineOptions
from tidewheel.server.options.model import DEMO_MODEL

LLAMA = {**CONFIGS["LlamaForCausalLM"], "rope_theta": 1e4, "rope_scaling": None}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}


def test_fields_are_replaced_and_objects_field_by_field() -> None:
    config = {"a": 1, "inner": {"b": 2, "c": 3}, "list": [1]}
    changed = overridden(config, {"inner": {"b": None}, "list": [2], "d": 4}, None, None)
    assert changed == {"a": 1, "inner": {"b": None, "c": 3}, "list": [2], "d": 4}
    assert config["inner"] == {"b": 2, "c": 3}


def test_a_rope_with_a_type_stands_in_place_of_the_whole_rope() -> None:
    llama3 = {"rope_type": "llama3", "factor": 8.0, "high_freq_factor": 4.0, "rope_theta": 5e5}
    config = {"rope_parameters": llama3, "text_config": {"rope_scaling": {"rope_type": "linear", "factor": 2.0}}}
    changed = overridden(config, {"rope_parameters": YARN, "text_config": {"rope_scaling": YARN}}, None, None)
    assert changed == {"rope_parameters": {**YARN, "rope_theta": 5e5}, "text_config": {"rope_scaling": YARN}}
    refined = overridden(config, {"rope_parameters": {"factor": 4.0}}, None, None)
    assert refined["rope_parameters"] == {**llama3, "factor": 4.0}


@pytest.mark.parametrize(
    "rope",
    [
        {"rope_theta": 1e4},
        {"rope_theta": 1e4, "rope_scaling": {"rope_type": "linear", "factor": 2.0}},
        {"rope_theta": None, "rope_parameters": {"rope_type": "default", "rope_theta": 1e4}},
    ],
)
def test_the_rope_is_that_of_a_config_that_says_so_itself(rope: dict[str, Any]) -> None:
    config = {**LLAMA, **rope}
    for scaling, theta in ((YARN, None), (YARN, 5e5), ({"rope_type": "default"}, 2e4)):
        written = {**LLAMA, "rope_scaling": scaling, "rope_theta": theta or 1e4}
        assert describe(overridden(config, None, scaling, theta)).spec == describe(written).spec
    kept = overridden(config, None, None, 5e5)
    assert describe(kept).spec != describe(config).spec


def test_the_rope_of_a_language_model_within_another() -> None:
    changed = overridden({"text_config": LLAMA, "vision_config": {}}, None, YARN, None)
    assert changed["text_config"]["rope_scaling"] == YARN
    assert "rope_scaling" not in changed
    assert rope_type(changed) == YARN["rope_type"]


def test_ropes_by_layer_are_refused() -> None:
    config = {"rope_parameters": {"full_attention": {"rope_theta": 1e6}, "sliding_attention": {"rope_theta": 1e4}}}
    with pytest.raises(ModelError, match="--hf-overrides"):
        overridden(config, None, None, 5e5)


def test_fields_that_change_nothing_are_told_of(caplog: pytest.LogCaptureFixture) -> None:
    rope = {"rope_theta": 7e5, "rope_parameters": {"rope_type": "linear", "factor": 2.0}}
    used = {"architectures": ["LlavaForConditionalGeneration"], "quantization_config": None, "text_config": rope}
    open_model(EngineOptions(str(DEMO_MODEL), device="cpu", hf_overrides=used))
    assert "--hf-overrides" not in caplog.text
    idle = {**used, "nope": 1, "num_hidden_layer": 2}
    open_model(EngineOptions(str(DEMO_MODEL), device="cpu", hf_overrides=idle))
    assert caplog.text.count("--hf-overrides: 'nope', 'num_hidden_layer' would change nothing") == 1
    nested = {"text_config": LLAMA, "rope_scaling": {"factor": 2.0}}
    fields = {"text_config": {"nope": 1, "vocab_size": 64, "head_dim": 8}, "rope_scaling": {"factor": 3.0}}

    def described(given: Mapping[str, Any]) -> object:
        return describe(overridden(nested, given, None, None)["text_config"])

    assert [*idle_fields(nested, fields, described)] == ["text_config.nope", "rope_scaling.factor"]


@pytest.mark.parametrize(
    ("scaling", "context", "told"),
    [
        ({"type": "dynamic", "factor": 2.0}, None, True),
        ({"type": "dynamic", "factor": 2.0}, 4096, False),
        ({"type": "linear", "factor": 2.0}, None, False),
        (None, None, False),
    ],
)
def test_a_rope_that_needs_a_longer_context_is_told_of(
    caplog: pytest.LogCaptureFixture, scaling: dict[str, Any] | None, context: int | None, told: bool
) -> None:
    open_model(EngineOptions(str(DEMO_MODEL), device="cpu", rope_scaling=scaling, max_model_len=context))
    assert ("type dynamic changes nothing within the 2048 tokens" in caplog.text) == told


def test_without_a_sliding_window_the_context_is_as_long_as_the_window() -> None:
    windowed = {"text_config": {"model_type": "mistral", "sliding_window": 64}}
    options = EngineOptions(str(DEMO_MODEL), device="cpu", hf_overrides=windowed)
    assert open_model(options).spec.max_positions == 2048
    assert open_model(replace(options, disable_sliding_window=True, max_model_len=64)).spec.max_positions == 64
    with pytest.raises(ModelError, match=r"smallest window of 64 tokens: lower --max-model-len 65"):
        open_model(replace(options, disable_sliding_window=True, max_model_len=65))
