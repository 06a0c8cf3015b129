"""The tags of structs in `/openapi.json`: required only where a body cannot be read without them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import msgspec
from msgspec.inspect import StructType, multi_type_info

from ..protocol.decode import OPTIONAL_TAGS

Schema = dict[str, Any]

REF = "#/components/schemas/"


def relax_tags(
    types: Sequence[Any], requests: Sequence[Schema], others: Sequence[Schema], components: dict[str, Schema]
) -> None:
    """Describes structs that bodies of `types` may hold without their tags as components of their own.

    msgspec asks for a tag only where there are several structs to tell apart, and `optional_tags` says which ones a
    body's preparation writes where they lack or are null. `requests` and `others` are all schemas that refer to
    `components`.
    """
    relaxation = _Relaxation(components, dict(_tag_fields(types, components)))
    done: set[str] = set()
    while names := reachable(requests, components) - done:
        for name in names:
            components[name] = relaxation.of(components[name])
        done |= names
    for name in components.keys() - reachable([*requests, *others], components):
        del components[name]


class _Relaxation:
    def __init__(self, components: dict[str, Schema], tag_fields: Mapping[str, str]) -> None:
        self._components = components
        self._tag_fields = tag_fields

    def of(self, value: Any) -> Any:
        """A schema, or a part of one, where structs that need no tag are replaced by those without."""
        if isinstance(value, list):
            return [self.of(item) for item in value]
        if not isinstance(value, dict):
            return value
        if "$ref" in value:
            return self._untagged(value["$ref"])
        if tags := value.pop(OPTIONAL_TAGS, None):
            union = value["items"]
            free = {ref for tag, ref in union.pop("discriminator")["mapping"].items() if tag in tags}
            members = [self._untagged(member["$ref"], None) if member["$ref"] in free else member
                       for member in union["anyOf"]]  # fmt: skip
            return {**value, "items": {**union, "anyOf": members}}
        if "discriminator" in value:
            return {**value, "anyOf": [one if "$ref" in one else self.of(one) for one in value["anyOf"]]}
        return {key: self.of(item) for key, item in value.items()}

    def _untagged(self, ref: str, *values: None) -> Schema:
        """The struct without its tag, or with it, or with one of `values` in its place."""
        name = ref.removeprefix(REF)
        field = self._tag_fields.get(name)
        if field is None:
            return {"$ref": ref}
        component = self._components[name]
        tag = {"enum": [*component["properties"][field]["enum"], *values]}
        self._components[name + ".untagged"] = {
            **component,
            "properties": {**component["properties"], field: tag},
            "required": [one for one in component["required"] if one != field],
        }
        return {"$ref": f"{ref}.untagged"}


def _tag_fields(types: Sequence[Any], components: Mapping[str, Schema]) -> Iterator[tuple[str, str]]:
    """The names of all components that are tagged structs within `types`, and of their tags' fields."""
    seen: set[type] = set()
    pending: list[Any] = [*multi_type_info(types)]
    while pending:
        item = pending.pop()
        if isinstance(item, StructType):
            if item.cls in seen:
                continue
            seen.add(item.cls)
            name = item.cls.__name__
            if name not in components:  # there are several of the name
                name = f"{item.cls.__module__.rpartition('.')[2]}.{name}"
            if item.tag_field is not None:
                yield name, item.tag_field
            pending += [field.type for field in item.fields]
        elif isinstance(item, msgspec.Struct):
            inside = [getattr(item, field) for field in item.__struct_fields__]
            pending += [part for value in inside for part in (value if isinstance(value, tuple) else (value,))]


def reachable(value: Any, components: Mapping[str, Schema]) -> set[str]:
    """The names of all components that a schema refers to, and those refer to."""
    found: set[str] = set()
    pending = [value]
    while pending:
        item = pending.pop()
        if isinstance(item, list):
            pending += item
        elif isinstance(item, dict):
            pending += [part for part in item.values() if isinstance(part, list | dict)]
            name = item.get("$ref", "").removeprefix(REF) if isinstance(item.get("$ref", ""), str) else ""
            if name and name not in found:
                found.add(name)
                pending.append(components[name])
    return found
