"""Drives an executor without an engine: greedy decoding over blocks that are handed out once and never freed."""

from __future__ import annotations

import importlib
from collections.abc import Container, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import models_zoo
import numpy as np
import pytest
from cores import one_core
from logits import run_with_logits
from numpy.typing import NDArray

from tidewheel.engine.devices import get_device
from tidewheel.engine.devices.base import Device
from tidewheel.engine.devices.batch import SamplingBatch, StepBatch
from tidewheel.engine.devices.cpu.options import CpuOptions
from tidewheel.engine.devices.executor import Executor
from tidewheel.engine.devices.limits import ExecutorOptions, LoraLimits
from tidewheel.engine.devices.memory_options import MemoryOptions
from tidewheel.engine.models import describe
from tidewheel.engine.weights import open_source
from tidewheel.engine.weights.dtypes import DType, KvCacheDType
from tidewheel.engine.weights.quantization import Quantization

_MAMBA_BYTES = 1 << 10  # a token, of models whose tokens leave nothing in the cache: for their states


def device_ids() -> list[str]:
    """Every device that this machine has: "torch", and "cpu-LEVEL" for each ISA level."""
    try:
        native: Any = importlib.import_module("tidewheel._native")
        importlib.import_module("tidewheel.engine.devices.cpu.device")
    except ImportError:
        return ["torch"]
    return ["torch", *(f"cpu-{level}" for level in native.available_isa_levels())]


def over_devices(cases: Iterable[Any], *, levels: Container[str], torch: Container[str] | None = None) -> list[Any]:
    """Parameters of a test: each device with each case, which is a model's name or a tuple that begins with one.

    `make test` has all cases on the processor's best ISA level, cases in `levels` on every other level, and cases in
    `torch` on torch. `make sweep` has the rest. The C++ tests run every kernel at every level. If `torch` is None, the
    test is for ISA levels only.
    """
    first, *others = device_ids()
    best = f"cpu-{importlib.import_module('tidewheel._native').chosen_isa_level('auto')}" if others else first
    found = []
    for device in others if torch is None else (first, *others):
        for case in cases:
            name, *rest = case if isinstance(case, tuple) else (case,)
            chosen = device == best or name in (torch or () if device == first else levels)
            found.append(pytest.param(device, name, *rest, marks=() if chosen else pytest.mark.sweep))
    return found


def make_device(device_id: str, threads_bind: str | None = None) -> Device:
    """The device of an id that `device_ids` gives, or "cpu", "graph" or "tpu". Torch computes on the threads it likes.

    By default the CPU device has one thread: two that wait for each other take three times as long with small models.
    A TPU must be within `jax_processors.asked_for`.
    """
    kind, _, level = device_id.partition("-")
    if kind == "graph":
        graph: Any = importlib.import_module("engine.devices.graph.loading")
        return cast(Device, graph.graph_cpu(graph.EAGER, MemoryOptions()))
    if kind == "tpu":
        tpu: Any = importlib.import_module("engine.devices.tpu.making")
        return cast(Device, tpu.device())
    if kind != "cpu":
        return get_device(kind)
    cpu: Any = importlib.import_module("tidewheel.engine.devices.cpu.device")
    device: Device = cpu.CpuDevice(CpuOptions(threads_bind=threads_bind or one_core()), isa=level or "auto")
    return device


def largest_step(device: Device) -> dict[str, int]:
    """`max_num_seqs` and `max_num_batched_tokens`. Those that compile for each size of steps are given small ones."""
    sizes = {"graph-cpu": (16, 256), "tpu": (8, 16)}
    # max_num_seqs also bounds the rows whose logits one step gives
    num_seqs, num_tokens = sizes.get(device.name, (256, 2048))
    return {"max_num_seqs": num_seqs, "max_num_batched_tokens": num_tokens}


def load(
    device: Device,
    folder: Path,
    dtype: DType = "float32",
    max_model_len: int | None = None,
    kv_cache_dtype: KvCacheDType | None = None,
    quantization: Quantization | None = None,
    lora: LoraLimits | None = None,
) -> Executor:
    """The model in a folder or a GGUF file on `device`, with room in the cache for about 64 sequences of 128 tokens."""
    source = open_source(str(folder))
    description = describe(source.config, max_model_len)
    options = ExecutorOptions(
        dtype=dtype,
        kv_cache_bytes=8192 * (device.kv_bytes_per_token(description.spec, kv_cache_dtype or dtype) or _MAMBA_BYTES),
        max_model_len=max_model_len or description.spec.max_positions,
        **largest_step(device),
        kv_cache_dtype=kv_cache_dtype,
        quantization=quantization,
        lora=lora,
    )
    return device.load(description.spec, source.weights(description), options)


@dataclass
class Running:
    """A sequence: its tokens so far, how many of them are in the cache, its blocks, and the logits it was given."""

    tokens: list[int]
    prompt_len: int
    tables: list[list[int]]  # by cache group
    cached: int = 0
    state_slot: int = -1
    adapter: int = -1
    logits: list[NDArray[np.float32]] = field(default_factory=list)

    @property
    def blocks(self) -> list[int]:
        return self.tables[0]

    @property
    def output(self) -> list[int]:
        return self.tokens[self.prompt_len :]


