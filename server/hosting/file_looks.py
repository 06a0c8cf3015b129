"""FileLooks: what the files of a model say of it, though it is not loaded."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING

import msgspec

from tidewheel.engine.errors import DeviceError, ModelError
from tidewheel.engine.weights.hub import cached_model, local_model

from ..api.ollama_models import Capabilities

if TYPE_CHECKING:
    from tidewheel.engine.options import EngineOptions

    from .catalog import ModelEntry

_MOST = 256


class FileLook(msgspec.Struct, frozen=True, kw_only=True):
    """What is known: `info` in the words of an engine's, and the longest context in tokens."""

    info: Mapping[str, str]
    context: int | None
    capabilities: Capabilities


_NOTHING = FileLook(info={}, context=None, capabilities=[])


class FileLooks:
    """Looks into headers, one model at a time, and keeps what it has seen of some hundred models."""

    def __init__(self) -> None:
        self._kept: dict[tuple[str, tuple[int, ...]], FileLook] = {}
        self._looking = asyncio.Lock()

    async def look(self, entry: ModelEntry) -> FileLook:
        """At an entry's files, as they are now. What cannot be read, or is not here yet, tells nothing."""
        key = entry.where, entry.fingerprint
        async with self._looking:
            if key not in self._kept:
                found = await asyncio.to_thread(_look, entry.options.engine)
                if len(self._kept) >= _MOST:
                    del self._kept[next(iter(self._kept))]
                self._kept[key] = found
        return self._kept[key]


def _look(options: EngineOptions) -> FileLook:
    from tidewheel.engine.encoders.inspection import EncoderInspection
    from tidewheel.engine.loading.inspection import inspect_model

    try:
        path = local_model(options.model, ".gguf")
        if path is None:  # the hub is not asked
            path = cached_model(options.model, options.revision, options.download_dir)
        found = inspect_model(replace(options, model=str(path)))
    except (ModelError, DeviceError):
        return _NOTHING
    kind = "gguf" if path.is_file() else "safetensors"
    info = {"architecture": found.architecture or "", "format": kind}
    if isinstance(found, EncoderInspection):
        return FileLook(info=info, context=found.max_length, capabilities=["embedding"])
    if found.contents is not None:
        info["quantization"] = found.contents.title or found.quantization or ""
    capabilities: Capabilities = ["completion"]
    if found.vision is not None:
        capabilities.append("vision")
    if found.shape is None:
        return FileLook(info=info, context=None, capabilities=capabilities)
    info |= {"architecture": found.shape.family, "parameters": str(found.shape.parameters)}
    return FileLook(info=info, context=found.shape.context, capabilities=capabilities)
