"""References to parts of tensors: they take what numpy takes row by row, and refuse what does not fit."""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from safetensors.numpy import save_file

from tidewheel.engine.errors import ModelError
from tidewheel.engine.models import ModelDescription, describe
from tidewheel.engine.models.spec import tensor_shapes
from tidewheel.engine.models.tensor_ref import TensorRef
from tidewheel.engine.weights import open_weights
from tidewheel.engine.weights.finite import require_finite
from tidewheel.engine.weights.taking import scaled
from tidewheel.engine.weights.tensor import DenseTensor, WeightSource, to_float32

FILE = "model.safetensors"
ROWS, COLUMNS = 12, 8  # of layers.0.up.weight
MODEL = describe({
    "architectures": ["LlamaForCausalLM"], "vocab_size": 20, "hidden_size": COLUMNS, "intermediate_size": ROWS,
    "num_hidden_layers": 1, "num_attention_heads": 2, "max_position_embeddings": 64, "mlp_bias": True,
})  # fmt: skip

Tensors = dict[str, NDArray[Any]]


def with_up(ref: TensorRef, kind: str = "weight") -> ModelDescription:
    return dataclasses.replace(MODEL, tensors={**MODEL.tensors, f"layers.0.up.{kind}": ref})


def opened(folder: Path, ref: TensorRef, tensors: Tensors, kind: str = "weight") -> WeightSource:
    """A checkpoint that has `tensors` beside all that the model needs."""
    rest = {MODEL.tensors[name].name: np.zeros(shape, np.float32) for name, shape in tensor_shapes(MODEL.spec).items()}
    (folder / FILE).unlink(missing_ok=True)  # not changed: it may still be mapped
    save_file({**rest, **{name: np.array(data, order="C") for name, data in tensors.items()}}, folder / FILE)
    return open_weights(folder, with_up(ref, kind))


@st.composite
def parts(draw: st.DrawFn, index: int, taken: int, columns: tuple[int, ...]) -> tuple[TensorRef, NDArray[Any], Any]:
    """A reference that takes `taken` rows of a tensor, that tensor as it is stored, and the rows in plain numpy."""
    permute = draw(st.none() | st.permutations(range(taken)).map(tuple))
    before, after = draw(st.tuples(st.integers(0, 3), st.integers(0, 3)))
    rows = draw(st.sampled_from([None, (before, before + taken)]))
    count = before + taken + after if rows else taken
    each = None
    if draw(st.booleans()):
        width = draw(st.sampled_from([w for w in range(1, count + 1) if count % w == 0]))
        start, after_it = draw(st.integers(0, 3)), draw(st.integers(0, 3))
        each = (start + width + after_it, start, start + width)
        count = count // width * each[0]
    whole = 10_000 * index + np.arange(count * math.prod(columns), dtype=np.float32).reshape(count, *columns)
    chosen = [i for i in range(count) if each is None or each[1] <= i % each[0] < each[2]]
    chosen = chosen if rows is None else chosen[rows[0] : rows[1]]
    chosen = chosen if permute is None else [chosen[i] for i in permute]
    transpose = draw(st.booleans())
    stored = whole.T if transpose else whole
    place = draw(st.none() | st.integers(0, 2))
    if place is not None:
        stored = np.stack([np.full_like(stored, -1)] * place + [stored] + [np.full_like(stored, -2)] * (2 - place))
    ref = TensorRef(f"part{index}", transpose, rows, each, permute, index=place)
    return ref, stored, np.array([whole[i] for i in chosen])


@settings(max_examples=70, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.data(), st.sampled_from(["weight", "bias"]), st.lists(st.integers(1, ROWS - 1), max_size=2, unique=True))
def test_a_reference_takes_the_rows_that_numpy_takes(
    tmp_path: Path, data: st.DataObject, kind: str, cuts: list[int]
) -> None:
    ends = [0, *sorted(cuts), ROWS]
    columns = (COLUMNS,) if kind == "weight" else ()
    drawn = [data.draw(parts(i, ends[i + 1] - ends[i], columns)) for i in range(len(ends) - 1)]
    refs = [ref for ref, _, _ in drawn]
    ref = dataclasses.replace(refs[0], stack=tuple(refs[1:]))
    weights = opened(tmp_path, ref, {ref.name: stored for ref, stored, _ in drawn}, kind)
    tensor = weights[f"layers.0.up.{kind}"]
    np.testing.assert_array_equal(tensor.data, np.concatenate([rows for _, _, rows in drawn]), strict=True)
    assert tensor.mapped == (not tensor.data.flags.owndata and not tensor.data.flags.writeable)
    if len(refs) == 1 and ref.each is None and ref.permute is None:
        assert tensor.mapped
    if len(refs) > 1 or ref.permute is not None:
        assert not tensor.mapped


