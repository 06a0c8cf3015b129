"""What encoders without a chat model answer."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

from starlette.applications import Starlette

from tidewheel.engine.encoders.engine import EncoderEngine

from .api.encoder_routes import encoder_routes
from .api.encoder_state import EncoderState
from .api.health import health_routes
from .api.metrics import metrics_routes
from .api.models import models_routes
from .api.no_chat import no_chat_routes
from .api.ollama_models import OllamaModelEndpoints
from .api.operations import encoder_operations_routes
from .app_options import AppOptions
from .app_resources import AppResources, find_resources
from .encoders import ServedEncoders
from .http.json_limits import MIN_VALUES
from .model_app import ModelApp, app_of_model
from .model_cards import ModelCards
from .model_engines import ModelEngines
from .protocol.decode import ParameterNotes
from .telemetry.encoder_metrics import EncoderMetrics
from .telemetry.text_log import TextLog
from .text_threads import TextThreads

logger = logging.getLogger(__name__)

_OF_CHATS = (
    "share_prefix_cache chat_template default_chat_template_kwargs trust_request_chat_template generation_config "
    "override_generation_config default_sampling response_role return_tokens_as_token_ids enable_force_include_usage "
    "enable_auto_tool_choice tool_call_parser reasoning_parser max_stored_responses shared_store "
    "enable_tokenizer_info_endpoint otlp_traces_endpoint enable_log_outputs log_stats log_stats_interval"
).split()
"""Fields of AppOptions that only a chat model has a use for."""

CONCURRENT_ROWS = 32
"""Requests of a batch that run at a time: the texts of a request run together anyway."""


def build_encoder_app(
    engine: EncoderEngine,
    options: AppOptions,
    *,
    resources: AppResources | None = None,
    shown_options: Mapping[str, Any] | None = None,
) -> Starlette:
    """The application of a server with these encoders alone. Its lifespan starts and stops the engine.

    The rest is as for `encoder_model_app`. Raises TidewheelError for what cannot be found.
    """
    resources = resources or find_resources(options)
    model = encoder_model_app(engine, options, shown_options=shown_options)
    return app_of_model(model, ModelEngines(None, engine), options, resources)


def encoder_model_app(
    engine: EncoderEngine, options: AppOptions, *, shown_options: Mapping[str, Any] | None = None
) -> ModelApp:
    """What encoders answer. `shown_options` are for `/server_info`.

    The first encoder has all names of --served-model-name, if there are any.
    """
    for flag in options.given_flags(_OF_CHATS):
        logger.info("%s has no effect: it is for models that generate", flag)
    first = next(iter(engine.encoders))
    aliases = {name: first for name in options.served_model_names if name != first}
    metrics = EncoderMetrics(engine, options.metrics_prefix)
    models = ModelCards(engine.encoders.values(), aliases)
    texts = TextLog(options.max_log_len, logs_answers=options.enable_log_outputs) if options.log_requests else None
    threads = TextThreads()
    notes = ParameterNotes(options.unknown_parameters)
    state = EncoderState(
        models=models,
        encoders=ServedEncoders(
            engine,
            metrics,
            options.admission,
            log_requests=options.log_requests,
            texts=texts,
            aliases=aliases,
            accepts_any=options.skip_model_name_validation,
        ),
        encoder=threads,
        notes=notes,
    )
    return ModelApp(
        models=models,
        routes=[*encoder_routes(state), *OllamaModelEndpoints(state).routes(), *models_routes(models)],
        status_routes=[
            *health_routes(engine),
            *metrics_routes(metrics, named=[]),
            *encoder_operations_routes(engine, models.root, shown_options or {}),
            *no_chat_routes(engine.encoders[first]),
        ],
        collectors=[metrics],
        notes=notes,
        max_values=MIN_VALUES,
        batch_rows=CONCURRENT_ROWS,
        close=threads.close,
    )
