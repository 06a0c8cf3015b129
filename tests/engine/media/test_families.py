"""Each family's images against transformers: pixels, embeddings, tokens and positions."""

from __future__ import annotations

import functools
import pickle
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, cast

import numpy as np
import pytest
from numpy.typing import NDArray

pytest.importorskip("torch")
pytest.importorskip("transformers")

import torch
from engine.media.pictures import processed_by
from plain_tower import PlainTower, run, tower_weights
from vision_zoo import (
    CASES,
    IMAGES,
    TorchvisionProcessor,
    VisionModel,
    expanded,
    features,
    photo,
    processed,
    processor_of,
    tokenizer_of,
    vision_model,
)

from tidewheel.engine.errors import InvalidRequestError, ModelError
from tidewheel.engine.media.families import FAMILIES, vision_of
from tidewheel.engine.media.families.phi3v import _Numbers
from tidewheel.engine.media.layouts import layout_of, plain_layout
from tidewheel.engine.media.media import Media
from tidewheel.engine.media.picture import Picture
from tidewheel.engine.media.placeholders import expand, spread
from tidewheel.engine.media.processing import (
    MAX_PATCHES,
    Patches,
    block_places,
    centre_crop,
    gelu,
    nearest,
    normalized,
    resized_bicubic,
)
from tidewheel.engine.media.prompt_media import PromptMedia
from tidewheel.engine.media.vision import Vision
from tidewheel.engine.models.families import FAMILIES as FAMILIES_OF_TEXT
from tidewheel.engine.models.spec import AttentionSpec
from tidewheel.engine.models.text_part import WRAPPERS

IN_TRANSFORMERS = [name for name, case in CASES.items() if case.published is None]
NARROW = ("granite4-vision", "mistral3", "pixtral", "llava-next", "llava-onevision", "granite-vision", "lfm2-vl")
NARROW += ("minicpm-v2.5", "minicpm-v2.6", "minicpm-v4.6", "minicpm-v4.7", "phi3-vision")
_GRANITE = {"model_type": "granite", "hidden_size": 32}
GRIDS = ("qwen", "glm", "paddle")  # whose images have rows and columns in the decoder
SIZES = ((1, 1), (3, 9), (32, 32), (33, 31), (64, 64), (97, 61), (100, 300), (31, 200), (7, 8), (512, 100), (90, 91))


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Models so small gain nothing from more, and wait for each other."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@functools.cache
def made(name: str) -> VisionModel:
    with TemporaryDirectory() as folder:
        return vision_model(CASES[name], Path(folder))


def seen_by(name: str) -> Vision:
    vision = vision_of(made(name).config, made(name).settings)
    assert vision is not None
    return vision


def media_of(vision: Vision, image: NDArray[np.uint8]) -> Media:
    tiles, layout = processed_by(vision, image)
    assert all(tile.dtype == np.uint8 and tile.ndim == 3 and tile.shape[2] == 3 for tile in tiles)
    hash(layout)
    return Media(tiles, layout, vision.num_tokens(layout), b"", image.shape[1], image.shape[0])


def images_of(name: str) -> Iterator[tuple[str, NDArray[np.uint8]]]:
    for title, image in IMAGES.items():
        nothing_left = name in ("mistral3", "pixtral", "lfm2-vl") and title == "tall"
        # Of one embedding transformers makes as many as it has numbers, and fails.
        if not nothing_left and not (name == "mistral3" and title == "a pixel"):
            yield title, image


@pytest.mark.parametrize("name", CASES)
def test_pixels_are_those_of_transformers(name: str) -> None:
    case, vision = CASES[name], cast(Any, seen_by(name))
    for title, image in images_of(name):
        inputs = processed(case, made(name), image)
        if name == "phi3-vision":  # whose image is in one piece there
            inputs["pixel_values"] = torch.stack(
                [row for rows in inputs["pixel_values"][0].split(32, 1) for row in rows.split(32, 2)]
            )
        expected = inputs["pixel_values"].numpy()
        if "spatial_shapes" in inputs:
            expected = expected[inputs["pixel_attention_mask"].bool().numpy()]
        if "image_position_ids" in inputs:
            expected = expected[(inputs["image_position_ids"] != -1).all(-1).numpy()]
        if case.model == "Gemma4ForConditionalGeneration":  # which does this itself
            expected = 2 * (expected - 0.5)
        tiles = processed_by(vision, image)[0]
        patches = vision.patches if name.startswith(GRIDS) else vision._patches
        if name == "paddleocr-vl":  # whose patches are row by row
            expected = expected.reshape(len(expected), -1)
            rows, columns = block_places(*patches.grid(tiles[0]), patches.merge)
            expected = expected[rows * (columns.max() + 1) + columns]
        if "target_sizes" in inputs:  # all patches side by side
            expected = expected.reshape(3, patches.size, -1, patches.size).transpose(2, 0, 1, 3)
        if expected.ndim == 2 or expected.shape[-1] == patches.size:
            expected = expected.reshape(len(expected), -1)
            ours = np.concatenate([*patches.pieces(tiles)])
        else:
            expected = expected.reshape(-1, *expected.shape[-3:])
            ours = np.stack([patches.pixels.of(tile).transpose(2, 0, 1) for tile in tiles])
        assert ours.shape == expected.shape, title
        assert np.abs(ours - expected).max() <= 1e-5, title


