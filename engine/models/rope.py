"""Rotary embeddings: from a config's rope settings to a table of inverse frequencies.

Some schemes define another table for each length of the sequence. Cached keys never change here, so a model has one
table for its whole life. The length that it is served with chooses the table:

- dynamic (NTK): the table for sequences of `max_model_len`;
- longrope: the short factors where `max_model_len` is within the original training length, the long ones beyond it.

Without an explicit length, both are served within the original training length, with the plain scheme.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from msgspec import Struct
from numpy.typing import NDArray

from ..errors import ModelError
from ..files.wording import shown
from .config import MAX_INTEGER, ConfigReader
from .spec import RopeSpec

BY_LENGTH = frozenset({"dynamic", "longrope", "su"})
"""The schemes that do nothing unless the model is served with a length above the one that it was trained with."""

_DEFAULT_THETA = 10000.0
# Many configs have these; they do not change the table.
_NEUTRAL_KEYS = {
    "type",
    "rope_type",
    "rope_theta",
    "partial_rotary_factor",
    "original_max_position_embeddings",
    "finetuned",
    # Which positions a pair turns by; see `_axes`.
    "mrope_section",
    "mrope_interleaved",
}


class Rope(Struct, frozen=True):
    """A rope table and the longest context, in tokens, that it serves."""

    spec: RopeSpec
    max_positions: int


class _Setting(Struct, frozen=True):
    """The input of every scheme. `max_positions` is the config's length, `original` the training length, in tokens."""

    head_dim: int
    dim: int
    theta: float
    max_positions: int
    original: int
    served: int | None
    scaling: ConfigReader

    def inv_freq(self, theta: float | None = None) -> NDArray[np.float64]:
        """`theta ** (-2i / dim)` for each pair i, as in https://arxiv.org/abs/2104.09864. Shape `[dim / 2]`."""
        return (theta or self.theta) ** -(np.arange(0, self.dim, 2, dtype=np.float64) / self.dim)


def rope_from_config(config: ConfigReader, head_dim: int, max_model_len: int | None) -> Rope:
    """The rope of a config, in the old spelling (`rope_scaling` beside `rope_theta`) or the new (`rope_parameters`).

    Raises ModelError for a scheme or a parameter that is not known.
    """
    parameters = _parameters(config)
    scaling = ConfigReader(parameters, "config.json: rope parameters")
    name = parameters.get("rope_type") or parameters.get("type") or "default"
    if not isinstance(name, str) or name not in _SCHEMES:
        raise ModelError(
            f"config.json: rope type {shown(name)} is not supported; known are {', '.join(sorted(_SCHEMES))}"
        )
    build, keys = _SCHEMES[name]
    for key, value in parameters.items():
        if key not in keys and key not in _NEUTRAL_KEYS and value is not None:
            raise ModelError(f"config.json: rope parameter {shown(key)} is not supported with rope type {name!r}")

    source = scaling if scaling.raw("rope_theta") is not None else config
    theta = source.number("rope_theta", _DEFAULT_THETA)
    source = scaling if scaling.raw("partial_rotary_factor") is not None else config
    partial = source.number("partial_rotary_factor", 1.0)
    dim = int(head_dim * partial)
    if partial > 1 or dim < 2 or dim % 2:
        raise ModelError(f"config.json: rope needs an even number of rotated dimensions in a head, got {dim}")
    max_positions = config.integer("max_position_embeddings")
    source = config if config.raw("original_max_position_embeddings") is not None else scaling
    original = source.integer("original_max_position_embeddings", max_positions)
    try:
        with np.errstate(all="raise", under="ignore"):
            table, attention_factor, longest = build(
                _Setting(head_dim, dim, theta, max_positions, original, max_model_len, scaling)
            )
            # Rounded once, here, so that every device starts from the same float32 values.
            inv_freq = tuple(table.astype(np.float32).tolist())
    except (ArithmeticError, ValueError) as error:
        raise ModelError(f"config.json: rope parameters {shown(parameters)} are unusable: {error}") from error
    if longest > MAX_INTEGER:
        raise ModelError(
            f"config.json: rope parameters {shown(parameters)} stretch the context beyond {MAX_INTEGER} tokens"
        )
    return Rope(RopeSpec(inv_freq, attention_factor, axes=_axes(scaling, len(inv_freq))), longest)


