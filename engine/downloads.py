"""What a start may download from the hub: the model, and what guesses for it."""

from __future__ import annotations

from .options import EngineOptions
from .speculative_options import DraftModel, Eagle3
from .weights.hub import local_model
from .weights.hub_room import Download


def downloads_of(options: EngineOptions) -> list[Download]:
    """The hub ids whose weights are needed, the model's own first. Raises ModelError for a path that is not there."""
    if options.load_format == "dummy":
        return []
    wanted, asked = [Download(options.model, options.revision)], options.speculative.speculation
    if isinstance(asked, DraftModel | Eagle3):
        wanted.append(Download(asked.model, asked.revision))
    return [download for download in wanted if local_model(download.model, ".gguf") is None]
