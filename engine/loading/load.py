"""From options to an engine: find the model, plan its memory, load the weights.

What the loading of weights need not wait for is imported and read meanwhile: see `EngineLoad`.
"""

from __future__ import annotations

import functools
import logging
import math
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, cast

from ..cancellation import Cancellation
from ..devices import check_options
from ..devices.cache_split import BLOCK_TOKENS, GroupBytes, keeps_kv
from ..devices.executor import Executor
from ..devices.limits import ExecutorLimits
from ..errors import DeviceError, ModelError
from ..hosting.units import Needs, Progress, Stage
from ..machine.priority import lower_thread_priority
from ..models.generation import sampling_defaults
from ..models.overrides import overridden
from ..models.spec import StageSpec, tensor_shapes
from ..options import DEFAULT_KV_OFFLOAD_SPACE, EngineOptions
from ..speculation.options import DraftModel, Eagle3, Mtp, Speculation
from ..start_log import start_logger
from .downloads import downloads_of, with_adapters_here
from .load_progress import WarmUpProgress
from .memory_plan import plan_memory
from .opened_model import OpenedModel, open_model

if TYPE_CHECKING:
    from ..adapters.registry import LoraRegistry
    from ..cache.tiers.folder import BlockFolder
    from ..core.engine import Engine
    from ..devices.base import Device
    from ..devices.executor import DraftExecutor
    from ..devices.tower import TowerExecutor
    from ..hosting.cores import SharedCores
    from ..hosting.kept_tokenizers import FilesVersion
    from ..hosting.units import Report
    from ..media.loaded import LoadedVision
    from ..pipeline.executor import PipelineExecutor
    from ..pipeline.stages import StageHost
    from ..speculation.drafter import BatchDrafter, Drafter
    from ..text.tokenizer import Tokenizer
    from .drafts import OpenedDraft

logger = logging.getLogger(__name__)

_GIB = 2**30
_READING_SHARE = 0.9  # of the progress of a load; warming up is the rest