class Harness:
    """Hands out blocks in a scattered order and runs steps of any sequences that it is given."""

    def __init__(self, executor: Executor, seed: int = 0) -> None:
        self.executor = executor
        random = np.random.default_rng(seed)
        self._free = [random.permutation(group.num_blocks).tolist() for group in executor.limits.groups]
        self._free_states: list[int] = random.permutation(executor.limits.num_states).tolist()

    def start(self, prompt: Sequence[int], max_tokens: int, adapter: int = -1) -> Running:
        count = -(-(len(prompt) + max_tokens) // self.executor.limits.block_size)
        assert min(map(len, self._free)) >= count, "the harness ran out of blocks"
        running = Running(list(prompt), len(prompt), [[free.pop() for _ in range(count)] for free in self._free])
        running.adapter = adapter
        if self.executor.limits.num_states:
            running.state_slot = self._free_states.pop()
        return running

    def finish(self, sequence: Running) -> None:
        for free, blocks in zip(self._free, sequence.tables, strict=True):
            free += blocks
        if sequence.state_slot >= 0:
            self._free_states.append(sequence.state_slot)

    def state_slots(self, sequences: Sequence[Running]) -> NDArray[np.int32] | None:
        return np.array([s.state_slot for s in sequences], np.int32) if self.executor.limits.num_states else None

    def adapters(self, sequences: Sequence[Running]) -> NDArray[np.int32] | None:
        return np.array([s.adapter for s in sequences], np.int32) if self.executor.limits.max_loras else None

    def step(self, sequences: Sequence[Running], chunk: int = 2048) -> None:
        """Run up to `chunk` tokens of each sequence; one that has no token left to run gets its next one."""
        counts = [min(chunk, len(s.tokens) - s.cached) for s in sequences]
        starts = np.concatenate([[0], np.cumsum(counts)])
        width = max(len(s.blocks) for s in sequences)
        tables = [
            np.full((len(sequences), width), group.padding_block, np.int32) for group in self.executor.limits.groups
        ]
        for i, sequence in enumerate(sequences):
            for table, blocks in zip(tables, sequence.tables, strict=True):
                table[i, : len(blocks)] = blocks
        ends = [s.cached + n for s, n in zip(sequences, counts, strict=True)]
        spans = list(zip(sequences, ends, strict=True))
        sampled = [i for i, s in enumerate(sequences) if ends[i] == len(s.tokens)]
        output, logits = run_with_logits(
            self.executor,
            StepBatch(
                token_ids=np.array([t for s, e in spans for t in s.tokens[s.cached : e]], np.int32),
                positions=np.array([p for s, e in spans for p in range(s.cached, e)], np.int32),
                query_start=starts.astype(np.int32),
                context_len=np.array(ends, np.int32),
                block_tables=tables[0],
                window_tables=tuple(tables[1:]),
                logits_rows=(starts[1:][sampled] - 1).astype(np.int32),
                sampling=SamplingBatch.greedy([ends[i] for i in sampled]),
                state_slots=self.state_slots(sequences),
                adapters=self.adapters(sequences),
            ),
        )
        for sequence, end in spans:
            sequence.cached = end
        for row, i in enumerate(sampled):
            sequences[i].tokens.append(int(output.token_ids[row]))
            sequences[i].logits.append(logits[row])

    def generate(self, prompts: Sequence[Sequence[int]], max_tokens: int, chunk: int = 2048) -> list[Running]:
        """Decode all prompts together, each prefilled in chunks of `chunk` while the others go on."""
        sequences = [self.start(prompt, max_tokens) for prompt in prompts]
        while running := [s for s in sequences if len(s.output) < max_tokens]:
            self.step(running, chunk)
        for sequence in sequences:
            self.finish(sequence)
        return sequences

    def logits(self, tokens: Sequence[int], chunk: int = 2048, adapter: int = -1) -> NDArray[np.float32]:
        """The logits after every one of the tokens. Shape [T, vocab]."""
        sequence = self.start(tokens, 0, adapter)
        table, *windows = (np.array([blocks], np.int32) for blocks in sequence.tables)
        rows = []
        for start in range(0, len(tokens), chunk):
            end = min(start + chunk, len(tokens))
            _, logits = run_with_logits(
                self.executor,
                StepBatch(
                    token_ids=np.array(tokens[start:end], np.int32),
                    positions=np.arange(start, end, dtype=np.int32),
                    query_start=np.array([0, end - start], np.int32),
                    context_len=np.array([end], np.int32),
                    block_tables=table,
                    window_tables=tuple(windows),
                    logits_rows=np.arange(end - start, dtype=np.int32),
                    sampling=SamplingBatch.greedy(range(start + 1, end + 1)),
                    state_slots=self.state_slots([sequence]),
                    adapters=self.adapters([sequence]),
                ),
            )
            rows.append(logits)
        self.finish(sequence)
        return np.concatenate(rows)


def check_greedy(name: str, sequences: Sequence[Running], *, max_error: float = 1e-4) -> None:
    """Each sequence of a model of the zoo has the tokens that transformers chooses greedily, and nearly its logits.

    `max_error` is the largest error of a logit, as a part of the largest logit.

    Transformers is given a whole sequence at once, which is much quicker than letting it generate. Up to the first
    token that differs, both see the same context.
    """
    for sequence in sequences:
        reference = models_zoo.reference_logits(name, sequence.tokens)
        chosen = reference[sequence.prompt_len - 1 : -1]
        assert sequence.output == chosen.argmax(-1).tolist()
        assert np.abs(np.stack(sequence.logits) - chosen).max() <= max_error * np.abs(reference).max()