@pytest.mark.parametrize("name", CASES)
def test_embeddings_are_those_of_transformers(name: str) -> None:
    vision = seen_by(name)
    tower = PlainTower(vision, made(name).stored)
    for title, image in images_of(name):
        expected = features(CASES[name], made(name), processed(CASES[name], made(name), image))
        media = media_of(vision, image)
        ours = run(vision.encode(media, tower))
        width = CASES[name].text.get("hidden_size")
        assert ours.shape == expected.shape == (media.num_tokens, (1 + len(vision.added_after)) * width), title
        assert ours.dtype == np.float32
        assert np.abs(ours - expected).max() <= 1e-4 * max(1, np.abs(expected).max()), title
    assert not tower.unused()


@pytest.mark.parametrize("name", CASES)
def test_a_prompt_has_the_tokens_that_transformers_gives_it(name: str) -> None:
    case, vision, tokenizer = CASES[name], seen_by(name), tokenizer_of(CASES[name])
    slot = tokenizer.token_to_id(vision.slot)
    assert case.prompt.count(vision.placeholder) == 1
    for height, width in SIZES:
        image = photo(height, width)
        layout = processed_by(vision, image)[1]
        expansion = vision.expansion(layout)
        text = case.prompt.replace(vision.placeholder, expansion.text)
        counts = iter(expansion.counts)
        ours = [
            token
            for one in tokenizer.encode(text, add_special_tokens=False).ids
            for token in [one] * (next(counts) if one == slot else 1)
        ]
        assert next(counts, None) is None
        assert sum(expansion.counts) == vision.num_tokens(layout)
        whole = expanded(case, processed(case, made(name), image))
        expected = tokenizer.encode(case.prompt.replace(vision.placeholder, whole), add_special_tokens=False).ids
        assert ours == expected, (height, width)


@pytest.mark.parametrize("name", [name for name in CASES if name.startswith(GRIDS)])
def test_positions_are_those_of_transformers(name: str) -> None:
    vision, model = seen_by(name), made(name).model
    layouts = [processed_by(vision, photo(*size))[1] for size in ((40, 60), (90, 30))]
    sections: list[int] = [0] * 5
    for layout in layouts:
        sections += [1] * vision.num_tokens(layout) + [0] * 3
    grids = torch.tensor([[1, *layout] for layout in layouts])  # type: ignore[misc]
    expected, delta = model.model.get_rope_index(
        torch.zeros((1, len(sections)), dtype=torch.long), torch.tensor([sections]), image_grid_thw=grids
    )
    found = vision.positions(layouts)
    assert found is not None
    ours, start = [np.tile(np.arange(5), (3, 1))], 5
    for positions in found:
        assert positions.dtype == np.int32
        after = start + int(positions.max()) + 1
        ours += [positions + start, np.tile(np.arange(after, after + 3), (3, 1))]
        start = after + 3
    joined = np.concatenate(ours, axis=1)
    assert np.array_equal(joined, expected[:, 0].numpy())
    assert int(delta) == start - len(sections)


@pytest.mark.parametrize("numbered", [True, False])
def test_positions_on_a_canvas_are_those_of_transformers(numbered: bool) -> None:
    """Of images with slices and without, with line breaks and nothing at all between them, first and last."""
    name = "minicpm-v4.7"
    tokenizer = tokenizer_of(CASES[name])
    vision = vision_of(made(name).config, {**made(name).settings, "use_image_id": numbered})
    assert vision is not None
    slot = tokenizer.token_to_id(vision.slot)
    assert slot is not None
    pictures = [photo(*size) for size in ((30, 30), (90, 91), (30, 120), (97, 21), (64, 300), (16, 48))]
    media = [media_of(vision, picture) for picture in pictures]
    assert len({(layout.rows, layout.columns) for layout in (one.layout for one in media)}) > 3
    text = "{}{}\n{}\nthree {}\n\n{}\nfive{}".format(*[vision.placeholder] * 6)
    for prompt in (text, f"{text}\n", f"{text} and more", f"before\n{text}\n\n what"):
        expanded = expand(vision, prompt, media, "prompt")
        ids = tokenizer.encode(expanded.text, add_special_tokens=False).ids
        ids, spans = spread(vision, {"image": slot}, ids, expanded)
        kinds = torch.tensor([ids]) == slot
        grids = [grid for one in media for grid in sizes_of(vision, one)]
        expected, delta = made(name).model.model.get_rope_index(
            torch.tensor([ids]), mm_token_type_ids=kinds.int(), target_sizes=torch.tensor(grids)
        )
        ours = PromptMedia(spans, np.array(ids, np.int32), vision)
        assert ours.rope is not None
        assert np.array_equal(ours.rope, expected[:, 0].numpy())
        assert ours.delta == int(delta)
        named = {position for position, _ in ours.identity}
        assert named >= {span.start - 1 for span in spans}
        assert (len(ids) in named) == (not prompt[-1].isalpha())


