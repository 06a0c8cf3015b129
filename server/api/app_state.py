"""AppState: what the endpoints of an application share."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from tidewheel.engine.core.engine import Engine

from ..chat.model_formats import ModelFormats
from ..chat.path import ChatPath
from ..chat.rendering import PromptRenderer
from ..chat.request_images import RequestImages
from ..completions.path import CompletionPath
from ..encoders import ServedEncoders
from ..generation.logprobs import LogprobsFormatter
from ..generation.prompt_encoding import PromptEncoder
from ..protocol.decode import ParameterNotes
from ..served_models import ServedModels
from ..telemetry.metrics import ServerMetrics


class AppState(msgspec.Struct, frozen=True, kw_only=True):
    """An endpoint keeps the parts that it needs.

    `defaults` are the sampling parameters that the model itself asks for. `notes` says what becomes of fields that are
    not known.
    """

    engine: Engine
    models: ServedModels
    path: ChatPath
    completion_path: CompletionPath
    encoder: PromptEncoder
    encoders: ServedEncoders
    renderer: PromptRenderer
    images: RequestImages
    formats: ModelFormats
    formatter: LogprobsFormatter
    metrics: ServerMetrics
    defaults: Mapping[str, float | int]
    fingerprint: str
    notes: ParameterNotes
