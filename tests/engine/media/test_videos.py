"""Videos against transformers: frames, pixels, embeddings, tokens, positions, and the text that follows."""

from __future__ import annotations

import asyncio
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

pytest.importorskip("torch")
pytest.importorskip("transformers")
pytest.importorskip("tidewheel._native")

import torch
from engine.media.test_families import made, one_thread
from engine.media.test_models import NUM_TOKENS, Answer, answers, engine_of, file_of, model
from plain_tower import PlainTower, run
from video_zoo import SETTINGS, VIDEO_CASES, VIDEOS, Video, chosen, expanded, features, processed, video
from vision_zoo import CASES, photo, tokenizer_of

from tidewheel.engine.core.engine import Engine
from tidewheel.engine.core.request import Request
from tidewheel.engine.media.families import vision_of
from tidewheel.engine.media.frames import sampled
from tidewheel.engine.media.media import Media, MediaFiles
from tidewheel.engine.media.vision import Vision
from tidewheel.engine.sampling_params import SamplingParams

__all__ = ["one_thread"]

APART = ("qwen3-vl", "qwen3.5", "glm4.1v")  # whose steps are images of their own
PLACEHOLDERS = {"glm4.1v": "<|begin_of_video|><|video|><|end_of_video|>"}


def seen_by(name: str) -> Vision:
    vision = vision_of(made(name).config, {**made(name).settings, "video_processor": SETTINGS})
    assert vision is not None
    return vision


def media_of(vision: Vision, given: Video) -> Media:
    tiles, layout = vision.process_video(given.taken)
    pixels = tuple(tile.pixels for tile in tiles)
    return Media(pixels, layout, vision.num_tokens(layout), b"", 0, 0, "video")


@pytest.mark.parametrize("name", VIDEO_CASES)
def test_pixels_and_embeddings_are_those_of_transformers(name: str) -> None:
    vision: Any = seen_by(name)
    tower = PlainTower(vision, made(name).stored)
    for title, given in VIDEOS.items():
        inputs = processed(name, given)
        media = media_of(vision, given)
        patches = np.concatenate([*vision._video_patches.pieces(media.tiles, 2)])
        assert patches.shape == inputs["pixel_values_videos"].shape, title
        assert np.abs(patches - inputs["pixel_values_videos"].numpy()).max() <= 1e-5, title
        wanted = features(made(name), inputs)
        ours = run(vision.encode(media, tower))
        assert ours.shape == wanted.shape == (media.num_tokens, (1 + len(vision.added_after)) * 32), title
        assert np.abs(ours - wanted).max() <= 1e-4 * max(1, np.abs(wanted).max()), title


@pytest.mark.parametrize("name", VIDEO_CASES)
def test_a_prompt_has_the_tokens_that_transformers_gives_it(name: str) -> None:
    vision, tokenizer = seen_by(name), tokenizer_of(CASES[name])
    assert vision.video is not None
    slot = tokenizer.token_to_id(vision.video.slot)
    for title, given in VIDEOS.items():
        expansion = vision.expansion(media_of(vision, given).layout)
        counts = iter(expansion.counts)
        ids = tokenizer.encode(expansion.text, add_special_tokens=False).ids
        ours = [token for one in ids for token in [one] * (next(counts) if one == slot else 1)]
        assert next(counts, None) is None
        wanted = tokenizer.encode(expanded(name, processed(name, given)), add_special_tokens=False).ids
        assert ours == wanted, title


