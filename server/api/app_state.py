"""What the endpoints of an application share: EncoderState, and AppState where there is a chat model."""

from __future__ import annotations

from collections.abc import Mapping

from tidewheel.engine.core.engine import Engine

from ..chat.model_formats import ModelFormats
from ..chat.path import ChatPath
from ..chat.rendering import PromptRenderer
from ..chat.request_images import RequestImages
from ..completions.path import CompletionPath
from ..generation.logprobs import LogprobsFormatter
from ..generation.prompt_encoding import PromptEncoder
from ..served_models import ServedModels
from ..telemetry.metrics import ServerMetrics
from .encoder_state import EncoderState


class AppState(EncoderState, frozen=True, kw_only=True):
    """An endpoint keeps the parts that it needs.

    `defaults` are the sampling parameters that the model itself asks for.
    """

    engine: Engine
    models: ServedModels
    path: ChatPath
    completion_path: CompletionPath
    encoder: PromptEncoder
    renderer: PromptRenderer
    images: RequestImages
    formats: ModelFormats
    formatter: LogprobsFormatter
    metrics: ServerMetrics
    defaults: Mapping[str, float | int]
    fingerprint: str
