"""A pipeline without an engine above it."""

from __future__ import annotations

from tidewheel.engine.cancellation import Cancellation
from tidewheel.engine.devices.limits import ExecutorOptions
from tidewheel.engine.loading.drafts import OpenedDraft
from tidewheel.engine.loading.opened_model import OpenedModel
from tidewheel.engine.loading.stages.pipeline import load_pipeline, local_host, plan_stages
from tidewheel.engine.options import EngineOptions
from tidewheel.engine.pipeline.executor import PipelineExecutor


def load_stages(
    options: EngineOptions, model: OpenedModel, wanted: ExecutorOptions, draft: OpenedDraft | None = None
) -> PipelineExecutor:
    """The stages of a model on this machine, the first with a draft model beside it."""
    host = local_host(options, model)
    return load_pipeline(options, model, plan_stages(options, model, host), wanted, Cancellation(), host, draft)
