"""Plans a model's memory: its KV cache, and so its context, and what a step needs."""

from __future__ import annotations

import functools
import logging
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple

from ..devices.cache_split import BLOCK_TOKENS, CacheSplit, GroupBytes, StateSplit, keeps_kv, max_states
from ..errors import DeviceError, ModelError
from ..machine.memory import Memory, read_memory
from ..models.spec import DecoderSpec, ExpertsSpec, StageSpec, mixers
from ..options import EngineOptions, logprobs_limit
from ..speculation.options import Eagle3, Mtp
from ..weights.dtypes import STORAGE
from ..weights.quantization import Method
from .opened_model import OpenedModel, open_model

if TYPE_CHECKING:
    from ..pipeline.stages import StageHost
    from .drafts import OpenedDraft

logger = logging.getLogger(__name__)

_GIB = 2**30
_LARGEST_DEFAULT_CACHE = 4 * _GIB
_CACHE_SHARE = 2  # of the memory that is available beside the weights: a half of it
_SHARED_CACHE_SHARE = 4  # where other models take some, too
_ACTIVATION_BYTES = 4
_ADAPTER_BYTES = 4  # of a number, as adapters are read
_MAX_TOGETHER = 5  # matrices of one product, as for a Mamba2's inputs
_LOGPROB_BYTES = 8  # a token id and its log-probability, as many in a step's rows as in the row that asks for most
_ROUND_TOKENS = 128  # a sequence's last block is rarely full, whatever the device's block size


class MemoryPlan(NamedTuple):
    """The context, in tokens, the KV cache's bytes, and its blocks if they are fixed; and the memory, in words.

    `weight_bytes` are the weights' with those of all that is beside the model, and `step_bytes` the most that a step
    takes beside them.
    """

    max_model_len: int
    cache_bytes: int
    num_blocks: int | None
    weight_bytes: int
    step_bytes: int
    said: str


def plan_memory(
    options: EngineOptions,
    model: OpenedModel,
    stages: Sequence[StageSpec],
    draft: OpenedDraft | None,
    host: StageHost | None,
    memory_bytes: int | None = None,
) -> MemoryPlan:
    """Plan a model in this machine's memory, or its stages in the memory of their `host`'s machines; or in the
    `memory_bytes` that it and other models may take together, whatever is available now.

    Raises ModelError if there is not enough memory for the model and its draft model.
    """
    memory = read_memory() if memory_bytes is None else Memory.of_budget(memory_bytes)
    weight_bytes, groups = model.weight_bytes, model.kv_groups
    if stages:
        from .stages.pipeline import memory_of, stages_bytes

        assert host is not None
        weight_bytes = stages_bytes(model, stages, options.max_num_batched_tokens)
        memory = memory_of(host, model, stages, draft)
    adapters = model.lora_bytes(options)
    weight_bytes += adapters
    if host is not None and host.is_here and (limits := model.lora_limits(options.lora)) is not None:
        weight_bytes += adapters * _ADAPTER_BYTES // STORAGE[limits.dtype].itemsize  # kept, in case stages start again
    if draft is not None:
        weight_bytes += draft.model.weight_bytes
        groups = draft.with_own_bytes(groups)
    max_model_len, cache_bytes = plan_kv_cache(
        options,
        model_limit=model.spec.max_positions,
        groups=groups,
        state_bytes=model.slot_bytes,
        weight_bytes=weight_bytes,
        memory=memory,
        smaller=functools.partial(_quantized_bytes, options, model),
    )
    num_blocks = options.num_gpu_blocks_override
    if draft is not None and num_blocks is None:  # of both models
        num_blocks = _cache_split(options, groups).blocks(cache_bytes)[0]
    specs = [model.spec] if draft is None else [draft.model.spec, model.spec]
    step_bytes = sum([_check_step(options, spec, memory) for spec in specs])
    said = _memory_text(memory, weight_bytes)
    return MemoryPlan(max_model_len, cache_bytes, num_blocks, weight_bytes, step_bytes, said)


def _quantized_bytes(options: EngineOptions, model: OpenedModel) -> dict[Method, int]:
    """What the weights would take with each --quantization that the device has; without those that take no less."""
    sizes: dict[Method, int] = {}
    for method in model.device.capabilities.quantizes:
        fewer = replace(options, quantization=method, quantization_group_size=None, quantization_zero_points=False)
        try:
            num_bytes = open_model(fewer, model.source).weight_bytes
        except (ModelError, DeviceError):  # a checkpoint that is quantized in another way
            continue
        if num_bytes < model.weight_bytes:
            sizes[method] = num_bytes
    return sizes


def _cache_split(options: EngineOptions, groups: Sequence[GroupBytes]) -> CacheSplit:
    """The split for devices whose cache lies in the machine's memory."""
    return CacheSplit(groups, BLOCK_TOKENS, options.max_num_seqs, options.max_num_batched_tokens)


