"""Rows of media in place of tokens, tokens that see each other, and rope by several axes."""

from __future__ import annotations

import functools
import importlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, get_args

import jax_processors
import numpy as np
import pytest
from engine.devices.made_models import (
    MLP,
    NORM,
    PLAIN,
    ROPE,
    SLOPES,
    VOCAB_SIZE,
    RandomWeights,
    decoder,
    load,
)
from harness import Harness, Running, make_device, over_devices
from logits import run_with_logits
from numpy.typing import NDArray

from tidewheel.engine.devices.batch import SamplingBatch, StepBatch, StepOutput
from tidewheel.engine.devices.executor import Executor
from tidewheel.engine.devices.limits import ExecutorOptions
from tidewheel.engine.errors import DeviceError
from tidewheel.engine.models.spec import (
    AltUpSpec,
    DecoderSpec,
    EmbeddingSpec,
    LaurelSpec,
    MtpSpec,
    PerLayerEmbeddingSpec,
    PerLayerSpec,
    ResidualBlockSpec,
    StageSpec,
    StreamsSpec,
    stage_row_floats,
    stage_tensors,
)
from tidewheel.engine.pipeline.step_slot import SlotShape
from tidewheel.engine.weights.dtypes import KvCacheDType

torch = pytest.importorskip("torch")

HIDDEN = 64
BY_AXES = replace(ROPE, axes=tuple(i % 3 for i in range(20)))
TWO_WAY = replace(PLAIN, rope=ROPE, two_way=True)
CAUSAL = replace(TWO_WAY, two_way=False)


@dataclass
class Prompt:
    """A text with images: what StepBatch says of all its tokens `[N]`, and where it may be cut."""

    token_ids: NDArray[np.int32]
    visible_until: NDArray[np.int32]
    rope_positions: NDArray[np.int32]  # [3, N]
    media_rows: NDArray[np.float32]  # [M, (1 + layers) * HIDDEN]
    media_layers: NDArray[np.int32]
    media_index: NDArray[np.int32]
    cuts: list[int]


def prompt(seed: int, length: int, images: Sequence[tuple[int, int, int]], layers: Sequence[int] = ()) -> Prompt:
    """`images` are (first token, rows, columns) of their grids, whose rows add something after these layers."""
    random = np.random.default_rng(seed)
    until = np.arange(1, length + 1, dtype=np.int32)
    axes = np.zeros((3, length), np.int32)
    index = np.full(length, -1, np.int32)
    cuts = set(range(length + 1))
    at = count = end = 0
    for first, rows, columns in (*images, (length, 0, 0)):
        axes[:, end:first] = at + np.arange(first - end)
        at += first - end
        end = first + rows * columns
        until[first:end] = end
        axes[0, first:end] = at
        axes[1, first:end] = at + np.repeat(np.arange(rows), columns)
        axes[2, first:end] = at + np.tile(np.arange(columns), rows)
        at += max(rows, columns)
        index[first:end] = count + np.arange(end - first)
        count += end - first
        cuts -= set(range(first + 1, end))
    return Prompt(
        random.integers(0, VOCAB_SIZE, length).astype(np.int32),
        until,
        axes,
        random.standard_normal((count, (1 + len(layers)) * HIDDEN)).astype(np.float32),
        np.array(layers, np.int32),
        index,
        sorted(cuts),
    )


def text(seed: int, length: int) -> Prompt:
    return prompt(seed, length, ())


class StageWeights(RandomWeights):
    """Those of a stage alone."""

    def __init__(self, spec: DecoderSpec, stage: StageSpec) -> None:
        super().__init__(spec)
        self._shapes = {name: self._shapes[name] for name in stage_tensors(spec, stage)}