def _axes(scaling: ConfigReader, pairs: int) -> tuple[int, ...]:
    """The axis that each pair turns by: time, height and width, by `mrope_section`, the number of pairs of each.

    They follow each other or, with `mrope_interleaved`, take turns: of three pairs, the second is one of height and the
    third one of width, as long as there are some. The rest are of time.
    """
    sections = scaling.raw("mrope_section")
    if sections is None:
        return ()
    if (
        not isinstance(sections, list | tuple)
        or len(sections) != 3
        or not all(type(size) is int and 0 <= size <= pairs for size in sections)
        or sum(sections) != pairs
    ):
        raise scaling.error("mrope_section", f"three numbers whose sum is {pairs}, the pairs of dimensions in a head")
    if not scaling.flag("mrope_interleaved", False):
        return tuple(axis for axis, size in enumerate(sections) for _ in range(size))
    return tuple(i % 3 if i < 3 * sections[i % 3] else 0 for i in range(pairs))


def rope_type(config: Mapping[str, Any]) -> str:
    """What a config, or that of the language model in it, calls its scheme; "several": one for each type of layer."""
    if isinstance(text := config.get("text_config"), Mapping):
        config = text
    for name in ("rope_scaling", "rope_parameters"):
        value = config.get(name)
        if isinstance(value, dict) and value:
            if any(isinstance(inner, dict) for inner in value.values()):
                return "several"
            return str(value.get("rope_type") or value.get("type") or "default")
    return "default"


def _parameters(config: ConfigReader) -> Mapping[str, Any]:
    for name in ("rope_scaling", "rope_parameters"):
        value = config.raw(name)
        if value is None or value == {}:
            continue
        if not isinstance(value, dict):
            raise config.error(name, "an object")
        nested = [key for key, inner in value.items() if isinstance(inner, dict)]
        if nested:
            raise ModelError(f"config.json: {name} by layer type ({shown(', '.join(nested))}) is not supported")
        return value
    return {}


_Table = tuple[NDArray[np.float64], float, int]


def _default(setting: _Setting) -> _Table:
    return setting.inv_freq(), 1.0, setting.max_positions


def _linear(setting: _Setting) -> _Table:
    """Position interpolation, https://arxiv.org/abs/2306.15595."""
    factor = setting.scaling.number("factor")
    return setting.inv_freq() / factor, 1.0, max(setting.max_positions, int(setting.max_positions * factor))


