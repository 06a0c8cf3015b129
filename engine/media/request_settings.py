"""RequestSettings: settings of a model's image processor that a request changes for its own media."""

from __future__ import annotations

import json
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from ..errors import InvalidRequestError, ModelError
from .vision import Vision

SETTINGS_FILE = "preprocessor_config.json"
"""The name by which errors of settings begin."""
VIDEO = "video_processor"
"""The field of a processor's settings that has those for videos."""

_MOST_KEPT = 32
_MOST_SIDES = 8  # of a size
_PIXELS = ("min_pixels", "max_pixels")


def overridden(processor: Mapping[str, Any], fields: Mapping[str, Any], *, videos: bool = True) -> dict[str, Any]:
    """The settings of a processor with these `fields` in place of its own, for images and, if wanted, for `videos`.

    `size` takes the place of `min_pixels` and `max_pixels` too, which say the same in another way.
    """
    video = processor.get(VIDEO)
    if not videos:
        return {**_replaced(processor, fields), VIDEO: processor if video is None else video}
    return _replaced(processor, fields) | ({VIDEO: _replaced(video, fields)} if isinstance(video, Mapping) else {})


def _replaced(settings: Mapping[str, Any], fields: Mapping[str, Any]) -> dict[str, Any]:
    gone = _PIXELS if "size" in fields else ()
    return {**{name: value for name, value in settings.items() if name not in gone}, **fields}


def idle_fields(
    processor: Mapping[str, Any], fields: Mapping[str, Any], make: Callable[[Mapping[str, Any]], Vision | None]
) -> list[str]:
    """Those of the `fields` that the vision does not read which `make` makes of the processor's settings with them.

    They are none for a family that copies all settings, and without a vision. Raises ModelError as `make` does.
    """
    names: set[str] = set()
    vision = make(_Watched(overridden(processor, fields), names))
    return [] if vision is None else [name for name in fields if name not in names | vision.request_fields]


class _Watched(Mapping[str, Any]):
    """Settings that note the names by which they, and those for videos, are asked."""

    def __init__(self, values: Mapping[str, Any], names: set[str]) -> None:
        self._values = values
        self._names = names

    def __getitem__(self, name: str) -> Any:
        self._names.add(name)
        value = self._values[name]
        return _Watched(value, self._names) if name == VIDEO and isinstance(value, Mapping) else value

    def __iter__(self) -> Iterator[str]:
        return iter(self._values)

    def __len__(self) -> int:
        return len(self._values)


def fault(error: ModelError) -> str:
    """What is wrong with settings that do not come from the model's own file."""
    return str(error).removeprefix(f"{SETTINGS_FILE}: ")


def _is_setting(value: object) -> bool:
    if isinstance(value, Mapping):
        return len(value) <= _MOST_SIDES and all(type(side) in (int, float) for side in value.values())
    return type(value) in (int, float, bool)


class RequestSettings:
    """Makes and keeps a model's Vision with the settings of requests. `make` gives the one for some settings.

    To be used on the event loop.
    """

    def __init__(self, vision: Vision, make: Callable[[Mapping[str, Any]], Vision | None] | None = None) -> None:
        self._vision = vision
        self._make = make
        self._kept: OrderedDict[str, Vision] = OrderedDict()

    def vision(self, fields: Mapping[str, Any], param: str) -> Vision:
        """The model's Vision with these settings of the processor.

        Raises InvalidRequestError, which names `param`, for a setting that the model does not have or that no request
        may change, and if images may become larger than the server has room for.
        """
        allowed = self._vision.request_fields if self._make is not None else frozenset()
        for name in fields:
            if name not in allowed:
                may = f"may have {', '.join(sorted(allowed))}" if allowed else "has no settings for this model"
                raise InvalidRequestError(f"{param}: {name!r:.100} is not supported: {param} {may}", param)
            if not _is_setting(fields[name]):
                raise InvalidRequestError(f"{param}: {name} must be a number, a switch or a size", param)
        key = json.dumps(fields, sort_keys=True)
        if (known := self._kept.get(key)) is not None:
            self._kept.move_to_end(key)
            return known
        made = self._made(fields, param)
        self._kept[key] = made
        if len(self._kept) > _MOST_KEPT:
            self._kept.popitem(last=False)
        return made

    def _made(self, fields: Mapping[str, Any], param: str) -> Vision:
        assert self._make is not None
        try:
            made = self._make(fields)
        except ModelError as error:
            raise InvalidRequestError(f"{param}: {fault(error)}", param) from error
        assert made is not None
        if made.max_rows > self._vision.max_rows:
            raise InvalidRequestError(
                f"{param} may lead to images of {made.max_rows} patches, and this server has room for "
                f"{self._vision.max_rows}: lower it, or start the server with --mm-processor-kwargs",
                param,
            )
        return made
