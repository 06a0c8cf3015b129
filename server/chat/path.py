"""ChatPath: from a chat request to a prompt, and from the prompt to a run that is being answered.

Every endpoint that answers conversations uses this path, and writes the result in the shape of its own protocol. An
endpoint of another protocol builds a ChatCompletionRequest and reads deltas:

    run = await path.start(body, len(raw), timer, client_id)
    NamedEventStream(run, builder.push, end=builder.finish, failed=write_error)  # streamed, in events with names
    await run.feed(request.receive, builder.push)  # in one piece, built from deltas
    answers = await run.whole(request.receive)  # or from whole turns
    run.usage()
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import TypeVar

from starlette.types import Receive

from tidewheel.engine.constraints.constraint import TokenConstraints
from tidewheel.engine.constraints.grammar import StructuredOutput
from tidewheel.engine.sampling_params import SamplingParams

from ..generation.generations import Generations
from ..generation.prompt_encoding import PromptEncoder
from ..generation.structured_output import structured_output
from ..generation.token_constraints import Calls
from ..protocol.chat import ChatCompletionRequest, Message
from ..protocol.rules import RequestRules
from ..protocol.sampling import sampling_params
from ..served_models import ServedModels
from ..telemetry.metrics import RequestTimer
from .answer_parsers import AnswerParsers
from .model_formats import ModelFormats
from .rendering import PromptRenderer, RenderedPrompt
from .request_images import RequestImages
from .request_prompts import RequestPrompts
from .run import ChatRun
from .tools.tool_choice import RequestTools, request_tools

T = TypeVar("T")


class ChatPath:
    """Starts conversations on the engine.

    `defaults` are the sampling parameters that the model itself asks for. `formats` say how the model writes reasoning
    and tool calls, which become separate pieces. Calls are looked for only if a request offers tools.
    """

    def __init__(
        self,
        models: ServedModels,
        encoder: PromptEncoder,
        renderer: PromptRenderer,
        generations: Generations,
        defaults: Mapping[str, float | int],
        formats: ModelFormats,
        rules: RequestRules,
        images: RequestImages,
    ) -> None:
        self._models = models
        self._encoder = encoder
        self._prompts = RequestPrompts(encoder, renderer, images)
        self.sees_images = images.reader is not None
        """Whether the model reads images."""
        self._generations = generations
        self._defaults = defaults
        self._rules = rules
        self._parsers = AnswerParsers(formats, encoder.tokenizer)

    @property
    def reads_reasoning(self) -> bool:
        """Whether reasoning is recognized, so that a budget can end it."""
        return self._parsers.reads_reasoning

    async def translated(self, raw_size: int, translate: Callable[[], T]) -> T:
        """The result of `translate`, which makes a chat request of another protocol's: in a thread for large bodies."""
        return await self._encoder.run(raw_size, translate)

    async def start(
        self,
        body: ChatCompletionRequest,
        raw_size: int,
        timer: RequestTimer,
        client_id: str,
        *,
        id_prefix: str = "chatcmpl",
        receive: Receive | None = None,
    ) -> ChatRun:
        """Checks a request, renders and encodes its prompt, and submits it.

        `raw_size` is the body's size in bytes: large bodies are encoded in a thread. `client_id` names the request in
        the log, and `id_prefix` begins the answer's id. With `receive`, ClientGone is raised if the client hangs up
        while images are read. Raises ApiError or InvalidRequestError for a request that
        cannot be served. The error names the field of a chat completion's body, and nothing is left running.
        """
        model = await self._models.resolve(body.model)
        tools = self._checked_tools(body)
        sampling = self._sampling(body, tools)
        context = await self._models.context(model)
        prompt, token_ids, media = await self._prompts.encode(body, tools, raw_size, context, receive)
        constraints = await self._constraints(body, tools, raw_size, prompt)
        lease = await self._models.lease(model)
        generation = self._generations.start(
            id_prefix,
            [token_ids],
            sampling,
            timer=timer,
            client_id=client_id,
            priority=body.priority or 0,
            cache_salt=body.cache_salt,
            constraints=constraints,
            request_id=body.request_id,
            lora=lease,
            media=media,
            shown_prompts=[prompt.text] if body.truncate_prompt_tokens is None else None,
        )
        answers = [self._parsers.answer(body, tools, prompt) for _ in generation.choices]
        return ChatRun(
            generation, model, token_ids, answers, sampling.max_tokens, counts_reasoning=self.reads_reasoning
        )

    async def count_tokens(self, body: ChatCompletionRequest, raw_size: int) -> int:
        """How many tokens a request's prompt has, even if it is too long. Raises what `start` raises."""
        await self._models.resolve(body.model)
        body.check_supported()
        return await self._prompts.count(body, raw_size)

    async def render(self, body: ChatCompletionRequest, raw_size: int) -> tuple[str, str, list[int]]:
        """The model's name, and a request's prompt as text and as token ids. Raises what `start` raises."""
        model = await self._models.resolve(body.model)
        body.check_supported()
        tools = request_tools(body)
        prompt, token_ids, _ = await self._prompts.encode(body, tools, raw_size, await self._models.context(model))
        return model, prompt.text, token_ids

    async def fitting_messages(
        self, body: ChatCompletionRequest, raw_size: int, receive: Receive | None = None
    ) -> list[Message]:
        """The request's messages. Oldest turns are dropped, as few as possible, until the prompt fits the context."""
        context = await self._models.context(await self._models.resolve(body.model))
        return await self._prompts.fitting_messages(body, raw_size, context, receive)

    def _checked_tools(self, body: ChatCompletionRequest) -> RequestTools:
        """The request's tools, after all checks that need no prompt."""
        self._encoder.tokenizer.require_text("messages")
        self._rules.apply(body)
        body.check_supported()
        self._generations.admission.check_shape(1, n=body.n, best_of=body.best_of)
        tools = request_tools(body)
        self._parsers.check_tools(tools)
        self._parsers.check_thinking(body)
        return tools

    def _sampling(self, body: ChatCompletionRequest, tools: RequestTools) -> SamplingParams:
        sampling = sampling_params(body, body.endpoint_sampling(), self._defaults)
        shown = self._parsers.shown_tokens(tools)
        return replace(sampling, shown_special_tokens=shown) if shown else sampling

    async def _constraints(
        self, body: ChatCompletionRequest, tools: RequestTools, raw_size: int, prompt: RenderedPrompt
    ) -> TokenConstraints | None:
        parsers = self._parsers
        demanded: StructuredOutput | Calls | None = None
        calls: Calls | None = None
        if tools.placed:  # whose schemas may be long
            demanded, calls = await self._encoder.run(raw_size, lambda: parsers.calls(body, tools))
        wanted = await self._encoder.run(raw_size, lambda: structured_output(body))
        return await self._generations.constraints(
            body,
            wanted,
            demanded,
            calls=calls,
            preface=parsers.preface(prompt),
            frame=parsers.frame(prompt),
            thinking=parsers.thinking_budget(body, tools, prompt),
        )
