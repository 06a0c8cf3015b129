"""RequestValidator: what a request must be, so that this engine can serve it."""

from __future__ import annotations

from collections.abc import Collection
from itertools import chain

from msgspec import Struct

from ..devices.limits import ExecutorLimits
from ..errors import InvalidRequestError
from ..media.vision import Vision
from ..sampling_params import SamplingParams
from .request import Request


class RequestValidator(Struct, frozen=True):
    """Checks requests against the context's length in tokens, the vocabulary, the `max_logprobs` likeliest tokens that
    they may ask for at a place, and what the device can hold and run.
    """

    vocab_size: int
    max_logprobs: int
    limits: ExecutorLimits
    vision: Vision | None = None  # how the model sees images

    def check(self, request: Request, context: int) -> None:
        """Raise InvalidRequestError, naming the parameter, if the request can never be served."""
        self._check_prompt(request, context)
        self._check_token_ids(request)
        self._check_media(request)
        self._check_logprobs(request.sampling)
        if request.sampling.beam_width is not None:
            self._check_beams(request, request.sampling.beam_width, context)

    def _check_prompt(self, request: Request, context: int) -> None:
        ids = request.prompt_token_ids
        longest = context - (request.sampling.max_tokens != 0)
        if len(ids) == 0:
            raise InvalidRequestError("the prompt must have at least one token", "prompt")
        if len(ids) > longest:
            raise InvalidRequestError(
                f"the prompt has {len(ids)} tokens, but this model's context of {context} tokens leaves "
                f"room for at most {context - 1} and one to generate",
                "prompt",
            )
        self._require_in_vocabulary(ids, "prompt")

    def _check_token_ids(self, request: Request) -> None:
        sampling = request.sampling
        self._require_in_vocabulary(list(sampling.logit_bias), "logit_bias")
        self._require_in_vocabulary(sampling.stop_token_ids, "stop_token_ids")
        constraints = request.constraints
        if constraints is not None:
            self._require_in_vocabulary(constraints.allowed_token_ids or (), "allowed_token_ids")
            self._require_in_vocabulary(list(chain.from_iterable(constraints.bad_words)), "bad_words")
            preface = constraints.preface
            if preface is not None and preface.opening_id is not None:
                self._require_in_vocabulary((preface.opening_id,), "reasoning")

    def _check_media(self, request: Request) -> None:
        end = 0
        for span in request.media:
            if self.vision is None:
                raise InvalidRequestError("this model reads text alone, and takes no images", "media")
            if not end <= span.start < span.end <= len(request.prompt_token_ids):
                raise InvalidRequestError("the images of a prompt must be in order, each in its own place", "media")
            end = span.end
            room = self.limits.max_num_batched_tokens - self.limits.max_num_seqs
            if self.vision.two_way and span.length > max(room, 0):
                raise InvalidRequestError(
                    f"an image of {span.length} tokens must run in one step with up to {self.limits.max_num_seqs} "
                    "answers: raise --max-num-batched-tokens",
                    "media",
                )

    def _check_logprobs(self, sampling: SamplingParams) -> None:
        for name, count in (("logprobs", sampling.logprobs), ("prompt_logprobs", sampling.prompt_logprobs)):
            if count is not None and count > self.max_logprobs:
                raise InvalidRequestError(
                    f"{name} must be at most {self.max_logprobs} (--max-logprobs), got {count}", name
                )

    def _check_beams(self, request: Request, width: int, context: int) -> None:
        """A search must have room for all its beams in one step, and in the cache."""
        limits, prompt_len = self.limits, len(request.prompt_token_ids)
        widest = min(limits.max_num_seqs, limits.max_num_batched_tokens, self.vocab_size)
        if width > widest:
            raise InvalidRequestError(
                f"n: a beam search can have at most {widest} beams on this server, got {width}", "n"
            )
        room, max_tokens = context - prompt_len, request.sampling.max_tokens
        longest = prompt_len + (room if max_tokens is None else min(max_tokens, room))
        shared = prompt_len // limits.block_size
        wanted = shared + width * (-(-longest // limits.block_size) - shared)
        if wanted > limits.num_blocks:
            raise InvalidRequestError(
                f"max_tokens must be lower, or there must be fewer beams: {width} beams of up to "
                f"{longest} tokens take {wanted} KV blocks, and this server has {limits.num_blocks}",
                "max_tokens",
            )

    def _require_in_vocabulary(self, ids: Collection[int], param: str) -> None:
        for token in (min(ids), max(ids)) if ids else ():
            if not 0 <= token < self.vocab_size:
                raise InvalidRequestError(
                    f"{param} has token id {token}, which is not in the vocabulary of {self.vocab_size} tokens", param
                )