def sizes_of(vision: Any, media: Media) -> list[tuple[int, int]]:
    """Rows and columns of the patches of each tile."""
    return [vision._patches.grid(tile) for tile in media.tiles]


def test_pages_that_would_become_small_have_more_tiles() -> None:
    from transformers import GraniteDoclingImageProcessorPil

    sizes = [(60, 200), (60, 60), (100, 180), (20, 300), (400, 700), (33, 64), (500, 90)]
    rules: list[dict[str, float]] = [
        {"dense_max_patches": 12, "dense_max_scale": 0.7},
        {"dense_max_patches": 12, "dense_min_aspect": 1.5, "dense_max_aspect": 4.0},
        {"dense_max_patches": 12, "dense_max_scale": 0.7, "dense_min_aspect": 1.5},
        {"dense_max_patches": 12},
        {"dense_max_scale": 0.7},
    ]
    found = set()
    for rule in rules:
        vision = vision_of(made("granite-docling").config, {**made("granite-docling").settings, **rule})
        assert vision is not None
        processor = GraniteDoclingImageProcessorPil(**CASES["granite-docling"].settings, **rule)
        grids = [processed_by(vision, photo(*size))[1] for size in sizes]
        assert grids == [processor.get_tile_grid(*size) for size in sizes]
        found.add(tuple(grids))
    assert len(found) > 2


def test_images_of_a_prompt_are_numbered_if_the_model_wants_it() -> None:
    case, vision = CASES["minicpm-v4.6"], seen_by("minicpm-v4.6")
    prompt, media = f"a{vision.placeholder}b{vision.placeholder}c", media_of(vision, IMAGES["photo"])
    expansions = [vision.expansion(media.layout).text] * 2
    numbered = processor_of(case)._prepend_local_ids([prompt], expansions, vision.placeholder)
    assert expand(vision, prompt, [media] * 2, "prompt").text == f"a{numbered[0]}b{numbered[1]}c"
    plain = vision_of(made("minicpm-v4.6").config, {**made("minicpm-v4.6").settings, "use_image_id": False})
    assert plain is not None
    assert expand(plain, prompt, [media] * 2, "prompt").text == f"a{expansions[0]}b{expansions[1]}c"


def test_images_of_a_prompt_may_have_numbers_in_it() -> None:
    vision = seen_by("phi3-vision")
    first, second = (media_of(vision, photo(*size)) for size in ((32, 32), (32, 64)))
    texts = [vision.expansion(media.layout).text for media in (first, second)]
    expanded = expand(vision, "a<|image_1|>b<|image_2|>c<|image_3|>", [first, second], "prompt")
    assert expanded.text == f"a{texts[0]}b{texts[1]}c<|image_3|>"
    assert [slot.media for slot in expanded.slots] == [first, second]
    assert expand(vision, "a<|image|>b<|image_1|>", [first], "prompt").text == f"a{texts[0]}b<|image_1|>"
    for text, found, missing in (("a<|image_2|>b<|image_1|>c", 1, 2), ("a<|image_2|>b", 0, 1), ("a<|image_1|>b", 1, 2)):
        says = rf"2 images, but only {found} of their marks .* '<\|image_{missing}\|>' must come next"
        with pytest.raises(InvalidRequestError, match=says):
            expand(vision, text, [first, second], "prompt")
    with pytest.raises(InvalidRequestError, match="shows 0"):
        expand(vision, "a", [first, second], "prompt")


def test_numbers_of_a_resized_image_do_not_depend_on_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    pixels, image = seen_by("phi3-vision")._patches.pixels, photo(300, 50)  # type: ignore[attr-defined]
    (whole,) = resized_bicubic(pixels, image, 32, 40)
    for most, count in ((8 * image.shape[1], 4), (1, 32)):
        monkeypatch.setattr("tidewheel.engine.media.processing._PIXELS", most)
        pieces = [*resized_bicubic(pixels, image, 32, 40)]
        assert len(pieces) == count
        np.testing.assert_array_equal(np.concatenate(pieces), whole)


