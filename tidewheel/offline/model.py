"""OfflineModel: a chat model, encoders, or both, loaded from options. The ways in to it are LLM and AsyncLLM."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import cache, partial
from itertools import repeat
from typing import Any, TypeAlias, cast

from tidewheel.engine.core.engine import Engine
from tidewheel.engine.encoders.load import load_encoders_beside, load_model_alone
from tidewheel.engine.encoders.settings import pools
from tidewheel.engine.errors import InvalidRequestError
from tidewheel.engine.loading.downloads import downloads_of
from tidewheel.engine.loading.load import check_at_once, load_engine
from tidewheel.engine.models.overrides import overridden
from tidewheel.engine.options import EngineOptions
from tidewheel.engine.weights import open_source
from tidewheel.ray.taking import with_ray
from tidewheel.server.app_resources import find_resources
from tidewheel.server.chat.request_images import request_images
from tidewheel.server.generation.prompt_encoding import PromptEncoder
from tidewheel.server.options.replicas import ReplicaOptions

from .adapters import Adapter, Adapters, LoraRequests
from .chat_tokenizer import ChatTokenizer
from .generation import Batch, Generator, Job, Plan, few_collections
from .hf_config import HfConfig
from .lora_request import LoRARequest
from .options import OfflineOptions
from .outputs import RequestOutput
from .params import BeamSearchParams, SamplingParams
from .pooling import Pooler
from .prompts import Conversation, EncodedPrompt, Prompts, PromptType

logger = logging.getLogger(__name__)

Params: TypeAlias = SamplingParams | BeamSearchParams

_TURN = 32  # prompts that are encoded before the event loop does something else


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """A loaded model: its folder or hub id, its context, and the size of its vocabulary, both in tokens.

    `read_config` reads its config.json when that is first asked for.
    """

    model: str
    max_model_len: int
    vocab_size: int
    read_config: Callable[[], HfConfig] = field(repr=False, compare=False)

    @property
    def hf_config(self) -> HfConfig:
        """The fields of its config.json; of a GGUF file, what its metadata say in the same words."""
        return self.read_config()

    @property
    def hf_text_config(self) -> HfConfig:
        """The fields of the part that reads text."""
        return self.hf_config.get_text_config()

    def get_vocab_size(self) -> int:
        """The same as `vocab_size`."""
        return self.vocab_size


class OfflineModel:
    """A loaded model. All but the constructor is called on the event loop."""

    def __init__(self, options: OfflineOptions) -> None:
        """Load it. Raises TidewheelError, saying what to change."""
        replicas, why_ray = with_ray(options.replicas, options.engine)
        for note in (*options.notes, *filter(None, [why_ray])):
            logger.warning("%s", note)
        resources = find_resources(options.app)
        self.engine: Engine | None = None
        self._cluster = ExitStack()  # a connection to Ray, if stages are there
        if pools(options.engine, options.encoders):
            self.encoders = load_model_alone(options.engine, options.encoders)
            self.pooler = Pooler(self.encoders)
            return
        if replicas.distributed_executor_backend != "ray":
            check_at_once(options.engine)
        # First, because a chat model's cache takes a share of the memory that is left.
        self.encoders = load_encoders_beside(options.engine, options.encoders, downloads_of(options.engine))
        self.pooler = Pooler(self.encoders)
        self.engine = engine = self._load(options.engine, replicas)
        self._name = options.engine.model
        self._read_config = cache(partial(_config, options.engine))
        self._generator = Generator(engine)
        self.adapters = Adapters(engine)
        self._encoder = PromptEncoder(engine.tokenizer, engine.context_of(1.0))
        media = options.engine.media
        self._prompts = Prompts(
            self._encoder,
            resources.chat_template or engine.tokenizer.chat_template,
            request_images(engine, media),
            images_in_place=media.interleave_mm_strings,
        )
        given = resources.sampling_defaults
        defaults = engine.generation_defaults if given is None else given
        self._defaults = {**defaults, **resources.sampling_overrides}

    def _load(self, options: EngineOptions, replicas: ReplicaOptions) -> Engine:
        if replicas.distributed_executor_backend != "ray":
            return load_engine(options)
        from tidewheel.ray.pipeline import stage_host

        with ExitStack() as cluster:
            engine = load_engine(options, cluster.enter_context(stage_host(options, replicas)))
            self._cluster = cluster.pop_all()
        return engine

    def start(self) -> None:
        """Start the engines' threads; they deliver to the running event loop."""
        if self.engine is not None:
            self.encoders.run_beside(self.engine)
            self.engine.start()
        self.encoders.start()

    async def stop(self) -> None:
        """End all requests and threads, and free the memory. Calling it twice is allowed."""
        if self.engine is not None:
            self._encoder.close()
        engines = [engine for engine in (self.engine, self.encoders) if engine is not None]
        try:
            await asyncio.gather(*(engine.stop() for engine in engines))  # both are stopped, even if one of them fails
        finally:
            self._cluster.close()

    def close(self) -> None:
        """`stop` where no event loop runs any more, because the program ends."""
        if self.engine is not None:
            self._encoder.close()
            self.engine.close()
        self.encoders.close()
        self._cluster.close()

    @property
    def generator(self) -> Generator:
        """What runs prompts. Raises InvalidRequestError if there is no model that generates."""
        if self.engine is None:
            raise InvalidRequestError(
                "this LLM generates no text: its model is an encoder (runner='pooling')", "runner"
            )
        return self._generator

    def model_config(self) -> ModelConfig:
        """The model's config. Raises InvalidRequestError if there is none that generates."""
        engine = self.generator.engine
        return ModelConfig(self._name, engine.max_model_len, engine.vocab_size, self._read_config)

    def default_params(self) -> SamplingParams:
        """The sampling parameters that the model's generation_config.json asks for."""
        self.generator.require_alive()
        defaults: Mapping[str, Any] = self._defaults
        return SamplingParams(**defaults)

    def tokenizer(self) -> ChatTokenizer:
        """The tokenizer. Raises InvalidRequestError if it was left out."""
        tokenizer = self.generator.engine.tokenizer
        tokenizer.require_text("get_tokenizer")
        return ChatTokenizer(tokenizer, self._prompts)

    async def reset_prefix_cache(self) -> None:
        """Forget the cached beginnings of prompts."""
        self.generator.engine.reset_prefix_cache()

    async def job(
        self,
        request_id: str,
        prompt: PromptType | Conversation,
        plan: Plan,
        lora_request: LoRARequest | None,
        priority: int = 0,
        chat: Mapping[str, Any] | None = None,
    ) -> Job:
        """A prompt to be answered, with its adapter in memory; who runs the job releases it.

        With `chat` the prompt is a conversation, and these are fields of a chat completion's body. It has to fit the
        context of its adapter. Raises InvalidRequestError.
        """
        adapter = await self.adapters.lease(lora_request)
        try:
            encoded = await self._encode(prompt, plan, adapter, chat)
            plan = await self.generator.framed(plan, encoded.frame)
        except BaseException:
            if adapter is not None:
                adapter.release()
            raise
        return Job(request_id, encoded, plan, priority, adapter)

    async def _encode(
        self, prompt: PromptType | Conversation, plan: Plan, adapter: Adapter | None, chat: Mapping[str, Any] | None
    ) -> EncodedPrompt:
        context = self.generator.engine.context_of(1.0 if adapter is None else adapter.lora.rope_factor)
        if chat is None:
            text = cast("PromptType", prompt)
            return await self._prompts.encode(text, context=context, truncate_to=plan.truncate_to, room=plan.room)
        said = cast("Conversation", prompt)
        return await self._prompts.render(said, context=context, truncate_to=plan.truncate_to, **chat)

    async def answer_all(
        self,
        prompts: Sequence[PromptType] | Sequence[Conversation],
        params: Params | Sequence[Params],
        done: Callable[[int], object],
        *,
        first_id: int,
        priorities: Sequence[int] | None = None,
        lora_request: LoraRequests = None,
        chat: Mapping[str, Any] | None = None,
    ) -> list[RequestOutput]:
        """The answers to all prompts, in their order; with `chat` they are conversations.

        `done` is called for each finished prompt. Requests are named by numbers from `first_id` on. Raises
        InvalidRequestError and EngineDeadError; then nothing is left running.
        """
        plans = await self._plans(params, len(prompts))
        if priorities is not None and len(priorities) != len(prompts):
            raise InvalidRequestError(f"priority has {len(priorities)} values for {len(prompts)} prompts", "priority")
        wanted = self.adapters.each(lora_request, len(prompts))
        order = _order(priorities or [0] * len(prompts), wanted)
        found: dict[int, RequestOutput] = {}

        def take(position: int, output: RequestOutput) -> None:
            found[order[position]] = output
            done(1)

        batch = Batch(self.generator, take)
        with few_collections():
            try:
                for position, i in enumerate(order):
                    priority = priorities[i] if priorities else 0
                    batch.add(await self.job(str(first_id + i), prompts[i], plans[i], wanted[i], priority, chat))
                    if not position % _TURN:
                        await asyncio.sleep(0)
                await batch.finish()
            finally:
                batch.abort()
        return [found[i] for i in range(len(prompts))]

    async def _plans(self, params: Params | Sequence[Params], count: int) -> list[Plan]:
        """Each prompt's; the same parameters are translated once."""
        if isinstance(params, SamplingParams | BeamSearchParams):
            return list(repeat(await self.generator.plan(params), count))
        if len(params) != count:
            raise InvalidRequestError(
                f"sampling_params has {len(params)} entries for {count} prompts: give one for all, or one each",
                "sampling_params",
            )
        by_id = {id(one): one for one in params}
        plans = {key: await self.generator.plan(one) for key, one in by_id.items()}
        return [plans[id(one)] for one in params]


def _order(priorities: Sequence[int], adapters: Sequence[LoRARequest | None]) -> list[int]:
    """Positions by priority, and within one by adapter: with more adapters than fit into memory, each is read once."""
    first: dict[LoRARequest | None, int] = {}
    for one in adapters:
        first.setdefault(one, len(first))
    return sorted(range(len(priorities)), key=lambda i: (priorities[i], first[adapters[i]]))


def _config(options: EngineOptions) -> HfConfig:
    seed = options.seed or 0
    source = open_source(options.model, options.revision, options.download_dir, options.load_format, seed)
    return HfConfig(overridden(source.config, options.hf_overrides, options.rope_scaling, options.rope_theta))
