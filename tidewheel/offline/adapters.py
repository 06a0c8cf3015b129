"""Adapters of prompts: what a LoRARequest names, in the engine's memory while a prompt uses it."""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import Sequence
from typing import NamedTuple, TypeAlias

from tidewheel.engine.adapters.hub import MAX_DOWNLOADS, is_hub_id
from tidewheel.engine.adapters.lora import Lora
from tidewheel.engine.adapters.options import LoraModule
from tidewheel.engine.adapters.registry import LoraExistsError, LoraLease
from tidewheel.engine.core.engine import Engine
from tidewheel.engine.errors import EngineDeadError, InvalidRequestError, ModelError, quoted

from .lora_request import LoRARequest

_PARAM = "lora_request"

LoraRequests: TypeAlias = LoRARequest | Sequence[LoRARequest | None] | None
"""One adapter for all prompts, or one each; None is the model itself."""


class Adapter(NamedTuple):
    """An adapter that stays in memory for a prompt until `release`."""

    request: LoRARequest
    lease: LoraLease

    @property
    def lora(self) -> Lora:
        """The adapter as the engine names it."""
        return self.lease.lora

    def release(self) -> None:
        """Give it back. Later calls do nothing."""
        self.lease.release()


class Adapters:
    """Finds an engine's adapters by name, and loads those that are new."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._adding = asyncio.Semaphore(MAX_DOWNLOADS)  # more at a time would be refused, and there is no retry here

    def each(self, given: LoraRequests, count: int) -> list[LoRARequest | None]:
        """The adapters of `count` prompts. Raises InvalidRequestError."""
        if isinstance(given, list | tuple):
            wanted: list[LoRARequest | None] = [*given]
        elif given is None or isinstance(given, LoRARequest):
            wanted = [given] * count
        else:
            raise InvalidRequestError(f"lora_request must be a LoRARequest or a list, got {quoted(given)}", _PARAM)
        if len(wanted) != count:
            raise InvalidRequestError(
                f"lora_request has {len(wanted)} entries for {count} prompts: give one for all, or one each", _PARAM
            )
        for one in wanted:
            if not isinstance(one, LoRARequest | None):
                raise InvalidRequestError(f"lora_request must have LoRARequests or None, got {quoted(one)}", _PARAM)
        if self._engine.loras is None and any(wanted):
            raise InvalidRequestError("lora_request needs enable_lora=True where the LLM is made", _PARAM)
        return wanted

    async def lease(self, wanted: LoRARequest | None) -> Adapter | None:
        """An adapter, loaded if necessary. Waits while all room is taken by adapters in use. `wanted` is as `each`
        gave it.

        Raises InvalidRequestError for one that cannot be loaded, or whose name belongs to another path.
        """
        if wanted is None:
            return None
        assert self._engine.loras is not None
        registry, name, path = self._engine.loras, wanted.lora_name, _expanded(wanted.lora_path)
        try:
            while (known := next((one for one in registry.modules if one.name == name), None)) is None:
                _require(name, path)
                async with self._adding:
                    with contextlib.suppress(LoraExistsError):  # another request was quicker
                        await registry.add(LoraModule(name, path, wanted.base_model_name))
            if not _are_one(known.path, path):
                raise InvalidRequestError(
                    f"the adapter {quoted(name)} is {known.path}, not {path}: give one of them another name", _PARAM
                )
            return Adapter(wanted, await registry.lease(name))
        except ModelError as error:
            raise InvalidRequestError(f"the adapter {quoted(name)} cannot be loaded: {error}", _PARAM) from error
        except RuntimeError as error:
            if self._engine.is_alive:
                raise
            raise EngineDeadError("the engine has been stopped") from error  # and the thread that loads with it


def _expanded(path: str) -> str:
    return os.path.expanduser(path)


def _require(name: str, path: str) -> None:
    if not os.path.exists(path) and not is_hub_id(path):
        raise InvalidRequestError(
            f"the adapter {quoted(name)}: there is no {path}; lora_path is a folder that peft has saved, a GGUF "
            "file, or a hub id such as owner/name",
            _PARAM,
        )


def _are_one(path: str, other: str) -> bool:
    return path == other or os.path.realpath(path) == os.path.realpath(other)