def test_numbers_are_cut_as_levels_are() -> None:
    pixels, image = seen_by("phi3-vision")._patches.pixels, photo(35, 34)  # type: ignore[attr-defined]
    (ours,) = _Numbers(pixels, 4).pieces([pixels.of(image)])
    np.testing.assert_array_equal(ours, np.concatenate([*Patches(pixels, 4).pieces([image])]))


def test_minicpm_merges_patches_once_if_it_should() -> None:
    name, image = "minicpm-v4.6", IMAGES["photo"]
    settings = {**made(name).settings, "downsample_mode": "4x"}
    vision = vision_of(made(name).config, settings)
    assert vision is not None
    inputs = made(name).image_processor(
        [image], return_tensors="pt", input_data_format="channels_last", downsample_mode="4x"
    )
    media = media_of(vision, image)
    assert sizes_of(vision, media) == [tuple(size) for size in inputs["target_sizes"].tolist()]
    with torch.no_grad():
        outputs = made(name).model.get_image_features(
            inputs["pixel_values"], target_sizes=inputs["target_sizes"], downsample_mode="4x"
        )
    ours = run(vision.encode(media, PlainTower(vision, made(name).stored)))
    assert np.abs(ours - torch.cat(outputs.pooler_output).numpy()).max() <= 1e-4


@pytest.mark.parametrize("name", CASES)
def test_only_some_see_both_ways_or_have_positions_of_their_own(name: str) -> None:
    vision = seen_by(name)
    assert vision.two_way == (name in ("gemma3", "gemma4", "gemma4-unified"))
    assert (vision.positions([]) is None) == (not name.startswith((*GRIDS, "minicpm-v4.7")))
    early = dict.fromkeys(("qwen3-vl", "qwen3-vl-moe", "granite-docling"), (0, 1))
    early["granite4-vision"] = (0, 1, 2, 3, 4, 5)
    assert vision.added_after == early.get(name, ())
    assert vision.embedding_multiplier == (3 if name.startswith("granite-") else 1)
    hash(vision.settings)
    copy = pickle.loads(pickle.dumps(vision))  # for the process that decodes images
    assert copy.settings == vision.settings
    assert np.array_equal(processed_by(copy, IMAGES["photo"])[0][0], processed_by(vision, IMAGES["photo"])[0][0])


@pytest.mark.parametrize("name", CASES)
def test_bits_do_not_depend_on_other_images(name: str) -> None:
    """What is computed outside of the tower's parts is computed row by row."""
    vision = seen_by(name)
    tower = PlainTower(vision, made(name).stored)
    media = media_of(vision, IMAGES["photo"])
    first = run(vision.encode(media, tower))
    run(vision.encode(media_of(vision, IMAGES["large"]), tower))
    assert np.array_equal(run(vision.encode(media, tower)), first)


