"""PoolingParams: what to make of a text, in vLLM's names."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, get_args

from tidewheel.engine.encoders.tasks import Task
from tidewheel.engine.errors import InvalidRequestError

from .params import RequestOutputKind
from .vllm_calls import check_fields

_TASKS = (None, "encode", *get_args(Task))
_NO_STEPS = "answers have all tokens: ask for task='token_classify', and take those that you want"
_NOT_SERVED = {
    "step_tag_id": _NO_STEPS,
    "returned_token_ids": _NO_STEPS,
    "extra_kwargs": "there are no plug-ins",
    "late_interaction_params": "ask for task='token_embed', which gives a vector for each token, or use LLM.score",
}
_IDLE = {
    "requires_token_ids": "an encoder is always given token ids",
    "skip_reading_prefix_cache": "encoders keep no prefixes",
}


@dataclass(kw_only=True)
class PoolingParams:
    """What to make of a text. `truncate_prompt_tokens` -1 cuts inputs to what the model takes.

    `task` is what is asked for; None is what the model is for. `dimensions` is how many numbers of a vector to keep.
    `use_activation` says whether vectors get the length 1, and logits become probabilities; versions of vLLM call it
    `normalize`, `softmax` or `activation`. `output_kind` may only be FINAL_ONLY. The others are not supported, or have
    no effect, as the log says once. Raises InvalidRequestError, which names the field.
    """

    truncate_prompt_tokens: int | None = None
    dimensions: int | None = None
    normalize: bool | None = None
    use_activation: bool | None = None
    task: str | None = None
    activation: bool | None = None
    softmax: bool | None = None
    step_tag_id: None = None
    returned_token_ids: None = None
    extra_kwargs: None = None
    late_interaction_params: None = None
    requires_token_ids: bool = False
    skip_reading_prefix_cache: bool | None = None
    output_kind: RequestOutputKind = RequestOutputKind.FINAL_ONLY

    def clone(self) -> PoolingParams:
        """A copy that shares nothing with these."""
        return replace(self)

    def __post_init__(self) -> None:
        if self.task not in _TASKS:
            raise InvalidRequestError(
                f"task={self.task!r} is not known: it must be one of {', '.join(get_args(Task))}", "task"
            )
        check_fields(self, _NOT_SERVED, _IDLE)
        if self.output_kind is not RequestOutputKind.FINAL_ONLY:
            raise InvalidRequestError(
                f"output_kind must be RequestOutputKind.FINAL_ONLY, got {self.output_kind!r}: a vector comes in one "
                "output",
                "output_kind",
            )
        if len({self.use_activation, self.normalize, self.activation, self.softmax} - {None}) > 1:
            raise InvalidRequestError(
                "use_activation contradicts normalize, softmax or activation, which are older names for it: give one",
                "use_activation",
            )

    def given(self) -> dict[str, Any]:
        """The fields that were given, by their names in LLM.encode."""
        names = (self.use_activation, self.normalize, self.activation, self.softmax)
        wanted = {
            "pooling_task": None if self.task == "encode" else self.task,
            "truncate_prompt_tokens": self.truncate_prompt_tokens,
            "dimensions": self.dimensions,
            "use_activation": next((value for value in names if value is not None), None),
        }
        return {name: value for name, value in wanted.items() if value is not None}


def pooling_options(params: PoolingParams | None, **given: Any) -> dict[str, Any]:
    """The options of a call, which go before those of its parameters.

    Raises InvalidRequestError, also if the parameters are for another task than the call.
    """
    if not isinstance(params, PoolingParams | None):
        raise InvalidRequestError(
            f"pooling_params must be one PoolingParams for all prompts, got {type(params).__name__}", "pooling_params"
        )
    of_params = {} if params is None else params.given()
    task, of_call = of_params.get("pooling_task"), given.get("pooling_task")
    if None not in (task, of_call) and task != of_call:
        raise InvalidRequestError(
            f"pooling_params have the task {task}, and this call is for {of_call}: leave it out, or use encode",
            "pooling_params",
        )
    return {**of_params, **{name: value for name, value in given.items() if value is not None}}
