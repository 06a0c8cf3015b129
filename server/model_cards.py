"""ModelCards: what clients are told of the models that are served, by their names."""

from __future__ import annotations

import os
import time
from collections.abc import Collection, Mapping
from http import HTTPStatus

from tidewheel.engine.encoders.encoder import Encoder
from tidewheel.engine.errors import quoted, shortened

from .errors import ApiError
from .protocol.models import ModelCard

_MAX_NAMED = 16  # of the models that are served, in an error


class ModelCards:
    """The descriptions of encoders. ServedModels adds those of a chat model and its adapters.

    Models are found by the sources that they are named by, too. `aliases` are more names of encoders, each with the
    first one. `default` is the first of all names.
    """

    chat_sampling: Mapping[str, float | int] = {}
    """What clients that people write to send with a request."""

    def __init__(self, encoders: Collection[Encoder], aliases: Mapping[str, str] | None = None) -> None:
        self._created = int(time.time())
        by_name = {one.name: one for one in encoders}
        by_name |= {alias: by_name[name] for alias, name in (aliases or {}).items()}
        self._encoder_names = {*by_name}
        self._cards = {
            name: ModelCard(
                id=name,
                created=self._created,
                root=root_of(one.source, name),
                max_model_len=one.max_length,
                output_modalities=[_modality(one)],
            )
            for name, one in by_name.items()
        }
        self._paths = {one.source: one.name for one in encoders if one.is_named_by_source}
        self.default = next(iter(by_name), "")

    async def refresh(self) -> None:
        """Learn which models there are now. Raises StoreError."""

    def generates(self, name: str) -> bool:
        """Whether a served name is the chat model's, and not an encoder's."""
        return name not in self._encoder_names

    @property
    def root(self) -> str:
        """The default model's source for clients."""
        return self._cards[self.default].root

    @property
    def cards(self) -> list[ModelCard]:
        """The descriptions of all models for clients."""
        return [*self._cards.values()]

    def card(self, name: str) -> ModelCard:
        """The description of one model for clients. Raises ApiError (404) for one that is not served."""
        card = self._cards.get(name) or self._cards.get(self._paths.get(name, ""))
        if card is None:
            raise self._not_served(name)
        return card

    def _not_served(self, name: str) -> ApiError:
        served = ", ".join(shortened(card.id) for card in self.cards[:_MAX_NAMED])
        return ApiError(
            HTTPStatus.NOT_FOUND,
            f"the model {quoted(name)} is not served here; served: {served}",
            param="model",
            code="model_not_found",
        )


def _modality(encoder: Encoder) -> str:
    if encoder.is_cross_encoder:
        return "scores"
    return "classes" if encoder.labels else "embeddings"


def root_of(source: str, name: str) -> str:
    """A model's source for clients. A folder is left out: it says more of the machine than of the model."""
    return name if os.path.isabs(source) or os.path.exists(source) else source