class Steps:
    """Runs parts of prompts, and keeps the logits after each of their tokens."""

    def __init__(self, executor: Executor, prompts: Sequence[Prompt], seed: int = 0) -> None:
        self._harness = Harness(executor, seed)
        self.prompts = prompts
        self._running: list[Running] = [self._harness.start(p.token_ids.tolist(), 0) for p in prompts]
        self.logits: list[NDArray[np.float32]] = [np.empty((0, VOCAB_SIZE), np.float32) for _ in prompts]

    def batch(self, ends: dict[int, int]) -> StepBatch:
        """The step that computes these prompts' tokens up to `ends`, with the logits after all of them."""
        executor, chosen = self._harness.executor, [self._running[i] for i in ends]
        parts = [(self.prompts[i], slice(s.cached, end)) for (i, end), s in zip(ends.items(), chosen, strict=True)]
        starts = np.concatenate([[0], np.cumsum([part.stop - part.start for _, part in parts])]).astype(np.int32)
        width = max(len(s.blocks) for s in chosen)
        tables = [np.full((len(chosen), width), group.padding_block, np.int32) for group in executor.limits.groups]
        for i, sequence in enumerate(chosen):
            for table, blocks in zip(tables, sequence.tables, strict=True):
                table[i, : len(blocks)] = blocks
        rows, index = [], []
        for p, part in parts:
            own = p.media_index[part]
            index.append(np.where(own < 0, -1, own + sum(map(len, rows))))
            rows.append(p.media_rows)
        positions = np.concatenate([np.arange(part.start, part.stop) for _, part in parts]).astype(np.int32)
        return StepBatch(
            token_ids=np.concatenate([p.token_ids[part] for p, part in parts]),
            positions=positions,
            query_start=starts,
            context_len=np.array([*ends.values()], np.int32),
            block_tables=tables[0],
            window_tables=tuple(tables[1:]),
            logits_rows=np.arange(len(positions), dtype=np.int32),
            sampling=SamplingBatch.greedy(positions + 1),
            media_rows=np.ascontiguousarray(np.concatenate(rows)),
            media_index=np.concatenate(index).astype(np.int32),
            media_layers=parts[0][0].media_layers,
            rope_positions=np.ascontiguousarray(np.concatenate([p.rope_positions[:, part] for p, part in parts], 1)),
            visible_until=np.concatenate([p.visible_until[part] for p, part in parts]),
        )

    def run(self, ends: dict[int, int], **changed: object) -> None:
        batch = replace(self.batch(ends), **changed)  # type: ignore[arg-type]
        _, logits = run_with_logits(self._harness.executor, batch)
        for (i, end), start in zip(ends.items(), batch.query_start, strict=False):
            part = logits[start : start + end - self._running[i].cached]
            self.logits[i] = np.concatenate([self.logits[i], part])
            self._running[i].cached = end


def at_once(executor: Executor, prompt: Prompt, **changed: object) -> NDArray[np.float32]:
    """The logits after each of the prompt's tokens, `[N, VOCAB_SIZE]`, computed in one step."""
    steps = Steps(executor, [prompt])
    steps.run({0: len(prompt.token_ids)}, **changed)
    return steps.logits[0]


