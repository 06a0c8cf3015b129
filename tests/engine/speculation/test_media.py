"""Layers that draft after images: their tokens go on where the model's own do."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from types import SimpleNamespace
from typing import Any

import numpy as np
from engine.media.tiny_vision import TinyVision
from numpy.typing import NDArray

from tidewheel.engine.devices.batch import StepBatch
from tidewheel.engine.media.media import Media, MediaSpan
from tidewheel.engine.media.prompt_media import PromptMedia
from tidewheel.engine.sampling_params import SamplingParams
from tidewheel.engine.sequences.sequence import Sequence
from tidewheel.engine.speculation.draft_costs import StepPrices
from tidewheel.engine.speculation.mtp import MtpDrafter

SIDE = 6
PROMPT_LEN = 60


class GridVision(TinyVision):
    """An image is a square of rows and columns."""

    def positions(self, layouts: Seq[Any]) -> list[NDArray[np.int32]]:
        rows, columns = np.indices((SIDE, SIDE), np.int32).reshape(2, -1)
        return [np.stack([np.zeros_like(rows), rows, columns]) for _ in layouts]


class Noting:
    """An executor that notes what it is asked."""

    limits = SimpleNamespace(max_num_seqs=6, max_loras=0)

    def __init__(self) -> None:
        self.batches: list[StepBatch] = []

    def draft(self, batch: StepBatch, counts: NDArray[np.int32], least: float) -> NDArray[np.int32]:
        self.batches.append(batch)
        return np.full((len(counts), int(counts.max())), 5, np.int32)


def sequence(key: int, *, with_image: bool) -> Sequence:
    """One with two tokens behind its prompt."""
    media = None
    if with_image:
        image = Media((), (SIDE, SIDE), SIDE**2, b"", SIDE, SIDE)
        media = PromptMedia([MediaSpan(image, 10, SIDE**2)], np.zeros(PROMPT_LEN, np.int32), GridVision())
    made = Sequence(key, np.arange(PROMPT_LEN, dtype=np.int32), SamplingParams(), seed=0, max_length=200, media=media)
    made.block_tables = np.zeros((1, 4), np.int32)
    for token in (7, 8):
        made.append(token)
    return made


def batch_of(*sequences: Sequence) -> StepBatch:
    executor: Any = Noting()
    drafter = MtpDrafter(executor, 3, max_context=200, clock=lambda: 0.0)
    drafter.draft(dict.fromkeys(sequences, 3), StepPrices(len(sequences), 10.0, 0.1, 0.1, 0.1, 100.0))
    batch: StepBatch = executor.batches[0]
    return batch


def test_drafts_behind_an_image_go_on_with_its_positions() -> None:
    """The image has 36 tokens and takes 6 positions."""
    batch = batch_of(sequence(0, with_image=True), sequence(1, with_image=False))
    last = PROMPT_LEN + 1
    assert batch.positions.tolist() == [last, last]
    assert batch.rope_positions is not None
    assert batch.rope_positions.tolist() == [[last - 30, last]] * 3
    assert batch.rope_positions.dtype == np.int32


def test_drafts_of_texts_have_no_positions_of_their_own() -> None:
    assert batch_of(sequence(0, with_image=False)).rope_positions is None