def test_each_of_several_matrices_is_transposed(tmp_path: Path) -> None:
    stored = np.arange(3 * 13 * 4, dtype=np.float32).reshape(39, 4)
    ref = TensorRef("a", each=(13, 0, 8), transpose_each=(8, 4))
    tensor = opened(tmp_path, ref, {"a": stored})["layers.0.up.weight"]
    np.testing.assert_array_equal(tensor.data, np.concatenate([stored[i : i + 8].T for i in (0, 13, 26)]))
    with pytest.raises(ModelError, match=r"\(39, 5\).*\(39, 4\)"):
        opened(tmp_path, ref, {"a": np.zeros((39, 5), np.float32)})


def test_a_stack_may_be_nested_and_is_named_whole_where_it_is_not_finite(tmp_path: Path) -> None:
    a, b, c = (np.full((4, COLUMNS), number, np.float32) for number in (1, 2, np.nan))
    ref = TensorRef("a", stack=(TensorRef("b", stack=(TensorRef("c"),)),))
    tensor = opened(tmp_path, ref, {"a": a, "b": b, "c": c})["layers.0.up.weight"]
    np.testing.assert_array_equal(tensor.data, np.concatenate([a, b, c]))
    with pytest.raises(
        ModelError, match=rf"{FILE}: tensor a \+ .*{FILE}: tensor b \+ .*{FILE}: tensor c has 32 values"
    ):
        require_finite([tensor])


def test_other_parts_of_a_file_are_another_identity(tmp_path: Path) -> None:
    tensors = {"a": np.zeros((24, COLUMNS), np.float32), "b": np.zeros((2, ROWS, COLUMNS), np.float32)}
    opened(tmp_path, TensorRef("a", rows=(0, ROWS)), tensors)
    refs = [
        TensorRef("a", rows=(0, ROWS)),
        TensorRef("a", rows=(12, 12 + ROWS)),
        TensorRef("a", each=(2, 0, 1)),
        TensorRef("a", each=(2, 1, 2)),
        TensorRef("a", rows=(0, ROWS), permute=tuple(reversed(range(ROWS)))),
        TensorRef("b", index=0),
        TensorRef("b", index=1),
        TensorRef("a", rows=(0, 6), stack=(TensorRef("a", rows=(0, 6)),)),
    ]
    assert len({open_weights(tmp_path, with_up(ref)).identity for ref in refs}) == len(refs)


@pytest.mark.parametrize(
    ("ref", "stored", "words"),
    [
        (TensorRef("a"), (11, 8), r"has shape \(11, 8\).* needs \(12, 8\)"),
        (TensorRef("a", transpose=True), (12, 8), r"has shape \(12, 8\).* needs \(8, 12\)"),
        (TensorRef("a", rows=(4, 16)), (15, 8), r"has shape \(15, 8\).* needs \(at least 16, 8\)"),
        (TensorRef("a", rows=(4, 16)), (16, 9), r"has shape \(16, 9\).* needs \(at least 16, 8\)"),
        (TensorRef("a", rows=(4, 17)), (17, 8), r"has shape \(17, 8\)"),
        (TensorRef("a", True, rows=(4, 16)), (8, 15), r"has shape \(8, 15\).* needs \(8, at least 16\)"),
        (TensorRef("a", each=(3, 1, 2)), (35, 8), r"has shape \(35, 8\).* needs \(36, 8\)"),
        (TensorRef("a", each=(3, 1, 2)), (12, 8), r"has shape \(12, 8\).* needs \(36, 8\)"),
        (
            TensorRef("a", each=(3, 1, 3), rows=(4, 16)),
            (25, 8),
            r"has shape \(25, 8\).* needs \(at least 24 in groups of 3, 8\)",
        ),
        (TensorRef("a", permute=tuple(range(12))), (13, 8), r"has shape \(13, 8\).* needs \(12, 8\)"),
        (TensorRef("a", index=2), (2, 12, 8), r"has shape \(2, 12, 8\).* needs \(more than 2, 12, 8\)"),
        (TensorRef("a", True, index=0), (2, 12, 8), r"has shape \(2, 12, 8\).* needs \(more than 0, 8, 12\)"),
        (TensorRef("a", index=0), (12,), r"has shape \(12,\).* needs \(more than 0, 12, 8\)"),
        (TensorRef("a"), (), r"has shape \(\).* needs \(12, 8\)"),
        (TensorRef("a", rows=(0, 12)), (), r"has shape \(\).* needs \(at least 12, 8\)"),
        (TensorRef("a"), (12, 8, 1), r"has shape \(12, 8, 1\).* needs \(12, 8\)"),
    ],
    ids=str,
)
def test_a_shape_that_does_not_fit_is_refused_with_both(
    tmp_path: Path, ref: TensorRef, stored: tuple[int, ...], words: str
) -> None:
    with pytest.raises(ModelError, match=rf"{FILE}: tensor a {words}"):
        opened(tmp_path, ref, {"a": np.zeros(stored, np.float32)})


