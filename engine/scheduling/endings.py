"""What a sampled token means for its sequence."""

from __future__ import annotations

from ..devices.sampling import NO_TOKEN
from ..outputs import FinishReason
from ..sequences.sequence import Sequence
from .step import Finished

NO_TOKEN_ERROR = "the model gave no token that may be sampled: its logits are not finite"


def append(sequence: Sequence, token: int) -> Finished | None:
    """Add a sampled token to its sequence; how that ends with it, None if it goes on."""
    constraint = sequence.constraint
    if token != NO_TOKEN:
        sequence.append(token)
    if constraint is not None:
        if token != NO_TOKEN:
            constraint.advance(token)
        if (failure := constraint.failure) is not None:
            return Finished(sequence.key, failure.reason, error=failure.message)
    if token == NO_TOKEN:
        return Finished(sequence.key, FinishReason.ERROR, error=NO_TOKEN_ERROR)
    if token in sequence.stop_ids:
        stop_reason = None if token in sequence.eos_ids else token
        return Finished(sequence.key, FinishReason.STOP, stop_reason)
    if constraint is not None and constraint.is_terminated:
        return Finished(sequence.key, FinishReason.STOP, is_complete=True)
    if sequence.num_tokens >= sequence.max_length:
        return Finished(sequence.key, FinishReason.LENGTH)
    return None
