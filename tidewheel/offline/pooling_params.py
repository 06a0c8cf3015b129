"""PoolingParams: how to make a vector of a text, in vLLM's names."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from tidewheel.engine.errors import InvalidRequestError

from .params import RequestOutputKind
from .vllm_calls import check_fields

_TASKS = (None, "embed", "encode")
_NOT_SERVED = {
    **dict.fromkeys(
        ("activation", "softmax", "step_tag_id", "returned_token_ids", "extra_kwargs"),
        "models that classify are not served",
    ),
    "late_interaction_params": "models with a vector for each token are not served; LLM.score compares texts",
}
_IDLE = {
    "requires_token_ids": "an encoder is always given token ids",
    "skip_reading_prefix_cache": "encoders keep no prefixes",
}


@dataclass(kw_only=True)
class PoolingParams:
    """How to make a vector. `truncate_prompt_tokens` -1 cuts inputs to what the model takes.

    `dimensions` is how many numbers to keep. Newer versions of vLLM call `normalize` `use_activation`. `task` may only
    be embed, and `output_kind` only FINAL_ONLY. The others are for models that classify, reward or interact late and
    are not served, or have no effect, as the log says once. Raises InvalidRequestError, which names the field.
    """

    truncate_prompt_tokens: int | None = None
    dimensions: int | None = None
    normalize: bool | None = None
    use_activation: bool | None = None
    task: str | None = None
    activation: None = None
    softmax: None = None
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
                f"task={self.task!r} is not supported: embeddings are task='embed', and LLM.score gives scores", "task"
            )
        check_fields(self, _NOT_SERVED, _IDLE)
        if self.output_kind is not RequestOutputKind.FINAL_ONLY:
            raise InvalidRequestError(
                f"output_kind must be RequestOutputKind.FINAL_ONLY, got {self.output_kind!r}: a vector comes in one "
                "output",
                "output_kind",
            )
        if None not in (self.normalize, self.use_activation) and self.normalize != self.use_activation:
            raise InvalidRequestError("normalize and use_activation contradict each other: give one", "normalize")

    def given(self) -> dict[str, Any]:
        """The fields that were given, by their names in LLM.embed."""
        normalize = self.use_activation if self.normalize is None else self.normalize
        wanted = {"truncate_prompt_tokens": self.truncate_prompt_tokens, "dimensions": self.dimensions}
        return {name: value for name, value in {**wanted, "normalize": normalize}.items() if value is not None}


def pooling_options(params: PoolingParams | None, **given: Any) -> dict[str, Any]:
    """The options of a call, which go before those of its parameters. Raises InvalidRequestError."""
    if not isinstance(params, PoolingParams | None):
        raise InvalidRequestError(
            f"pooling_params must be one PoolingParams for all prompts, got {type(params).__name__}", "pooling_params"
        )
    of_params = {} if params is None else params.given()
    return {**of_params, **{name: value for name, value in given.items() if value is not None}}
