"""What a start may download from the hub: the model, its draft model, and adapters."""

from __future__ import annotations

from dataclasses import replace

from ..options import EngineOptions
from ..speculation.options import DraftModel, Eagle3
from ..weights.hub import local_model
from ..weights.hub_room import Download


def downloads_of(options: EngineOptions) -> list[Download]:
    """The hub ids whose weights are needed, the model's own first. Raises ModelError for a path that is not there."""
    if options.load_format == "dummy":
        return []
    wanted, asked = [download_of(options)], options.speculative.speculation
    if isinstance(asked, DraftModel | Eagle3):
        wanted.append(Download(asked.model, asked.revision))
    return [download for download in wanted if local_model(download.model, ".gguf") is None]


def download_of(options: EngineOptions) -> Download:
    """The model itself."""
    return Download(options.model, options.revision, with_mmproj=options.media.wants_mmproj)


def with_adapters_here(options: EngineOptions) -> EngineOptions:
    """The options with the commits of adapters of the hub, which are downloaded: the plan of memory needs their
    sizes. Raises ModelError.
    """
    if not options.lora.enable_lora or not options.lora.lora_modules:
        return options
    from ..adapters.hub import AdapterHub

    hub = AdapterHub(options.download_dir)
    modules = [hub.fetch_before_serving(module) for module in options.lora.lora_modules]
    return replace(options, lora=replace(options.lora, lora_modules=modules))
