"""What a server keeps. Several replicas share it or refuse it: it is never in only one of them."""

from __future__ import annotations

from dataclasses import fields, replace

from tidewheel.engine.errors import TidewheelError
from tidewheel.server.app_options import AppOptions
from tidewheel.server.options.serve import ServeOptions


def without_own_state(options: ServeOptions) -> ServeOptions:
    """The options for one of several replicas: without a shared store, it keeps no responses.

    Raises TidewheelError for what would be in one replica alone.
    """
    app, lora = options.app, options.engine.lora
    default = next(field.default for field in fields(AppOptions) if field.name == "max_stored_responses")
    if app.shared_store is None and app.max_stored_responses not in (0, default):
        raise TidewheelError(
            f"--max-stored-responses {app.max_stored_responses} needs a single replica or --shared-store: stored "
            "responses would lie in the memory of one. Leave it out; requests that need a stored response are then "
            "refused"
        )
    if app.shared_store is None and app.batch_dir is not None:
        raise TidewheelError(
            "--batch-dir needs a single replica or --shared-store, and then a folder that all replicas see. Or serve "
            "batches from another server with one replica, or answer a file with `tidewheel run-batch`"
        )
    if app.shared_store is None and lora.allow_runtime_lora_updating:
        raise TidewheelError(
            "--allow-runtime-lora-updating needs a single replica or --shared-store: an adapter would be loaded into "
            "one of them. Name adapters with --lora-modules, or put them into the folder of "
            "--lora-resolver-cache-dir, which all read"
        )
    if options.engine.kv_offload is not None or any("kv_offload" in model.given for model in options.models):
        raise TidewheelError("--kv-offload needs a single replica: its folder belongs to one process")
    if options.hosting.allow_model_management:
        raise TidewheelError(
            "--allow-model-management needs a single replica: the others would not notice a model that one of them "
            "downloads or deletes. Use `tidewheel pull`, and update the application"
        )
    return options if app.shared_store else replace(options, app=replace(app, max_stored_responses=0))
