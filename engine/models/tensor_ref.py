"""TensorRef: where a weight lies in a checkpoint, and what is taken of the tensor that lies there."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace


@dataclass(frozen=True, slots=True)
class TensorRef:
    """The tensor `name`, or a part of it. The steps are taken in this order; vectors have rows of one number.

    1. `index`: of a stack of tensors, which lies as one with a dimension more in front, this one.
    2. `transpose`: reverse the dimensions.
    3. `each` `(size, start, stop)`: the rows are groups of `size`; keep rows `[start, stop)` of every group. For
       matrices that hold queries, keys and values head by head.
    4. `rows` `(start, stop)`: keep rows `[start, stop)` of those that are left.
    5. `permute`: row i is row `permute[i]` of those that are left. It names each of them once. `columns`: column i of
       a matrix is column `columns[i]`, which may be taken more than once.
    6. `transpose_each` `(rows, columns)`: the rows are matrices of that size, one below the other; transpose each.
    7. `flat`: one dimension, with the elements row by row; a number alone is one of them. Or `matrix`: two, with all
       elements of a row in a line, for the kernel of a convolution over patches that lie side by side.
    8. `scaled_by`: each row is multiplied by the element for it of the tensor with that name. Of towers alone.
    9. `minus_rows` `(start, stop)`: these rows, taken as `rows` are, are subtracted in float32. Of towers alone.
    10. `stack`: the rows of these references follow.

    Raises ValueError for steps that no tensor could take.
    """

    name: str
    transpose: bool = False
    rows: tuple[int, int] | None = None
    each: tuple[int, int, int] | None = None
    permute: tuple[int, ...] | None = None
    flat: bool = False
    stack: tuple[TensorRef, ...] = ()
    index: int | None = None
    transpose_each: tuple[int, int] | None = None
    matrix: bool = False
    scaled_by: str = ""
    columns: tuple[int, ...] | None = None
    minus_rows: tuple[int, int] | None = None

    def __post_init__(self) -> None:
        if self.index is not None and self.index < 0:
            raise ValueError(f"{self.name}: index {self.index} is none")
        if self.rows is not None and not 0 <= self.rows[0] < self.rows[1]:
            raise ValueError(f"{self.name}: rows {self.rows} are none")
        if self.each is not None and not 0 <= self.each[1] < self.each[2] <= self.each[0]:
            raise ValueError(f"{self.name}: each {self.each} takes no rows of a group")
        if self.flat and self.matrix:
            raise ValueError(f"{self.name}: flat or a matrix, not both")
        if self.transpose_each is not None and min(self.transpose_each) < 1:
            raise ValueError(f"{self.name}: transpose_each {self.transpose_each} is no size")
        if self.permute is not None:
            if sorted(self.permute) != [*range(len(self.permute))]:
                raise ValueError(f"{self.name}: permute must name each row once")
            if self.rows is not None and self.rows[1] - self.rows[0] != len(self.permute):
                raise ValueError(f"{self.name}: permute names {len(self.permute)} rows, but rows are {self.rows}")

    def parts(self) -> Iterator[TensorRef]:
        """The references whose rows follow each other here, without a stack of their own."""
        yield replace(self, stack=()) if self.stack else self
        for ref in self.stack:
            yield from ref.parts()

    def shape(self, stored: tuple[int, ...]) -> tuple[int, ...] | None:
        """The shape of what is taken of a tensor of shape `stored`; None if it has not the rows. Leaves out `stack`."""
        if self.index is not None:
            if len(stored) < 2 or stored[0] <= self.index:
                return None
            stored = stored[1:]
        rest = (stored[::-1] if self.transpose else stored)[1:]
        if not stored:
            if self.rows or self.each or self.permute or self.transpose_each:
                return None
            return (1,) if self.flat else ()
        count = stored[-1] if self.transpose else stored[0]
        if self.each is not None:
            size, start, stop = self.each
            if count % size:
                return None
            count = count // size * (stop - start)
        if self.rows is not None:
            if count < max(self.rows[1], self.minus_rows[1] if self.minus_rows else 0):
                return None
            count = self.rows[1] - self.rows[0]
        if self.permute is not None and len(self.permute) != count:
            return None
        if self.columns is not None:
            if len(rest) != 1 or not 0 <= min(self.columns) <= max(self.columns) < rest[0]:
                return None
            rest = (len(self.columns),)
        if self.transpose_each is not None:
            rows, columns = self.transpose_each
            if rest != (columns,) or count % rows:
                return None
            count, rest = count // rows * columns, (rows,)
        if self.matrix:
            return count, math.prod(rest)
        return (math.prod((count, *rest)),) if self.flat else (count, *rest)

    def needed(self, shape: tuple[int, ...]) -> str:
        """In words, the shape of the tensor that `shape` is to be taken from. Leaves out `stack`."""
        if self.flat:
            return f"{shape[0]} elements"
        if self.matrix:
            return f"{shape[0]} rows of {shape[1]} elements"
        if self.transpose_each is not None:
            rows, columns = self.transpose_each
            shape = (shape[0] // columns * rows, columns)
        count = shape[0] if self.rows is None else self.rows[1]
        words = "" if self.rows is None else "at least "
        groups = ""
        if self.each is not None:
            size, start, stop = self.each
            count = -(-count // (stop - start)) * size
            groups = "" if self.rows is None else f" in groups of {size}"
        sizes = [f"{words}{count}{groups}", *map(str, shape[1:])]
        sizes = sizes[::-1] if self.transpose else sizes
        return f"({', '.join(sizes if self.index is None else [f'more than {self.index}', *sizes])})"