def renamed(name: str, stored: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """The weights by the names that other versions of transformers give them."""
    bare = {key.removeprefix("model."): tensor for key, tensor in stored.items()}
    yield bare
    yield {f"model.{key}": tensor for key, tensor in bare.items()}
    if "vision_tower.encoder.layers.0.layer_norm1.weight" in bare and not name.startswith("minicpm"):
        inner = {key.replace("vision_tower.", "vision_tower.vision_model."): bare[key] for key in bare}
        yield inner
        yield {f"model.{key}": tensor for key, tensor in inner.items()}


@pytest.mark.parametrize("name", IN_TRANSFORMERS)
def test_weights_are_found_by_other_names(name: str) -> None:
    vision, stored = seen_by(name), made(name).stored
    expected = tower_weights(vision, stored)
    for other in renamed(name, stored):
        found = tower_weights(vision, other)
        assert all(torch.equal(found[key], expected[key]) for key in expected)


@pytest.mark.parametrize(
    ("name", "config", "settings", "says"),
    [
        ("smolvlm", {"scale_factor": 3}, {}, "scale_factor"),
        ("smolvlm", {}, {"size": {"longest_edge": 10**5}}, "longest_edge"),
        ("smolvlm", {}, {"size": {"height": 5, "width": 5}}, "longest_edge"),
        ("smolvlm", {}, {"size": {"longest_edge": 4096}, "max_image_size": {"longest_edge": 8}}, "patches"),
        ("smolvlm", {}, {"do_resize": False}, "do_resize"),
        ("smolvlm", {}, {"image_std": [0, 1, 1]}, "image_std"),
        ("smolvlm", {}, {"resample": 9}, "resample"),
        ("smolvlm", {"vision_config": 3}, {}, "vision_config"),
        ("llava", {}, {"crop_size": 48}, "crop_size"),
        ("llava", {}, {"size": {"shortest_edge": 2**20}}, "shortest_edge"),
        ("llava", {"vision_feature_layer": 9}, {}, "vision_feature_layer"),
        ("llava", {"vision_feature_layer": 0}, {}, "vision_feature_layer"),
        ("llava", {"vision_config": {"model_type": "dinov2"}}, {}, "model_type"),
        ("llava-next", {"image_grid_pinpoints": [[32, 33]]}, {}, "image_grid_pinpoints"),
        ("llava-next", {}, {"image_grid_pinpoints": [[32, 64]]}, "those of config.json"),
        ("llava-next", {"vision_feature_select_strategy": "full"}, {}, "vision_feature_select_strategy"),
        ("llava-onevision", {"vision_aspect_ratio": "anyres_max_"}, {}, "vision_aspect_ratio"),
        ("llava-onevision", {}, {"size": {"height": 32, "width": 64}}, "size"),
        ("pixtral", {"vision_feature_select_strategy": "default"}, {}, "vision_feature_select_strategy"),
        ("pixtral", {}, {"size": {"longest_edge": 2**14}}, "patches"),
        ("mistral3", {"spatial_merge_size": 99}, {}, "spatial_merge_size"),
        ("qwen2-vl", {}, {"size": {"shortest_edge": 9, "longest_edge": 10**9}}, "patches"),
        ("qwen2-vl", {}, {"size": {"shortest_edge": 10**6, "longest_edge": 9}}, "size"),
        ("qwen2-vl", {}, {"patch_size": 14}, "patch_size"),
        ("qwen2.5-vl", {"fullatt_block_indexes": [3]}, {}, "fullatt_block_indexes"),
        ("qwen2.5-vl", {"window_size": 3}, {}, "window_size"),
        ("qwen3-vl", {"deepstack_visual_indexes": [1, 0]}, {}, "deepstack_visual_indexes"),
        ("qwen3-vl", {"num_position_embeddings": 24}, {}, "num_position_embeddings"),
        ("qwen3-vl", {"num_position_embeddings": 2**30}, {}, "num_position_embeddings"),
        ("qwen3-vl", {"out_hidden_size": 64}, {}, "out_hidden_size"),
        ("qwen3-vl", {"num_heads": 16}, {}, "num_heads"),
        ("glm4.1v", {"out_hidden_size": 64}, {}, "out_hidden_size"),
        ("glm4.1v", {"image_size": 2**13}, {}, "image_size"),
        ("lfm2-vl", {}, {"max_tiles": 10**6}, "max_tiles"),
        ("lfm2-vl", {}, {"min_tiles": 1}, "min_tiles"),
        ("lfm2-vl", {}, {"tile_size": 36}, "tile_size"),
        ("lfm2-vl", {}, {"max_image_tokens": 10**6}, "patches"),
        ("lfm2-vl", {"num_patches": 35}, {}, "num_patches"),
        ("granite4-vision", {"downsample_rate": "3/8"}, {}, "downsample_rate"),
        ("granite4-vision", {"downsample_rate": "6/12"}, {}, "downsample_rate"),
        ("granite4-vision", {"deepstack_layer_map": [[9, 0]]}, {}, "deepstack_layer_map"),
        ("granite4-vision", {"deepstack_layer_map": [[1, 4]]}, {}, "different layers"),
        ("granite4-vision", {"spatial_target_layers": [1, 2, 3]}, {}, "spatial_target_layers"),
        ("granite4-vision", {"qformer_config": {"num_hidden_layers": 17}}, {}, "num_hidden_layers"),
        ("aya-vision", {"downsample_factor": 3}, {}, "downsample_factor"),
        ("aya-vision", {"alignment_intermediate_size": 41}, {}, "alignment_intermediate_size"),
        ("gemma3", {}, {"do_pan_and_scan": True}, "do_pan_and_scan"),
        ("gemma3", {"mm_tokens_per_image": 9}, {}, "mm_tokens_per_image"),
        ("gemma3", {}, {"size": {"height": 99, "width": 32}}, "height"),
        ("gemma4", {}, {"max_soft_tokens": 71}, "max_soft_tokens"),
        ("gemma4", {}, {"patch_size": 16}, "patch_size"),
        ("gemma4", {"pooling_kernel_size": 17}, {"pooling_kernel_size": 17}, "pooling_kernel_size"),
        ("gemma4", {"position_embedding_size": 139}, {}, "position_embedding_size"),
        ("gemma4", {"num_key_value_heads": 3}, {}, "num_key_value_heads"),
        ("gemma4", {"num_attention_heads": 2**20}, {}, "num_attention_heads"),
        ("gemma4", {"attention_bias": True}, {}, "attention_bias"),
        ("gemma4-e2b", {"text_config": {**CASES["gemma4-e2b"].text, "pad_token_id": 3}}, {}, "pad_token_id"),
        ("gemma4-unified", {"mm_posemb_size": 69}, {}, "mm_posemb_size"),
        ("gemma4-unified", {"output_proj_dims": 32}, {}, "output_proj_dims"),
        ("gemma4-unified", {}, {"max_soft_tokens": 280}, "mm_posemb_size"),
        ("paddleocr-vl", {}, {"temporal_patch_size": 2}, "temporal_patch_size"),
        ("paddleocr-vl", {"image_size": 2**13}, {}, "image_size"),
        ("llama4", {}, {"max_patches": 10**6}, "max_patches"),
        ("llama4", {}, {"size": {"height": 32, "width": 16}}, "width"),
        ("llama4", {"pixel_shuffle_ratio": 0.3}, {}, "pixel_shuffle_ratio"),
        ("llama4", {"pixel_shuffle_ratio": 100.0}, {}, "pixel_shuffle_ratio"),
        ("llama4", {"projector_output_dim": 32}, {}, "projector_output_dim"),
        ("llama4", {"intermediate_size": 64}, {}, "intermediate_size"),
        ("granite-vision", {"text_config": {**_GRANITE, "embedding_multiplier": 0}}, {}, "embedding_multiplier"),
        ("granite-docling", {"scale_factor": 3}, {}, "scale_factor"),
        ("granite-docling", {"out_hidden_size": 64}, {}, "out_hidden_size"),
        ("granite-docling", {"deepstack_visual_indexes": [2, 0]}, {}, "deepstack_visual_indexes"),
        ("granite-docling", {}, {"max_patches": 10**6}, "max_patches"),
        ("granite-docling", {}, {"size": {"height": 64, "width": 32}}, "height"),
        ("granite-docling", {}, {"fine_route": True}, "fine_route"),
        ("granite-docling", {}, {"dense_max_patches": 10**6}, "dense_max_patches"),
        ("granite-docling", {}, {"dense_max_scale": "x"}, "dense_max_scale"),
        ("minicpm-v4.6", {"insert_layer_id": 3}, {}, "insert_layer_id"),
        ("minicpm-v4.6", {"merge_kernel_size": [3, 3]}, {}, "merge_kernel_size"),
        ("minicpm-v4.6", {"window_kernel_size": 2}, {}, "window_kernel_size"),
        ("minicpm-v4.6", {"image_size": 2**13}, {}, "image_size"),
        ("minicpm-v4.6", {}, {"patch_size": 14}, "patch_size"),
        ("minicpm-v4.6", {}, {"max_slice_nums": 10**6}, "max_slice_nums"),
        ("minicpm-v4.6", {}, {"scale_resolution": 2**12}, "patches"),
        ("minicpm-v4.6", {}, {"downsample_mode": "8x"}, "downsample_mode"),
        ("minicpm-v4.7", {"newline_id": None}, {}, "newline_id"),
        ("kimi-vl", {"merge_kernel_size": [2, 99]}, {}, "merge_kernel_size"),
        ("kimi-vl", {"hidden_size": 2**30, "num_attention_heads": 2**26}, {}, "num_hidden_layers"),
        ("kimi-vl", {"init_pos_emb_width": 8}, {}, "init_pos_emb_width"),
        ("kimi-vl", {}, {"in_token_limit": 10**6}, "patches"),
        ("kimi-vl", {}, {"pad_input": False}, "pad_input"),
        ("minicpm-v2.6", {"version": "2.0"}, {}, "version"),
        ("minicpm-v2.6", {"query_num": 2**20}, {}, "query_num"),
        ("minicpm-v2.6", {"hidden_size": 200}, {}, "hidden_size"),
        ("minicpm-v2.6", {"image_size": 2**13}, {}, "image_size"),
        ("minicpm-v2.6", {}, {"image_feature_size": 64}, "image_feature_size"),
        ("minicpm-v2.6", {}, {"patch_size": 14}, "patch_size"),
        ("phi3-vision", {"embd_layer": {"use_hd_transform": False}}, {}, "use_hd_transform"),
        ("phi3-vision", {"img_processor": {"patch_size": 13}}, {}, "patch_size"),
        ("phi3-vision", {}, {"num_img_tokens": 144}, "num_img_tokens"),
        ("phi3-vision", {}, {"num_crops": 10**6}, "num_crops"),
        ("internvl", {}, {"max_patches": 10**6}, "max_patches"),
        ("internvl", {"downsample_ratio": 0.3}, {}, "downsample_ratio"),
        ("internvl", {"use_mean_pooling": False}, {}, "use_mean_pooling"),
        ("internvl-chat", {"ps_version": "v1"}, {}, "ps_version"),
        ("internvl-chat", {"force_image_size": 64}, {}, "force_image_size"),
        ("internvl-chat", {"use_thumbnail": False}, {}, "use_thumbnail"),
        ("internvl-chat", {}, {"max_dynamic_patch": 10**6}, "max_dynamic_patch"),
    ],
)
def test_what_is_not_supported_is_refused(
    name: str, config: dict[str, Any], settings: dict[str, Any], says: str
) -> None:
    """Fields of the tower's config are those that config.json has not on top."""
    whole = made(name).config
    tower = whole.get("vision_config", {})
    tower = tower | {key: value for key, value in config.items() if key in tower}
    changed = {**whole, "vision_config": tower, **config}
    with pytest.raises(ModelError, match=says):
        vision_of(changed, {**made(name).settings, **settings})


@pytest.mark.parametrize("name", IN_TRANSFORMERS)
def test_a_field_that_is_missing_means_what_transformers_takes_it_to_mean(name: str) -> None:
    """Leave out one field of the tower's config after the other, and compare with transformers' default for it."""
    import transformers

    case, compared = CASES[name], set()
    needed = {"out_hidden_size"} if name == "granite-docling" else set()
    for missing in case.vision.keys() - {"model_type", "vision_use_head"} - needed:
        rest = {key: value for key, value in made(name).config["vision_config"].items() if key != missing}
        config = getattr(transformers, case.config)(
            vision_config=dict(rest), text_config=dict(case.text), **case.others
        )
        architectures = {"architectures": made(name).config["architectures"]}
        complete = {**config.to_dict(), **architectures}
        try:
            meant = vision_of(complete, made(name).settings)
        except ModelError:  # for a default that does not fit to the rest
            with pytest.raises(ModelError):
                vision_of({**complete, "vision_config": rest}, made(name).settings)
            continue
        described = vision_of({**complete, "vision_config": rest}, made(name).settings)
        assert meant is not None
        assert described is not None
        assert (described.spec, described.settings) == (meant.spec, meant.settings), missing
        compared.add(missing)
    assert compared


def test_internvl_as_published_has_settings_of_its_own() -> None:
    config, image = made("internvl-chat").config, photo(40, 90)
    tower = config["vision_config"]
    rest = {key: tower[key] for key in tower.keys() - {"norm_type", "qk_normalization", "qkv_bias", "hidden_act"}}
    vision = vision_of({**config, "vision_config": {**rest, "hidden_act": None}}, {})
    assert vision is not None
    attention, norm = vision.spec.layers[0][0].mixer, vision.spec.layers[0][0].norm
    assert isinstance(attention, AttentionSpec)
    assert attention.qk_norm is not None
    assert not attention.qkv_bias
    assert norm is not None
    assert norm.kind == "rms"
    assert np.array_equal(processed_by(vision, image)[0][-1], processed_by(seen_by("internvl-chat"), image)[0][-1])
    for fewer in ({"max_dynamic_patch": 1}, {"dynamic_image_size": False}):
        assert processed_by(vision_of(config, fewer), image)[1] == 1  # type: ignore[union-attr]


NARROW_FOR = ("qwen2-vl", "llava", "mistral3", "llava-next", "lfm2-vl", "minicpm-v2.6", "phi3-vision")


@pytest.mark.parametrize("name", NARROW_FOR)
def test_an_image_that_is_too_narrow_is_refused(name: str) -> None:
    with pytest.raises(ValueError, match="narrow"):
        processed_by(seen_by(name), np.zeros((1, 400, 3), np.uint8))


@pytest.mark.parametrize("count", [4, pytest.param(200, marks=pytest.mark.sweep)])
@pytest.mark.parametrize("name", CASES)
def test_images_of_any_size_are_taken_or_refused(name: str, count: int) -> None:
    """From a pixel to thousands along a side: what is taken has bounds, and its tokens are counted alike everywhere."""
    vision, random = seen_by(name), np.random.default_rng(len(name) + count)
    for height, width in np.exp(random.uniform(0, np.log(3000), (count, 2))).astype(int).tolist():
        try:
            tiles, layout = processed_by(vision, np.zeros((height, width, 3), np.uint8))
        except ValueError as error:
            refused = str(error)
        else:
            refused = ""
        if refused:
            assert f"{width} x {height} pixels" in refused
            continue
        assert sum(tile.size for tile in tiles) <= 3 * MAX_PATCHES * 4**2, (height, width)
        expansion = vision.expansion(layout)
        assert all(found > 0 for found in expansion.counts), (height, width)
        assert sum(expansion.counts) == vision.num_tokens(layout) > 0
        assert expansion.text.count(vision.slot) == len(expansion.counts)
        assert layout_of(plain_layout(layout)) == layout


def test_a_square_around_an_image_is_bounded() -> None:
    vision = vision_of(
        made("llava").config, {**made("llava").settings, "image_processor_type": "LlavaImageProcessor", "do_pad": True}
    )
    assert vision is not None
    with pytest.raises(ValueError, match="more alike"):
        processed_by(vision, np.zeros((100, 20_000, 3), np.uint8))


@pytest.mark.parametrize("title", ["photo", "portrait", "square", "wide"])
def test_llava_pads_to_a_square_if_it_should(title: str) -> None:
    from transformers import LlavaImageProcessorPil

    processor = LlavaImageProcessorPil(**CASES["llava"].settings, do_pad=True)
    vision: Any = vision_of(made("llava").config, {**processor.to_dict(), "resample": 3, "crop_size": 32, "size": 32})
    (tile,) = processed_by(vision, IMAGES[title])[0]
    inputs = processor([IMAGES[title]], return_tensors="pt", input_data_format="channels_last")
    expected = inputs["pixel_values"][0].numpy()
    assert np.abs(vision._patches.pixels.of(tile).transpose(2, 0, 1) - expected).max() <= 1e-5


@pytest.mark.parametrize("title", ["square", "wide", "a pixel"])
def test_llama_4_fills_the_largest_canvas_if_it_should(title: str) -> None:
    case = CASES["llama4"]._replace(settings={**CASES["llama4"].settings, "resize_to_max_canvas": True})
    vision: Any = vision_of(made("llama4").config, dict(case.settings))
    tiles = processed_by(vision, IMAGES[title])[0]
    expected = TorchvisionProcessor(case)([IMAGES[title]])["pixel_values"].numpy()
    ours = np.stack([vision._patches.pixels.of(tile).transpose(2, 0, 1) for tile in tiles])
    assert ours.shape == expected.shape
    assert np.abs(ours - expected).max() <= 1e-5
    assert len(tiles) > len(processed_by(cast(Any, seen_by("llama4")), IMAGES[title])[0])


@pytest.mark.parametrize("name", CASES)
def test_no_image_becomes_larger_than_the_settings_allow(name: str) -> None:
    vision = seen_by(name)
    for height, width in ((1, 190), (190, 1), (3000, 17), (2000, 2000)):
        if name in NARROW and min(height, width) < 100:
            continue
        tiles = processed_by(vision, np.zeros((height, width, 3), np.uint8))[0]
        assert sum(tile.shape[0] * tile.shape[1] for tile in tiles) <= 128 * 128 + 32 * 32


def test_other_models_have_no_images_here() -> None:
    assert vision_of({"architectures": ["LlamaForCausalLM"]}, {}) is None
    assert vision_of({}, {}) is None
    assert all(name in WRAPPERS or name in FAMILIES_OF_TEXT for name in FAMILIES)


# Not for each number: torch computes the bounds in vectors of the machine's width, and rounds some differently.
@pytest.mark.parametrize("side", [16, 26, 27, 32])
def test_the_nearest_entries_are_those_of_transformers(side: int) -> None:
    boundaries = torch.arange(1 / side, 1.0, 1 / side)
    for count in range(1, 80):
        places = torch.arange(count, dtype=torch.float32) * (1.0 / torch.tensor(count))
        expected = torch.bucketize(torch.clamp(places, max=1.0 - 1e-6), boundaries, right=True)
        assert np.array_equal(nearest(side, count), expected.numpy()), count


def test_gelu_is_that_of_torch() -> None:
    x = np.linspace(-12, 12, 30_000, dtype=np.float32).reshape(-1, 3)
    expected = torch.nn.functional.gelu(torch.from_numpy(x).double()).numpy()
    assert np.abs(gelu(x) - expected).max() < 2e-6


@pytest.mark.parametrize("eps", [1e-6, 1e-5])
def test_a_row_is_normalized_by_itself(eps: float) -> None:
    rng = np.random.default_rng(0)
    rows, weight, bias = (rng.normal(size=shape).astype(np.float32) for shape in ((3000, 72), 72, 72))
    expected = torch.nn.functional.layer_norm(
        *map(torch.from_numpy, (rows,)), (72,), *map(torch.from_numpy, (weight, bias)), eps
    )
    ours = normalized(rows, eps, weight, bias)
    assert np.abs(ours - expected.numpy()).max() < 1e-5
    alone = np.concatenate([normalized(rows[i : i + 1], eps, weight, bias) for i in range(0, 3000, 37)])
    assert np.array_equal(alone, ours[::37])


@pytest.mark.parametrize("shape", [(40, 30), (20, 50), (10, 10), (21, 33), (32, 32)])
def test_the_middle_is_cropped_as_by_transformers(shape: tuple[int, int]) -> None:
    from transformers.image_transforms import center_crop

    image = photo(*shape)
    ours = centre_crop(Picture(image), 32, 32).pixels
    assert np.array_equal(ours, center_crop(image, (32, 32), input_data_format="channels_last"))
