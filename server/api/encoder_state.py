"""EncoderState: what the endpoints of encoders share. They need no chat model."""

from __future__ import annotations

import msgspec

from ..encoders import ServedEncoders
from ..model_cards import ModelCards
from ..protocol.decode import ParameterNotes
from ..text_threads import TextThreads


class EncoderState(msgspec.Struct, frozen=True, kw_only=True):
    """An endpoint keeps the parts that it needs.

    Long texts and answers are handled in the threads of `encoder`. `notes` says what becomes of fields that are not
    known.
    """

    models: ModelCards
    encoders: ServedEncoders
    encoder: TextThreads
    notes: ParameterNotes
