"""What clients are told of each of several models, be it loaded or not."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Literal

from msgspec import UNSET, structs

from tidewheel.engine.hosting.units import STAGES, Event, Progress, State, UnitStatus

from ..model_cards import root_of
from ..protocol.models import ModelCard
from ..protocol.router import Modalities, RouterCard, RouterStatus
from .hosted_models import HostedModels

if TYPE_CHECKING:
    from .catalog import ModelEntry
    from .management import Management
    from .pulls import Pull
    from .unit import LoadedModel

_VALUES: Mapping[State, Literal["loading", "loaded"]] = {State.LOADING: "loading", State.LOADED: "loaded"}


class RouterCards:
    """The descriptions of all models. `management` is there if clients may change which models there are."""

    def __init__(self, models: HostedModels, management: Management | None) -> None:
        self._models = models
        self._management = management
        self._created = int(time.time())

    def all(self) -> Iterator[RouterCard]:
        """All, in the catalog's order, and then models that are being downloaded.

        They may be asked for one after the other: a model that is gone meanwhile is left out.
        """
        pulls = {} if self._management is None else dict(self._management.pulls.running)
        for entry in self._models.catalog.entries:
            if self._models.knows(entry):
                card = self.card(entry)
                pull = pulls.pop(entry.name, None)
                # Some of its files may be here already.
                yield card if pull is None or card.status.value != "unloaded" else self._downloading(entry.name, pull)
        for name, pull in pulls.items():
            yield self._downloading(name, pull)

    def loaded(self) -> Iterator[RouterCard]:
        """Those of the loaded models."""
        for entry in self._models.catalog.entries:
            if entry.error is None and self._models.status(entry).state is State.LOADED:
                yield self.card(entry)

    def card(self, entry: ModelEntry) -> RouterCard:
        """One model."""
        status = None if entry.error is not None else self._models.status(entry)
        own = self._own_card(entry)
        return RouterCard(
            **{field: getattr(own, field) for field in own.__struct_fields__},
            aliases=[*entry.aliases],
            status=_failed(entry.error) if status is None else status_of(status),
            architecture=Modalities(input_modalities=own.input_modalities, output_modalities=own.output_modalities),
            source="models_dir" if entry.is_found else "preset",
            can_remove=self._management is not None and self._management.can_remove(entry),
            pinned=entry.pinned,
            file_bytes=entry.file_bytes or 0,
            memory_bytes=None if status is None or status.needs is None else status.needs.total_bytes,
            requests=0 if status is None else status.leases,
            expires_at=None if status is None else self._models.expires_at(status),
        )

    def info(self, name: str) -> Mapping[str, str]:
        """What the engine of a model says of it; nothing if it is not loaded."""
        loaded = self._loaded(self._models.catalog.find(name))
        if loaded is None:
            return {}
        if loaded.engines.chat is not None:
            return loaded.engines.chat.info
        return next(iter(loaded.engines.encoders.encoders.values())).info

    def _loaded(self, entry: ModelEntry) -> LoadedModel | None:
        return None if entry.error is not None else self._models.unit(entry).loaded

    def _own_card(self, entry: ModelEntry) -> ModelCard:
        """As the model itself tells it, if it is loaded."""
        if (loaded := self._loaded(entry)) is not None:
            cards = loaded.models[entry.name].models
            return structs.replace(cards.card(cards.default), id=entry.name)
        return ModelCard(
            id=entry.name,
            created=self._created,
            root=root_of(entry.where, entry.name),
            max_model_len=entry.max_model_len or 0,
        )

    def _downloading(self, name: str, pull: Pull) -> RouterCard:
        return RouterCard(
            id=name,
            created=self._created,
            root=name,
            max_model_len=0,
            status=RouterStatus(value="downloading", progress={name: {"done": pull.completed, "total": pull.total}}),
            architecture=Modalities(input_modalities=["text"], output_modalities=["text"]),
            source="download",
        )


def status_of(status: UnitStatus | Event) -> RouterStatus:
    """A unit's state, in llama.cpp's words."""
    if status.state is State.FAILED:
        return _failed(status.error)
    progress = UNSET if status.progress is None else _progress(status.progress)
    return RouterStatus(value=_VALUES.get(status.state, "unloaded"), progress=progress)


def _progress(progress: Progress) -> dict[str, object]:
    """How far a load is."""
    return {"stages": [*STAGES], "current": progress.stage, "value": round(progress.fraction, 4)}


def _failed(error: str | None) -> RouterStatus:
    return RouterStatus(value="unloaded", failed=True, error=error or UNSET)
