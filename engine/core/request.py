"""Request: one prompt and how to continue it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ..adapters.lora import Lora
from ..constraints.constraint import TokenConstraints
from ..errors import InvalidRequestError
from ..media.media import MediaSpan
from ..sampling_params import SamplingParams


@dataclass(frozen=True, slots=True)
class Request:
    """One prompt and how to continue it. Lower `priority` values run first.

    Requests of equal priority run in order of arrival, and different clients take turns.

    Raises InvalidRequestError for constraints with beam search.
    """

    request_id: str
    prompt_token_ids: Sequence[int]
    sampling: SamplingParams
    priority: int = 0
    cache_salt: str | None = None  # requests with different salts never share cached prefixes
    constraints: TokenConstraints | None = None
    lora: Lora | None = None  # the adapter; the caller keeps it in memory
    client: str = ""  # who it is for
    first_choice: int = 0  # the index of its first choice, if its choices are counted after those of other requests
    media: tuple[MediaSpan, ...] = ()  # where images take the place of its tokens
    max_model_len: int | None = None  # its context in tokens, if that is shorter than the engine's

    def __post_init__(self) -> None:
        if self.constraints is not None and self.sampling.beam_width is not None:
            raise InvalidRequestError("constraints must be left out with beam search", "constraints")
