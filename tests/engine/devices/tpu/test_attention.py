"""Our attention gives what JAX's reference for the TPU's kernel gives, and what that has not, by the formula."""

from __future__ import annotations

import numpy as np
import pytest
from numpy.typing import NDArray

jax = pytest.importorskip("jax")

T, PAGES, PAGE, WIDTH, H, G, D = 64, 40, 32, 12, 6, 2, 24
QUERIES, CONTEXTS = (1, 17, 30, 1), (300, 17, 200, 64)  # tokens of four sequences, and all of their contexts'
COUNT = sum(QUERIES)
MODULE = "jax.experimental.pallas.ops.tpu.ragged_paged_attention"


class Case:
    """A ragged batch over scattered pages. What no token may see is NaN."""

    def __init__(self, seed: int = 0) -> None:
        from tidewheel.engine.devices.tpu.attention import Sequences

        random = np.random.default_rng(seed)
        self.q = random.standard_normal((T, H, D), np.float32)
        self.pages = np.full((PAGES, PAGE, 2 * G, D), np.nan, np.float32)
        tables = np.full((8, WIDTH), PAGES - 1, np.int32)
        free = random.permutation(PAGES - 1).tolist()
        for row, length in zip(tables, CONTEXTS, strict=False):
            for column in range(-(-length // PAGE)):
                row[column] = page = free.pop()
                used = min(PAGE, length - column * PAGE)
                self.pages[page, :used] = random.standard_normal((used, 2 * G, D), np.float32)
        positions = [np.arange(c - q, c) for q, c in zip(QUERIES, CONTEXTS, strict=True)]
        start = np.concatenate([[0], np.cumsum(QUERIES)])
        self.sequences = Sequences(
            positions=np.concatenate([*positions, np.zeros(T - COUNT)]).astype(np.int32),
            sequence=np.repeat([0, 1, 2, 3, 0], [*QUERIES, T - COUNT]).astype(np.int32),
            tables=tables,
            query_start=np.pad(start, (0, 4), mode="edge").astype(np.int32),
            context_len=np.pad(CONTEXTS, (0, 4)).astype(np.int32),
            num_seqs=np.array([4], np.int32),
        )

    def attend(self, window: int | None, softcap: float | None, **of_heads: NDArray[np.float32]) -> NDArray[np.float32]:
        from tidewheel.engine.devices.tpu.attention import Scores, attend

        run = jax.jit(lambda q, pages, at: attend(q, pages, at, Scores(0.2, window, softcap), **of_heads))
        return np.asarray(run(self.q, self.pages, self.sequences))[:COUNT]

    def by_formula(
        self, window: int | None, softcap: float | None, slopes: NDArray[np.float32], sinks: NDArray[np.float32]
    ) -> NDArray[np.float64]:
        rows = []
        for token in range(COUNT):
            position = self.sequences.positions[token]
            table = self.sequences.tables[self.sequences.sequence[token]]
            seen = self.pages[table].reshape(-1, 2 * G, D)[: position + 1].astype(np.float64)
            distance = np.arange(position + 1) - position
            k, v = (seen[:, kind::2].repeat(H // G, axis=1) for kind in (0, 1))
            scores = np.einsum("hd,khd->hk", self.q[token], k) * 0.2
            if softcap is not None:
                scores = softcap * np.tanh(scores / softcap)
            scores += slopes[:, None] * distance
            if window is not None:
                scores[:, distance <= -window] = -np.inf
            weights = np.exp(scores)
            rows.append(np.einsum("hk,khd->hd", weights, v) / (weights.sum(1) + np.exp(sinks))[:, None])
        return np.array(rows)


# Compiling JAX's reference takes seconds. In `make test` the formula takes its place.
@pytest.mark.sweep
@pytest.mark.parametrize("softcap", [None, 1.5])
@pytest.mark.parametrize("window", [None, 20, 130])
def test_it_is_that_of_the_reference(window: int | None, softcap: float | None) -> None:
    from jax.experimental.pallas.ops.tpu.ragged_paged_attention.kernel import ref_ragged_paged_attention

    case = Case()
    _, _, tables, start, lengths, count = case.sequences
    # The reference multiplies what it masks with zero.
    expected = ref_ragged_paged_attention(
        case.q,
        jax.numpy.nan_to_num(case.pages),
        jax.numpy.array(lengths),
        jax.numpy.array(tables),
        jax.numpy.array(start),
        count,
        sm_scale=0.2,
        sliding_window=window,
        soft_cap=softcap,
    )
    np.testing.assert_allclose(case.attend(window, softcap), np.asarray(expected), rtol=2e-4, atol=2e-5)


def test_it_knows_windows_and_caps_of_scores() -> None:
    case = Case()
    expected = case.by_formula(20, 1.5, np.zeros(H, np.float32), np.full(H, -np.inf, np.float32))
    np.testing.assert_allclose(case.attend(20, 1.5), expected, rtol=2e-4, atol=2e-5)


@pytest.mark.parametrize("window", [None, 50])
def test_it_knows_alibi_and_sinks(window: int | None) -> None:
    case = Case(1)
    slopes = 2.0 ** -np.arange(1, H + 1, dtype=np.float32)
    sinks = np.linspace(-2, 2, H, dtype=np.float32)
    attended = case.attend(window, None, slopes=slopes, sinks=sinks)
    np.testing.assert_allclose(attended, case.by_formula(window, None, slopes, sinks), rtol=2e-4, atol=2e-5)


def test_the_kernel_gives_the_same_head_by_head_without_pages_before_windows(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is replaced by our own attention, since nothing but a TPU runs it."""
    import importlib

    from tidewheel.engine.devices.tpu.attention import Scores, attend, kernel_attend, write

    case, random = Case(3), np.random.default_rng(3)
    jnp = jax.numpy
    at = jax.tree.map(jnp.asarray, case.sequences)

    def kernel(q, pages, lengths, tables, start, count, *, sm_scale, sliding_window, soft_cap, **blocks):  # type: ignore[no-untyped-def]
        assert (lengths.shape, count.shape) == (at.context_len.shape, (1,))
        assert 0 < blocks["num_kv_pages_per_block"] <= tables.shape[1]
        assert tables.shape[1] == 4  # of 12: pages of 32 for the step's 64 tokens and 19 before them
        positions = at.positions - (at.context_len - lengths)[at.sequence]
        seen = at._replace(positions=positions, tables=tables, query_start=start)
        return attend(q, pages, seen, Scores(sm_scale, sliding_window, soft_cap))

    monkeypatch.setattr(importlib.import_module(MODULE), "ragged_paged_attention", kernel)
    k, v = random.standard_normal((2, T, G, D), np.float32)
    blocks, offsets = jnp.divmod(at.positions, PAGE)
    slots = jnp.where(jnp.arange(T) < COUNT, at.tables[at.sequence, blocks] * PAGE + offsets, PAGES * PAGE)
    pages = jnp.nan_to_num(case.pages)
    own = jnp.moveaxis(pages.reshape(PAGES, PAGE, G, 2, D), 2, 1)
    scores = Scores(0.2, 20, 1.5)
    run = jax.jit(lambda pages: kernel_attend(case.q, write(pages, slots, k, v), at, scores))
    together, apart = np.asarray(run(pages)), np.asarray(run(own))
    np.testing.assert_allclose(apart, together, rtol=1e-5, atol=1e-6)
    assert np.abs(together[:COUNT]).min() > 0
    assert not together[COUNT:].any()
    expected = jax.jit(lambda pages: attend(case.q, write(pages, slots, k, v), at, scores))(pages)
    np.testing.assert_allclose(together[:COUNT], np.asarray(expected)[:COUNT], rtol=1e-5, atol=1e-6)


def test_memory_does_not_grow_with_the_context() -> None:
    """A few of a step's tokens at a time look at a few pages."""
    from tidewheel.engine.devices.tpu.attention import Scores, Sequences, attend

    def bytes_for(width: int) -> int:
        ints = jax.ShapeDtypeStruct
        sequences = Sequences(
            *(ints((n,), "int32") for n in (256, 256)),
            ints((4, width), "int32"),
            *(ints((n,), "int32") for n in (5, 4, 1)),
        )
        arrays = (ints((n, *rest), "float32") for n, *rest in ((256, H, D), (8 * width, PAGE, 2 * G, D)))
        step = jax.jit(lambda q, pages, at: attend(q, pages, at, Scores(1.0, None, None)))
        return int(step.lower(*arrays, sequences).compile().memory_analysis().temp_size_in_bytes)

    assert bytes_for(1024) <= bytes_for(16) + 256 * 1024 * 4 * 2  # except for tables


def test_writing_leaves_all_other_slots_as_they_are() -> None:
    from tidewheel.engine.devices.tpu.attention import write

    random = np.random.default_rng(2)
    pages = random.standard_normal((4, 16, 2 * G, D), np.float32)
    k, v = random.standard_normal((2, 3, G, D - 4), np.float32)
    written = np.asarray(write(jax.numpy.array(pages), np.array([5, 4 * 16, 33]), k, v))
    expected = pages.copy()
    for token, (page, slot) in ((0, (0, 5)), (2, (2, 1))):  # the second one's slot lies behind the last page
        expected[page, slot, 0::2, : D - 4], expected[page, slot, 1::2, : D - 4] = k[token], v[token]
        expected[page, slot, :, D - 4 :] = 0
    np.testing.assert_array_equal(written, expected)