@pytest.mark.parametrize(
    ("a", "b"), [((8, 8), (5, 8)), ((8, 8), (4, 7)), ((8, 8), ()), ((8,), (4, 8)), ((12, 8), (4, 8))]
)
def test_a_stack_that_does_not_fit_is_refused_with_all_of_its_shapes(
    tmp_path: Path, a: tuple[int, ...], b: tuple[int, ...]
) -> None:
    with pytest.raises(ModelError) as caught:
        opened(tmp_path, TensorRef("a", stack=(TensorRef("b"),)), {"a": np.zeros(a, "f4"), "b": np.zeros(b, "f4")})
    for words in (f"{FILE}: tensor a has shape {a}, ", f"{FILE}: tensor b has shape {b}, ", "the shape (12, 8)"):
        assert words in str(caught.value)


def test_a_stack_of_two_dtypes_is_refused(tmp_path: Path) -> None:
    tensors: Tensors = {"a": np.zeros((8, 8), np.float16), "b": np.zeros((4, 8), np.float32)}
    with pytest.raises(ModelError, match=f"{FILE}: tensor b is stored as F32, but a, to which it is joined, as F16"):
        opened(tmp_path, TensorRef("a", stack=(TensorRef("b"),)), tensors)


def test_a_part_that_is_missing_is_named(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=f"tensor b is missing from .*{FILE}"):
        opened(tmp_path, TensorRef("a", stack=(TensorRef("b"),)), {"a": np.zeros((8, 8), np.float32)})


@pytest.mark.parametrize(
    "steps",
    [
        {"rows": (3, 3)},
        {"transpose_each": (0, 4)},
        {"index": -1},
        {"rows": (-1, 2)},
        {"each": (4, 2, 5)},
        {"each": (4, 2, 2)},
        {"permute": (0, 2)},
        {"permute": (1, 1, 0)},
        {"rows": (0, 3), "permute": (1, 0)},
    ],
    ids=str,
)
def test_steps_that_no_tensor_can_take_are_an_error(steps: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"^a: "):
        TensorRef("a", **steps)


def test_a_kernel_of_a_convolution_is_a_matrix(tmp_path: Path) -> None:
    kernel = np.arange(ROWS * COLUMNS, dtype=np.float32).reshape(ROWS, 2, 2, 2)
    found = opened(tmp_path, TensorRef("conv", matrix=True), {"conv": kernel})["layers.0.up.weight"]
    assert np.array_equal(to_float32(found), kernel.reshape(ROWS, COLUMNS))
    with pytest.raises(ModelError, match=f"{ROWS} rows of {COLUMNS} elements"):
        opened(tmp_path, TensorRef("conv", matrix=True), {"conv": kernel[:, :1]})
    with pytest.raises(ValueError, match="not both"):
        TensorRef("conv", flat=True, matrix=True)


def test_numbers_alone_make_a_vector(tmp_path: Path) -> None:
    numbers = {f"n{i}": np.array(i, np.float32) for i in range(ROWS)}
    first, *others = (TensorRef(name, flat=True) for name in numbers)
    ref = dataclasses.replace(first, stack=tuple(others))
    found = opened(tmp_path, ref, numbers, "bias")["layers.0.up.bias"]
    np.testing.assert_array_equal(to_float32(found), np.arange(ROWS), strict=False)
    with pytest.raises(ModelError, match=r"tensor n0 has shape \(\)"):
        opened(tmp_path, dataclasses.replace(ref, flat=False), numbers, "bias")


def test_rows_are_scaled_in_float32() -> None:
    rows, factors = np.arange(12, dtype=np.float16).reshape(4, 3), np.array([0.1, -2, 0, 3], np.float32)
    found = scaled(DenseTensor(rows, "float16"), DenseTensor(factors, "float32"))
    assert found.dtype == "float32"
    assert np.array_equal(found.data, rows.astype(np.float32) * factors[:, None])
    bias = scaled(DenseTensor(factors, "float32"), DenseTensor(factors, "float32"))
    assert np.array_equal(bias.data, factors * factors)
