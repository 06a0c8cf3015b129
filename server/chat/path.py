"""The way of a conversation: a chat request to a prompt, to a generation, to pieces of each choice.

Every endpoint that answers conversations stands on this one path and only writes what comes out of it in its own
protocol's shape. A translating endpoint builds a ChatCompletionRequest and reads pieces:

    run = await path.start(body, len(raw), timer, client_id)
    run.frames(builder.push, end=builder.finish)     # for an EventStream whose events have names
    async for delta in run.deltas():                 # or as they come, for nobody's connection
        for piece in delta.pieces: ...
    answers = await run.whole(request.receive)       # or in one piece
    await run.feed(request.receive, builder.push)    # or in one piece, built from deltas
    run.usage()
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import msgspec
from starlette.types import Receive

from tidewheel.engine.constraints.constraint import Preface
from tidewheel.engine.constraints.grammar import StructuredOutput
from tidewheel.engine.outputs import RequestOutput
from tidewheel.engine.sampling_params import SamplingParams

from ..errors import bad_request
from ..generation.generations import Generation, Generations
from ..generation.prompt_encoding import PromptEncoder
from ..generation.streaming import AnswerFrames, client_watch, collect, named_event, named_events
from ..generation.structured_output import compact, json_schema_output
from ..generation.token_constraints import Calls
from ..protocol.chat import ChatCompletionRequest, Message, Tool, check_parts
from ..protocol.sampling import sampling_params
from ..protocol.usage import CompletionTokensDetails, Usage
from ..served_models import ServedModels
from ..telemetry.metrics import RequestTimer
from .answer import Answer
from .model_formats import ModelFormats
from .pieces import Piece, Turn
from .reasoning import REASONING_PARSERS, ReasoningParser
from .rendering import PromptRenderer, RenderedPrompt
from .tools import TOOL_CALL_PARSERS
from .tools.parser import ToolParser
from .tools.tool_choice import (
    demanded_calls_parser,
    demanded_calls_schema,
    demanded_tool,
    demands_calls,
    offered_tools,
    optional_calls,
)
from .truncation import drop_oldest_turns


class ChoiceDelta(msgspec.Struct):
    """What one step of the engine added to one choice.

    `pieces` may be empty, while text is held back that may become something else than it looks like. `output` is the
    engine's own account of the step: token ids, log-probabilities, stop reason. `finish_reason` (`stop`, `length` or
    `tool_calls`) comes with a choice's last delta.
    """

    index: int
    pieces: list[Piece]
    output: RequestOutput
    finish_reason: str | None


class ChoiceAnswer(msgspec.Struct):
    """One choice, complete: its turn, why it ended, and all outputs of the engine that it was made from."""

    index: int
    turn: Turn
    finish_reason: str
    stop_reason: str | int | None
    outputs: list[RequestOutput]


class ChatRun:
    """One conversation being answered. Read one of `frames`, `deltas`, `whole` and `feed`, or the generation, once.

    `id` is the answer's, `model` the name it was asked for under, `created` the time in seconds since 1970,
    `prompt_token_ids` are the rendered prompt.
    `generation` is for AnswerFrames, which close it; who streams by other means calls `close` in the end.
    """

    def __init__(
        self,
        generation: Generation,
        model: str,
        prompt_token_ids: list[int],
        answers: list[Answer],
        *,
        counts_reasoning: bool,
    ) -> None:
        self.id = generation.id
        self.prompt_token_ids = prompt_token_ids
        self.model = model
        self.created = int(time.time())
        self.generation = generation
        self.num_choices = generation.num_choices
        self._answers = answers
        self._counts_reasoning = counts_reasoning

    def frames(
        self,
        push: Callable[[ChoiceDelta], Iterable[msgspec.Struct]],
        *,
        begin: Callable[[], Iterable[msgspec.Struct]] = tuple,
        end: Callable[[], Iterable[msgspec.Struct]],
    ) -> AnswerFrames:
        """The frames of the events that `begin` gives, `push` for each delta, and `end`."""
        return AnswerFrames(
            self.generation,
            lambda index, output: named_events(push(self.delta(index, output))),
            begin=lambda: named_events(begin()),
            end=lambda: map(named_event, end()),
        )

    async def deltas(self) -> AsyncIterator[ChoiceDelta]:
        """Each step of each choice, as it comes.

        Raises ApiError if a choice fails or the server stops, and ClientGone if the client hangs up.
        """
        async for index, output in self.generation.outputs():
            yield self.delta(index, output)

    def delta(self, index: int, output: RequestOutput) -> ChoiceDelta:
        """What the next output of a choice adds to it, for who reads the generation itself."""
        answer = self._answers[index]
        return ChoiceDelta(index, answer.push(output), output, answer.finish_reason)

    def is_plain(self, index: int) -> bool:
        """Whether the text of a choice that has begun is its content as it comes: `delta` need not see text alone."""
        return self._answers[index].is_plain

    async def whole(self, receive: Receive) -> list[ChoiceAnswer]:
        """All choices, complete. Watches `receive` for the client's leaving, and closes the run.

        Raises ApiError if a choice fails or the server stops, and ClientGone if the client hangs up.
        """
        answers = []
        for index, outputs in enumerate(await collect(receive, self.generation)):
            answers.append(self._complete(index, outputs))
            await asyncio.sleep(0)  # a long choice takes milliseconds, and there may be many
        return answers

    async def feed(self, receive: Receive, push: Callable[[ChoiceDelta], Iterable[object]]) -> None:
        """Hands each delta to `push` and exhausts what it gives, for answers that are built as events are made.

        Watches `receive` for the client's leaving, and closes the run.

        Raises ApiError if a choice fails or the server stops, and ClientGone if the client hangs up.
        """
        try:
            with client_watch(receive, self.generation.abort):
                async for delta in self.deltas():
                    for _ in push(delta):
                        pass
        finally:
            self.close()

    def usage(self) -> Usage:
        """Tokens so far, of all choices."""
        usage = self.generation.usage()
        if self._counts_reasoning:
            reasoning_tokens = sum(answer.reasoning_tokens for answer in self._answers)
            usage.completion_tokens_details = CompletionTokensDetails(reasoning_tokens)
        return usage

    def close(self) -> None:
        """Aborts what is unfinished. Later calls do nothing."""
        self.generation.close()

    def _complete(self, index: int, outputs: list[RequestOutput]) -> ChoiceAnswer:
        answer = self._answers[index]
        pieces = [piece for output in outputs for piece in answer.push(output)]
        assert answer.finish_reason is not None, "the last output of a choice has a finish reason"
        return ChoiceAnswer(index, Turn.of(pieces), answer.finish_reason, outputs[-1].stop_reason, outputs)


class ChatPath:
    """Starts conversations on the engine.

    `defaults` are the sampling parameters that the model itself asks for. By its `formats`, the model's reasoning
    becomes pieces of its own, and so do its calls for requests that offer tools.
    """

    def __init__(
        self,
        models: ServedModels,
        encoder: PromptEncoder,
        renderer: PromptRenderer,
        generations: Generations,
        defaults: Mapping[str, float | int],
        formats: ModelFormats,
    ) -> None:
        self._models = models
        self._encoder = encoder
        self._renderer = renderer
        self._generations = generations
        self._defaults = defaults
        self._no_calls_because = formats.no_calls_because
        tool_parser = TOOL_CALL_PARSERS[formats.tool_calls] if formats.tool_calls else None
        reasoning_parser = REASONING_PARSERS[formats.reasoning] if formats.reasoning else None
        self._tool_parser: type[ToolParser] | None = tool_parser
        self._reasoning_parser: type[ReasoningParser] | None = reasoning_parser
        self._tool_tags = self._special_tokens(tool_parser.markers if tool_parser else ())
        self._reasoning_tags = self._special_tokens(
            (reasoning_parser.opening, reasoning_parser.closing) if reasoning_parser else ()
        )

    async def start(
        self,
        body: ChatCompletionRequest,
        raw_size: int,
        timer: RequestTimer,
        client_id: str,
        *,
        id_prefix: str = "chatcmpl",
    ) -> ChatRun:
        """Checks a request, renders and encodes its prompt, and submits it.

        `raw_size` is the body's size in bytes, which says whether encoding may take long; `client_id` names the
        request in the log; `id_prefix` begins the answer's id. Raises ApiError or InvalidRequestError for a request
        that cannot be served, naming the field as in a chat completion's body, with nothing left running.
        """
        model = self._models.resolve(body.model)
        body.check_supported()
        self._generations.admission.check_shape(1, n=body.n, best_of=body.best_of)
        tools = offered_tools(body)
        if tools and self._tool_parser is None and not demands_calls(body):
            raise bad_request(
                f"tools that the model may call cannot be served: {self._no_calls_because}. Start the server with the "
                '--tool-call-parser of its model, or set tool_choice to "none", "required" or a function',
                "tools",
                "unsupported_parameter",
            )
        sampling = self._sampling(body)
        prompt, token_ids = await self._renderer.run(raw_size, body.chat_template, lambda: self._checked_prompt(body))
        demanded: StructuredOutput | None = None
        calls: Calls | None = None
        if tools:  # whose schemas may be long
            demanded, calls = await self._encoder.run(
                raw_size, lambda: (_demanded_calls(body), optional_calls(body, self._tool_parser))
            )
        constraints = await self._generations.constraints(body, demanded, calls=calls, preface=self._preface(prompt))
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
        )
        answers = [self._answer(body, tools, prompt) for _ in range(generation.num_choices)]
        return ChatRun(generation, model, token_ids, answers, counts_reasoning=self._reasoning_parser is not None)

    async def count_tokens(self, body: ChatCompletionRequest, raw_size: int) -> int:
        """How many tokens a request's prompt has, be it too long for the context. Raises what `start` raises."""
        self._models.resolve(body.model)
        body.check_supported()

        def count() -> int:
            text, special = self._rendered(body).text, bool(body.add_special_tokens)
            return len(self._encoder.count(text, "messages", add_special_tokens=special))

        return await self._renderer.run(raw_size, body.chat_template, count)

    async def fitting_messages(self, body: ChatCompletionRequest, raw_size: int) -> list[Message]:
        """The request's messages without the oldest turns, as few as must go for the prompt to fit the context."""
        check_parts(len(body.messages), "messages")

        def fits(messages: list[Message]) -> bool:
            if len(messages) >= self._encoder.max_model_len:  # each has a token at least
                return False
            prompt = self._rendered(msgspec.structs.replace(body, messages=messages))
            return self._encoder.fits(prompt.text, add_special_tokens=bool(body.add_special_tokens))

        return await self._renderer.run(raw_size, body.chat_template, lambda: drop_oldest_turns(body.messages, fits))

    def _sampling(self, body: ChatCompletionRequest) -> SamplingParams:
        sampling = sampling_params(body, body.endpoint_sampling(), self._defaults)
        shown = self._reasoning_tags | self._tool_tags if offered_tools(body) else self._reasoning_tags
        return replace(sampling, shown_special_tokens=shown) if shown else sampling

    def _rendered(self, body: ChatCompletionRequest) -> RenderedPrompt:
        variables: dict[str, Any] = dict(body.chat_template_kwargs or {})
        if body.enable_thinking is not None:
            variables.setdefault("enable_thinking", body.enable_thinking)
        if body.reasoning_effort is not None:
            variables["reasoning_effort"] = body.reasoning_effort
            if body.reasoning_effort == "none":
                variables.setdefault("enable_thinking", False)
        if body.documents is not None:
            variables["documents"] = body.documents
        return self._renderer.render(
            body.messages,
            offered_tools(body),
            variables=variables,
            template=body.chat_template,
            add_generation_prompt=body.add_generation_prompt,
            continue_final_message=body.continue_final_message,
        )

    def _checked_prompt(self, body: ChatCompletionRequest) -> tuple[RenderedPrompt, list[int]]:
        prompt = self._rendered(body)
        token_ids = self._encoder.encode(
            prompt.text,
            "messages",
            add_special_tokens=bool(body.add_special_tokens),  # the template writes them itself
            truncate_to=body.truncate_prompt_tokens,
            side=body.truncation_side,
        )
        self._encoder.check_prompt(token_ids, "messages")
        return prompt, token_ids

    def _reasoning(self, prompt: RenderedPrompt) -> ReasoningParser | None:
        if self._reasoning_parser is None:
            return None
        begun = prompt.spoken if prompt.continues else prompt.text
        return self._reasoning_parser(begun, continues=prompt.continues)

    def _preface(self, prompt: RenderedPrompt) -> Preface | None:
        """The reasoning that may come before what an answer has to match."""
        reasoning = self._reasoning(prompt)
        if reasoning is None or reasoning.is_over:
            return None
        tokenizer = self._encoder.tokenizer
        return Preface(reasoning.closing, reasoning.is_open, tokenizer.token_to_id(reasoning.opening))

    def _answer(self, body: ChatCompletionRequest, tools: Sequence[Tool], prompt: RenderedPrompt) -> Answer:
        reasoning_parser, tool_parser = self._reasoning(prompt), None
        if demands_calls(body):
            tool_parser = demanded_calls_parser(body, self._tool_parser)
        elif self._tool_parser is not None and tools:
            tool_parser = self._tool_parser(tools)
        return Answer(
            self._encoder.tokenizer,
            reasoning_parser,
            tool_parser,
            echo=prompt.spoken if body.echo else "",
            one_call=body.parallel_tool_calls is False,
            hide_reasoning=body.include_reasoning is False,
            chosen=demanded_tool(body) is None,
        )

    def _special_tokens(self, tags: Sequence[str]) -> frozenset[int]:
        """Those of `tags` that the tokenizer has as special tokens."""
        tokenizer = self._encoder.tokenizer
        token_ids = (tokenizer.token_to_id(tag) for tag in tags)
        return frozenset(i for i in token_ids if i is not None and tokenizer.is_special(i))


def _demanded_calls(body: ChatCompletionRequest) -> StructuredOutput | None:
    schema = demanded_calls_schema(body)
    return None if schema is None else json_schema_output(compact(schema), "tools")
