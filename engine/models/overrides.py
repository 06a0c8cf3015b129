"""A model's config with what options say instead of it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from ..errors import ModelError

_ROPES = ("rope_scaling", "rope_parameters")
# They are no part of a description: what weights are stored as, and what GenerationConfig has.
_ELSEWHERE = {"quantization_config", "compression_config", "dtype", "torch_dtype", "eos_token_id", "bos_token_id"}


def overridden(
    config: Mapping[str, Any],
    fields: Mapping[str, Any] | None,
    rope_scaling: Mapping[str, Any] | None,
    rope_theta: float | None,
) -> Mapping[str, Any]:
    """The config with other fields, objects within it field by field, and with another rope. A rope of `fields` that
    has a `rope_type` replaces the whole rope except its base.

    The rope is the language model's, which may be a part of the config. Raises ModelError where layers have their own
    ropes.
    """
    config = _merged(config, fields or {})
    if rope_scaling is None and rope_theta is None:
        return config
    if isinstance(text := config.get("text_config"), Mapping):
        return {**config, "text_config": _with_rope(text, rope_scaling, rope_theta)}
    return _with_rope(config, rope_scaling, rope_theta)


def _merged(config: Mapping[str, Any], fields: Mapping[str, Any]) -> dict[str, Any]:
    merged = dict(config)
    for name, value in fields.items():
        inner = merged.get(name)
        if not (isinstance(inner, Mapping) and isinstance(value, Mapping)):
            merged[name] = value
        elif "rope_type" in value:  # a rope of another type has other fields
            merged[name] = {**{theta: inner[theta] for theta in ("rope_theta",) if theta in inner}, **value}
        else:
            merged[name] = _merged(inner, value)
    return merged


def idle_fields(
    config: Mapping[str, Any], fields: Mapping[str, Any], described: Callable[[Mapping[str, Any]], object]
) -> Iterator[str]:
    """The fields that say something else than the config, and change nothing. Fields within an object have its name
    before theirs, with a dot.

    `described` says what a model the config becomes with given fields.
    """
    whole = described(fields)
    for path in _changes(config, fields):
        if path[0] in _ELSEWHERE:
            continue
        try:
            idle = described(_without(fields, path)) == whole
        except ModelError:  # without it the model could not be served
            idle = False
        if idle:
            yield ".".join(path)


def _changes(config: Mapping[str, Any], fields: Mapping[str, Any]) -> Iterator[tuple[str, ...]]:
    for name, value in fields.items():
        inner = config.get(name)
        if isinstance(inner, Mapping) and isinstance(value, Mapping) and "rope_type" not in value:
            yield from ((name, *path) for path in _changes(inner, value))
        elif value != inner:
            yield (name,)


def _without(fields: Mapping[str, Any], path: tuple[str, ...]) -> dict[str, Any]:
    name, *rest = path
    kept = {other: value for other, value in fields.items() if other != name}
    return {**kept, name: _without(fields[name], tuple(rest))} if rest else kept


def _with_rope(
    config: Mapping[str, Any], rope_scaling: Mapping[str, Any] | None, rope_theta: float | None
) -> dict[str, Any]:
    rope: Any = next((config[name] for name in _ROPES if config.get(name)), {})
    if not isinstance(rope, Mapping) or any(isinstance(value, Mapping) for value in rope.values()):
        raise ModelError(
            "--rope-scaling and --rope-theta change one rope, and this model's layers have several: use --hf-overrides"
        )
    theta = rope.get("rope_theta") if rope_theta is None else rope_theta
    rope = dict(rope if rope_scaling is None else rope_scaling)
    changed: dict[str, Any] = {**config, "rope_parameters": None, "rope_scaling": rope or None}
    if theta is not None:
        changed["rope_theta"] = theta
        if rope:
            rope["rope_theta"] = theta
    return changed
