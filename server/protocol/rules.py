"""What a server's options set for every request for tokens: limits, and fields that requests leave open."""

from __future__ import annotations

from msgspec import Struct

from ..errors import bad_request
from .sampling import GenerationBody, StreamOptions


class RequestRules(Struct, frozen=True):
    """Checks and completes bodies. `max_logprobs` bounds the likely tokens that are asked for at each place, where -1
    asks for all `vocab_size`. Without `has_text`, answers are token ids.
    """

    max_logprobs: int
    vocab_size: int
    has_text: bool = True
    tokens_as_ids: bool = False
    include_usage: bool = False

    def apply(self, body: GenerationBody) -> None:
        """Raises ApiError (400) for more logprobs than there may be."""
        for name in ("logprobs", "top_logprobs", "prompt_logprobs"):
            asked = getattr(body, name, None)
            if type(asked) is not int:
                continue
            count = self.vocab_size if asked == -1 else asked
            if count > self.max_logprobs:
                raise bad_request(
                    f"{name} must be at most {self.max_logprobs} on this server (--max-logprobs), got {asked}"
                    f"{', which asks for the whole vocabulary' if asked == -1 else ''}",
                    name,
                )
            setattr(body, name, count)
        if not self.has_text or (self.tokens_as_ids and body.return_tokens_as_token_ids is None):
            body.return_tokens_as_token_ids = True
        if not self.has_text and body.return_token_ids is None:
            body.return_token_ids = True
        if self.include_usage and body.stream:
            body.stream_options = body.stream_options or StreamOptions()
            body.stream_options.include_usage = True
