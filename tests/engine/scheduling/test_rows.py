"""A step's rows and tokens each have one owner, in one order."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from tidewheel.engine.sampling_params import SamplingParams
from tidewheel.engine.scheduling.rows import StepRows
from tidewheel.engine.sequences.sequence import Sequence


def sequence(key: int) -> Sequence:
    return Sequence(key, np.arange(40, dtype=np.int32), SamplingParams(), seed=0, max_length=64)


@given(
    st.integers(0, 4),
    st.lists(st.integers(1, 5), max_size=3),
    st.lists(st.tuples(st.integers(1, 12), st.integers(0, 3), st.integers(0, 12)), max_size=4),
)
def test_every_token_and_every_row_has_one_owner(
    num_decodes: int, drafts: list[int], chunks: list[tuple[int, int, int]]
) -> None:
    rows, key = StepRows(), 0
    rows.set_decodes([sequence(i) for i in range(num_decodes)])
    for key, count in enumerate(drafts, 10):
        rows.add_draft(sequence(key), [1] * count)
    for key, (count, forks, scored) in enumerate(chunks, 20):
        sampling = [sequence(key + 10 * i) for i in range(forks)]
        rows.add_chunk(sequence(key), count, num_scored=min(scored, count), sampling=sampling)
    tokens, owned = list(range(num_decodes)), list(range(num_decodes))
    owners = [s.key for s in rows.decodes]
    for span in rows.spans:
        tokens += range(span.tokens.start, span.tokens.stop)
        owned += range(span.sampled.start, span.sampled.stop)
        assert len(span.token_ids) == span.end - span.start == span.tokens.stop - span.tokens.start
        assert set(span.sampled_after) <= set(range(span.tokens.start, span.tokens.stop))
        assert len(span.sampled_after) == span.sampled.stop - span.sampled.start
    for draft in rows.drafts:
        owners += [draft.sequence.key] * len(draft.token_ids)
    for chunk in rows.chunks:
        owners += [s.key for s in chunk.sampling]
        owned += range(rows.scored(chunk).start, rows.scored(chunk).stop)
        assert len(chunk.scored) == chunk.num_scored
    assert tokens == list(range(rows.num_tokens))
    assert sorted(owned) == list(range(rows.num_rows))
    assert [s.key for s in rows.sampled] == owners
    assert bool(rows) == bool(tokens)


@given(st.lists(st.integers(0, 1), max_size=6), st.lists(st.integers(0, 1), min_size=7, max_size=7))
def test_what_is_kept_ends_with_the_first_token_that_was_not_drafted(
    draft_tokens: list[int], sampled: list[int]
) -> None:
    rows = StepRows()
    rows.set_decodes([sequence(0)])
    drafting = sequence(1)
    rows.add_draft(drafting, draft_tokens)
    token_ids = [5, *sampled[: len(draft_tokens) + 1]]
    kept = [row for owner, row in rows.kept(token_ids) if owner is drafting]
    assert kept == list(range(1, len(kept) + 1))
    assert [token_ids[row] for row in kept[:-1]] == draft_tokens[: len(kept) - 1]
    assert len(kept) == len(draft_tokens) + 1 or token_ids[kept[-1]] != draft_tokens[len(kept) - 1]
    assert dict(rows.newest(token_ids)) == {rows.decodes[0]: 5, drafting: token_ids[kept[-1]]}
