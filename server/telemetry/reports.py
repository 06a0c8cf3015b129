"""Reports of finished requests: metrics, a line in the log, and a span if traces are on."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from tidewheel.engine.core.output_processor import OutputProcessor
from tidewheel.engine.outputs import FinishReason
from tidewheel.engine.sampling_params import SamplingParams

from ..protocol.usage import Usage
from .metrics import RequestTimer
from .tracing import Tracer

logger = logging.getLogger("tidewheel.requests")


@dataclass(frozen=True, kw_only=True)
class Ended:
    """A request that has ended.

    `id` is its answer's id, `client_id` its x-request-id, `adapter` the name of its LoRA adapter. `choices` has each
    prompt's choices. `cut_short` is client_gone or timed_out if that has ended the request early.
    """

    id: str
    client_id: str
    adapter: str | None
    operation: str
    prompt_lengths: Sequence[int]
    sampling: SamplingParams
    choices: Sequence[Sequence[OutputProcessor]]
    timer: RequestTimer
    usage: Usage
    cut_short: str | None
    trace_context: Mapping[str, str]


class RequestReports:
    """Reports requests. `model_name` is the model's name in spans. Prompts and answers are never reported."""

    def __init__(self, model_name: str, tracer: Tracer | None, *, log_requests: bool) -> None:
        self._model_name = model_name
        self._tracer = tracer
        self._log_requests = log_requests

    def report(self, ended: Ended) -> None:
        """Measure, log and trace."""
        elapsed_s = ended.timer.stop(ended.prompt_lengths, ended.sampling, ended.choices)
        if self._log_requests:
            _log(ended, elapsed_s)
        if self._tracer is not None:
            attributes = self._attributes(ended, elapsed_s)
            self._tracer.record(ended.trace_context, attributes, elapsed_s=elapsed_s, error=_error(ended))

    def _attributes(self, ended: Ended, elapsed_s: float) -> dict[str, str | int | float | list[str] | None]:
        """OpenTelemetry's names for generative AI, and vLLM's. Times inside the engine are the first choice's."""
        sampling, usage = ended.sampling, ended.usage
        attributes: dict[str, str | int | float | list[str] | None] = {
            "gen_ai.operation.name": ended.operation,
            "gen_ai.provider.name": "tidewheel",
            "gen_ai.request.model": ended.adapter or self._model_name,
            "gen_ai.response.model": ended.adapter or self._model_name,
            "gen_ai.request.id": ended.id,
            "gen_ai.response.id": ended.id,
            "http.request.header.x-request-id": [ended.client_id],
            "gen_ai.request.n": sampling.n,
            "gen_ai.request.choice.count": sampling.n,
            "gen_ai.request.max_tokens": sampling.max_tokens,
            "gen_ai.request.temperature": sampling.temperature,
            "gen_ai.request.top_p": sampling.top_p,
            "gen_ai.usage.prompt_tokens": usage.prompt_tokens,
            "gen_ai.usage.completion_tokens": usage.completion_tokens,
            "gen_ai.usage.input_tokens": usage.prompt_tokens,
            "gen_ai.usage.output_tokens": usage.completion_tokens,
            "gen_ai.usage.cache_read.input_tokens": usage.prompt_tokens_details.cached_tokens,
            "gen_ai.response.finish_reasons": ended.timer.finish_reasons,
            "gen_ai.latency.e2e": elapsed_s,
            "gen_ai.latency.time_to_first_token": ended.timer.time_to_first_token,
        }
        first = ended.choices[0][0]
        times, decode = first.times, ended.timer.decode_time(first)
        if times is not None and decode is not None:
            prefill = times.first_token - times.scheduled
            attributes["gen_ai.latency.time_in_queue"] = times.scheduled - times.queued
            attributes["gen_ai.latency.time_in_model_prefill"] = prefill
            attributes["gen_ai.latency.time_in_model_decode"] = decode
            attributes["gen_ai.latency.time_in_model_inference"] = prefill + decode
        return attributes


def _error(ended: Ended) -> str | None:
    """The span's name for the failure; None if there is none. A client that disconnects is not a failure."""
    if ended.cut_short is not None:
        return "timeout" if ended.cut_short == "timed_out" else None
    if FinishReason.ERROR.value in ended.timer.finish_reasons:
        return "generation_failed"
    if FinishReason.INVALID.value in ended.timer.finish_reasons:
        return "invalid_request"
    return "server_stopped" if FinishReason.ABORT.value in ended.timer.finish_reasons else None


def _log(ended: Ended, elapsed_s: float) -> None:
    first = ended.timer.time_to_first_token
    fields = {
        "id": ended.id,
        "request_id": ended.client_id,
        **({} if ended.adapter is None else {"adapter": ended.adapter}),
        "prompt_tokens": ended.usage.prompt_tokens,
        "cached_tokens": ended.usage.prompt_tokens_details.cached_tokens,
        "completion_tokens": ended.usage.completion_tokens,
        "first_token_s": first,
        "total_s": elapsed_s,
        "finish": ended.cut_short or ",".join(ended.timer.finish_reasons) or "-",
    }
    logger.info(
        "%(id)s x-request-id=%(request_id)s%(adapter)s prompt=%(prompt_tokens)d cached=%(cached_tokens)d "
        "completion=%(completion_tokens)d first_token=%(first_token)s total=%(total_s).3fs finish=%(finish)s",
        {
            **fields,
            "adapter": "" if ended.adapter is None else f" adapter={ended.adapter}",
            "first_token": "-" if first is None else f"{first:.3f}s",
        },
        extra={"fields": fields},
    )
