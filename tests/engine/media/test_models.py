"""Whole models with images: prompts go on as in transformers, whatever runs beside them."""

from __future__ import annotations

import asyncio
import functools
import io
import json
from collections.abc import Generator, Iterator, Sequence
from dataclasses import replace
from itertools import chain
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple
from unittest.mock import patch

import numpy as np
import pytest
from numpy.typing import NDArray

pytest.importorskip("torch")
pytest.importorskip("transformers")
pytest.importorskip("tidewheel._native")

import torch
from PIL import Image
from transformers.modeling_outputs import MoeCausalLMOutputWithPast
from vision_zoo import CASES, VisionCase, VisionModel, photo, processed, tokenizer_of, vision_model

from tidewheel.engine.core.engine import Engine
from tidewheel.engine.core.request import Request
from tidewheel.engine.core.stream import RequestStream
from tidewheel.engine.devices.tower import Rows, TowerExecutor
from tidewheel.engine.loading.load import load_engine
from tidewheel.engine.media.families.llava import LlavaVision
from tidewheel.engine.media.media import Media, MediaFiles
from tidewheel.engine.options import EngineOptions
from tidewheel.engine.outputs import FinishReason, RequestOutput
from tidewheel.engine.pipeline_options import PipelineOptions
from tidewheel.engine.sampling_params import SamplingParams

NUM_TOKENS = 6
PICTURES = [photo(61, 97, seed=7), photo(40, 30, seed=8)]


class Model(NamedTuple):
    case: VisionCase
    made: VisionModel
    folder: Path


@functools.cache
def model(name: str) -> Model:
    """A case whose language model knows all tokens of its tokenizer."""
    case = CASES[name]
    tokenizer = tokenizer_of(case)
    fields = {field: slot_of(case) for field in ("image_token_id", "image_token_index")}
    text = {**case.text, "vocab_size": tokenizer.get_vocab_size() + 1, "max_position_embeddings": 2048}
    if "<|video_pad|>" in case.tokens:
        fields["video_token_id"] = tokenizer.token_to_id("<|video_pad|>")
    case = case._replace(text=text, others={**case.others, **fields})
    folder = Path(_folders.name) / name
    if name in ("qwen3.5", "qwen3.5-moe", "minicpm-v4.7"):
        rope = {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 1.0}
        text["rope_parameters"] = {**rope, "mrope_section": [3, 3, 2], "mrope_interleaved": True}
    made = vision_model(case, folder)
    (folder / "preprocessor_config.json").write_text(json.dumps(made.settings))
    tokenizer.save(str(folder / "tokenizer.json"))
    return Model(case, made, folder)


def slot_of(case: VisionCase) -> int | None:
    """The token that stands for an image's embeddings."""
    return tokenizer_of(case).token_to_id(next(token for token in case.tokens if token in _SLOTS))


_folders = TemporaryDirectory()
# Whose images become one array.
_PADDED = (
    "granite4-vision",
    "llava-next",
    "llava-onevision",
    "granite-vision",
    "granite-docling",
    "pixtral",
    "mistral3",
)
_PADDED += ("minicpm-v2.5", "minicpm-v2.6", "minicpm-v4.6", "minicpm-v4.7")
_SLOTS = {"<|image|>", "<image>", "[IMG]", "<|image_pad|>", "<image_soft_token>", "<IMG_CONTEXT>", "<|media_pad|>"}
_SLOTS |= {"<|IMG_PATCH|>", "<|patch|>", "<|IMAGE_PLACEHOLDER|>", "<unk>"}


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def engine_of(name: str, device: str = "cpu", **options: Any) -> Engine:
    given = {"max_model_len": 2000, "max_num_seqs": 8, "max_num_batched_tokens": 2048, **options}
    return load_engine(EngineOptions(str(model(name).folder), device=device, dtype="float32", **given))


def file_of(image: NDArray[np.uint8]) -> bytes:
    content = io.BytesIO()
    Image.fromarray(image).save(content, "PNG")
    return content.getvalue()


async def asked(engine: Engine, text: str, images: Sequence[NDArray[np.uint8]], **fields: Any) -> Request:
    """A request for that text, in which each placeholder is one of the images."""
    reader, sampling = engine.media, SamplingParams(max_tokens=NUM_TOKENS, temperature=0, ignore_eos=True, logprobs=3)
    assert reader is not None
    media = [await reader.read(MediaFiles((file_of(image),)), "image") for image in images]
    expanded = reader.expand(text, media, "prompt")
    ids, spans = reader.spread(engine.tokenizer.encode(expanded.text, add_special_tokens=False), expanded)
    return Request("request", ids, fields.pop("sampling", sampling), media=spans, **fields)


class Answer(NamedTuple):
    token_ids: list[int]
    logprobs: list[float]
    num_cached: int