@pytest.mark.parametrize("name", VIDEO_CASES)
def test_positions_are_those_of_transformers(name: str) -> None:
    """For videos that are no longer in time than in space: behind others, transformers 5 forgets their time."""
    vision, whole = seen_by(name), made(name).model.model
    for title in ("two frames", "three frames", "a frame"):
        inputs = processed(name, VIDEOS[title])
        (found,) = vision.positions([media_of(vision, VIDEOS[title]).layout]) or ()
        grid, counts = inputs["video_grid_thw"], [found.shape[1]]
        if name in APART:
            counts = [found.shape[1] // int(grid[0, 0])] * int(grid[0, 0])
        kinds = [kind for count in counts for kind in [0] * 3 + [2] * count] + [0] * 4
        expected, _ = whole.get_rope_index(
            torch.zeros((1, len(kinds)), dtype=torch.long),
            torch.tensor([kinds]),
            video_grid_thw=grid,
            second_per_grid_ts=inputs["second_per_grid_ts"],
        )
        ours, start, row = [], 0, 0
        for count in counts:
            ours += [np.tile(np.arange(start, start + 3), (3, 1)), found[:, row : row + count] + start + 3]
            start, row = int(ours[-1].max()) + 1, row + count
        ours.append(np.tile(np.arange(start, start + 4), (3, 1)))
        assert np.array_equal(np.concatenate(ours, axis=1), expected[:, 0].numpy()), title


def test_seconds_are_positions_in_time() -> None:
    vision = seen_by("qwen2.5-vl")
    (found,) = vision.positions([media_of(vision, video(6, 16, 16, fps=0.3)).layout]) or ()
    per_step = found.shape[1] // 3
    step = 4 * 2 / 0.3  # tokens per second, of two frames
    assert found[0].tolist() == [int(i * step) for i in range(3) for _ in range(per_step)]


@pytest.mark.parametrize(("count", "fps"), [(1, 1.0), (5, 2.0), (90, 30.0), (2000, 24.0), (7, 0.5), (30, 3.0)])
def test_frames_are_taken_as_by_transformers(count: int, fps: float) -> None:
    assert sampled(count, count / fps, 2.0, 768) == chosen("qwen3-vl", count, fps)


def test_the_bits_of_a_step_are_those_of_the_step_alone() -> None:
    vision = seen_by("qwen3-vl")
    tower = PlainTower(vision, made("qwen3-vl").stored)
    whole = video(4, 40, 40, 2.0)
    both = run(vision.encode(media_of(vision, whole), tower))
    first = media_of(vision, whole)
    alone = Media(first.tiles[:2], first.layout._replace(steps=1), first.num_tokens // 2, b"", 0, 0, "video")
    assert np.allclose(run(vision.encode(alone, tower)), both[: len(both) // 2], atol=1e-5)


def test_a_video_of_too_many_patches_is_refused_before_it_is_resized() -> None:
    vision = vision_of(
        made("qwen2-vl").config,
        {**made("qwen2-vl").settings, "video_processor": {"size": {"shortest_edge": 9, "longest_edge": 160_000}}},
    )
    assert vision is not None
    for count, patches in ((20, 100_000), (2, 10_000)):  # in all, and in a step
        with pytest.raises(ValueError, match=rf"{count} frames of 400 x 400 pixels.* are {patches} patches"):
            vision.process_video(Video((photo(400, 400),) * count, 2.0).taken)


async def asked(engine: Engine, text: str, sent: list[MediaFiles]) -> Request:
    reader, sampling = engine.media, SamplingParams(max_tokens=NUM_TOKENS, temperature=0, ignore_eos=True, logprobs=3)
    assert reader is not None
    media = [await reader.read(one, "video") for one in sent]
    text_and_slots = reader.expand(text, media, "prompt")
    ids, spans = reader.spread(engine.tokenizer.encode(text_and_slots.text, add_special_tokens=False), text_and_slots)
    return Request("request", ids, sampling, media=spans)


def expected(name: str, ids: list[int], given: Video, image: NDArray[np.uint8] | None) -> Answer:
    """What transformers says, without a cache."""
    from vision_zoo import processed as processed_image

    of_model, config = model(name).made, model(name).made.config
    inputs = processed(name, given)
    if image is not None:
        inputs |= processed_image(CASES[name], of_model, image)
    inputs.pop("video_metadata")
    if name != "qwen2.5-vl":
        inputs.pop("second_per_grid_ts")
    tokens, logprobs = [*ids], []
    for _ in range(NUM_TOKENS):
        row = torch.tensor([tokens])
        of_video = row == config["image_token_id" if image is None else "video_token_id"]
        of_image = torch.zeros_like(row) if image is None else (row == config["image_token_id"]).long()
        inputs["mm_token_type_ids"] = of_image + 2 * of_video
        of_model.model.model.rope_deltas = None
        with torch.no_grad():
            logits = of_model.model(input_ids=row, use_cache=False, **inputs).logits[0, -1]
        found = torch.log_softmax(logits.float(), -1)
        tokens.append(int(found.argmax()))
        logprobs.append(float(found.max()))
    return Answer(tokens[len(ids) :], logprobs, 0)


@pytest.mark.parametrize("name", VIDEO_CASES)
def test_prompts_with_videos_go_on_as_in_transformers(name: str) -> None:
    """A video, an image, and a text in one step; then the same again, of which much is cached."""
    model(name)
    (model(name).folder / "video_preprocessor_config.json").write_text(json_of(SETTINGS))
    given = video(5, 40, 60, 4.0)  # no longer in time than wide: see above
    image = None if name == "glm4.1v" else photo(33, 40, seed=9)  # transformers takes no two kinds for it
    sent = [MediaFiles(tuple(map(file_of, given.frames)), "video", given.fps)]
    text = f"see {PLACEHOLDERS.get(name, '<|vision_start|><|video_pad|><|vision_end|>')} and"
    if image is not None:
        sent.append(MediaFiles((file_of(image),)))
        text += " <|vision_start|><|image_pad|><|vision_end|> now"
    engine = engine_of(name)

    async def ask() -> tuple[Request, list[Answer]]:
        engine.start()
        request, plain = await asked(engine, text, sent), await asked(engine, "no video at all", [])
        found = await answers(engine, [request, plain])
        found += await answers(engine, [await asked(engine, text, sent)])
        await engine.stop()
        return request, found

    request, (first, _, again) = asyncio.run(ask())
    wanted = expected(name, list(request.prompt_token_ids), given, image)
    assert first.token_ids == wanted.token_ids
    assert first.logprobs == pytest.approx(wanted.logprobs, abs=1e-4)
    assert (again.token_ids, again.logprobs) == (first.token_ids, first.logprobs)
    assert again.num_cached > 0


def json_of(settings: Any) -> str:
    import json

    return json.dumps(settings)
