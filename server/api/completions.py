"""`/v1/completions`."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Sequence
from itertools import chain, islice

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from tidewheel.engine.outputs import PromptLogprobs, RequestOutput

from ..completions.path import Prompt
from ..generation.frames import around_text, encode_json, event
from ..generation.generations import Generation
from ..generation.logprobs import Entry, LogprobsFormatter, output_entries, places_at_once, prompt_entries
from ..generation.streaming import EventStream, collect
from ..openapi.document import operation
from ..protocol.completions import Completion, CompletionChoice, CompletionLogprobs, CompletionRequest
from ..protocol.decode import BodyDecoder
from .app_state import AppState
from .body import whole_body
from .json_response import HOLE, JsonParts, filled, listed

_TOKENS_A_PIECE = 256  # of a prompt: with all that may be known of them they take some milliseconds


class CompletionsEndpoint:
    """Continues prompts."""

    def __init__(self, state: AppState) -> None:
        self._path = state.completion_path
        self._formatter = state.formatter
        self._metrics = state.metrics
        self._fingerprint = state.fingerprint
        self._decode = BodyDecoder(CompletionRequest, notes=state.notes)

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
        raw = await whole_body(request)
        body = self._decode(raw)
        run = await self._path.start(body, len(raw), timer, request.state.request_id)
        generation = run.generation
        answer = Completion(
            id=generation.id,
            created=int(time.time()),
            model=run.model,
            system_fingerprint=self._fingerprint,
            choices=[],
        )
        writer = _ChoiceWriter(body, run.prompts, self._formatter, run.per_prompt)
        if body.stream:
            return _CompletionStream(generation, answer, writer, body)
        outputs = await collect(request.receive, generation)
        answer.choices = HOLE
        answer.usage = generation.usage()
        return JsonParts(filled(answer, writer.whole(outputs)))


class _ChoiceWriter:
    """Turns the engine's outputs into the choices of one request's answer.

    `per_prompt` choices are generated for each prompt. The answer may have fewer.
    """

    def __init__(
        self, body: CompletionRequest, prompts: Sequence[Prompt], formatter: LogprobsFormatter, per_prompt: int
    ) -> None:
        self._body = body
        self._prompts = prompts
        self._formatter = formatter
        self._per_prompt = per_prompt
        self._prompt_logprobs: list[PromptLogprobs | None] = [None] * len(prompts)
        self._offsets: dict[int, int] = {}  # characters so far of the choices that have begun
        self._awaited: dict[int, Iterator[Entry]] = {}  # what `prompt_pieces` has left to `piece`

    def whole(self, outputs: Sequence[Sequence[RequestOutput]]) -> Iterator[bytes]:
        """Parts of the JSON of the answer's choices, made from all their outputs. The best ones, if there are more."""
        count = 0
        for number in range(len(self._prompts)):
            indices: Sequence[int] = range(number * self._per_prompt, (number + 1) * self._per_prompt)
            self._prompt_logprobs[number] = outputs[indices[0]][0].prompt_logprobs
            if self._body.num_choices < self._per_prompt:
                # Sorting is stable: of equally good ones the first are taken.
                best = sorted(indices, key=lambda index: _mean_logprob(outputs[index]), reverse=True)
                indices = best[: self._body.num_choices]
            for index in indices:
                yield b"," if count else b"["
                yield from self._whole_choice(index, outputs[index], count)
                count += 1
        yield b"]"

    def _whole_choice(self, index: int, outputs: Sequence[RequestOutput], number: int) -> Iterator[bytes]:
        body, formatter, prompt = self._body, self._formatter, index // self._per_prompt
        token_ids, scores = self._prompts[prompt].token_ids, self._prompt_logprobs[prompt]
        choice = self._choice(index, outputs)
        choice.index = number
        holes: list[Iterator[bytes]] = []
        if body.logprobs is not None:
            choice.logprobs = CompletionLogprobs(HOLE, HOLE, HOLE, HOLE)
            columns = formatter.completion_columns(
                lambda: self._entries(index, outputs, begins=True), bool(body.return_tokens_as_token_ids)
            )
            holes += [listed(column, places_at_once(body.logprobs)) for column in columns]
        if body.prompt_logprobs is not None:
            choice.prompt_logprobs = HOLE
            places = formatter.prompt(token_ids, scores, body.prompt_logprobs)
            holes.append(listed(places, places_at_once(body.prompt_logprobs)))
        yield from filled(choice, *holes)

    def piece(self, output: RequestOutput) -> CompletionChoice | None:
        """What one output adds to a choice; None if it adds nothing."""
        index = output.index
        if output.prompt_logprobs is not None:
            self._prompt_logprobs[index // self._per_prompt] = output.prompt_logprobs
        begins = index not in self._offsets
        offset = self._offsets.setdefault(index, 0)
        choice = self._choice(index, [output], begins=begins)
        if self._body.logprobs is not None:
            entries = self._entries(index, [output], begins=begins)
            as_token_ids = bool(self._body.return_tokens_as_token_ids)
            choice.logprobs, self._offsets[index] = self._formatter.completion(entries, offset, as_token_ids)
        if choice.text or choice.finish_reason or choice.logprobs is not None or choice.token_ids:
            return choice
        return None

    def has_begun(self, index: int) -> bool:
        """Whether a choice has had a piece."""
        return index in self._offsets

    def prompt_pieces(self, output: RequestOutput) -> Iterator[CompletionChoice]:
        """The pieces for the tokens of an echoed prompt, when a choice begins, without the last piece.

        `piece` gives the rest, which is everything unless the prompt is long.
        """
        index, body = output.index, self._body
        number = index // self._per_prompt
        if output.prompt_logprobs is not None:
            self._prompt_logprobs[number] = output.prompt_logprobs
        prompt, offset = self._prompts[number], 0
        entries = prompt_entries(prompt.token_ids, self._prompt_logprobs[number], body.logprobs or 0)
        as_token_ids = bool(body.return_tokens_as_token_ids)
        for start in range(0, len(prompt.token_ids) - _TOKENS_A_PIECE, _TOKENS_A_PIECE):
            choice = CompletionChoice(index, "" if start else prompt.text)
            some = islice(entries, _TOKENS_A_PIECE)
            choice.logprobs, offset = self._formatter.completion(some, offset, as_token_ids)
            if body.return_token_ids and not start:
                choice.prompt_token_ids = prompt.token_ids
            self._offsets[index] = offset
            self._awaited[index] = entries
            yield choice

    def _choice(self, index: int, outputs: Sequence[RequestOutput], *, begins: bool = True) -> CompletionChoice:
        """A choice, or what `outputs` add to it, without log-probabilities."""
        body, last = self._body, outputs[-1]
        prompt = self._prompts[index // self._per_prompt]
        text = "".join([output.text for output in outputs])
        if begins and body.echo:
            text = prompt.text + text
        choice = CompletionChoice(index, text, None, last.finish_reason, last.stop_reason)
        if body.return_token_ids:
            choice.token_ids = [token for output in outputs for token in output.token_ids]
            if begins:
                choice.prompt_token_ids = prompt.token_ids
        return choice

    def _entries(self, index: int, outputs: Sequence[RequestOutput], *, begins: bool) -> Iterable[Entry]:
        count, number = self._body.logprobs or 0, index // self._per_prompt
        entries = chain(self._awaited.pop(index, ()), output_entries(outputs))
        if begins and self._body.echo:
            scores = self._prompt_logprobs[number]
            return chain(prompt_entries(self._prompts[number].token_ids, scores, count), entries)
        return entries


def _mean_logprob(outputs: Sequence[RequestOutput]) -> float:
    logprobs = [entry.logprob for output in outputs for entry in output.logprobs or ()]
    return sum(logprobs) / len(logprobs) if logprobs else 0.0


class _CompletionStream(EventStream[RequestOutput]):
    """A streamed answer, of whose frames `answer` becomes one after the other."""

    __slots__ = ("_around_text",)

    def __init__(
        self, generation: Generation, answer: Completion, writer: _ChoiceWriter, body: CompletionRequest
    ) -> None:
        super().__init__(generation)
        self._generation = generation
        self._answer = answer
        self._writer = writer
        self._include_usage, self._continuous_usage = body.include_usage, body.continuous_usage
        if self._include_usage:
            answer.usage = None
        self._echoes_logprobs = bool(body.echo) and body.logprobs is not None
        self._is_plain = not (self._continuous_usage or body.return_token_ids or body.logprobs is not None)
        # Most frames of a choice differ in their text alone. Until a choice has begun it has no entry.
        self._around_text: dict[int, tuple[bytes, bytes]] = {}

    def frame(self, output: RequestOutput) -> bytes | Iterator[bytes]:
        around = self._around_text.get(output.index)
        if around is not None and output.finish_reason is None:
            return around[0] + encode_json(output.text) + around[1] if output.text else b""
        if self._echoes_logprobs and not self._writer.has_begun(output.index):
            return self._with_prompt(output)
        return self._frame(output)

    def _with_prompt(self, output: RequestOutput) -> Iterator[bytes]:
        """The frames of a choice's first output, which may tell of a long prompt."""
        for choice in self._writer.prompt_pieces(output):
            self._answer.choices = [choice]
            if self._continuous_usage:
                self._answer.usage = self._generation.usage()
            yield event(self._answer)
        if frame := self._frame(output):
            yield frame

    def _frame(self, output: RequestOutput) -> bytes:
        index, answer = output.index, self._answer
        choice = self._writer.piece(output)
        if choice is None:
            return b""
        if self._is_plain and index not in self._around_text:
            answer.choices = [CompletionChoice(index, "", None, None, None)]
            self._around_text[index] = around_text(answer, "text")
        answer.choices = [choice]
        if self._continuous_usage:
            answer.usage = self._generation.usage()
        return event(answer)

    def last_frames(self) -> Iterator[bytes]:
        if not self._include_usage:
            return
        self._answer.choices = []
        self._answer.usage = self._generation.usage()
        yield event(self._answer)
