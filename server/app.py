"""What a chat model answers: an engine and its options as routes. No globals: a process may hold several."""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Mapping
from typing import Any

from starlette.applications import Starlette

from tidewheel import __version__
from tidewheel.engine.core.engine import Engine
from tidewheel.engine.encoders.engine import EncoderEngine
from tidewheel.engine.media.options import MediaOptions
from tidewheel.engine.model_names import short_name
from tidewheel.engine.start_log import start_logger
from tidewheel.engine.text.tokenizer import Tokenizer

from .api.adapters import adapter_routes
from .api.app_state import AppState
from .api.chat import ChatEndpoint
from .api.completions import CompletionsEndpoint
from .api.encoder_routes import encoder_routes
from .api.health import health_routes
from .api.infill import InfillEndpoint
from .api.messages import MessagesEndpoints
from .api.metrics import metrics_routes
from .api.models import models_routes
from .api.ollama import OllamaEndpoints
from .api.ollama_models import OllamaChatModel, OllamaModelEndpoints
from .api.operations import operations_routes
from .api.render import RenderEndpoints
from .api.responses import ResponsesEndpoints
from .api.stored_responses import StoredResponsesEndpoints
from .api.tokenize import TokenizeEndpoints
from .app_options import AppOptions
from .app_resources import AppResources, find_resources
from .chat.image_placeholders import ImagePlaceholders
from .chat.model_template import ModelTemplate, model_template
from .chat.path import ChatPath
from .chat.rendering import PromptRenderer
from .chat.request_images import request_images
from .chat.request_templates import RequestTemplates
from .completions.path import CompletionPath
from .default_sampling import sampling_defaults_of
from .encoders import ServedEncoders
from .generation.admission import Admission
from .generation.generations import Generations
from .generation.logprobs import LogprobsFormatter
from .generation.prompt_encoding import PromptEncoder
from .http.json_limits import values_limit
from .model_app import ModelApp, app_of_model
from .model_engines import ModelEngines
from .protocol.decode import ParameterNotes
from .protocol.rules import RequestRules
from .responses.store import Responses, ResponseStore
from .served_models import ServedModels
from .shared_adapters import SharedAdapters
from .telemetry.adapter_metrics import AdapterMetrics
from .telemetry.encoder_metrics import EncoderMetrics
from .telemetry.metrics import ServerMetrics
from .telemetry.reports import RequestReports
from .telemetry.text_log import TextLog


def build_app(
    engine: Engine,
    options: AppOptions,
    encoder_engine: EncoderEngine | None = None,
    *,
    resources: AppResources | None = None,
    read_template: ModelTemplate | None = None,
    media: MediaOptions | None = None,
    shown_options: Mapping[str, Any] | None = None,
) -> Starlette:
    """The application of a server with this model alone. Its lifespan starts and stops the engines.

    The rest is as for `chat_model_app`, and `resources` are what the options name, if they were read before.
    """
    resources = resources or find_resources(options)
    engines = chat_engines(engine, encoder_engine or EncoderEngine(), options)
    responses = responses_of(options, resources)
    model = chat_model_app(
        engine,
        options,
        engines.encoders,
        responses,
        resources=resources,
        read_template=read_template,
        media=media,
        shown_options=shown_options,
        shared_adapters=shared_adapters_of(engine, resources),
    )
    return app_of_model(model, engines, options, resources, responses)


def chat_engines(engine: Engine, encoder_engine: EncoderEngine, options: AppOptions) -> ModelEngines:
    """The engines of a chat model, with what is logged of them."""
    return ModelEngines(engine, encoder_engine, options.log_stats_interval if options.log_stats else None)


