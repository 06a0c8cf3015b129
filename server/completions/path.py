"""CompletionPath: from a request of `/v1/completions` to prompts, and from the prompts to a generation.

Every endpoint that continues a text uses this path. An endpoint of another protocol builds a CompletionRequest.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from msgspec import Struct

from tidewheel.engine.sampling_params import SamplingParams

from ..errors import bad_request
from ..generation.generations import Generation, Generations
from ..generation.prompt_encoding import PromptEncoder
from ..generation.structured_output import structured_output
from ..protocol.completions import CompletionRequest
from ..protocol.rules import RequestRules
from ..protocol.sampling import sampling_params
from ..served_models import ServedModels
from ..telemetry.metrics import RequestTimer
from ..telemetry.text_log import Shown
from .fill_in_the_middle import FillInTheMiddle, Hole

_MAX_PROMPT_TOKENS = 2**22  # of all prompts together: 150 MB of Python's integers


class Prompt(Struct, frozen=True):
    """A prompt's token ids, its text if that is to be echoed, and what the log shows: what was sent, if it is whole."""

    token_ids: list[int]
    text: str
    shown: Shown


class CompletionRun(Struct, frozen=True):
    """Prompts that are being continued, each by `per_prompt` choices. `model` is the name they were asked for under."""

    generation: Generation
    model: str
    prompts: Sequence[Prompt]
    per_prompt: int


class CompletionPath:
    """Starts completions on the engine. `defaults` are the sampling parameters that the model itself asks for."""

    def __init__(
        self,
        models: ServedModels,
        encoder: PromptEncoder,
        generations: Generations,
        defaults: Mapping[str, float | int],
        rules: RequestRules,
    ) -> None:
        self._models = models
        self._encoder = encoder
        self._generations = generations
        self._defaults = defaults
        self._rules = rules
        self.fill = FillInTheMiddle.of(encoder)

    async def start(
        self,
        body: CompletionRequest,
        raw_size: int,
        timer: RequestTimer,
        client_id: str,
        *,
        hole: Hole | None = None,
    ) -> CompletionRun:
        """Checks a request, encodes its prompts, and submits them.

        `raw_size` is the body's size in bytes: large bodies are encoded in a thread. `client_id` names the request in
        the log. By default the `hole` comes from the body's suffix, if there is one. Raises ApiError or
        InvalidRequestError for a request that cannot be served; then nothing is left running.
        """
        hole = hole or _hole(body)
        model, sampling = await self._checked(body, hole)
        prompts = await self._prompts(model, body, raw_size, sampling, hole)
        if hole is not None:
            ends = {*sampling.stop_token_ids, *self._filling().ends}
            sampling = replace(sampling, stop_token_ids=tuple(sorted(ends)))
        wanted = await self._encoder.run(raw_size, lambda: structured_output(body))  # whose schema may be long
        constraints = await self._generations.constraints(body, wanted)
        lease = await self._models.lease(model)
        generation = self._generations.start(
            "cmpl",
            [prompt.token_ids for prompt in prompts],
            sampling,
            timer=timer,
            client_id=client_id,
            priority=body.priority or 0,
            cache_salt=body.cache_salt,
            constraints=constraints,
            request_id=body.request_id,
            lora=lease,
            shows_prompt=bool(body.echo or body.return_token_ids),
            shown_prompts=[prompt.shown for prompt in prompts],
        )
        return CompletionRun(generation, model, prompts, sampling.n)

    async def prompts(self, body: CompletionRequest, raw_size: int) -> tuple[str, list[Prompt]]:
        """The model's name and the prompts of a request that nothing is generated for. Raises what `start` raises."""
        hole = _hole(body)
        model, sampling = await self._checked(body, hole)
        return model, await self._prompts(model, body, raw_size, sampling, hole)

    async def _prompts(
        self, model: str, body: CompletionRequest, raw_size: int, sampling: SamplingParams, hole: Hole | None
    ) -> list[Prompt]:
        encoder = self._encoder.within(await self._models.context(model))
        return await encoder.run(raw_size, lambda: self._encode(encoder, body, sampling, hole))

    async def _checked(self, body: CompletionRequest, hole: Hole | None) -> tuple[str, SamplingParams]:
        model = await self._models.resolve(body.model)
        self._rules.apply(body)
        body.check_supported()
        if hole is not None:
            self._filling()
        return model, sampling_params(body, body.endpoint_sampling(), self._defaults)

    def _filling(self) -> FillInTheMiddle:
        if self.fill is None:
            self._encoder.tokenizer.require_text("suffix")
            raise bad_request(
                "suffix cannot be served: this model's tokenizer has no fill-in-the-middle tokens, so the model was "
                "not trained for it; serve a model for code that has them, or leave suffix out",
                "suffix",
                "unsupported_parameter",
            )
        return self.fill

    def _encode(
        self, encoder: PromptEncoder, body: CompletionRequest, sampling: SamplingParams, hole: Hole | None
    ) -> list[Prompt]:
        room = 0 if sampling.max_tokens == 0 else 1
        encoded: list[Prompt] = []
        prompts: Sequence[str | list[int]] = body.prompts()
        self._generations.admission.check_shape(len(prompts), n=body.n, best_of=body.best_of)
        room_left = _MAX_PROMPT_TOKENS
        for i, prompt in enumerate(prompts):
            param = "prompt" if len(prompts) == 1 else f"prompt[{i}]"
            kept = self._token_ids(encoder, body, prompt, param, room, hole)
            encoder.check_prompt(kept, param, room)
            room_left -= len(kept)
            if room_left < 0 and i:
                raise bad_request(
                    f"prompt: the first {i + 1} prompts have over {_MAX_PROMPT_TOKENS} tokens, which is more than one "
                    "request may have together; send them in several",
                    "prompt",
                )
            is_whole = hole is None and body.truncate_prompt_tokens is None
            encoded.append(Prompt(kept, self._echo(body, prompt, kept, param), prompt if is_whole else kept))
        return encoded

    def _token_ids(
        self,
        encoder: PromptEncoder,
        body: CompletionRequest,
        prompt: str | list[int],
        param: str,
        room: int,
        hole: Hole | None,
    ) -> list[int]:
        special = body.add_special_tokens is not False
        if hole is not None:
            return self._filling().token_ids(prompt, hole, param, add_special_tokens=special)
        truncate_to, side = body.truncate_prompt_tokens, body.truncation_side
        if isinstance(prompt, str):
            return encoder.encode(
                prompt, param, add_special_tokens=special, truncate_to=truncate_to, side=side, room=room
            )
        return encoder.truncated(prompt, truncate_to, side, room)

    def _echo(self, body: CompletionRequest, prompt: str | list[int], kept: list[int], param: str) -> str:
        if not body.echo or not self._encoder.tokenizer.has_text:
            return ""
        self._encoder.check_vocabulary(kept, param)
        if isinstance(prompt, str) and body.truncate_prompt_tokens is None:
            return prompt
        return self._encoder.tokenizer.decode(kept, skip_special_tokens=body.skip_special_tokens is not False)


def _hole(body: CompletionRequest) -> Hole | None:
    return Hole(body.suffix) if body.suffix else None
