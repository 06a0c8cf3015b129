"""Engine: what the server talks to. `submit` a request, read its stream."""

from __future__ import annotations

import asyncio
import itertools
import logging
import random
import secrets
import threading
from collections.abc import Callable, Mapping
from functools import partial
from typing import TYPE_CHECKING

import numpy as np
from msgspec import Struct

from ..adapters.registry import LoraRegistry, LoraUse
from ..constraints.constraint import SequenceConstraint
from ..constraints.grammar import GrammarCompiler
from ..constraints.masks import MaskWriter
from ..cost_model import CostModel
from ..devices.bucket_stats import BucketStats
from ..devices.executor import Executor
from ..devices.limits import ExecutorLimits
from ..errors import EngineDeadError, ModelError
from ..histogram import Histogram
from ..media.encoder import MediaEncoder
from ..media.prompt_media import PromptMedia
from ..options import DEFAULT_MAX_LOGPROBS, logprobs_limit
from ..scheduling.scheduler import Scheduler
from ..sequences.beam_search import BeamSearch
from ..sequences.sequence import Sequence
from ..side_work import SideWork
from ..speculation.drafter import BatchDrafter, Drafter
from ..speculation.drafts import DraftStats
from ..text.tokenizer import Tokenizer
from .loop import EngineLoop
from .open_streams import OpenStreams
from .output_processor import OutputProcessor
from .request import Request
from .stream import RequestStream
from .validation import RequestValidator
from .watchdog import StepWatchdog

if TYPE_CHECKING:
    from ..cache.tiers.folder import BlockFolder
    from ..cache.tiers.offload import OffloadStats
    from ..hosting.turns import Turn
    from ..media.loaded import LoadedVision
    from ..pipeline.stage_times import PipelineStats

logger = logging.getLogger(__name__)

_LONGEST_STOP_S = 3.0  # that a stop waits for the step that runs


class EngineStats(Struct, frozen=True):
    """A look at the engine from outside; totals count since the start, and the histograms go on counting."""

    num_running: int
    num_waiting: int
    num_deferred: int
    kv_blocks_total: int
    kv_blocks_used: int
    prompt_tokens_total: int
    generation_tokens_total: int
    cached_prompt_tokens_total: int
    preemptions_total: int
    steps_total: int
    stalled_steps_total: int
    step_seconds: Histogram
    step_tokens: Histogram
    drafts: DraftStats | None = None  # where the device can run any
    offload: OffloadStats | None = None  # if KV blocks are kept on disk
    pipeline: PipelineStats | None = None  # if layers are shared out to stages