class EngineLoad:
    """A model whose weights are being loaded, in a thread of their own, while the caller does something else.

    A context manager that waits for that thread. If it is left by an exception, or without the engine, loading is given
    up and what there is of it is freed.
    """

    def __init__(
        self,
        options: EngineOptions,
        host: StageHost | None = None,
        *,
        cores: SharedCores | None = None,
        memory_bytes: int | None = None,
        report: Report | None = None,
    ) -> None:
        """Find the model, whose stages run on other machines with a `host`.

        With `cores`, which other models of this process have as well, it is loaded in the background with threads of
        its own, and computes with theirs once it is loaded. It is planned in the `memory_bytes` that all of them may
        take together. `report` is told how far it is, on the thread that loads.

        `needs` is the memory of this machine that it will take. Raises ModelError and DeviceError, saying what to
        change.
        """
        self._started = time.perf_counter()
        check_at_once(options, host)
        options = with_adapters_here(options)
        self._options, self._host, self._memory_bytes = options, host, memory_bytes
        if downloads := downloads_of(options):
            from .download_check import check_before_download

            check_before_download(options, downloads, self._check_fits)
        self._model = model = open_model(options)
        self._generation = model.source.generation(overridden(model.source.config, options.hf_overrides, None, None))
        self._draft = _open_draft(options, model)
        self._stages = self._plan_stages(options, model, self._draft)
        self._max_model_len = options.max_model_len or model.spec.max_positions
        if options.num_gpu_blocks_override is not None and options.kv_cache_space is not None:
            logger.warning("--kv-cache-space has no effect: --num-gpu-blocks-override is the size of the KV cache")
        self._num_blocks = options.num_gpu_blocks_override
        self._kv_cache_bytes = None if options.kv_cache_space is None else int(options.kv_cache_space * _GIB)
        self.needs = Needs(0)
        if not model.device.capabilities.own_memory:
            self._plan()
        self._kv_folder: BlockFolder | None = None
        self._cancellation = Cancellation()
        self._executor: Executor | None = None
        self._tower: TowerExecutor | None = None
        self._drafter: Drafter | BatchDrafter | None = None
        self._failure: BaseException | None = None
        self._finished = False
        self._cores, self._report = cores, report
        self._tokenizer_versions: dict[Path, FilesVersion] = {}
        if cores is not None:
            from ..hosting.kept_tokenizers import files_version

            for opened in (model, *(() if self._draft is None else (self._draft.model,))):
                if opened.tokenizer_source is not None:
                    path = opened.tokenizer_source.path
                    self._tokenizer_versions[path] = files_version(path)
        self._threads = None if self._stages else _threads(model.device, cores)
        self._thread = threading.Thread(target=self._load, name="weights")

    def _open_kv_folder(self) -> BlockFolder | None:
        """Where KV blocks are kept on disk, if that was asked for."""
        options = self._options
        if options.kv_offload is None:
            if options.kv_offload_space is not None:
                logger.warning("--kv-offload-space has no effect: name a folder with --kv-offload")
            return None
        from .kv_offload import open_kv_folder

        model = self._model
        lora = model.lora_limits(options.lora)
        return open_kv_folder(
            options.kv_offload,
            options.kv_offload_space or DEFAULT_KV_OFFLOAD_SPACE,
            model.device,
            model.spec,
            model.weights.identity,
            (model.dtype, model.kv_cache_dtype, repr(model.kv_scales), repr(model.plan.formats), lora and lora.dtype),
            model.kv_bytes_per_token * BLOCK_TOKENS,
            None if self._cores is None else self._cores.kv_folders,
        )

    def _plan(self) -> None:
        """Size what will lie in this machine's memory."""
        plan = plan_memory(self._options, self._model, self._stages, self._draft, self._host, self._memory_bytes)
        self.needs = Needs(plan.weight_bytes + plan.step_bytes, plan.cache_bytes)
        self._max_model_len, self._num_blocks = plan.max_model_len, plan.num_blocks
        self._kv_cache_bytes = plan.cache_bytes
        start_logger.info("%s", plan.said)

    def _plan_stages(
        self, options: EngineOptions, model: OpenedModel, draft: OpenedDraft | None
    ) -> Sequence[StageSpec]:
        """The stages of a pipeline, if one was asked for. Raises ModelError and DeviceError if there cannot be one."""
        if options.pipeline.stages == 1:
            return ()
        from .stages.pipeline import local_host, plan_stages

        if self._host is None:
            self._host = local_host(options, model)
        return plan_stages(options, model, self._host, 0 if draft is None else draft.model.weight_bytes)

    def _check_fits(self, options: EngineOptions, model: OpenedModel) -> None:
        """Raise ModelError or DeviceError if a model, and a draft model for it, cannot have the memory they take."""
        host, draft = self._host, _open_draft(options, model)
        stages = self._plan_stages(options, model, draft)
        if not model.device.capabilities.own_memory:
            plan_memory(options, model, stages, draft, self._host, self._memory_bytes)
        self._host = host  # a host for headers alone says nothing of what it chose

    def cancel(self) -> None:
        """Give it up, from any thread: whoever waits for the engine gets a LoadCancelledError."""
        self._cancellation.cancel()

    def __enter__(self) -> EngineLoad:
        """Begin to load. Raises ModelError and DeviceError for a folder of KV blocks that it cannot have."""
        self._kv_folder = self._open_kv_folder()
        try:
            self._thread.start()
        except BaseException:  # Ctrl-C while it waits for the thread to begin: nothing would end that thread
            self._cancellation.cancel()
            if self._kv_folder is not None:
                self._kv_folder.close()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if error is not None or not self._finished:
            self._cancellation.cancel()
            self._thread.join()
            if self._tower is not None:
                self._tower.close()
            if self._executor is not None:
                self._executor.close()
            if self._kv_folder is not None:
                self._kv_folder.close()

    @functools.cached_property
    def tokenizer(self) -> Tokenizer:
        """The tokenizer, which needs no weights. Raises ModelError if there is none, or it is broken."""
        return self._tokenizer_of(self._model)

    def _tokenizer_of(self, model: OpenedModel) -> Tokenizer:
        if self._cores is None or model.tokenizer_source is None:
            return model.tokenizer()
        path, mode = model.tokenizer_source.path, model.tokenizer_mode

        def make() -> Tokenizer:
            if self._may_stall(model):
                from .lent_tokenizer import LentTokenizer, can_be_lent

                if can_be_lent(path):
                    try:
                        return LentTokenizer(path)
                    except ModelError as error:  # if the files are broken, to make it here says how
                        logger.info("The tokenizer in %s is made in this process: %s", path, error)
            return model.tokenizer()

        return self._cores.tokenizers.get(path, self._tokenizer_versions[path], mode, make)

    def _may_stall(self, model: OpenedModel) -> bool:
        """Whether to make its tokenizer may stop the streams of other models. On accelerators, nothing tells of any."""
        if self._cores is None or model.tokenizer_mode == "mistral":
            return False
        from ..hosting.kept_tokenizers import LARGE_VOCABULARY

        is_large = model.spec.vocab_size >= LARGE_VOCABULARY
        return is_large and (self._threads is None or self._cores.turns.is_taken)

    def engine(self) -> Engine:
        """The engine, which still has to be started. Raises ModelError and DeviceError, saying what to change."""
        from ..core.engine import Engine

        model, options = self._model, self._options
        defaults = sampling_defaults(self._generation)
        speculation = options.speculative.speculation
        tokenizer = self.tokenizer
        if self._draft is not None:
            self._draft.require_vocabulary(tokenizer, self._tokenizer_of(self._draft.model))
        executor = self._wait()
        self._check_context(executor.limits)
        # A chat model's files may name the end of a turn in one place and the end of a text in another.
        eos_token_ids = {*self._generation.eos_token_ids, tokenizer.eos_token_id}
        engine = Engine(
            executor,
            tokenizer,
            model_name=options.model,
            max_model_len=self._max_model_len,
            own_context=None if model.contexts is None else model.contexts.own,
            vocab_size=model.spec.vocab_size,
            eos_token_ids=frozenset(i for i in eos_token_ids if i is not None),
            generation_defaults=defaults,
            max_logprobs=options.max_logprobs,
            max_step_ms=options.max_step_ms,
            enable_prefix_caching=options.enable_prefix_caching,
            drafter=self._drafter or _drafter(speculation, executor.limits),
            max_drafted=None if speculation is None else speculation.max_sequences,
            scheduler_delay_factor=options.scheduler_delay_factor,
            step_timeout_s=options.step_timeout,
            loras=self._loras(executor),
            kv_folder=self._kv_folder,
            vision=self._loaded_vision(tokenizer),
            seed=options.seed,
            turn=None if self._cores is None or self._threads is None else self._cores.turns.join(),
            info={
                "device": model.device.name,
                "isa": model.device.isa or "",
                "architecture": str(model.source.config.get("model_type") or model.spec.family),
                "parameters": str(sum(map(math.prod, tensor_shapes(model.spec).values()))),
                "weights": model.kept_as,
                "weight_bytes": str(model.weight_bytes),
                "kv_cache_bytes": str(_kept_bytes(model, executor.limits)),
                "dtype": model.dtype,
                "quantization": model.kept_as if model.quantization or model.keeps_bits else "",
                "kv_cache_dtype": model.kv_cache_dtype,
                "enable_prefix_caching": str(options.enable_prefix_caching),
                **({"stages": ", ".join(map(str, self._stages))} if self._stages else {}),
            },
        )
        self._finished = True
        limits = executor.limits
        start_logger.info(
            "Loaded %s (%s, %s on %s) in %.2f s: context %d tokens, KV cache %.2f GiB (%s blocks of %d tokens%s)",
            options.model,
            model.spec.family,
            model.kept_as,
            model.device.name,
            time.perf_counter() - self._started,
            engine.max_model_len,
            _kept_bytes(model, limits) / _GIB,
            "+".join(str(group.num_blocks) for group in limits.groups),
            limits.block_size,
            _windows_text(limits) + _states_text(limits, model.slot_bytes),
        )
        if limits.max_num_seqs < options.max_num_seqs:
            logger.warning(
                "At most %d sequences run at a time, not the %d of --max-num-seqs, because %s the KV cache has room "
                "for this number of recurrent states, besides snapshots; raise --kv-cache-space for more",
                limits.max_num_seqs,
                options.max_num_seqs,
                "half of" if keeps_kv(model.kv_groups) else "all of",
            )
        return engine

    def _loaded_vision(self, tokenizer: Tokenizer) -> LoadedVision | None:
        """What takes images; None: nothing does."""
        vision = self._model.vision
        if vision is None or self._tower is None:
            return None
        return vision.loaded(self._tower, tokenizer, self._options)

    def _loras(self, executor: Executor) -> LoraRegistry | None:
        """The adapters, read from their files."""
        options = self._options.lora
        limits = self._model.lora_limits(options)
        if limits is None:
            return None
        from ..adapters.hub import AdapterHub
        from ..adapters.registry import LoraRegistry

        read, hub = (
            functools.partial(self._model.read_lora, limits=limits, copies=3 if self._stages else 1),
            AdapterHub(self._options.download_dir),
        )
        registry = LoraRegistry(options, read, executor, hub)
        try:
            registry.load_modules()
        except BaseException:
            registry.close()
            raise
        return registry

    def _check_context(self, limits: ExecutorLimits) -> None:
        """A device may run prompts whole, or have found room in its own memory for less than was planned."""
        fitting, wanted = limits.max_context, self._max_model_len
        if not limits.chunked_prefill and limits.max_num_batched_tokens < wanted:
            logger.warning(
                "The context is cut from %d tokens to %d: the %s device runs prompts whole; raise "
                "--max-num-batched-tokens for more",
                wanted,
                limits.max_num_batched_tokens,
                self._model.device.name,
            )
            wanted = limits.max_num_batched_tokens
        if fitting is None or fitting >= wanted:
            return
        what = f"the KV cache of the {self._model.device.name} device holds {fitting} tokens"
        if self._options.max_model_len is not None:
            raise ModelError(
                f"{what}, less than one sequence of {wanted}: lower --max-model-len, or give the cache more memory "
                "with --gpu-memory-utilization or --kv-cache-space, or more blocks with --num-gpu-blocks-override"
            )
        logger.warning("The context is cut from the model's %d tokens to %d, because %s", wanted, fitting, what)

    def _load(self) -> None:
        try:
            # Streams of other models go on meanwhile; or the caller, whose work is one thread's, would be done last.
            if self._cores is not None or self._threads is not None:
                lower_thread_priority()
            if self._kv_folder is not None:
                self._kv_folder.scan()
            self._executor = self._load_model()
            if (vision := self._model.vision) is not None:
                model = self._model
                beside = None if self._stages else self._executor  # stages are other processes
                self._tower = vision.load(model.device, model.dtype, model.quantization, beside, self._cancellation)
            asked = self._options.speculative.speculation
            if isinstance(asked, Mtp | Eagle3):
                self._drafter = _layer_drafter(asked, self._drafting_layer(self._executor), self._max_model_len)
            if self._draft is not None:
                self._drafter = self._load_draft(self._draft, self._executor)
            with WarmUpProgress() as progress:

                def warmed(done: int, steps: int) -> None:
                    progress.report(done, steps)
                    self._tell("warming up", _READING_SHARE + (1 - _READING_SHARE) * done / max(steps, 1))

                self._executor.warm_up(warmed)
            if self._threads is not None and not self._executor.use_threads(self._threads):
                raise DeviceError(f"the {self._model.device.name} device cannot compute with another model's threads")
        except BaseException as error:  # it is raised again in the thread that waits
            self._failure = error

    def _tell(self, stage: Stage, fraction: float) -> None:
        if self._report is not None:
            self._report(Progress(stage, fraction))

    def _drafting_layer(self, executor: Executor) -> DraftExecutor:
        if not self._stages:
            return cast("DraftExecutor", executor)
        from ..pipeline.draft import StagedLayer

        return StagedLayer(cast("PipelineExecutor", executor))

    def _load_draft(self, draft: OpenedDraft, executor: Executor) -> Drafter | BatchDrafter:
        if not self._stages:
            return draft.load(executor, self._max_model_len, self._cancellation)
        beside = cast("PipelineExecutor", executor).draft  # the first stage has loaded it
        assert beside is not None
        return draft.drafter(beside, executor.limits, self._max_model_len)

    def _load_model(self) -> Executor:
        model, options = self._model, self._options
        if not self._stages:
            return model.load(
                options,
                kv_cache_bytes=self._kv_cache_bytes,
                max_model_len=self._max_model_len,
                max_num_seqs=options.max_num_seqs,
                max_num_batched_tokens=options.max_num_batched_tokens,
                num_blocks=self._num_blocks,
                cancellation=self._cancellation,
                told=lambda fraction: self._tell("reading", _READING_SHARE * fraction),
            )
        from .stages.pipeline import load_pipeline

        executor_options = model.executor_options(
            options,
            kv_cache_bytes=self._kv_cache_bytes,
            max_model_len=self._max_model_len,
            max_num_seqs=options.max_num_seqs,
            max_num_batched_tokens=options.max_num_batched_tokens,
            num_blocks=self._num_blocks,
        )
        assert self._host is not None
        return load_pipeline(
            options,
            model,
            self._stages,
            executor_options,
            self._cancellation,
            self._host,
            self._draft,
        )

    def _wait(self) -> Executor:
        self._thread.join()
        if self._failure is not None:
            raise self._failure
        assert self._executor is not None
        return self._executor


