"""MediaEncoder: prompts wait for embeddings, which are computed piece by piece and kept."""

from __future__ import annotations

import gc
from collections.abc import Generator

import numpy as np
import pytest
from engine.media.stripes import WIDTH, StripesVision, picture

from tidewheel.engine.devices.tower import Rows, TowerExecutor
from tidewheel.engine.media.encoder import MediaEncoder
from tidewheel.engine.media.media import Media, MediaSpan
from tidewheel.engine.media.prompt_media import PromptMedia


class Tower(TowerExecutor):
    """Takes a piece for each row, and notes what it does."""

    def __init__(self) -> None:
        self.spec = StripesVision().spec
        self.pieces = 0
        self.closed = False

    def project(self, name: str, rows: Rows) -> Generator[None, None, Rows]:
        if rows.shape[0] == 13:
            raise MemoryError("too little memory")
        for _ in rows:
            self.pieces += 1
            yield
        return np.repeat(rows[:, :1], WIDTH, axis=1)

    def layer(
        self,
        index: int,
        rows: Rows,
        segments: object,
        positions: object = None,
        *,
        seen: object = None,
        in_place: bool = False,
        read: object = None,
    ) -> Generator[None, None, Rows]:
        raise NotImplementedError

    def attend(self, name: str, queries: Rows, keys: Rows, values: Rows) -> Generator[None, None, Rows]:
        raise NotImplementedError

    def table(self, name: str) -> Rows:
        raise KeyError(name)

    def close(self) -> None:
        self.closed = True


@pytest.fixture
def tower() -> Tower:
    return Tower()


def prompt_of(*media: Media) -> PromptMedia:
    start, spans = 0, []
    for one in media:
        spans.append(MediaSpan(one, start, one.num_tokens))
        start += one.num_tokens
    return PromptMedia(spans, np.zeros(start, np.int32), StripesVision())


def encoder_of(tower: Tower, max_bytes: int = 1 << 20) -> MediaEncoder[str]:
    return MediaEncoder(StripesVision(), tower, max_bytes)


def work(encoder: MediaEncoder[str], *, nothing_runs: bool = True) -> list[str]:
    while encoder.run_piece(1.0, nothing_runs=nothing_runs):
        pass
    return [encoded.prompt for encoded in encoder.take_encoded()]


def test_prompts_are_given_in_order_with_embeddings(tower: Tower) -> None:
    encoder, first, second = encoder_of(tower), prompt_of(picture(5)), prompt_of(picture(3, seed=1), picture(4, seed=2))
    encoder.add("second", second, (0, 2, 0))
    encoder.add("first", first, (0, 1, 0))
    assert work(encoder) == ["first", "second"]
    (media,) = first.media
    np.testing.assert_array_equal(first.embeddings[media.digest][:, 0], media.tiles[0][0, :, 0] / np.float32(255))
    assert {rows.shape for rows in second.embeddings.values()} == {(3, WIDTH), (4, WIDTH)}


def test_a_higher_priority_goes_first_although_another_was_begun(tower: Tower) -> None:
    encoder = encoder_of(tower)
    encoder.add("begun", prompt_of(picture(50)), (0, 1, 0))
    assert encoder.run_piece(1.0, nothing_runs=True)
    encoder.add("urgent", prompt_of(picture(3, seed=1)), (-1, 2, 0))
    assert work(encoder) == ["urgent", "begun"]


def test_a_call_runs_one_piece_and_the_next_goes_on_there(tower: Tower) -> None:
    encoder = encoder_of(tower)
    encoder.add("one", prompt_of(picture(100)), (0, 1, 0))
    for piece in range(1, 101):
        assert encoder.is_waiting
        assert not encoder.take_encoded()
        assert encoder.run_piece(1.0, nothing_runs=True)
        assert tower.pieces == piece
    assert encoder.run_piece(1.0, nothing_runs=True)  # the generator's end
    assert [encoded.prompt for encoded in encoder.take_encoded()] == ["one"]
    assert not encoder.is_waiting


def test_the_same_picture_is_encoded_once(tower: Tower) -> None:
    encoder, media = encoder_of(tower), picture(7)
    encoder.add("one", prompt_of(media, media), (0, 1, 0))
    encoder.add("two", prompt_of(media), (0, 2, 0))
    assert work(encoder) == ["one", "two"]
    assert (tower.pieces, encoder.encoded_total, encoder.reused_total) == (7, 1, 1)


def test_what_was_not_used_for_longest_goes_first(tower: Tower) -> None:
    size = 10 * WIDTH * 4
    encoder, pictures = encoder_of(tower, 2 * size), [picture(10, seed) for seed in range(3)]
    for turn, media in enumerate([pictures[0], pictures[1], pictures[0], pictures[2], pictures[0], pictures[1]]):
        encoder.add(str(turn), prompt_of(media), (0, turn, 0))
        assert work(encoder) == [str(turn)]
    assert (encoder.encoded_total, encoder.reused_total) == (4, 2)


def test_no_more_is_encoded_than_running_prompts_may_hold(tower: Tower) -> None:
    encoder, running = encoder_of(tower, 10 * WIDTH * 4), prompt_of(picture(10))
    encoder.add("running", running, (0, 1, 0))
    assert work(encoder) == ["running"]
    encoder.add("next", prompt_of(picture(10, seed=1)), (0, 2, 0))
    assert work(encoder, nothing_runs=False) == []
    assert len(encoder) == 1
    del running
    gc.collect()
    assert work(encoder, nothing_runs=False) == ["next"]


def test_one_runs_however_large_it_is_if_nothing_else_does(tower: Tower) -> None:
    encoder = encoder_of(tower, 1)
    encoder.add("large", prompt_of(picture(10), picture(9, seed=1)), (0, 1, 0))
    assert work(encoder) == ["large"]


def test_a_failure_ends_its_own_prompt_alone(tower: Tower) -> None:
    encoder = encoder_of(tower)
    encoder.add("broken", prompt_of(picture(13)), (0, 1, 0))
    encoder.add("whole", prompt_of(picture(5)), (0, 2, 0))
    while encoder.run_piece(1.0, nothing_runs=True):
        pass
    assert [(end.prompt, end.error) for end in encoder.take_encoded()] == [
        ("broken", "an image could not be encoded: too little memory"),
        ("whole", None),
    ]


def test_what_is_dropped_is_not_encoded(tower: Tower) -> None:
    encoder = encoder_of(tower)
    encoder.add("gone", prompt_of(picture(50)), (0, 1, 0))
    encoder.add("stays", prompt_of(picture(5, seed=1)), (0, 2, 0))
    assert encoder.drop(lambda prompt: prompt == "gone") == ["gone"]
    assert len(encoder) == 1
    assert work(encoder) == ["stays"]
    assert tower.pieces == 5


def test_closing_frees_the_tower(tower: Tower) -> None:
    encoder = encoder_of(tower)
    encoder.add("one", prompt_of(picture(5)), (0, 1, 0))
    encoder.close()
    assert tower.closed
    assert len(encoder) == 0