async def answers(engine: Engine, requests: Sequence[Request]) -> list[Answer]:
    async def one(request: Request) -> Answer:
        stream = engine.submit(request)
        outputs = [output async for output in stream]
        ids = [token for output in outputs for token in output.token_ids]
        logprobs = [entry.logprob for output in outputs for entry in output.logprobs or ()]
        return Answer(ids, logprobs, stream.choices[0].num_cached_tokens or 0)

    return await asyncio.gather(*map(one, requests))


@functools.cache
def expected(name: str, ids: tuple[int, ...], num_pictures: int) -> Answer:
    """What transformers says of the first so many pictures, without a cache of keys."""
    made = model(name).made
    inputs = _inputs(name, PICTURES[:num_pictures])
    slot = slot_of(model(name).case)
    tokens, logprobs = [*ids], []
    for _ in range(NUM_TOKENS):
        row = torch.tensor([tokens])
        kinds = (row == slot).long()
        if name == "gemma3":
            inputs["token_type_ids"] = kinds
        if name.startswith("gemma4"):
            inputs["mm_token_type_ids"] = kinds
        if name.startswith(("qwen", "glm", "paddle", "minicpm-v4.7")):
            inputs["mm_token_type_ids"] = kinds
            made.model.model.rope_deltas = None
        if name == "gemma4-unified":  # whose forward alone has other masks than generation, and than the original model
            inputs["attention_mask"] = made.model.create_masks_for_generate(
                config=made.model.config,
                inputs_embeds=torch.empty((1, len(tokens), 0)),
                attention_mask=None,
                cache=None,
                position_ids=torch.arange(len(tokens))[None],
                mm_token_type_ids=kinds,
            )
        # Llama 4 reads this of its language model, which gives no such thing.
        with torch.no_grad(), patch.object(MoeCausalLMOutputWithPast, "image_outputs", None, create=True):
            logits = made.model(input_ids=row, use_cache=False, **inputs).logits[0, -1]
        found = torch.log_softmax(logits.float(), -1)
        tokens.append(int(found.argmax()))
        logprobs.append(float(found.max()))
    return Answer(tokens[len(ids) :], logprobs, 0)


def _inputs(name: str, images: Sequence[NDArray[np.uint8]]) -> dict[str, Any]:
    """What the image processor gives for all images of a prompt."""
    case, made, _ = model(name)
    if name in _PADDED:
        given = [made.image_processor([*images], return_tensors="pt", input_data_format="channels_last")]
    else:
        given = [processed(case, made, image) for image in images]
    axis = 1 if name in ("smolvlm", "idefics3") else 0  # of images, behind that of prompts
    fields = ("pixel_values", "pixel_attention_mask", "image_grid_thw", "image_sizes", "spatial_shapes")
    fields += ("image_position_ids", "target_sizes")
    found = {field: [one[field] for one in given] for field in fields if field in given[0]}
    return {
        field: torch.cat(values, axis) if isinstance(values[0], torch.Tensor) else [*chain(*values)]
        for field, values in found.items()
    }


def text_with(name: str, count: int) -> str:
    prompt = model(name).case.prompt
    return "first: " + " then ".join([prompt] * count) + " done"


# The torch reference computes parts of towers in tests/engine/devices/test_towers.py; here, those unlike others.
_IN_TORCH = ("gemma3", "gemma4", "llama4", "qwen2.5-vl", "qwen3-vl", "smolvlm")
_RUNS = [
    pytest.param(name, device, marks=[pytest.mark.sweep] * (device == "torch" and name not in _IN_TORCH))
    for name in CASES
    for device in ("cpu", "torch")
]


@pytest.mark.parametrize(("name", "device"), _RUNS)
def test_prompts_with_images_go_on_as_in_transformers(name: str, device: str) -> None:
    engine = engine_of(name, device)
    # transformers gives OneVision only the whole image where there are several.
    asking = [PICTURES[:1], PICTURES[:1] if name == "llava-onevision" else PICTURES]

    async def ask() -> tuple[list[Request], list[Answer]]:
        engine.start()
        requests = [await asked(engine, text_with(name, len(images)), images) for images in asking]
        beside = await asked(engine, "no image at all", [])
        found = await answers(engine, [*requests, beside])
        await engine.stop()
        return requests, found

    requests, found = asyncio.run(ask())
    for request, answer, images in zip(requests, found[:-1], asking, strict=True):
        wanted = expected(name, tuple(request.prompt_token_ids), len(images))
        assert answer.token_ids == wanted.token_ids
        assert answer.logprobs == pytest.approx(wanted.logprobs, abs=1e-4)


