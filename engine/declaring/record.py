"""`record`: `dataclasses.dataclass` for frozen classes, quicker to declare and slower to make.

`dataclass` writes and compiles up to eight methods for each class, which is most of the time that importing the class
takes. The methods of records are written here, once. To type checkers there is no difference, and `fields`, `replace`
and `asdict` take both. Classes of which thousands a second are made should stay dataclasses.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

__all__ = ["record"]

if TYPE_CHECKING:
    from dataclasses import dataclass as record
else:
    import dataclasses
    from collections.abc import Callable
    from dataclasses import MISSING, FrozenInstanceError
    from operator import attrgetter
    from reprlib import recursive_repr
    from typing import Any

    def record(*, frozen: bool, slots: bool = False, kw_only: bool = False) -> Callable[[type], type]:
        """As `dataclass(frozen=True, ...)`, for classes whose fields are all given when an object is made."""
        assert frozen, "an object of a record never changes"

        def made(cls: type) -> type:
            own = vars(cls)
            for name, method in _METHODS.items():
                if name not in own:
                    setattr(cls, name, method)
            if slots:
                cls.__getstate__, cls.__setstate__ = _get_state, _set_state
            cls = dataclasses.dataclass(init=False, repr=False, eq=False, slots=slots, kw_only=kw_only)(cls)
            fields = dataclasses.fields(cls)
            assert all(field.init for field in fields)
            cls.__record__ = (
                tuple(field.name for field in fields if not field.kw_only),
                tuple((field.name, field.default, field.default_factory) for field in fields),
                _getter([field.name for field in fields if field.compare]),
            )
            return cls

        return made

    def _getter(names: list[str]) -> Callable[[object], tuple[Any, ...]]:
        if len(names) > 1:
            return attrgetter(*names)
        return (lambda self: (getattr(self, names[0]),)) if names else (lambda self: ())

    def _init(self: Any, /, *args: Any, **given: Any) -> None:
        positional, fields, _ = self.__record__
        if len(args) > len(positional):
            raise TypeError(f"{type(self).__name__} takes {len(positional)} positional arguments, not {len(args)}")
        for name, value in zip(positional, args, strict=False):
            if name in given:
                raise TypeError(f"{type(self).__name__} got multiple values for argument {name!r}")
            given[name] = value
        for name, default, factory in fields:
            if name in given:
                value = given.pop(name)
            elif default is not MISSING:
                value = default
            elif factory is not MISSING:
                value = factory()
            else:
                raise TypeError(f"{type(self).__name__} is missing the argument {name!r}")
            object.__setattr__(self, name, value)
        if given:
            raise TypeError(f"{type(self).__name__} got an unexpected argument {next(iter(given))!r}")
        if hasattr(self, "__post_init__"):
            self.__post_init__()

    @recursive_repr()
    def _repr(self: Any) -> str:
        shown = (f"{field.name}={getattr(self, field.name)!r}" for field in dataclasses.fields(self) if field.repr)
        return f"{type(self).__qualname__}({', '.join(shown)})"

    def _set(self: Any, name: str, value: object) -> None:
        raise FrozenInstanceError(f"cannot assign to field {name!r}")

    def _delete(self: Any, name: str) -> None:
        raise FrozenInstanceError(f"cannot delete field {name!r}")

    def _equals(self: Any, other: object) -> bool:
        if type(self) is not type(other):
            return NotImplemented
        values = self.__record__[2]
        return values(self) == values(other)

    def _hash(self: Any) -> int:
        return hash(self.__record__[2](self))

    def _get_state(self: Any) -> list[Any]:
        return [getattr(self, name) for name, _, _ in self.__record__[1]]

    def _set_state(self: Any, state: list[Any]) -> None:
        for (name, _, _), value in zip(self.__record__[1], state, strict=True):
            object.__setattr__(self, name, value)

    _METHODS = {
        "__init__": _init,
        "__repr__": _repr,
        "__setattr__": _set,
        "__delattr__": _delete,
        "__eq__": _equals,
        "__hash__": _hash,
    }
