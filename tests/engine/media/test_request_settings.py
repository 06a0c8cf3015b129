"""Settings of image processors: what options and requests change of them, and what they may not."""

from __future__ import annotations

import asyncio
import functools
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")

from engine.media.pictures import processed_by
from engine.media.test_models import file_of, model
from plain_tower import PlainTower, run
from vision_zoo import CASES, VisionModel, photo, vision_model

from tidewheel.engine.declaring.option import OptionError
from tidewheel.engine.errors import InvalidRequestError
from tidewheel.engine.loading.vision import OpenedVision, find_vision
from tidewheel.engine.media.families import vision_of
from tidewheel.engine.media.media import Media, MediaFiles
from tidewheel.engine.media.options import MediaOptions
from tidewheel.engine.media.reader import MediaReader
from tidewheel.engine.media.request_settings import RequestSettings, idle_fields, overridden
from tidewheel.engine.media.vision import Vision
from tidewheel.engine.options import EngineOptions
from tidewheel.engine.weights import open_source

PARAM = "mm_processor_kwargs"


@functools.cache
def made(name: str) -> VisionModel:
    with TemporaryDirectory() as folder:
        return vision_model(CASES[name], Path(folder))


def seen_by(name: str, **fields: Any) -> Vision:
    vision = vision_of(made(name).config, overridden(made(name).settings, fields))
    assert vision is not None
    return vision


def settings_of(name: str) -> RequestSettings:
    config, processor = made(name).config, made(name).settings
    return RequestSettings(seen_by(name), lambda fields: vision_of(config, overridden(processor, fields)))


def tokens(vision: Vision, height: int = 60, width: int = 90) -> int:
    return vision.num_tokens(processed_by(vision, photo(height, width))[1])


@pytest.mark.parametrize(
    ("name", "fields"),
    [
        ("smolvlm", {"do_image_splitting": False}),
        ("smolvlm", {"size": {"longest_edge": 64}}),
        ("internvl", {"max_patches": 2}),
        ("lfm2-vl", {"max_tiles": 2}),
        ("pixtral", {"size": {"longest_edge": 24}}),
        ("llama4", {"max_patches": 2}),
    ],
)
def test_other_families_have_settings_of_their_own(name: str, fields: dict[str, Any]) -> None:
    """The model's own vision knows what follows from a layout."""
    usual, image = seen_by(name), photo(90, 140)
    tiles, layout = processed_by(settings_of(name).vision(fields, PARAM), image)
    media = Media(tiles, layout, usual.num_tokens(layout), b"", 0, 0)
    assert media.num_tokens < usual.num_tokens(processed_by(usual, image)[1])
    assert sum(usual.expansion(layout).counts) == media.num_tokens
    assert len(run(usual.encode(media, PlainTower(usual, made(name).stored)))) == media.num_tokens


@pytest.mark.parametrize("name", ["qwen2-vl", "qwen3-vl", "glm4.1v", "paddleocr-vl"])
def test_a_request_may_have_smaller_images(name: str) -> None:
    settings = settings_of(name)
    usual, smaller = tokens(seen_by(name)), settings.vision({"max_pixels": 700}, PARAM)
    assert tokens(smaller) < usual
    by_size = settings.vision({"size": {"shortest_edge": 256, "longest_edge": 700}}, PARAM)
    assert by_size.settings == smaller.settings
    assert settings.vision({"max_pixels": 700}, PARAM) is smaller


def test_a_request_may_have_a_smaller_budget_of_tokens() -> None:
    config, processor = made("gemma4").config, {**made("gemma4").settings, "max_soft_tokens": 140}
    usual = vision_of(config, processor)
    assert usual is not None
    settings = RequestSettings(usual, lambda fields: vision_of(config, overridden(processor, fields)))
    assert tokens(settings.vision({"max_soft_tokens": 70}, PARAM)) <= 70 < tokens(usual) <= 140


def test_a_size_takes_the_place_of_numbers_of_pixels() -> None:
    processor = {"min_pixels": 1, "max_pixels": 2, "video_processor": {"max_pixels": 3, "fps": 4}}
    size = {"longest_edge": 9}
    assert overridden(processor, {"size": size}) == {"size": size, "video_processor": {"size": size, "fps": 4}}
    assert overridden(processor, {"max_pixels": 5}) == {
        "min_pixels": 1,
        "max_pixels": 5,
        "video_processor": {"max_pixels": 5, "fps": 4},
    }


def test_settings_of_images_alone_leave_those_of_videos() -> None:
    fields = {"size": {"longest_edge": 9}}
    both = {"max_pixels": 2, "video_processor": {"max_pixels": 3}}
    assert overridden(both, fields, videos=False) == {**fields, "video_processor": {"max_pixels": 3}}
    alone = {"max_pixels": 2}
    assert overridden(alone, fields, videos=False) == {**fields, "video_processor": alone}