def chat_model_app(
    engine: Engine,
    options: AppOptions,
    encoder_engine: EncoderEngine,
    responses: Responses,
    *,
    resources: AppResources,
    read_template: ModelTemplate | None = None,
    media: MediaOptions | None = None,
    shown_options: Mapping[str, Any] | None = None,
    max_model_len: int | None = None,
    shared_adapters: SharedAdapters | None = None,
) -> ModelApp:
    """What a chat model answers, and the encoders beside it.

    `media` says which images requests may have, where the model sees any. `read_template` is the `template_of` the
    model, if it was read before. `responses` are where responses are kept, and `shown_options` are for `/server_info`.
    `max_model_len` is the context in tokens where that is shorter than the engine's. `shared_adapters` are those that
    other servers have, too.
    Raises ModelError for an unusable template, or if two models have the same name.
    """
    media = media or MediaOptions()

    def context_of(rope_factor: float) -> int:
        context = engine.context_of(rope_factor)
        return min(context, max_model_len or context)

    tokenizer = engine.tokenizer
    loras = engine.loras
    template, formats = read_template or template_of(tokenizer, options, resources)
    start_logger.info("Tool calls are read as %s, reasoning as %s", *(name or "text" for name in formats[:2]))
    suggested = engine.generation_defaults if resources.sampling_defaults is None else resources.sampling_defaults
    sampling = sampling_defaults_of({**suggested, **resources.sampling_overrides}, options.default_sampling)
    start_logger.info("Sampling where a request leaves it open: %s", sampling.described())
    defaults = sampling.of_all
    name = short_name(engine.model_name)
    models = ServedModels(
        options.served_model_names or [name],
        engine.model_name,
        context_of,
        encoder_engine.encoders.values(),
        loras,
        shared=shared_adapters,
        paths=() if options.served_model_names or name == engine.model_name else (engine.model_name,),
        accepts_any=options.skip_model_name_validation,
        chat_sampling=sampling.of_chats,
        sees_images=engine.media is not None,
    )
    default_max_tokens = int(defaults["max_tokens"]) if "max_tokens" in defaults else None
    if default_max_tokens is not None:
        start_logger.info("Answers have at most %d tokens (max_new_tokens)", default_max_tokens)
    encoder = PromptEncoder(tokenizer, context_of(1.0))
    request_templates = RequestTemplates(options.admission) if options.trust_request_chat_template else None
    if formats.tools_as_text:
        start_logger.info(
            "This model's chat template does not support tools: a message describes them to the model, and how to "
            "call them"
        )
    renderer = PromptRenderer(
        template,
        encoder,
        options.default_chat_template_kwargs,
        request_templates,
        tools_as_text=formats.tools_as_text,
        placeholders=None if engine.media is None else ImagePlaceholders(engine.media, tokenizer),
        images_in_place=media.interleave_mm_strings,
    )
    metrics = ServerMetrics(engine, models.default, options.metrics_prefix)
    adapter_metrics = AdapterMetrics(engine, models.default, options.metrics_prefix)
    admission = Admission(engine, metrics, options.admission)
    tracer = resources.tracer
    reports = RequestReports(models.default, tracer, log_requests=options.log_requests)
    texts = TextLog(options.max_log_len, logs_answers=options.enable_log_outputs) if options.log_requests else None
    if resources.keys.are_several_tenants:
        start_logger.info(
            "The API keys have several owners: each owner has separate responses, files and batches, and cached "
            "prefixes are %s",
            "shared by all (--share-prefix-cache)" if options.share_prefix_cache else "too",
        )
    elif options.share_prefix_cache:
        start_logger.info("--share-prefix-cache has no effect: there are no API keys of several owners")
    generations = Generations(
        engine,
        admission,
        reports,
        texts,
        default_max_tokens,
        max_model_len=max_model_len,
        shares_prefixes=options.share_prefix_cache,
    )
    encoder_metrics = EncoderMetrics(encoder_engine, options.metrics_prefix)
    encoders = ServedEncoders(
        encoder_engine, encoder_metrics, options.admission, log_requests=options.log_requests, texts=texts
    )
    fingerprint = "fp_" + hashlib.sha256(f"{__version__} {engine.model_name}".encode()).hexdigest()[:12]
    rules = RequestRules(
        engine.max_logprobs,
        engine.vocab_size,
        has_text=tokenizer.has_text,
        tokens_as_ids=options.return_tokens_as_token_ids,
        include_usage=options.enable_force_include_usage,
    )
    notes = ParameterNotes(options.unknown_parameters)
    images = request_images(engine, media, notes)
    state = AppState(
        engine=engine,
        models=models,
        path=ChatPath(models, encoder, renderer, generations, defaults, formats, rules, images),
        completion_path=CompletionPath(models, encoder, generations, defaults, rules),
        encoder=encoder,
        encoders=encoders,
        renderer=renderer,
        images=images,
        formats=formats,
        formatter=LogprobsFormatter(tokenizer),
        metrics=metrics,
        defaults=defaults,
        fingerprint=fingerprint,
        notes=notes,
    )

    def close() -> None:
        encoder.close()
        images.close()
        if request_templates is not None:
            request_templates.close()

    routes = [
        *ChatEndpoint(state, role=options.response_role).routes(),
        *ResponsesEndpoints(state, responses).routes(),
        *StoredResponsesEndpoints(responses).routes(),
        *MessagesEndpoints(state).routes(),
        *CompletionsEndpoint(state).routes(),
        *OllamaEndpoints(state).routes(),
        *OllamaModelEndpoints(
            state, OllamaChatModel(engine, formats, fills=state.completion_path.fill is not None)
        ).routes(),
        *models_routes(models),
        *adapter_routes(loras, models, shared_adapters, notes=notes),
        *RenderEndpoints(state).routes(),
        *InfillEndpoint(state).routes(),
        *TokenizeEndpoints(state, shows_tokenizer=options.enable_tokenizer_info_endpoint).routes(),
        *encoder_routes(state),
    ]
    return ModelApp(
        models=models,
        routes=routes,
        status_routes=[
            *health_routes(engine, encoder_engine),
            *metrics_routes(metrics, encoder_metrics, named=[adapter_metrics]),
            *operations_routes(engine, models.root, context_of(1.0), formats, shown_options or {}),
        ],
        collectors=[metrics, encoder_metrics],
        named_collectors=[adapter_metrics],
        notes=notes,
        max_values=values_limit(engine.max_model_len),
        has_images=engine.media is not None,
        batch_rows=engine.limits.max_num_seqs,
        close=close,
    )


def shared_adapters_of(engine: Engine, resources: AppResources, names: Collection[str] = ()) -> SharedAdapters | None:
    """The adapters that clients load, if servers share them. `names` are the model's on a server of several."""
    store, loras = resources.shared_store, engine.loras
    if store is None or loras is None or not loras.allows_updates:
        return None
    return SharedAdapters(store, loras, names)


def responses_of(options: AppOptions, resources: AppResources) -> Responses:
    """Where responses are kept."""
    most = options.max_stored_responses
    if resources.shared_store is None or not most:
        return ResponseStore(most)
    from .responses.shared import SharedResponses

    return SharedResponses(resources.shared_store, most)


def template_of(tokenizer: Tokenizer, options: AppOptions, resources: AppResources) -> ModelTemplate:
    """The chat template to serve a model with. Raises ModelError if it cannot be used."""
    return model_template(tokenizer, resources.chat_template, options.tool_call_parser, options.reasoning_parser)
