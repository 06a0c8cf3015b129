"""Layouts on their way from a decoder's process: named tuples of the package come back, and nothing else is made."""

from __future__ import annotations

import json
from typing import Any, NamedTuple

import numpy as np
import pytest

from tidewheel.engine.media.layouts import layout_of, plain_layout
from tidewheel.engine.media.placeholders import Slot
from tidewheel.engine.media.vision import Expansion

RECORD: Any = Slot  # any named tuple of the package


class Foreign(NamedTuple):
    value: int


@pytest.mark.parametrize(
    "layout",
    [
        (), 5, -1.5, "ä", None, True, (1, (2, "x", (None, False), ())), RECORD(1, 2, 3), (RECORD("a", (1,), None), 4),
    ],
)  # fmt: skip
def test_layouts_come_back_as_they_were(layout: Any) -> None:
    back = layout_of(json.loads(json.dumps(plain_layout(layout))))
    assert back == layout
    assert type(back) is type(layout)
    assert hash(back) == hash(layout)


@pytest.mark.parametrize(
    "layout", [[1], {"a": 1}, b"a", np.int64(1), Foreign(1), Expansion("", ()), object(), (1, {2})]
)
def test_other_values_are_refused_where_they_are_written(layout: Any) -> None:
    with pytest.raises(TypeError, match="a layout has no"):
        plain_layout(layout)


@pytest.mark.parametrize(
    "name",
    [
        ["os", "system"],
        ["subprocess", "Popen"],
        ["builtins", "tuple"],
        ["tidewheel.engine.sandboxing.sandbox", "Answer"],
        ["tidewheel.engine.media.vision", "Expansion"],
        ["tidewheel.engine.media.layouts", "sys"],
        ["tidewheel.engine.media.nowhere", "Slot"],
    ],
)
def test_nothing_but_named_tuples_of_the_package_is_made(name: list[str]) -> None:
    with pytest.raises(TypeError, match="a layout has no"):
        layout_of({"name": name, "values": [1]})


@pytest.mark.parametrize("values", [[], [1, 2, 3, 4]])
def test_a_named_tuple_of_another_length_is_refused(values: list[int]) -> None:
    with pytest.raises(TypeError):
        layout_of({"name": ["tidewheel.engine.media.placeholders", "Slot"], "values": values})