def check_at_once(options: EngineOptions, host: StageHost | None = None) -> None:
    """Raise DeviceError for what this machine cannot be asked for, before a model is looked for.

    `EngineLoad` does so, too. It is for those who load something else first.
    """
    if host is None:
        check_options(options.device, options.device_options, options.pipeline.stages)


def _threads(device: Device, cores: SharedCores | None) -> object | None:
    """The threads with which a model computes once it is loaded, and other models of `cores` too; None: the threads
    that loaded it.
    """
    if cores is not None:
        return cores.threads_of(device)
    groups = device.thread_groups()
    return None if groups is None else device.start_threads(groups)


def _open_draft(options: EngineOptions, model: OpenedModel) -> OpenedDraft | None:
    """The draft model that the options ask for. Raises ModelError and DeviceError if it cannot draft for the model."""
    asked = options.speculative.speculation
    if not isinstance(asked, DraftModel):
        return None
    from .drafts import open_draft

    return open_draft(options, asked, model)


def _layer_drafter(asked: Mtp | Eagle3, executor: DraftExecutor, max_model_len: int) -> BatchDrafter:
    """What drafts with the layer for that beside the model's own."""
    from ..speculation.mtp import MtpDrafter

    max_draft_tokens = executor.limits.draft_limit
    num_tokens = asked.num_tokens if max_draft_tokens is None else min(asked.num_tokens, max_draft_tokens)
    longest = min(max_model_len, asked.max_context or max_model_len)
    layer = "The checkpoint's MTP layer" if isinstance(asked, Mtp) else f"The EAGLE3 layer {asked.model}"
    logger.info("%s drafts up to %d tokens a step, in contexts of up to %d tokens", layer, num_tokens, longest)
    return MtpDrafter(executor, num_tokens, max_context=longest)