def plan_kv_cache(
    options: EngineOptions,
    *,
    model_limit: int,
    groups: Sequence[GroupBytes],
    weight_bytes: int,
    memory: Memory,
    state_bytes: int = 0,
    smaller: Callable[[], Mapping[Method, int]] = dict,
) -> tuple[int, int]:
    """The context length, in tokens, and the KV cache with the slots of recurrent state, in bytes.

    Without `kv_cache_space` the cache has room for `max_num_seqs` full-length sequences, but takes at most 4 GiB
    and at most half of the memory that is available beside the weights, or a quarter if other models have some of it,
    too. A context that was not asked for is cut to what one sequence can have of the cache. `num_gpu_blocks_override`
    sets the number of blocks in the cache; then the context is cut when the device has them. `weight_bytes` are the
    weights', with the adapters that the options name, and `state_bytes` the recurrent state of a sequence; `smaller`
    says what quantized weights would take.
    Raises ModelError if the context that was asked for does not fit, or if weights and cache need more than the
    control group or the machine could ever give, and DeviceError if there is no room for state.
    """
    wanted = options.max_model_len or model_limit
    has_kv = keeps_kv(groups)
    what = "weights and adapters" if options.lora.lora_modules else "weights"
    if options.num_gpu_blocks_override is not None:
        blocks = _cache_split(options, groups)
        cache_bytes = blocks.bytes_with(options.num_gpu_blocks_override)
        cache_bytes += StateSplit.whole(state_bytes, options.max_num_seqs).num_bytes
        _check_room(what, weight_bytes, cache_bytes, memory, smaller, options.num_gpu_blocks_override)
        return wanted, cache_bytes
    split = CacheSplit(groups, _ROUND_TOKENS, options.max_num_seqs, options.max_num_batched_tokens)
    full_length = split.bytes_with(split.first_blocks_of(1, wanted, 0))
    if options.kv_cache_space is None:
        left = None if memory.available is None else max(memory.available - weight_bytes, 0)
        share = _SHARED_CACHE_SHARE if memory.is_shared else _CACHE_SHARE
        most = _LARGEST_DEFAULT_CACHE if left is None else left // share
        all_blocks = split.first_blocks_of(options.max_num_seqs, wanted, options.max_num_batched_tokens)
        # Twice the states, because they get at most half of the cache where there are K and V too.
        state_room = (2 if has_kv else 1) * state_bytes * max_states(options.max_num_seqs)
        cache_bytes = min(split.bytes_with(all_blocks) + state_room, _LARGEST_DEFAULT_CACHE, most)
    else:
        cache_bytes = int(options.kv_cache_space * _GIB)
    _check_room(what, weight_bytes, cache_bytes, memory, smaller)
    states = StateSplit.within(cache_bytes, state_bytes, options.max_num_seqs, beside_kv=has_kv)
    block_bytes = cache_bytes - states.num_bytes
    if block_bytes >= full_length:
        return wanted, cache_bytes
    fitting = split.first_blocks(block_bytes) * _ROUND_TOKENS
    cause = f"a KV cache of {cache_bytes / _GIB:.2f} GiB holds {fitting} tokens"
    given = options.kv_cache_space is not None
    why = "" if given else f" ({_memory_text(memory, weight_bytes)})"
    raised = _more_cache(weight_bytes + full_length + states.num_bytes, memory, given=given)
    if options.max_model_len is not None or fitting < 1:
        advice = [f"lower --max-model-len to {fitting}"] * (fitting > 0) + [raised] * bool(raised)
        raise ModelError(
            f"{cause}, less than one sequence of {wanted}, which takes {full_length / _GIB:.2f} GiB{why}: "
            f"{', or '.join(advice) or 'take a smaller model, or free memory'}"
        )
    logger.warning(
        "The context is cut from the model's %d tokens to %d, because %s%s%s",
        wanted,
        fitting,
        cause,
        why,
        f"; {raised} for more" if raised else "",
    )
    return fitting, cache_bytes


