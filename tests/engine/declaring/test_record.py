"""A record behaves as the frozen dataclass of the same fields."""

from __future__ import annotations

import copy
import pickle
from dataclasses import FrozenInstanceError, asdict, dataclass, field, fields, is_dataclass, replace
from functools import cached_property
from typing import Any, ClassVar

import pytest

from tidewheel.engine.declaring.record import record


@record(frozen=True, slots=True)
class Point:
    """A record."""

    kind: ClassVar[str] = "point"

    x: int
    y: int = 2
    names: tuple[str, ...] = field(default_factory=tuple)
    secret: str = field(default="", repr=False, compare=False)

    def __post_init__(self) -> None:
        if self.x < 0:
            raise ValueError("x must be 0 or more")


@record(frozen=True, kw_only=True)
class Base:
    """One that others begin with."""

    a: int = 1

    @cached_property
    def twice(self) -> int:
        """Kept in the object."""
        return 2 * self.a


@record(frozen=True, kw_only=True)
class More(Base):
    """One with more fields."""

    b: str


@dataclass(frozen=True, slots=True)
class Plain:
    """The same as a dataclass."""

    x: int
    y: int = 2


def test_it_is_made_shown_and_compared_like_a_dataclass() -> None:
    one = Point(3, names=("n",), secret="s")
    assert (one.x, one.y, one.names, one.secret, one.kind) == (3, 2, ("n",), "s", "point")
    assert repr(one) == "Point(x=3, y=2, names=('n',))"
    assert one == Point(3, 2, ("n",))
    assert hash(one) == hash(Point(3, 2, ("n",)))
    assert one != Point(4, 2, ("n",))
    assert Point(3) != Plain(3)
    assert repr(More(b="x")) == "More(a=1, b='x')"
    assert More(b="x").twice == 2


def test_what_takes_dataclasses_takes_it() -> None:
    one = Point(3)
    assert is_dataclass(one)
    assert [each.name for each in fields(one)] == ["x", "y", "names", "secret"]
    assert replace(one, y=5) == Point(3, 5)
    assert asdict(Point(1)) == {"x": 1, "y": 2, "names": (), "secret": ""}
    assert copy.copy(one) == one
    assert pickle.loads(pickle.dumps(one)) == one
    assert pickle.loads(pickle.dumps(More(b="x"))) == More(b="x")
    match one:
        case Point(x, y):
            assert (x, y) == (3, 2)


@pytest.mark.parametrize(
    ("args", "given", "message"),
    [
        ((), {}, "missing the argument 'x'"),
        ((1,), {"x": 2}, "multiple values for argument 'x'"),
        ((1,), {"z": 2}, "unexpected argument 'z'"),
        ((1, 2, (), "", 5), {}, "takes 4 positional arguments, not 5"),
    ],
)
def test_wrong_arguments(args: tuple[Any, ...], given: dict[str, Any], message: str) -> None:
    with pytest.raises(TypeError, match=message):
        Point(*args, **given)


def test_it_cannot_be_changed() -> None:
    one = Point(3)
    with pytest.raises(FrozenInstanceError):
        one.x = 4  # type: ignore[misc]
    with pytest.raises(FrozenInstanceError):
        del one.x
    with pytest.raises(ValueError, match="x must be 0 or more"):
        replace(one, x=-1)
