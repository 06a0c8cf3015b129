"""Rope tables equal transformers', in either spelling of the config."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from tidewheel.engine.errors import ModelError
from tidewheel.engine.models.config import ConfigReader
from tidewheel.engine.models.rope import Rope, rope_from_config

HEAD_DIM = 64
FACTORS = {"short_factor": [1.0 + 0.01 * i for i in range(32)], "long_factor": [1.0 + i for i in range(32)]}
LLAMA3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 512}

SCALINGS: list[dict[str, Any]] = [
    {"rope_type": "default"},
    {"rope_type": "linear", "factor": 4.0},
    {"rope_type": "dynamic", "factor": 4.0},
    {"rope_type": "yarn", "factor": 4.0},
    {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 512, "beta_fast": 16, "beta_slow": 2},
    {"rope_type": "yarn", "factor": 8.0, "mscale": 1.0, "mscale_all_dim": 0.8, "truncate": False},
    {"rope_type": "yarn", "factor": 8.0, "attention_factor": 1.25},
    {"rope_type": "longrope", **FACTORS, "original_max_position_embeddings": 512},
    {"rope_type": "longrope", **FACTORS, "factor": 4.0, "original_max_position_embeddings": 512},
    {"rope_type": "longrope", **FACTORS, "attention_factor": 1.5, "original_max_position_embeddings": 512},
    {"rope_type": "llama3", **LLAMA3},
    {"rope_type": "llama3", **LLAMA3, "high_freq_factor": LLAMA3["low_freq_factor"]},  # as Llama 4 has it
]


def rope(max_model_len: int | None = None, **fields: Any) -> Rope:
    config = {"max_position_embeddings": 2048, **fields}
    return rope_from_config(ConfigReader(config), HEAD_DIM, max_model_len)


def transformers_rope(scaling: dict[str, Any], seq_len: int | None) -> tuple[Any, float]:
    pytest.importorskip("transformers")
    from transformers import LlamaConfig
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    config = LlamaConfig(
        hidden_size=256,
        num_attention_heads=4,
        max_position_embeddings=2048,
        rope_parameters={"rope_theta": 50000.0, **scaling},
    )
    compute = ROPE_INIT_FUNCTIONS.get(scaling["rope_type"], LlamaRotaryEmbedding.compute_default_rope_parameters)
    table, attention_factor = compute(config, device=None, seq_len=seq_len)
    return table.numpy(), attention_factor


@pytest.mark.parametrize("scaling", SCALINGS)
@pytest.mark.parametrize("length", [None, 256, 2048, 4000])
def test_tables_are_those_of_transformers(scaling: dict[str, Any], length: int | None) -> None:
    table, attention_factor = transformers_rope(scaling, length)
    result = rope(length, rope_parameters={"rope_theta": 50000.0, **scaling})
    np.testing.assert_allclose(result.spec.inv_freq, table, rtol=1e-6)
    assert result.spec.attention_factor == pytest.approx(attention_factor, rel=1e-12)
    old = {("type" if key == "rope_type" else key): value for key, value in scaling.items()}
    assert rope(length, rope_theta=50000.0, rope_scaling=old) == result


def test_a_config_without_rope_fields_has_the_plain_table() -> None:
    np.testing.assert_allclose(rope().spec.inv_freq, 10000.0 ** -(np.arange(32) / 32), rtol=1e-6)
    assert rope(rope_scaling=None, rope_parameters={}) == rope(rope_theta=10000)


def test_a_part_of_the_head_may_be_rotated() -> None:
    half = rope(partial_rotary_factor=0.5)
    np.testing.assert_allclose(half.spec.inv_freq, 10000.0 ** -(np.arange(16) / 16), rtol=1e-6)
    assert rope(rope_parameters={"rope_type": "default", "partial_rotary_factor": 0.5}) == half


@pytest.mark.parametrize(
    ("scaling", "max_model_len", "longest"),
    [
        ({"rope_type": "default"}, None, 2048),
        ({"rope_type": "linear", "factor": 4.0}, None, 8192),
        ({"rope_type": "dynamic", "factor": 4.0}, None, 2048),
        ({"rope_type": "dynamic", "factor": 4.0}, 4096, 8192),
        ({"rope_type": "yarn", "factor": 4.0}, None, 8192),
        ({"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 512}, None, 2048),
        ({"rope_type": "longrope", **FACTORS, "original_max_position_embeddings": 512}, None, 512),
        ({"rope_type": "longrope", **FACTORS, "original_max_position_embeddings": 512}, 600, 2048),
        ({"rope_type": "llama3", **LLAMA3}, None, 2048),
    ],
)
def test_the_longest_context(scaling: dict[str, Any], max_model_len: int | None, longest: int) -> None:
    assert rope(max_model_len, rope_parameters=scaling).max_positions == longest


def test_longrope_may_scale_what_is_rotated_by_the_length() -> None:
    scales = {"short_mscale": 1.2, "long_mscale": 1.3, "original_max_position_embeddings": 512}
    scaling = {"rope_type": "longrope", **FACTORS, **scales}
    assert [rope(length, rope_scaling=scaling).spec.attention_factor for length in (512, 600)] == [1.2, 1.3]


@pytest.mark.parametrize(("model", "sections"), [("qwen2_vl", [8, 12, 12]), ("qwen3_vl", [12, 10, 10])])
def test_pairs_turn_by_the_axes_of_transformers(model: str, sections: list[int]) -> None:
    torch = pytest.importorskip("torch")
    module = pytest.importorskip(f"transformers.models.{model}.modeling_{model}")
    name = {"qwen2_vl": "Qwen2VLRotaryEmbedding", "qwen3_vl": "Qwen3VLTextRotaryEmbedding"}[model]
    embedding = getattr(module, name).__new__(getattr(module, name))
    torch.nn.Module.__init__(embedding)
    embedding.mrope_section = sections
    axes = torch.arange(3.0)[:, None, None, None].expand(3, 1, 1, 32).clone()
    expected = embedding.recomposition_frequencies(axes).reshape(-1)[:32]
    scaling = {"rope_type": "default", "mrope_section": sections, "mrope_interleaved": model == "qwen3_vl"}
    assert rope(rope_scaling=scaling).spec.axes == tuple(map(int, expected))


@pytest.mark.parametrize(
    ("fields", "names"),
    [
        (
            {"rope_scaling": {"type": "spiral"}},
            "'spiral'.*default, dynamic, linear, llama3, longrope, proportional, yarn",
        ),
        ({"rope_scaling": {"type": ["linear"]}}, "rope type"),
        ({"rope_scaling": {"type": "linear"}}, "factor is missing"),
        ({"rope_scaling": {"type": "linear", "factor": "4"}}, "factor must be a positive number"),
        ({"rope_scaling": {"type": "default", "mrope_section": [1, 2]}}, "mrope_section"),
        ({"rope_scaling": {"type": "default", "mrope_section": [8, 12, 11]}}, "mrope_section"),
        ({"rope_scaling": {"type": "default", "mrope_section": [8, 12.0, 12]}}, "mrope_section"),
        (
            {"rope_scaling": {"type": "default", "mrope_section": [8, 12, 12], "mrope_interleaved": 1}},
            "mrope_interleaved",
        ),
        ({"rope_scaling": {"type": "longrope", "short_factor": [1.0] * 32}}, "long_factor is missing"),
        ({"rope_scaling": {"type": "longrope", "short_factor": [1.0] * 8, "long_factor": []}}, "32 entries, got 8"),
        ({"rope_scaling": {"type": "longrope", "short_factor": "x"}}, "short_factor"),
        ({"rope_scaling": {"type": "llama3", **LLAMA3, "high_freq_factor": 0.5}}, "high_freq_factor"),
        ({"rope_scaling": 4}, "rope_scaling must be an object"),
        ({"rope_parameters": {"full_attention": {"rope_type": "default"}}}, "by layer type"),
        ({"rope_scaling": {"type": "yarn", "factor": 4.0}, "rope_theta": 1}, "are unusable"),
        (
            {"rope_scaling": {"type": "linear", "factor": 1e-300}},
            "factor must be a positive number that float32 can hold",
        ),
        ({"rope_scaling": {"type": "linear", "factor": 1e30}}, "stretch the context beyond 2147483647 tokens"),
        ({"rope_scaling": {"type": "longrope", "short_factor": [float("inf")] * 32}}, "short_factor"),
        ({"rope_scaling": {"type": "linear", "factor": 10**400}}, "float32 can hold"),
        ({"rope_theta": 0}, "rope_theta"),
        ({"partial_rotary_factor": 2.0}, "even number"),
    ],
)
def test_what_is_not_understood_is_refused_by_name(fields: dict[str, Any], names: str) -> None:
    with pytest.raises(ModelError, match=names):
        rope(**fields)