def _check_room(
    what: str,
    weight_bytes: int,
    cache_bytes: int,
    memory: Memory,
    smaller: Callable[[], Mapping[Method, int]],
    num_blocks: int | None = None,
) -> None:
    # The cache's pages appear as it fills: without this a server could run well for hours before it is killed.
    if memory.ceiling is None or memory.available is None:
        return
    needed = f"{what} of {weight_bytes / _GIB:.2f} GiB and a KV cache of {cache_bytes / _GIB:.2f} GiB"
    if weight_bytes + cache_bytes > memory.ceiling:
        room = min(memory.ceiling, memory.available)  # others have the rest
        advice = []
        if weight_bytes < room:
            left = room - weight_bytes
            if num_blocks is None:
                advice.append(f"lower --kv-cache-space: {math.floor(left / _GIB * 100) / 100:.2f} GiB would fit")
            else:
                advice.append(f"lower --num-gpu-blocks-override: {num_blocks * left // cache_bytes} would fit")
        if cache_bytes < room or not advice:
            advice.append(_fewer_bits(smaller(), room - cache_bytes))
        owner = "this machine has"
        if memory.is_shared:
            owner = "all models may take (--memory)"
        elif memory.cgroup_limit is not None:
            advice.append("raise that limit")
            owner = "its control group allows this process"
        free = f", {room / _GIB:.2f} GiB of it available" if room < memory.ceiling else ""
        ceiling = f"{memory.ceiling / _GIB:.2f} GiB of memory that {owner}{free}"
        raise ModelError(f"{needed} do not fit into the {ceiling}: {', or '.join(advice)}")
    if weight_bytes + cache_bytes > memory.available:
        logger.warning("There is less memory than %s may need later: %s", needed, _memory_text(memory, weight_bytes))


def _more_cache(needed: int, memory: Memory, *, given: bool) -> str:
    """How to get a larger KV cache, with which `needed` bytes are needed; "" if there is not that much memory."""
    if memory.available is None or needed <= memory.available:
        return "raise --kv-cache-space"
    return "" if given or memory.cgroup_limit is None else "raise that limit"


def _fewer_bits(sizes: Mapping[Method, int], room: int) -> str:
    """How to get weights into `room` bytes. `sizes` says what they would take with each method."""
    if not sizes:
        return "take fewer bits for the weights with --quantization"
    fitting = [
        f"{method} would take {num_bytes / _GIB:.2f} GiB" for method, num_bytes in sizes.items() if num_bytes <= room
    ]
    if fitting:
        return f"take fewer bits for the weights with --quantization ({', '.join(fitting)})"
    least = min(sizes, key=lambda method: sizes[method])
    return f"take a smaller model: even with --quantization {least} the weights take {sizes[least] / _GIB:.2f} GiB"


def _check_step(options: EngineOptions, spec: DecoderSpec, memory: Memory) -> int:
    """The most that a step takes, in bytes. Raises ModelError if there is less."""
    # Its pages appear with the first long prompt, which would end the server.
    widest = max(sum(mixer.activations for mixer in mixers(layer)) for layer in spec.all_layers)
    tokens, rows = options.max_num_batched_tokens, options.max_num_seqs
    hidden = spec.hidden_size * (1 if spec.streams is None else spec.streams.count)
    logprobs = logprobs_limit(options.max_logprobs, spec.vocab_size)
    needed = (tokens * (widest + 2 * hidden) + rows * spec.vocab_size) * _ACTIVATION_BYTES
    needed += tokens * logprobs * _LOGPROB_BYTES
    if options.lora.enable_lora:
        values = _MAX_TOGETHER * (options.lora.max_lora_rank + 2)  # between A and B; two are of biases
        needed += max(tokens, rows) * _rows_per_token(spec) * values * _ACTIVATION_BYTES
    asked = options.speculative.speculation
    if isinstance(asked, Mtp | Eagle3):  # the last rows of each sequence, and what is drafted
        width = hidden if spec.eagle3 is None else spec.eagle3.hidden_size
        needed += rows * (2 + asked.num_tokens) * width * _ACTIVATION_BYTES
    if spec.eagle3 is not None:  # what is fused, what its attention reads, and its logits
        needed += (tokens * 3 * spec.eagle3.hidden_size + rows * spec.eagle3.vocab_size) * _ACTIVATION_BYTES
    if memory.ceiling is not None and needed > memory.ceiling:
        raise ModelError(
            f"a step of {tokens} tokens takes {needed / _GIB:.2f} GiB beside the weights, more than the "
            f"{memory.ceiling / _GIB:.2f} GiB of memory there are: lower --max-num-batched-tokens, --max-num-seqs, "
            f"--max-logprobs{' or --max-lora-rank' if options.lora.enable_lora else ''}"
        )
    return needed


def _rows_per_token(spec: DecoderSpec) -> int:
    """How many experts compute a token, at most; 1 without experts."""
    mixtures = [mixer for layer in spec.all_layers for mixer in mixers(layer) if isinstance(mixer, ExpertsSpec)]
    return max((mixture.experts_per_token + (mixture.shared is not None) for mixture in mixtures), default=1)


def _memory_text(memory: Memory, weight_bytes: int) -> str:
    if memory.is_shared:
        room = (memory.total or 0) / _GIB
        return f"all models may take {room:.2f} GiB (--memory), and the weights take {weight_bytes / _GIB:.2f} GiB"
    available = "an unknown amount" if memory.available is None else f"{memory.available / _GIB:.2f} GiB"
    limit = "" if memory.cgroup_limit is None else f" the control group's {memory.cgroup_limit / _GIB:.2f} GiB of"
    return f"{available} of{limit} memory is available, and the weights take {weight_bytes / _GIB:.2f} GiB"