class Engine:
    """A loaded model that serves requests. Everything but `stats` is called on the event loop's thread.

    The engine thread owns scheduler, blocks and sequences; this side owns the streams. They exchange messages:
    sequences and aborts one way, EngineCoreOutputs once a step the other way.
    """

    def __init__(
        self,
        executor: Executor,
        tokenizer: Tokenizer,
        *,
        model_name: str,
        max_model_len: int,
        own_context: int | None = None,
        vocab_size: int,
        eos_token_ids: frozenset[int] = frozenset(),
        generation_defaults: Mapping[str, float | int] | None = None,
        max_logprobs: int = DEFAULT_MAX_LOGPROBS,
        max_step_ms: float,
        enable_prefix_caching: bool,
        drafter: Drafter | BatchDrafter | None = None,
        max_drafted: int | None = None,
        scheduler_delay_factor: float = 0.0,
        step_timeout_s: float | None = None,
        loras: LoraRegistry | None = None,
        kv_folder: BlockFolder | None = None,
        vision: LoadedVision | None = None,
        info: Mapping[str, str] | None = None,
        seed: int | None = None,
        turn: Turn | None = None,
    ) -> None:
        """`max_model_len` is lowered to what the executor's KV cache can hold. `info` says how the model was loaded.

        Where adapters have longer contexts than the model, `own_context` is the model's; see `context_of`.

        `max_logprobs` is how many likeliest tokens a request may ask for at each place, -1 for the whole vocabulary.
        `loras` are the adapters that requests may name. With a `vision`, prompts may have images. KV blocks that memory
        has no room for are kept in `kv_folder`, which the engine closes; it takes an Executor. A `drafter` drafts
        tokens while at most `max_drafted` sequences decode: this makes steps fewer and changes no token. While others
        run, prompts wait `scheduler_delay_factor` times as long as the last step that began a prompt took. Stacks are
        written to stderr when a step takes longer than `step_timeout_s`. With a `seed`, the n-th request without its
        own seed gets the same seed in every engine. Where other models compute on the same cores, each step waits for
        its `turn`.
        """
        limits = executor.limits
        self.model_name = model_name
        self.tokenizer = tokenizer
        self.info: Mapping[str, str] = info or {}
        self.generation_defaults: Mapping[str, float | int] = generation_defaults or {}
        self.failure: BaseException | None = None
        self.max_model_len = min(max_model_len, limits.max_context or max_model_len)
        if not limits.chunked_prefill:
            self.max_model_len = min(self.max_model_len, limits.max_num_batched_tokens)
        self._own_context = own_context or self.max_model_len
        self.vocab_size = vocab_size
        self.max_logprobs = logprobs_limit(max_logprobs, vocab_size)
        self.media = None if vision is None else vision.reader
        self._vision = None if vision is None else vision.vision
        self._validator = RequestValidator(vocab_size, self.max_logprobs, limits, self._vision)
        self._eos_token_ids = frozenset(i for i in eos_token_ids if i < vocab_size)
        self.grammars = GrammarCompiler(tokenizer, vocab_size, self._eos_token_ids)
        self._block_size = limits.block_size
        self._executor = executor
        self._scheduler = Scheduler(
            CostModel(max_step_ms),
            limits,
            enable_prefix_caching=enable_prefix_caching,
            drafter=drafter,
            max_drafted=max_drafted,
            delay_factor=scheduler_delay_factor,
        )
        self._streams = OpenStreams(self._abort, self._fail)
        self._encoder: MediaEncoder[list[Sequence]] | None = None
        if vision is not None:
            self._encoder = MediaEncoder(vision.vision, vision.tower, vision.max_bytes)
        self._engine_loop = EngineLoop(
            self._scheduler, executor, MaskWriter(vocab_size), self._streams.deliver, self._encoder, turn
        )
        self._offload = None
        if kv_folder is not None:
            from ..cache.tiers.disk import DiskTier
            from ..cache.tiers.offload import Offload

            storing = executor
            self._offload = self._scheduler.offload = Offload(
                DiskTier(kv_folder, storing.block_bytes, self._engine_loop.wake),
                self._scheduler.cache,
                storing,
                max_step_ms=max_step_ms,
                computing_ms=self._scheduler.cost_model.prefill_ms,
            )
        self.loras = loras
        if loras is not None:
            loras.drop = self._drop_lora
        self._watchdog = None if step_timeout_s is None else StepWatchdog(self._engine_loop, step_timeout_s)
        self._has_started = False
        self._settling: threading.Thread | None = None
        self._refusal: str | None = "the engine has not been started"
        # Asking the system for each would let go of the GIL.
        self._seeds = random.Random(secrets.randbits(256) if seed is None else seed)
        self._keys = itertools.count()
        self._arrivals = itertools.count()

    def context_of(self, rope_factor: float) -> int:
        """The longest sequence, in tokens, with an adapter of that factor; of 1.0 without an adapter too."""
        return min(self.max_model_len, int(self._own_context * rope_factor))

    def start(self, loop: asyncio.AbstractEventLoop | None = None) -> None:
        """Start the engine thread; outputs are delivered on `loop`, by default the running one."""
        self._streams.start(loop or asyncio.get_running_loop())
        self._has_started = True
        self._refusal = None
        self._engine_loop.start()
        if self._watchdog is not None:
            self._watchdog.start()

    def submit(self, request: Request) -> RequestStream:
        """Queue a request. Raises InvalidRequestError if it can never be served, EngineDeadError if nothing can."""
        if self._refusal is not None:
            raise EngineDeadError(self._refusal)
        context = self.context_of(1.0 if request.lora is None else request.lora.rope_factor)
        context = min(context, request.max_model_len or context)
        self._validator.check(request, context)
        if request.sampling.stop:
            self.tokenizer.require_text("stop")
        prompt, sampling = np.asarray(request.prompt_token_ids, dtype=np.int32), request.sampling
        seed = self._seeds.getrandbits(64) if sampling.seed is None else sampling.seed % 2**64
        arrival = next(self._arrivals)
        constraint = self._constraint(request)
        media = None
        if request.media and self._vision is not None:
            media = PromptMedia(request.media, prompt, self._vision)
        search = None
        if sampling.beam_width is not None:
            search = BeamSearch(sampling, self._eos_token_ids, self.vocab_size)
        sequences = [
            Sequence(
                next(self._keys),
                prompt,
                sampling,
                index=index,
                seed=seed,
                arrival=arrival,
                priority=request.priority,
                client=request.client,
                cache_salt=request.cache_salt,
                lora=request.lora,
                media=media,
                eos_ids=self._eos_token_ids,
                max_length=context,
                constraint=None if constraint is None else constraint.fresh(),
                search=search,
            )
            for index in range(sampling.num_sequences)
        ]
        text = (
            request.prompt_token_ids,
            sampling.skip_special_tokens,
            sampling.shown_special_tokens,
            sampling.spaces_between_special_tokens,
        )
        stream = self._streams.open(
            [
                OutputProcessor(s.key, request.first_choice + s.index, sampling, self.tokenizer.detokenizer(*text))
                for s in sequences[: sampling.n]
            ]
        )
        self._engine_loop.add(sequences)
        return stream

    async def drain(self, timeout_s: float) -> None:
        """Refuse new requests and wait for those that run; after `timeout_s` abort the rest."""
        self._refusal = self._refusal or "the server is shutting down"
        self.grammars.close()  # requests that wait for one would be refused
        try:
            await asyncio.wait_for(self._streams.ended(), timeout_s)
        except asyncio.TimeoutError:
            if self._streams:  # without time, the wait fails even if there is nothing to wait for
                logger.warning("Aborting %d sequences that did not finish in %g s", len(self._streams), timeout_s)
                self._streams.abort_all()

    async def stop(self) -> None:
        """Abort everything and end the engine thread; the executor is closed. Calling it twice is allowed.

        A thread that is stuck in a step is waited for only so long: `is_alive` then stays true.
        """
        self._streams.abort_all()
        if self._begin_stop():
            await asyncio.get_running_loop().run_in_executor(None, self._end_stop)

    def close(self) -> None:
        """The same where no event loop runs any more, because the program ends. Streams hear nothing of it."""
        if self._begin_stop():
            self._end_stop()

    def warm_up(self) -> None:
        """Prepare for grammars in a thread, and make a lent tokenizer here, unless requests are there.

        The first grammar would do it, but it holds the GIL for tens of milliseconds: streams would stand still.
        """
        if self._refusal is None and self.is_idle:
            self.grammars.warm_up()
            if self.tokenizer.is_lent and self._settling is None:
                self._settling = threading.Thread(target=self._settle, name="tokenizer", daemon=True)
                self._settling.start()

    @property
    def is_idle(self) -> bool:
        """Whether no request has a stream here."""
        return not self._streams

    @property
    def is_writing(self) -> bool:
        """See Executor."""
        return self._executor.is_writing

    @property
    def is_alive(self) -> bool:
        """Whether the engine thread runs."""
        return self._engine_loop.is_alive

    def lend_threads(self, take: Callable[[Executor], bool]) -> bool:
        """Offer the executor's threads to what will compute between the steps; whether it took them."""
        return take(self._executor)

    def add_side_work(self, work: SideWork) -> None:
        """Have this computed, too, between the steps. Call it before `start`."""
        self._engine_loop.add_side_work(work)

    def call(self, function: Callable[[], None]) -> None:
        """Call `function` on the engine thread before the next step."""
        self._engine_loop.call(function)

    @property
    def limits(self) -> ExecutorLimits:
        """What the executor can hold and run."""
        return self._executor.limits

    def reset_prefix_cache(self) -> None:
        """Forget all cached prompts, on disk too; requests submitted from now on find none of what was computed before.

        Raises EngineDeadError.
        """
        if self._refusal is not None:
            raise EngineDeadError(self._refusal)
        self._engine_loop.call(self._scheduler.forget)

    def stats(self) -> EngineStats:
        """Figures for metrics; may be called from any thread."""
        scheduler, cache = self._scheduler, self._scheduler.cache
        # Of a PipelineExecutor. To ask whether it has the shape of one takes as long as all the rest.
        stage_stats: Callable[[], PipelineStats] | None = getattr(self._executor, "stage_stats", None)
        return EngineStats(
            num_running=scheduler.num_running,
            num_waiting=scheduler.num_waiting + (0 if self._encoder is None else len(self._encoder)),
            num_deferred=scheduler.num_deferred,
            kv_blocks_total=cache.num_blocks,
            kv_blocks_used=cache.num_used,
            prompt_tokens_total=scheduler.prompt_tokens_total,
            generation_tokens_total=scheduler.generation_tokens_total,
            cached_prompt_tokens_total=scheduler.cached_prompt_tokens_total,
            preemptions_total=scheduler.preemptions_total,
            steps_total=self._engine_loop.steps_total,
            stalled_steps_total=0 if self._watchdog is None else self._watchdog.stalled_steps_total,
            step_seconds=self._engine_loop.step_seconds,
            step_tokens=self._engine_loop.step_tokens,
            drafts=None if scheduler.drafts is None else scheduler.drafts.stats,
            offload=None if self._offload is None else self._offload.stats(),
            pipeline=None if stage_stats is None else stage_stats(),
        )

    def prompts_left_s(self) -> float | None:
        """Seconds that it will take to compute what is left of all prompts, from any thread: see Scheduler."""
        left_ms = self._scheduler.prompts_left_ms()
        return None if left_ms is None else left_ms / 1e3

    def adapters_used(self) -> LoraUse | None:
        """The adapters of all sequences, from any thread; None where none are served."""
        return None if self.loras is None else self.loras.used(*self._scheduler.adapters())

    def bucket_stats(self) -> BucketStats | None:
        """How the device padded its launches, from any thread; None if it pads none, or the engine does not run."""
        executor = self._executor
        return executor.stats() if self.is_alive else None

    def _begin_stop(self) -> bool:
        """Refuse what is new, and tell the engine thread to end; whether there is one."""
        self._refusal = self._refusal or "the engine has been stopped"
        self.grammars.close()
        if self.media is not None:
            self.media.close()
        if self.loras is not None:
            self.loras.close()
        if self._has_started:
            self._engine_loop.stop()
        else:
            if self._offload is not None:
                self._offload.close(saving=False)
            self._engine_loop.close()
            self.grammars.free()
        return self._has_started

    def _end_stop(self) -> None:
        longest_s = _LONGEST_STOP_S + (0.0 if self._offload is None else self._offload.longest_close_s)
        if not self._engine_loop.join(longest_s):
            logger.error(
                "The engine thread did not end within %g s; the server exits without waiting for it", longest_s
            )
        self.grammars.free()
        if self._watchdog is not None:
            self._watchdog.stop()

    def _constraint(self, request: Request) -> SequenceConstraint | None:
        if request.constraints is None:
            return None
        return SequenceConstraint(
            request.constraints,
            request.sampling,
            self.tokenizer,
            eos_ids=self._eos_token_ids,
            vocab_size=self.vocab_size,
        )

    def _settle(self) -> None:
        try:
            self.tokenizer.settle()
        except ModelError as error:
            logger.warning("Another process goes on encoding texts: %s", error)

    def _drop_lora(self, number: int) -> None:
        # Behind the aborts of the sequences that have named it.
        self._engine_loop.call(partial(self._executor.drop_lora, number))

    def _abort(self, keys: list[int]) -> None:
        self._engine_loop.abort(keys)

    def _fail(self, failure: BaseException) -> None:
        self.failure = failure
        self._refusal = f"the engine has failed: {failure}"
        self._engine_loop.stop()
        self._streams.fail(self._refusal)
