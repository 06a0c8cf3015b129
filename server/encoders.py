"""ServedEncoders: finds embedding models by name, and runs one HTTP request in the encoder engine."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Iterable, Mapping, Sequence
from http import HTTPStatus

from msgspec import Struct
from starlette.requests import Request

from tidewheel.engine.encoders.encoder import Encoder
from tidewheel.engine.encoders.engine import EncoderEngine, Results
from tidewheel.engine.encoders.tasks import Task
from tidewheel.engine.encoders.tokenization import EncoderInput
from tidewheel.engine.errors import quoted

from .client_watch import client_watch
from .errors import ApiError, ClientGone, bad_request
from .generation.backlog import EndRate, check_backlog, request_timeout
from .http.clients import current_client
from .http.limits import AdmissionLimits
from .ids import new_id
from .protocol.embeddings import InputUsage
from .telemetry.encoder_metrics import EncoderMetrics
from .telemetry.text_log import Shown, TextLog

logger = logging.getLogger("tidewheel.requests")

_ENDPOINTS: dict[Task, str] = {"embed": "/v1/embeddings", "classify": "/v1/classify"}


class EncoderAnswer(Struct, frozen=True):
    """What an encoder has made of a request's inputs: a result for each."""

    id: str
    created: int
    results: Results
    usage: InputUsage

    @property
    def nbytes(self) -> int:
        """The size of the results."""
        return sum(result.nbytes for result in self.results)


class ServedEncoders:
    """The encoders that requests may ask for. There may be none.

    `aliases` are more names of encoders, each with the first one. With `accepts_any`, a name that nothing is served
    under means the same as none. `max_queue` is how many inputs may wait; None is no limit.
    """

    def __init__(
        self,
        engine: EncoderEngine,
        metrics: EncoderMetrics,
        limits: AdmissionLimits,
        *,
        log_requests: bool,
        texts: TextLog | None = None,
        aliases: Mapping[str, str] | None = None,
        accepts_any: bool = False,
    ) -> None:
        self._engine = engine
        self._aliases = aliases or {}
        self._accepts_any = accepts_any
        self.max_queue = limits.max_queue
        self._metrics = metrics
        self._limits = limits
        self._log_requests = log_requests
        self._texts = texts
        self._rate = EndRate()  # of inputs

    def doing(self, task: Task, name: str | None) -> Encoder:
        """The model of a name, for None the first that does a task, best as its main one.

        Raises ApiError: 404 if there is none, and 400 if the task is none of the model's.
        """
        encoders = (one for one in self._engine.encoders.values() if task in one.tasks)
        encoder = self._find(name, sorted(encoders, key=lambda one: one.task != task))
        if task not in encoder.tasks:
            others = sorted(encoder.tasks)
            raise bad_request(
                f"the model {encoder.name!r} does not do {task}, but {', '.join(others)}: use it with "
                f"{endpoints_for(encoder)}",
                "model",
            )
        return encoder

    def any(self, name: str | None) -> Encoder:
        """The model of a name, the first one for None. Raises ApiError (404)."""
        return self._find(name, self._engine.encoders.values())

    def scorer(self, name: str | None) -> Encoder:
        """The model of a name, for None the first cross-encoder or else the first embedder. Raises ApiError (404)."""
        encoders = (one for one in self._engine.encoders.values() if one.is_cross_encoder or not one.labels)
        return self._find(name, sorted(encoders, key=lambda one: not one.is_cross_encoder))

    def info(self, name: str) -> Mapping[str, str]:
        """What is known of a served encoder, see Encoder."""
        encoder = self._named(name)
        return {} if encoder is None else encoder.info

    async def run(
        self,
        request: Request,
        kind: str,
        encoder: Encoder,
        task: Task,
        inputs: Sequence[EncoderInput],
        given: Sequence[Shown],
    ) -> EncoderAnswer:
        """A task's results of inputs that were checked. `kind` begins the answer's id, and `given` are the texts, for
        the log.

        Raises ApiError or InvalidRequestError if they cannot be had, too much waits or it takes too long, and
        ClientGone if the client hangs up, which takes them from the queue.
        """
        encoder.check_size(task, inputs)
        try:
            held = self._engine.backlogs()
            check_backlog(sum(held.values()), self._limits.max_queue, self._rate, held=held, count=len(inputs))
        except ApiError:
            self._metrics.reject(encoder.name)
            raise
        started, outcome = time.perf_counter(), "abort"
        answer_id, tokens = f"{kind}-{new_id()}", sum(map(len, inputs))
        if self._texts is not None:
            self._texts.log_prompts(answer_id, request.state.request_id, given)
        future = self._engine.submit(encoder, task, inputs, current_client())

        def leave() -> None:
            future.cancel()

        try:
            with client_watch(request.receive, leave):
                await asyncio.wait([future], timeout=self._limits.request_timeout_s)
            if future.cancelled():
                raise ClientGone
            if not future.done():
                raise request_timeout()
            outcome = "error"
            results = future.result()
            outcome = "stop"
            self._rate.add(len(inputs))
        finally:
            future.cancel()
            elapsed = time.perf_counter() - started
            self._metrics.observe(encoder.name, outcome, elapsed)
            if self._log_requests:
                fields = {
                    "id": answer_id,
                    "request_id": request.state.request_id,
                    "model": encoder.name,
                    "inputs": len(inputs),
                    "prompt_tokens": tokens,
                    "total_s": elapsed,
                    "finish": outcome,
                }
                logger.info(
                    "%(id)s x-request-id=%(request_id)s model=%(model)s inputs=%(inputs)d tokens=%(prompt_tokens)d "
                    "total=%(total_s).3fs finish=%(finish)s",
                    fields,
                    extra={"fields": fields},
                )
        return EncoderAnswer(answer_id, int(time.time()), results, InputUsage(tokens, tokens))

    def _find(self, name: str | None, fitting: Iterable[Encoder]) -> Encoder:
        encoder = None if name is None else self._named(name)
        if encoder is None and (name is None or self._accepts_any):
            encoder = next(iter(fitting), None)
        if encoder is not None:
            return encoder
        encoders = self._engine.encoders
        if name is None:
            wanted = "a model that can do this"
            served = ", ".join(f"{one.name} ({', '.join(sorted(one.tasks))})" for one in encoders.values())
        else:
            wanted, served = f"the embedding model {quoted(name)}", ", ".join(encoders)
        hint = f"served: {served}" if served else "start the server with --embedding-model FOLDER_OR_HUB_ID"
        raise ApiError(
            HTTPStatus.NOT_FOUND, f"{wanted} is not served here; {hint}", param="model", code="model_not_found"
        )

    def _named(self, name: str) -> Encoder | None:
        encoders = self._engine.encoders
        paths = (one for one in encoders.values() if one.source == name and one.is_named_by_source)
        return encoders.get(self._aliases.get(name, name)) or next(paths, None)