# Images of 12 and of 20 tokens; the second one lies across the end of a block.
IMAGES = ((3, 3, 4), (25, 5, 4))
PICTURE = prompt(6, 60, IMAGES)
DEEP = prompt(7, 60, IMAGES, layers=(1, 0))
PER_LAYER = PerLayerEmbeddingSpec(VOCAB_SIZE, 16, scale=2.0, projection_scale=0.5, sum_scale=0.7, norm=NORM)
PROJECTED = EmbeddingSpec(40, 2048, 2, scale=0.5, norm=NORM)
CASES: dict[str, tuple[DecoderSpec, Prompt]] = {
    "two-way": (decoder(TWO_WAY, TWO_WAY), PICTURE),
    "two-way in a window": (decoder(*[replace(TWO_WAY, sliding_window=w) for w in (9, None)]), PICTURE),
    "two-way in some layers": (decoder(replace(TWO_WAY, sliding_window=40), CAUSAL, TWO_WAY), PICTURE),
    "two-way with ALiBi, sinks and a cap": (
        decoder(replace(TWO_WAY, rope=None, alibi_slopes=SLOPES, sinks=True, softcap=5.0), TWO_WAY),
        PICTURE,
    ),
    "two-way with the keys of another layer": (decoder(TWO_WAY, replace(TWO_WAY, kv_layer=0)), PICTURE),
    "axes": (decoder(*[replace(CAUSAL, rope=BY_AXES)] * 2), PICTURE),
    "axes in sections, interleaved": (
        decoder(replace(CAUSAL, rope=replace(ROPE, axes=(0,) * 8 + (1,) * 6 + (2,) * 6, interleaved=True)), CAUSAL),
        PICTURE,
    ),
    "rows added after layers": (decoder(CAUSAL, replace(CAUSAL, rope=BY_AXES), CAUSAL), DEEP),
    "rows added after the last layer": (decoder(CAUSAL, TWO_WAY), DEEP),
    "per-layer embeddings": (
        replace(
            decoder(),
            embedding=EmbeddingSpec(HIDDEN, per_layer=PER_LAYER),
            layers=tuple(
                (ResidualBlockSpec(CAUSAL, NORM), ResidualBlockSpec(PerLayerSpec(i, 16, "gelu_tanh"))) for i in range(2)
            ),
        ),
        PICTURE,
    ),
    "a projected, normalized embedding": (replace(decoder(CAUSAL, CAUSAL), embedding=PROJECTED), PICTURE),
}
OF_LEVELS = ("two-way in a window", "axes")


