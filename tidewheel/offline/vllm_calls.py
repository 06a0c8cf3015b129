"""Arguments of calls and fields of parameters that vLLM has and that mean nothing here: one line in the log, or a
reason and a way out.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sized
from functools import cache
from typing import Any

from tidewheel.engine.errors import InvalidRequestError

logger = logging.getLogger(__name__)


def _by_name(reasons: Mapping[str, str]) -> dict[str, str]:
    return {name: why for why, names in reasons.items() for name in names.split()}


OF_STARTS = _by_name(
    {
        "no usage statistics are sent": "usage_context",
        "loggers of statistics are not called; each RequestOutput has metrics": "stat_loggers",
        "the model runs in this process, and starts with the first request": "start_engine_loop enable_multiprocessing",
    }
)
"""Arguments that say how an engine is started, without effect, and why."""

_IDLE = _by_name(
    {
        "the chat template shows whether it reads texts or parts": "chat_template_content_format",
        "only the server sends traces": "trace_headers",
        "it is between vLLM's server and its engine": "arrival_time data_parallel_rank prompt_text session_id kv_hints "
        "reasoning_ended reasoning_parser_kwargs",
        "beams run together as far as max_num_seqs allows": "concurrency_limit",
        "texts are encoded in their order": "priority",
        "requests that run keep what they have computed": "reset_running_requests",
        "what is kept on disk is always forgotten too": "reset_connector",
    }
)
_REFUSED = _by_name(
    {
        "give it with a prompt's multi_modal_data, or to chat()": "mm_processor_kwargs",
        "a text is encoded as the model's tokenizer does it; prompts may be token ids": "tokenization_kwargs",
        "SamplingParams has structured_outputs": "guided_options_request",
        "prompt adapters are not served; LoRA adapters are, with lora_request": "prompt_adapter_request",
        "adapters are of models that generate": "lora_request",
    }
)


def without_vllms(given: Mapping[str, Any]) -> dict[str, Any]:
    """The other keyword arguments of a call, without those that only vLLM has.

    Those of vLLM have no effect, as a line in the log says once. Raises InvalidRequestError for what is not supported.
    None, False, "auto" and empty values ask for nothing.
    """
    for name, value in given.items():
        if value is None or value is False or value == "auto" or (isinstance(value, Sized) and not len(value)):
            continue
        if name in _REFUSED:
            raise InvalidRequestError(f"{name} is not supported: {_REFUSED[name]}", name)
        if name in _IDLE:
            say_once(f"{name} has no effect: {_IDLE[name]}")
    return {name: value for name, value in given.items() if name not in _IDLE and name not in _REFUSED}


def take_none_but_vllms(method: str, given: Mapping[str, Any]) -> None:
    """The same for a method that has no further arguments. Raises TypeError for those that vLLM has not either."""
    for name in without_vllms(given):
        raise TypeError(f"{method}() got an unexpected keyword argument {name!r}")


def check_fields(params: object, refused: Mapping[str, str], idle: Mapping[str, str]) -> None:
    """The same for fields of parameters, each with the reason. None, False and the default ask for nothing."""
    for name, why in refused.items():
        value = getattr(params, name)
        if value is not None and value is not False and value != getattr(type(params), name):
            raise InvalidRequestError(f"{name} is not supported: {why}", name)
    for name, why in idle.items():
        if getattr(params, name):
            say_once(f"{name} has no effect: {why}")


@cache
def say_once(sentence: str) -> None:
    """Log a warning, unless it was logged before."""
    logger.warning("%s", sentence)