def _drafter(asked: Speculation | DraftModel | Mtp | Eagle3 | None, limits: ExecutorLimits) -> Drafter | None:
    """A drafter without a model; None, and a line in the log, if none is possible."""
    if not isinstance(asked, Speculation):
        return None
    if limits.draft_limit == 0:
        why = (
            "this device has fixed shapes"
            if limits.shapes
            else "a recurrent state cannot go back before a rejected draft token"
        )
        logger.warning("--speculative-config has no effect: %s", why)
        return None
    if limits.draft_limit is not None and limits.draft_limit < asked.num_tokens:
        logger.info(
            "At most %d tokens of a sequence are drafted in a step: its recurrent state cannot go back further",
            limits.draft_limit,
        )
    if asked.suffix is not None:
        from ..speculation.suffix import SuffixDrafter

        return SuffixDrafter(asked.num_tokens, asked.suffix, asked.max_context)
    from ..speculation.ngram import NgramDrafter

    return NgramDrafter(asked.num_tokens, asked.longest, asked.shortest, asked.max_context)


def _kept_bytes(model: OpenedModel, limits: ExecutorLimits) -> int:
    return _cache_bytes(limits, model.kv_groups) + limits.num_states * model.slot_bytes


def _cache_bytes(limits: ExecutorLimits, groups: Sequence[GroupBytes]) -> int:
    blocks = zip(limits.groups, groups, strict=True)
    return sum(group.num_blocks * limits.block_size * size.bytes_per_token for group, size in blocks)


def _windows_text(limits: ExecutorLimits) -> str:
    """Nothing for a model that has full attention alone."""
    windows = ["all tokens" if group.window is None else f"{group.window} tokens" for group in limits.groups]
    return "" if windows == ["all tokens"] else f", for layers that see {' and '.join(windows)}"


def _states_text(limits: ExecutorLimits, state_bytes: int) -> str:
    if not limits.num_states:
        return ""
    return f", {limits.num_states} states of {state_bytes / 2**20:.1f} MiB for sequences and snapshots of prefixes"


def load_engine(options: EngineOptions, host: StageHost | None = None) -> Engine:
    """Load a model; the engine still has to be started. Raises ModelError and DeviceError, saying what to change."""
    with EngineLoad(options, host) as load:
        return load.engine()
