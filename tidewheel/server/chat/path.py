"""The way of a conversation: a chat request to a prompt, to a generation, to pieces of each choice.

Every endpoint that answers conversations stands on this one path and only writes what comes out of it in its own
protocol's shape. A translating endpoint builds a ChatCompletionRequest and reads pieces:

    run = await path.start(body, len(raw), timer, client_id)
    async for delta in run.deltas():                 # streamed
        for piece in delta.pieces: ...
    answers = await run.whole(request.receive)       # or in one piece
    run.usage()
"""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Mapping
from typing import Any

import msgspec
from starlette.types import Receive

from tidewheel.engine.request import RequestOutput
from tidewheel.server.api.models import ServedModels
from tidewheel.server.chat.answer import Answer
from tidewheel.server.chat.messages import template_messages, template_tools
from tidewheel.server.chat.pieces import Piece, Turn
from tidewheel.server.chat.templates import ChatTemplate
from tidewheel.server.chat.tools.parser import ToolParser
from tidewheel.server.generation import Generation, Generations
from tidewheel.server.metrics import RequestTimer
from tidewheel.server.prompts import PromptEncoder
from tidewheel.server.protocol.chat import ChatCompletionRequest
from tidewheel.server.protocol.sampling import sampling_params
from tidewheel.server.protocol.usage import Usage
from tidewheel.server.streaming import collect


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
    """One conversation being answered. Read either `deltas` or `whole`, once.

    `id` is the answer's, `model` the name it was asked for under, `created` the time in seconds since 1970.
    `generation` is for EventStream, which aborts and closes it; who streams by other means calls `close` in the end.
    """

    def __init__(self, generation: Generation, model: str, answers: list[Answer]) -> None:
        self.id = generation.id
        self.model = model
        self.created = int(time.time())
        self.generation = generation
        self.num_choices = generation.num_choices
        self._answers = answers

    async def deltas(self) -> AsyncIterator[ChoiceDelta]:
        """Each step of each choice, as it comes.

        Raises ApiError if a choice fails or the server stops, and ClientGone if the client hangs up.
        """
        async for index, output in self.generation.outputs():
            answer = self._answers[index]
            pieces = answer.push(output)
            yield ChoiceDelta(index, pieces, output, answer.finish_reason)

    async def whole(self, receive: Receive) -> list[ChoiceAnswer]:
        """All choices, complete. Watches `receive` for the client's leaving, and closes the run.

        Raises ApiError if a choice fails or the server stops, and ClientGone if the client hangs up.
        """
        outputs = await collect(receive, self.generation)
        return [self._complete(index, parts) for index, parts in enumerate(outputs)]

    def usage(self) -> Usage:
        """Tokens so far, of all choices."""
        return self.generation.usage()

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

    `defaults` are the sampling parameters that the model itself asks for. With `tool_parser`, calls in the model's
    text become pieces of their own for requests that offer tools.
    """

    def __init__(
        self,
        models: ServedModels,
        encoder: PromptEncoder,
        template: ChatTemplate,
        generations: Generations,
        defaults: Mapping[str, float | int],
        tool_parser: type[ToolParser] | None,
    ) -> None:
        self._models = models
        self._encoder = encoder
        self._template = template
        self._generations = generations
        self._defaults = defaults
        self._tool_parser = tool_parser

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
        sampling = sampling_params(body, body.endpoint_sampling(), self._defaults)
        prompt = await self._encoder.run(raw_size, lambda: self.encode(body))
        generation = self._generations.start(
            id_prefix,
            [prompt],
            sampling,
            timer=timer,
            client_id=client_id,
            priority=body.priority or 0,
            cache_salt=body.cache_salt,
        )
        return ChatRun(generation, model, [self._answer(body) for _ in range(generation.num_choices)])

    def encode(self, body: ChatCompletionRequest) -> list[int]:
        """The token ids of a request's prompt. Raises ApiError (400)."""
        variables: dict[str, Any] = dict(body.chat_template_kwargs or {})
        if body.reasoning_effort is not None:
            variables["reasoning_effort"] = body.reasoning_effort
        text = self._template.render(
            template_messages(body.messages),
            None if body.tool_choice == "none" else template_tools(body.tools),
            add_generation_prompt=body.add_generation_prompt is not False,
            variables=variables,
        )
        # The template writes the special tokens itself.
        token_ids = self._encoder.encode(text, add_special_tokens=False)
        self._encoder.check_prompt(token_ids, "messages")
        return token_ids

    def _answer(self, body: ChatCompletionRequest) -> Answer:
        offers_tools = bool(body.tools) and body.tool_choice != "none"
        parser = self._tool_parser(body.tools or []) if self._tool_parser is not None and offers_tools else None
        return Answer(parser, one_call=body.parallel_tool_calls is False)