@pytest.mark.parametrize("name", ["smolvlm", "qwen2-vl", "qwen3-vl", "qwen3.5", "gemma3", "gemma4", "minicpm-v4.7"])
def test_nothing_beside_a_prompt_changes_its_bits(name: str) -> None:
    """Not how it is cut, not what runs beside it, not what is cached."""

    async def ask(engine: Engine) -> list[Answer]:
        engine.start()
        alone = await asked(engine, text_with(name, 2), PICTURES)
        found = await answers(engine, [alone])
        others = [await asked(engine, text_with(name, 1), [photo(50, 50 + i, seed=i)]) for i in range(4)]
        text = [await asked(engine, f"text number {i} and more of it", []) for i in range(3)]
        crowd = await answers(engine, [*others, replace(alone, cache_salt="other"), *text, replace(alone)])
        found += [crowd[len(others)], crowd[-1]]
        found += await answers(engine, [alone])
        await engine.stop()
        return found

    whole = asyncio.run(ask(engine_of(name)))
    cut = asyncio.run(ask(engine_of(name, max_num_batched_tokens={"gemma3": 40, "gemma4": 80}.get(name, 24))))
    assert len({(*answer.token_ids, *answer.logprobs) for answer in [*whole, *cut]}) == 1
    assert whole[0].num_cached == 0
    assert whole[-1].num_cached > 0


def test_features_for_layers_that_a_model_has_not_are_not_computed(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    made, folder = model("granite4-vision").made, model("granite4-vision").folder
    for file in folder.iterdir():
        (tmp_path / file.name).symlink_to(file)
    (tmp_path / "config.json").unlink()
    (tmp_path / "config.json").write_text(json.dumps({**made.config, "spatial_target_layers": [1, 5, 4, 7]}))
    engine = load_engine(EngineOptions(str(tmp_path), dtype="float32", max_model_len=2000))
    assert engine.media is None
    assert "after layer 6, and the model has 6" in caplog.text


def test_stages_give_the_bits_of_one_process() -> None:
    async def ask(engine: Engine) -> list[tuple[list[int], list[float]]]:
        engine.start()
        requests = [await asked(engine, text_with("qwen3-vl", count), PICTURES[:count]) for count in (2, 1, 0)]
        found = await answers(engine, requests)
        await engine.stop()
        return [(answer.token_ids, answer.logprobs) for answer in found]

    assert asyncio.run(ask(engine_of("qwen3-vl", pipeline=PipelineOptions(2)))) == asyncio.run(
        ask(engine_of("qwen3-vl"))
    )


def test_the_same_words_with_another_picture_share_what_is_before_it() -> None:
    async def ask(engine: Engine) -> list[int]:
        engine.start()
        text = "words before the picture, forty of them at least" + text_with("llava", 1)
        cached = []
        for seed in (1, 2, 1):
            (answer,) = await answers(engine, [await asked(engine, text, [photo(61, 97, seed=seed)])])
            cached.append(answer.num_cached)
        await engine.stop()
        return cached

    none, before, all_of_it = asyncio.run(ask(engine_of("llava")))
    assert none == 0
    assert 0 < before < all_of_it


def test_a_prompt_that_is_not_wanted_any_more_is_not_encoded() -> None:
    async def ask(engine: Engine) -> tuple[int, list[Answer]]:
        engine.start()
        gone = await asked(engine, text_with("llava", 1), [photo(50, 50, seed=20)])
        stays = await asked(engine, text_with("llava", 1), PICTURES[:1])
        stream = engine.submit(gone)
        stream.abort()
        found = await answers(engine, [stays])
        waiting = engine.stats().num_waiting
        await engine.stop()
        return waiting, found

    waiting, (answer,) = asyncio.run(ask(engine_of("llava")))
    assert waiting == 0
    assert len(answer.token_ids) == NUM_TOKENS


def test_an_image_that_cannot_be_encoded_fails_its_own_request(monkeypatch: pytest.MonkeyPatch) -> None:
    async def ask(engine: Engine) -> tuple[list[RequestOutput], list[Answer]]:
        engine.start()
        broken = await asked(engine, text_with("llava", 1), [photo(50, 50, seed=21)])
        whole = await asked(engine, text_with("llava", 1), PICTURES[:1])
        encode = LlavaVision.encode

        def failing(vision: LlavaVision, media: Media, tower: TowerExecutor) -> Generator[None, None, Rows]:
            if media is broken.media[0].media:
                raise MemoryError("none is left")
            return (yield from encode(vision, media, tower))

        monkeypatch.setattr(LlavaVision, "encode", failing)
        ends, found = await asyncio.gather(_outputs(engine.submit(broken)), answers(engine, [whole]))
        await engine.stop()
        return ends, found

    ends, (answer,) = asyncio.run(ask(engine_of("llava")))
    assert ends[-1].finish_reason is FinishReason.ERROR
    assert len(answer.token_ids) == NUM_TOKENS


async def _outputs(stream: RequestStream) -> list[RequestOutput]:
    return [output async for output in stream]
