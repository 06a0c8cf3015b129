"""`/v1/completions`."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Mapping, Sequence

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from tidewheel.server.api.json_response import json_response
from tidewheel.server.api.models import ServedModels
from tidewheel.server.generation import Generation, Generations
from tidewheel.server.logprobs import LogprobsFormatter
from tidewheel.server.metrics import ServerMetrics
from tidewheel.server.openapi import operation
from tidewheel.server.prompts import PromptEncoder
from tidewheel.server.protocol.completions import Completion, CompletionChoice, CompletionRequest
from tidewheel.server.protocol.decode import BodyDecoder
from tidewheel.server.protocol.sampling import sampling_params
from tidewheel.server.streaming import EventStream, collect, event


class CompletionsEndpoint:
    """Continues prompts. `defaults` are the sampling parameters that the model itself asks for."""

    def __init__(
        self,
        models: ServedModels,
        encoder: PromptEncoder,
        generations: Generations,
        metrics: ServerMetrics,
        defaults: Mapping[str, float | int],
        fingerprint: str,
    ) -> None:
        self._models = models
        self._encoder = encoder
        self._generations = generations
        self._metrics = metrics
        self._defaults = defaults
        self._fingerprint = fingerprint
        self._formatter = LogprobsFormatter(encoder.tokenizer)
        self._decode = BodyDecoder(CompletionRequest)

    def routes(self) -> list[Route]:
        """The endpoint."""
        return [Route("/v1/completions", self._create, methods=["POST"])]

    @operation(
        "Continue a text",
        CompletionRequest,
        Completion,
        events=Completion,
        example={"prompt": "Once upon a time", "max_tokens": 32},
    )
    async def _create(self, request: Request) -> Response:
        timer = self._metrics.start_timer()
        raw = await request.body()
        body = self._decode(raw)
        model = self._models.resolve(body.model)
        body.check_supported()
        sampling = sampling_params(body, body.endpoint_sampling(), self._defaults)
        prompts = await self._encoder.run(len(raw), lambda: self._encode(body))
        constraints = await self._generations.constraints(body)
        generation = self._generations.start(
            "cmpl",
            prompts,
            sampling,
            timer=timer,
            client_id=request.state.request_id,
            priority=body.priority or 0,
            cache_salt=body.cache_salt,
            constraints=constraints,
        )
        answer = Completion(
            id=generation.id, created=int(time.time()), model=model, system_fingerprint=self._fingerprint, choices=[]
        )
        if body.stream:
            return EventStream(self._frames(generation, answer, body.include_usage), generation)
        return json_response(await self._whole(request, generation, answer))

    def _encode(self, body: CompletionRequest) -> list[list[int]]:
        encoded: list[list[int]] = []
        prompts: Sequence[str | list[int]] = body.prompts()
        self._generations.admission.check_shape(len(prompts), body.n)
        for i, prompt in enumerate(prompts):
            if isinstance(prompt, str):
                token_ids = self._encoder.encode(prompt, add_special_tokens=body.add_special_tokens is not False)
            else:
                token_ids = prompt
            self._encoder.check_prompt(token_ids, "prompt" if len(prompts) == 1 else f"prompt[{i}]")
            encoded.append(token_ids)
        return encoded

    async def _frames(self, generation: Generation, answer: Completion, include_usage: bool) -> AsyncIterator[bytes]:
        if include_usage:
            answer.usage = None
        offsets = [0] * generation.num_choices
        async for choice, output in generation.outputs():
            logprobs = self._formatter.completion([output], offsets[choice])
            if logprobs is not None:
                offsets[choice] += sum(map(len, logprobs.tokens))
            elif not output.text and output.finish_reason is None:
                continue
            answer.choices = [CompletionChoice(choice, output.text, logprobs, output.finish_reason, output.stop_reason)]
            yield event(answer)
        if include_usage:
            answer.choices = []
            answer.usage = generation.usage()
            yield event(answer)

    async def _whole(self, request: Request, generation: Generation, answer: Completion) -> Completion:
        outputs = await collect(request.receive, generation)
        answer.choices = [
            CompletionChoice(
                choice,
                "".join(output.text for output in parts),
                self._formatter.completion(parts, 0),
                parts[-1].finish_reason,
                parts[-1].stop_reason,
            )
            for choice, parts in enumerate(outputs)
        ]
        answer.usage = generation.usage()
        return answer