def _proportional(setting: _Setting) -> _Table:
    """Pairs reach over the whole head, with frequencies as of all its dimensions; only the first pairs turn.

    As in Gemma 4: `partial_rotary_factor` says how many.
    """
    turning = setting.dim // 2
    exponents = np.arange(turning, dtype=np.float64) * 2 / setting.head_dim
    table = np.zeros(setting.head_dim // 2)
    table[:turning] = setting.theta**-exponents / setting.scaling.number("factor", 1.0)
    return table, 1.0, setting.max_positions


def _dynamic(setting: _Setting) -> _Table:
    """NTK-aware scaling by length: theta grows as `(factor * length / trained - (factor - 1)) ** (dim / (dim - 2))`.

    See https://arxiv.org/abs/2309.00071, appendix B. The config's `max_position_embeddings` is the trained length.
    """
    factor, trained = setting.scaling.number("factor"), setting.max_positions
    longest = max(trained, int(trained * factor))
    served = min(max(setting.served or trained, trained), longest)
    growth = factor * served / trained - (factor - 1)
    theta = setting.theta * growth ** (setting.dim / (setting.dim - 2)) if served > trained else setting.theta
    return setting.inv_freq(theta), 1.0, longest if served > trained else trained


def _yarn(setting: _Setting) -> _Table:
    """YaRN, https://arxiv.org/abs/2309.00071, section 3.

    Pairs that turn more than `beta_fast` times within the trained length keep their frequency, those that turn less
    than `beta_slow` times are interpolated, and a linear ramp over the pair's index lies between.
    """
    scaling, dim = setting.scaling, setting.dim
    factor = scaling.number("factor", setting.max_positions / setting.original)
    beta_fast, beta_slow = scaling.number("beta_fast", 32.0), scaling.number("beta_slow", 1.0)

    def pair_with_turns(turns: float) -> float:
        return dim * math.log(setting.original / (turns * 2 * math.pi)) / (2 * math.log(setting.theta))

    low, high = pair_with_turns(beta_fast), pair_with_turns(beta_slow)
    if scaling.flag("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    # Where the ramp has no width, any small one makes it a step.
    ramp = np.clip((np.arange(dim // 2) - low) / ((high - low) or 0.001), 0.0, 1.0)
    plain = setting.inv_freq()
    inv_freq = plain / factor * ramp + plain * (1.0 - ramp)

    def magnitude(weight: float) -> float:
        return 0.1 * weight * math.log(factor) + 1.0 if factor > 1 else 1.0

    if scaling.raw("attention_factor") is not None:
        attention_factor = scaling.number("attention_factor")
    elif scaling.raw("mscale") and scaling.raw("mscale_all_dim"):
        attention_factor = magnitude(scaling.number("mscale")) / magnitude(scaling.number("mscale_all_dim"))
    else:
        attention_factor = magnitude(1.0)
    return inv_freq, attention_factor, max(setting.max_positions, int(setting.original * factor))


def _longrope(setting: _Setting) -> _Table:
    """LongRoPE, https://arxiv.org/abs/2402.13753: each pair's frequency is divided by a factor found by search."""
    scaling, original = setting.scaling, setting.original
    extended = (setting.served or original) > original
    pairs = setting.dim // 2
    for name in ("short_factor", "long_factor"):
        factors = scaling.raw(name)
        if not isinstance(factors, list) or not all(type(f) in (int, float) and 0 < f < math.inf for f in factors):
            raise scaling.error(name, "a list of positive numbers")
        if len(factors) != pairs:
            raise ModelError(f"config.json: {name} must have {pairs} entries, got {len(factors)}")
    factors = np.array(scaling.raw("long_factor" if extended else "short_factor"), np.float64)
    factor = scaling.number("factor", setting.max_positions / original)
    default = math.sqrt(1 + math.log(factor) / math.log(original)) if factor > 1 else 1.0
    longest = setting.max_positions if extended else min(original, setting.max_positions)
    attention_factor = scaling.number("attention_factor", default)
    attention_factor = scaling.number("long_mscale" if extended else "short_mscale", attention_factor)
    return setting.inv_freq() / factors, attention_factor, longest


def _llama3(setting: _Setting) -> _Table:
    """Llama 3.1's scaling: https://github.com/meta-llama/llama-models/blob/main/models/llama3/model.py.

    Wavelengths longer than `original / low_freq_factor` are divided by `factor`, those shorter than
    `original / high_freq_factor` are kept, and those between are blended.
    """
    scaling = setting.scaling
    factor = scaling.number("factor")
    low, high = scaling.number("low_freq_factor"), scaling.number("high_freq_factor")
    if high < low:
        raise ModelError("config.json: rope parameter high_freq_factor must not be less than low_freq_factor")
    inv_freq = setting.inv_freq()
    turns = setting.original * inv_freq / (2 * math.pi)
    # Llama 4's factors are equal: there is nothing between.
    kept = np.clip((turns - low) / (high - low), 0.0, 1.0) if high > low else (turns >= low).astype(turns.dtype)
    return inv_freq * (kept + (1.0 - kept) / factor), 1.0, setting.max_positions


_SCHEMES: dict[str, tuple[Callable[[_Setting], _Table], frozenset[str]]] = {
    "default": (_default, frozenset()),
    "linear": (_linear, frozenset({"factor"})),
    "proportional": (_proportional, frozenset({"factor"})),
    "dynamic": (_dynamic, frozenset({"factor"})),
    "yarn": (
        _yarn,
        frozenset({"factor", "attention_factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim", "truncate"}),
    ),
    "longrope": (
        _longrope,
        frozenset({"factor", "attention_factor", "short_factor", "long_factor", "short_mscale", "long_mscale"}),
    ),
    "llama3": (_llama3, frozenset({"factor", "low_freq_factor", "high_freq_factor"})),
}