def endpoints_for(encoder: Encoder) -> str:
    """The endpoints that an encoder is for, in words."""
    if encoder.is_cross_encoder:
        return "/v1/score or /v1/rerank"
    return " or ".join({_ENDPOINTS.get(task, "/v1/pooling"): None for task in sorted(encoder.tasks)})


def truncation(encoder: Encoder, truncate_prompt_tokens: int | None) -> int | None:
    """How many tokens to cut inputs to: -1 means all that the model takes. Raises ApiError (400) for other numbers."""
    if truncate_prompt_tokens == -1:
        return encoder.max_length
    if truncate_prompt_tokens is not None and not 1 <= truncate_prompt_tokens <= encoder.max_length:
        raise bad_request(
            f"truncate_prompt_tokens must be between 1 and {encoder.max_length}, what {encoder.name} takes, or -1 for "
            f"that; got {truncate_prompt_tokens}",
            "truncate_prompt_tokens",
        )
    return truncate_prompt_tokens


def check_input(encoder: Encoder, item: EncoderInput, param: str, cut_by: str = "truncate_prompt_tokens: -1") -> None:
    """Raises ApiError or InvalidRequestError (400) for an input that the encoder cannot take.

    `cut_by` is what a request says to have it cut.
    """
    if item.is_too_long or len(item) > encoder.max_length:
        beside = " with what it is scored against" if encoder.is_cross_encoder else ""
        counted = "far more" if item.is_too_long else len(item)  # such a text is not read to its end
        raise bad_request(
            f"{param} has {counted} tokens{beside}, and {encoder.name} takes {encoder.max_length}: shorten it, or "
            f"send {cut_by} to have it cut",
            param,
            "context_length_exceeded",
        )
    encoder.check(item, param)