@pytest.mark.parametrize(
    ("name", "fields", "says"),
    [
        ("qwen2-vl", {"image_mean": 0.5}, "'image_mean' is not supported.*max_pixels, min_pixels, size"),
        ("qwen2-vl", {"max_pixels": "many"}, "max_pixels must be a number"),
        ("qwen2-vl", {"size": {"a": {}}}, "size must be a number"),
        ("qwen2-vl", {"size": {str(i): i for i in range(9)}}, "size must be a number"),
        ("qwen2-vl", {"min_pixels": 10**6}, "least number of pixels"),
        ("qwen2-vl", {"max_pixels": 10**6}, "this server has room for"),
        ("qwen2-vl", {"max_pixels": 10**9}, "patches"),
        ("gemma4", {"max_soft_tokens": 140}, "this server has room for"),
        ("gemma4", {"max_soft_tokens": 99}, "one of 70, 140, 280, 560, 1120"),
        ("gemma3", {"max_pixels": 10}, "has no settings for this model"),
        ("llava", {"size": 8}, "has no settings for this model"),
    ],
)
def test_what_a_request_may_not_change(name: str, fields: dict[str, Any], says: str) -> None:
    with pytest.raises(InvalidRequestError, match=says) as refused:
        settings_of(name).vision(fields, PARAM)
    assert refused.value.param == PARAM


def test_an_image_of_other_settings_is_another_one() -> None:
    """In what is kept, too; its tokens are those of its layout."""
    reader = MediaReader(seen_by("qwen2-vl"), {"image": 5}, for_requests=settings_of("qwen2-vl"), cache_bytes=2**20)
    sent = MediaFiles((file_of(photo(60, 90)),))

    async def read(fields: dict[str, Any] | None) -> Media:
        return await reader.read(sent, "image", fields, PARAM)

    async def read_all() -> list[Media]:
        given: list[dict[str, Any] | None] = [
            None,
            {"max_pixels": 700},
            None,
            {"max_pixels": 700},
            {"max_pixels": 1920},
        ]
        return [await read(fields) for fields in given]

    usual, smaller, *others = asyncio.run(read_all())
    reader.close()
    assert others[:2] == [usual, smaller]
    assert smaller.num_tokens < usual.num_tokens
    assert len({usual.digest, smaller.digest}) == 2
    assert others[2].digest == usual.digest  # which has the same settings in other words


@pytest.mark.parametrize(
    ("name", "least", "most"),
    [("qwen2-vl", None, 9), ("qwen2-vl", 16, None), ("glm4.1v", 4, 9), ("lfm2-vl", 5, 9), ("gemma4", 100, None)],
)
def test_images_have_as_many_tokens_as_options_say(name: str, least: int | None, most: int | None) -> None:
    vision = seen_by(name, **seen_by(name).fields_of_tokens(least, most))
    for size in ((20, 30),) if name == "lfm2-vl" else ((20, 30), (200, 300)):  # its large images have tiles
        assert (least or 0) <= tokens(vision, *size) <= (most or 10**6)


def found(name: str, **options: Any) -> OpenedVision | None:
    folder = str(model(name).folder)
    return find_vision(EngineOptions(folder, media=MediaOptions(**options)), open_source(folder), made(name).config)


def test_a_model_is_loaded_with_the_settings_of_options() -> None:
    counted = []
    for options in ({}, {"mm_processor_kwargs": {"max_pixels": 640}}, {"image_max_tokens": 10}):
        opened = found("qwen2-vl", **options)
        assert opened is not None
        counted.append(tokens(opened.vision))
        assert tokens(opened.for_requests.vision({"max_pixels": 400}, PARAM)) <= 6
    assert counted[0] > counted[1] == counted[2]


@pytest.mark.parametrize("name", ["smolvlm", "qwen2.5-vl", "gemma3", "internvl"])
def test_settings_of_options_that_no_processor_reads_are_told(name: str) -> None:
    config, processor = made(name).config, made(name).settings
    fields = {"image_means": 0, "image_mean": [0.5] * 3, "resample": 3}
    assert idle_fields(processor, fields, lambda settings: vision_of(config, settings)) == ["image_means"]


def test_wrong_settings_of_options_are_told(caplog: pytest.LogCaptureFixture) -> None:
    with pytest.raises(OptionError, match=r"^--mm-processor-kwargs: max_pixels must be a positive integer.*got 'x'"):
        found("qwen2-vl", mm_processor_kwargs={"max_pixels": "x"})
    assert found("qwen2-vl", mm_processor_kwargs={"max_pixel": 640}) is not None
    assert "--mm-processor-kwargs: 'max_pixel' would change nothing" in caplog.text


def test_images_of_one_size_have_as_many_tokens_as_they_have() -> None:
    with pytest.raises(OptionError, match="--image-max-tokens: the model's image processor does not count tokens"):
        found("gemma3", image_max_tokens=4)
    with pytest.raises(OptionError, match="at most 70, 140, 280, 560, 1120 tokens, and none fits"):
        found("gemma4", image_max_tokens=69)
