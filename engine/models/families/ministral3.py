"""Ministral 3 (https://huggingface.co/collections/mistralai/ministral-3): Llama with YaRN, and a temperature.

Behind the length of its first training, queries grow with their position.
"""

from __future__ import annotations

from dataclasses import replace

from ..config import ConfigReader
from ..description import ModelDescription
from ..rope import rope_from_config
from ..spec import NormSpec, TemperatureSpec
from .listing import Listing
from .names import PRE_NORMS, llama_names
from .parts import attention, decoder, gated_mlp, pre_norm_layers, uniform_layers

ARCHITECTURES = {"Ministral3ForCausalLM": Listing("Ministral 3, text only")}

_ROPE = {
    "rope_type": "yarn",
    "rope_theta": 1e6,
    "factor": 16.0,
    "original_max_position_embeddings": 16384,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
    "llama_4_scaling_beta": 0.1,
}
# Rope parameters of its own, which are not about the rotation.
_BETA, _LENGTH = "llama_4_scaling_beta", "max_position_embeddings"


def describe(architecture: str, config: ConfigReader, max_model_len: int | None) -> ModelDescription:
    """Ministral 3. `rope_parameters` have the temperature too; a config without them means those of the first model."""
    if config.raw("rope_scaling") is None:
        config = config.with_defaults(rope_parameters=_ROPE)
    for name, default in (("num_key_value_heads", 8), ("head_dim", 128)):
        if name not in config:  # null is something else
            config = config.with_fields(**{name: default})
    heads = attention(config)
    config, temperature = _temperature(config)
    rope = rope_from_config(config, heads.head_dim, max_model_len)
    window = config.optional_integer("sliding_window")
    num_layers = uniform_layers(config, "full_attention" if window is None else "sliding_attention")
    mixer = replace(heads, rope=rope.spec, sliding_window=window, query_temperature=temperature)
    norm = NormSpec("rms", config.number("rms_norm_eps", 1e-5))
    layers = pre_norm_layers([mixer] * num_layers, gated_mlp(config), norm)
    return llama_names(PRE_NORMS).describe(decoder(config, "ministral3", layers, norm, rope.max_positions))


def _temperature(config: ConfigReader) -> tuple[ConfigReader, TemperatureSpec | None]:
    """The config with nothing but rope in its rope parameters, and the temperature that was there."""
    temperature = None
    for name in ("rope_scaling", "rope_parameters"):
        parameters = config.raw(name)
        if not isinstance(parameters, dict):
            continue
        fields = ConfigReader(parameters, f"config.json: {name}")
        if fields.raw(_BETA):
            temperature = TemperatureSpec(fields.number(_BETA), fields.integer("original_max_position_embeddings"))
        rest = {key: value for key, value in parameters.items() if key not in (_BETA, _LENGTH)}
        config = config.with_fields(**{name: rest})
    return config, temperature
