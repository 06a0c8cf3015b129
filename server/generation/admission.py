"""Admission: whether a new request may join the queue, by an estimate of how many sequences fit into the KV cache."""

from __future__ import annotations

import math
from collections.abc import Sequence
from http import HTTPStatus

from msgspec import Struct

from tidewheel.engine.core.engine import Engine, EngineStats
from tidewheel.engine.media.media import MediaSpan
from tidewheel.engine.sampling_params import SamplingParams

from ..errors import ApiError, bad_request
from ..http.clients import current_client
from ..http.limits import AdmissionLimits
from ..telemetry.metrics import ServerMetrics
from .backlog import EndRate, has_part, queue_full

_FIRST_DRAFT = 256  # expected tokens of an answer before the first one has ended
_LENGTH_WEIGHT = 0.05  # weight of the newest answer in the running mean of lengths
_MAX_MEDIA_BYTES = 2**30  # of the images of all requests together that have not ended


class Demand(Struct, frozen=True):
    """What a request will need: sequences, the KV blocks that they end with if answers have the mean length, and bytes
    of images.
    """

    sequences: int
    blocks: int
    client: str = ""
    media_bytes: int = 0


class Admission:
    """Counts the requests that were admitted. Lives on the event loop.

    The number of waiting sequences is estimated. The engine cannot tell it: it learns of new requests only between
    steps, and it starts more sequences than the KV cache can hold to their ends. So admission counts how many fit at
    their expected lengths. The rest count as waiting, although some of them may run for a while and be preempted.

    A full queue is closed to those who fill it: a client that has less than an equal part of it is still let in, until
    twice as many wait.
    """

    def __init__(self, engine: Engine, metrics: ServerMetrics, limits: AdmissionLimits) -> None:
        self.limits = limits
        self._metrics = metrics
        self._engine = engine
        self._demand = Demand(0, 0)
        self._media_bytes = 0
        self._sequences: dict[str, int] = {}  # of each client that has any
        self._mean_length = float(_FIRST_DRAFT)
        self._rate = EndRate()  # of sequences

    def check_shape(self, num_prompts: int, *, n: int | None, best_of: int | None = None) -> None:
        """Raises ApiError (400) if a request has too many prompts or choices."""
        if num_prompts > self.limits.max_prompts:
            limit = f"{self.limits.max_prompts} entries (--max-prompts)"
            raise bad_request(f"prompt must have at most {limit}, got {num_prompts}", "prompt")
        for name, count in (("n", n), ("best_of", best_of)):
            if count is not None and count > self.limits.max_n:
                raise bad_request(f"{name} must be at most {self.limits.max_n} (--max-n), got {count}", name)

    def admit(
        self, prompts: Sequence[Sequence[int]], sampling: SamplingParams, media: Sequence[MediaSpan] = ()
    ) -> Demand:
        """Admit a request, until `release` is called for it.

        Raises ApiError: 429 with `retry-after` if too many sequences would wait, or if they would have too many images
        in memory, and 400 if that were so even without other requests.
        """
        self.check_shape(len(prompts), n=sampling.num_sequences)
        demand = self._expected(prompts, sampling, media)
        if self._media_bytes and self._media_bytes + demand.media_bytes > _MAX_MEDIA_BYTES:
            self._metrics.rejected += 1
            raise _too_many_images(self._rate.retry_after_s(1))
        total = Demand(self._demand.sequences + demand.sequences, self._demand.blocks + demand.blocks)
        if self.limits.max_queue is not None:
            waiting = self._waiting(total, self._engine.stats())
            excess = waiting - self.limits.max_queue
            if excess > 0 and self._waiting(demand) > self.limits.max_queue:
                raise bad_request(
                    f"the request asks for {demand.sequences} answers, more than this server can work on with "
                    f"{self.limits.max_queue} waiting (--max-queue); send fewer prompts at once, or a smaller n",
                    "n" if sampling.num_sequences > 1 else "prompt",
                )
            if excess > 0 and not has_part(
                self._sequences, demand.client, demand.sequences, waiting, self.limits.max_queue
            ):
                self._metrics.rejected += 1
                raise queue_full(self.limits.max_queue, self._rate.retry_after_s(excess))
        self._demand = total
        self._media_bytes += demand.media_bytes
        self._sequences[demand.client] = self._sequences.get(demand.client, 0) + demand.sequences
        return demand

    def release(self, demand: Demand, lengths: Sequence[int]) -> None:
        """Forget a request that has ended. `lengths` are its answers' lengths, in tokens."""
        self._demand = Demand(self._demand.sequences - demand.sequences, self._demand.blocks - demand.blocks)
        self._media_bytes -= demand.media_bytes
        self._sequences[demand.client] -= demand.sequences
        if not self._sequences[demand.client]:
            del self._sequences[demand.client]
        self._rate.add(len(lengths))
        for length in lengths:
            self._mean_length += _LENGTH_WEIGHT * (length - self._mean_length)

    def _expected(
        self, prompts: Sequence[Sequence[int]], sampling: SamplingParams, media: Sequence[MediaSpan]
    ) -> Demand:
        block_size = self._engine.limits.block_size
        blocks = 0
        for prompt in prompts:
            room = self._engine.max_model_len - len(prompt)
            answer = min(self._mean_length, room if sampling.max_tokens is None else sampling.max_tokens)
            grown = math.ceil((len(prompt) + answer) / block_size)
            # Choices share the full blocks of their prompt.
            blocks += grown + (sampling.num_sequences - 1) * (grown - len(prompt) // block_size)
        images = {id(span.media): span.media for span in media}.values()
        media_bytes = sum(tile.nbytes for image in images for tile in image.tiles)
        return Demand(len(prompts) * sampling.num_sequences, blocks, current_client(), media_bytes)

    def _waiting(self, demand: Demand, stats: EngineStats | None = None) -> int:
        """How many sequences of `demand` do not fit. `stats` show how many blocks they save by sharing prefixes."""
        limits = self._engine.limits
        blocks_each = demand.blocks / demand.sequences
        if stats is not None and stats.num_running:
            held = stats.kv_blocks_used / stats.num_running
            blocks_each = min(blocks_each, held + self._mean_length / limits.block_size)
        return demand.sequences - min(demand.sequences, limits.max_num_seqs, int(limits.num_blocks / blocks_each))


def _too_many_images(retry_after_s: int) -> ApiError:
    return ApiError(
        HTTPStatus.TOO_MANY_REQUESTS,
        f"the server is busy: the images of other requests take {_MAX_MEDIA_BYTES >> 20} MiB already; try again later",
        code="queue_full",
        headers={"retry-after": str(retry_after_s)},
    )