@pytest.fixture(scope="module", autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


@functools.cache
def reference(name: str) -> NDArray[np.float32]:
    spec, prompt = CASES[name]
    return at_once(load("torch", spec), prompt)


@pytest.mark.parametrize(("device_id", "name"), over_devices(CASES, levels=OF_LEVELS))
def test_every_level_computes_what_the_reference_computes(device_id: str, name: str) -> None:
    spec, prompt = CASES[name]
    expected, ours = reference(name), at_once(load(device_id, spec), prompt)
    np.testing.assert_allclose(ours, expected, atol=1e-4 * np.abs(expected).max())


@pytest.mark.parametrize("name", CASES)
def test_all_of_this_matters(name: str) -> None:
    spec, prompt = CASES[name]
    executor, expected = load("torch", spec), reference(name)
    matters = {"media_rows": prompt.media_rows[:, ::-1].copy()}
    if any(layer.two_way for layer in spec.attentions()):
        matters["visible_until"] = np.arange(1, 61, dtype=np.int32)
    if any(layer.rope is not None and layer.rope.axes for layer in spec.attentions()):
        matters["rope_positions"] = np.tile(np.arange(60, dtype=np.int32), (3, 1))
    if prompt is DEEP:
        first, *others = np.split(prompt.media_rows, 3, axis=1)
        for i in range(2):
            changed = [part * (i != j) for j, part in enumerate(others)]
            matters |= {f"part {i}": np.concatenate([first, *changed], axis=1)}
    for field, value in matters.items():
        changed = at_once(executor, prompt, **{"media_rows" if "part" in field else field: value})
        assert np.abs(changed - expected).max() > 1e-2 * np.abs(expected).max(), field


def threads() -> list[str]:
    """Places for one thread, for two, and for two groups of one."""
    native: Any = importlib.import_module("tidewheel._native")
    cpus = [processor["cpu"] for processor in native.topology()["processors"]]
    if len(cpus) < 2:
        pytest.skip("this machine has one processor")
    return [str(cpus[0]), f"{cpus[0]},{cpus[1]}", f"{cpus[0]}|{cpus[1]}"]


@pytest.mark.parametrize(
    "kv_cache_dtype",
    [
        pytest.param(kind, marks=() if kind in ("float32", "bfloat16", "int8") else pytest.mark.sweep)
        for kind in get_args(KvCacheDType)
    ],
)
def test_company_chunks_and_threads_change_no_bit(kv_cache_dtype: KvCacheDType) -> None:
    """The images lie across the ends of tiles, KV splits and tasks, the last one in a step whose tasks are divided."""
    by_axes = replace(TWO_WAY, rope=BY_AXES)
    spec = decoder(by_axes, replace(by_axes, sliding_window=300), replace(by_axes, two_way=False))
    prompts = [
        prompt(1, 700, ((100, 16, 16), (400, 15, 17)), (0, 1)),
        prompt(2, 1050, ((0, 4, 7), (505, 5, 4), (1004, 4, 7)), (0, 1)),
        prompt(3, 40, ((30, 2, 5),), (0, 1)),
        prompt(4, 530, (), (0, 1)),
    ]
    one, *others = (load("cpu", spec, "bfloat16", kv_cache_dtype, place) for place in threads())
    alone = [at_once(one, each) for each in prompts]
    for seed, executor in enumerate((one, *others)):
        for chunk in (1, 9, 64, 300) if executor is one else (64, 300):
            steps = Steps(executor, prompts if chunk > 9 else prompts[2:3], seed)
            wanted = alone if chunk > 9 else alone[2:3]
            ends = dict.fromkeys(range(len(wanted)), 0)
            while ends:
                for i, end in ends.items():
                    # The next place where the prompt may be cut, so an image is never divided.
                    length = len(wanted[i])
                    ends[i] = min((cut for cut in steps.prompts[i].cuts if cut >= end + chunk), default=length)
                steps.run(ends)
                ends = {i: end for i, end in ends.items() if end < len(wanted[i])}
            for ours, expected in zip(steps.logits, wanted, strict=True):
                np.testing.assert_array_equal(ours, expected, strict=True)


def test_the_references_bits_do_not_depend_on_company_or_chunks() -> None:
    by_axes = replace(TWO_WAY, rope=BY_AXES)
    prompts = [PICTURE, prompt(2, 45, ((10, 2, 9),))]
    executor = load("torch", decoder(by_axes, replace(by_axes, sliding_window=9)))
    alone = [at_once(executor, each) for each in prompts]
    steps = Steps(executor, prompts)
    for ends in ({0: 2}, {0: 15, 1: 9}, {1: 28}, {0: 20, 1: 30}, {0: 45}, {1: 45, 0: 60}):
        steps.run(ends)
    for ours, expected in zip(steps.logits, alone, strict=True):
        np.testing.assert_array_equal(ours, expected, strict=True)


@pytest.mark.parametrize("device_id", ["cpu", "torch"])
def test_text_gets_the_bits_that_it_gets_without_all_of_this(device_id: str) -> None:
    """Tokens that see up to themselves, and equal positions on all axes."""
    by_axes = replace(TWO_WAY, rope=BY_AXES)
    plain = load(device_id, decoder(CAUSAL, replace(CAUSAL, sliding_window=9)))
    able = load(device_id, decoder(by_axes, replace(by_axes, sliding_window=9)))
    length = 700 if device_id == "cpu" else 40
    tokens = text(8, length)
    expected = Harness(plain).logits(tokens.token_ids.tolist())
    np.testing.assert_array_equal(Harness(able).logits(tokens.token_ids.tolist()), expected)
    nothing = {"media_rows": None, "media_index": None, "media_layers": None}
    np.testing.assert_array_equal(at_once(able, tokens, **nothing), expected)


@pytest.mark.parametrize("device_id", ["cpu", "torch"])
def test_the_ids_of_tokens_with_rows_of_media_do_not_matter(device_id: str) -> None:
    """They have row 0 of the per-layer embeddings."""
    spec, given = CASES["per-layer embeddings"]
    executor = load(device_id, spec)
    expected = at_once(executor, given)
    for id_of_media in (0, 9):
        ids = np.where(given.media_index < 0, given.token_ids, id_of_media).astype(np.int32)
        np.testing.assert_array_equal(at_once(executor, replace(given, token_ids=ids)), expected)


@pytest.mark.parametrize("device_id", ["cpu", "torch"])
def test_rows_of_media_are_not_scaled(device_id: str) -> None:
    """So rows that are scaled embeddings give the bits of their tokens."""
    spec = replace(decoder(CAUSAL, CAUSAL), embedding=EmbeddingSpec(HIDDEN, scale=8.0))
    executor = load(device_id, spec)
    given = replace(PICTURE, rope_positions=np.tile(np.arange(60, dtype=np.int32), (3, 1)))
    table = RandomWeights(spec)["embed.weight"].data
    places = np.flatnonzero(given.media_index >= 0)
    given = replace(given, media_rows=table[given.token_ids[places]] * np.float32(8))
    expected = Harness(executor).logits(given.token_ids.tolist())
    np.testing.assert_array_equal(at_once(executor, given, visible_until=None), expected)


def test_a_layer_that_drafts_turns_by_the_positions_that_follow_on_each_axis() -> None:
    """Attention knows distances alone: all positions may be 50 further."""
    by_axes = replace(CAUSAL, rope=BY_AXES)
    layer = (ResidualBlockSpec(by_axes, NORM), ResidualBlockSpec(MLP, NORM))
    spec = replace(decoder(by_axes), mtp=MtpSpec(NORM, NORM, layer, NORM))
    after = prompt(6, 40, ((3, 3, 4),))
    drafts = []
    for shift, shift_of_last in ((0, 0), (50, 50), (50, 0)):
        executor: Any = load("cpu", spec, layer_draft_tokens=8)
        moved = replace(after, rope_positions=after.rope_positions + np.int32(shift))
        steps = Steps(executor, [moved])
        steps.run({0: 39})
        batch = replace(steps.batch({0: 40}), media_rows=None, media_index=None, visible_until=None)
        batch.rope_positions = after.rope_positions[:, 39:] + np.int32(shift_of_last)
        batch.block_tables = np.concatenate([batch.block_tables, np.array([[200]], np.int32)], axis=1)
        drafts.append(executor.draft(batch, np.array([8], np.int32)).tolist())
    assert drafts[0] == drafts[1] != drafts[2]


BAD: list[tuple[dict[str, object], str]] = [
    ({"visible_until": np.zeros(60, np.int32)}, "visible_until must be above"),
    ({"visible_until": np.arange(60, dtype=np.int32)}, "visible_until must be above"),
    ({"visible_until": np.full(60, 61, np.int32)}, "visible_until must be above"),
    ({"visible_until": np.r_[60, np.arange(2, 61)].astype(np.int32)}, "not descend"),
    ({"visible_until": np.full(59, 60, np.int32)}, "visible_until must have one entry"),
    ({"rope_positions": np.zeros((2, 60), np.int32)}, "rope_positions must have one row for each axis"),
    ({"rope_positions": np.zeros((60, 3), np.int32)}, "rope_positions must have a column"),
    ({"rope_positions": np.zeros(180, np.int32)}, "two-dimensional"),
    ({"media_rows": None}, "a row of media has"),
    ({"media_rows": np.zeros((32, 65), np.float32)}, "a row of media has"),
    ({"media_rows": np.zeros((32, 4 * HIDDEN), np.float32)}, "a row of media has"),
    ({"media_rows": np.zeros((32, HIDDEN), np.float64)}, "two-dimensional array of its type"),
    ({"media_layers": np.array([0], np.int32)}, "a row of media has"),
    (
        {"media_rows": np.zeros((32, 2 * HIDDEN), np.float32), "media_layers": np.array([2], np.int32)},
        "numbers of layers",
    ),
    (
        {"media_rows": np.zeros((32, 2 * HIDDEN), np.float32), "media_layers": np.array([-1], np.int32)},
        "numbers of layers",
    ),
    ({"media_rows": None, "media_index": None, "media_layers": np.array([0], np.int32)}, "a row of media has"),
    ({"media_index": None}, "media_index must have one entry"),
    ({"media_rows": np.zeros((0, HIDDEN), np.float32), "media_index": None}, "media_index must have one entry"),
    ({"media_index": np.full(60, 32, np.int32)}, "media_index must lie within"),
    ({"media_index": np.full(60, -2, np.int32)}, "media_index must lie within"),
]


@pytest.mark.parametrize(("changed", "message"), BAD)
def test_arrays_that_do_not_fit_are_refused(changed: dict[str, object], message: str) -> None:
    executor = load("cpu", decoder(replace(TWO_WAY, rope=BY_AXES), TWO_WAY))
    with pytest.raises(ValueError, match=message):
        at_once(executor, PICTURE, **changed)


def test_streams_take_rows_of_media_and_nothing_added_later() -> None:
    layer = AltUpSpec(
        2,
        0,
        NORM,
        (ResidualBlockSpec(CAUSAL, NORM), ResidualBlockSpec(MLP, NORM)),
        ResidualBlockSpec(LaurelSpec(20, NORM), NORM),
    )
    spec = replace(decoder(CAUSAL), layers=((ResidualBlockSpec(layer),),) * 2, streams=StreamsSpec(2, 1e-5))
    executor = load("cpu", spec)
    expected, ours = at_once(load("torch", spec), PICTURE), at_once(executor, PICTURE)
    np.testing.assert_allclose(ours, expected, atol=1e-4 * np.abs(expected).max())
    with pytest.raises(ValueError, match="several streams"):
        at_once(executor, DEEP)


def test_stages_take_what_belongs_to_their_layers() -> None:
    """The first one the embedding, each the rows added after its layers; a row travels in the slot of a step."""
    name = "rows added after layers"
    spec, deep = CASES[name]
    device: Any = make_device("cpu")
    batch = Steps(load("cpu", spec), [deep]).batch({0: 60})
    slot = SlotShape(num_groups=1, num_stages=2, row_floats=stage_row_floats(spec)).slot()
    _, arrays = slot.write(batch)
    for begin, end in ((0, 1), (1, 3)):
        stage = StageSpec(begin, end, 3)
        options = ExecutorOptions("float32", 1 << 24, spec.max_positions, 60, 60)
        executor = device.load_stage(spec, StageWeights(spec, stage), options, stage)
        given = slot.batch(arrays)
        if end < 3:
            given.logits_rows, given.sampling = np.empty(0, np.int32), SamplingBatch.greedy([])
        logits = np.empty((len(given.logits_rows), VOCAB_SIZE), np.float32)
        output = StepOutput.empty(given.sampling)
        executor.native.step(given, output.token_ids, None, None, None, None, arrays["rows"], logits)
    np.testing.assert_array_equal(logits, at_once(load("cpu", spec), deep))
    slot.close()


def test_other_devices_refuse_media_by_name_and_take_text() -> None:
    spec = decoder(replace(TWO_WAY, rope=BY_AXES))
    tokens = text(8, 12)
    expected = Harness(load("torch", spec)).logits(tokens.token_ids.tolist())
    with jax_processors.asked_for():
        for device_id, name in (("graph", "graph-cpu"), ("tpu", "tpu")):
            executor = load(device_id, spec)
            logits = Harness(executor).logits(tokens.token_ids.tolist())
            np.testing.assert_allclose(logits, expected, atol=1e-3 * np.abs(expected).max())
            batch = Steps(executor, [prompt(1, 12, ((2, 2, 2),))]).batch({0: 12})
            fields = ("media_rows", "rope_positions", "visible_until")
            for field in fields:
                others = dict.fromkeys({*fields, "media_index", "media_layers"} - {field})
                with pytest.raises(DeviceError, match=f"the {name} device takes no media"):
                    executor.start(replace(batch, **others))  # type: ignore[arg-type]
