"""Which names are served, and the check that a request asks for one of them."""

from __future__ import annotations

import os
import time
from collections.abc import Collection, Sequence
from http import HTTPStatus

from tidewheel.engine.encoders.encoder import Encoder
from tidewheel.engine.errors import ModelError, quoted

from .errors import ApiError, bad_request
from .protocol.models import ModelCard


class ServedModels:
    """The names that the chat model is served under; the first one names it in answers to requests that name none.

    `source` is the folder or hub id that the model came from; clients are shown a hub id as the `root`, but no folder.
    `encoders` are listed beside it. Raises ModelError if one of them has one of its names.
    """

    def __init__(
        self, names: Sequence[str], source: str, max_model_len: int, encoders: Collection[Encoder] = ()
    ) -> None:
        created = int(time.time())
        self.root = _root(source, names[0])
        self._cards = {
            name: ModelCard(id=name, created=created, root=self.root, max_model_len=max_model_len) for name in names
        }
        self._encoder_names = {encoder.name for encoder in encoders}
        if taken := self._encoder_names & self._cards.keys():
            raise ModelError(
                f"{taken.pop()} names the chat model and an embedding model: use --served-embedding-model-name"
            )
        for one in encoders:
            self._cards[one.name] = ModelCard(
                id=one.name, created=created, root=_root(one.source, one.name), max_model_len=one.max_length
            )
        self.default = names[0]

    def resolve(self, name: str | None) -> str:
        """The name to answer with. Raises ApiError (404) for a model that is not served, 400 for an encoder."""
        if name is None:
            return self.default
        card = self.card(name)
        if name in self._encoder_names:
            raise bad_request(
                f"the model {quoted(name)} generates no text; send it to /v1/embeddings or /v1/score", "model"
            )
        return card.id

    def generates(self, name: str) -> bool:
        """Whether a served name is the chat model's, and not an encoder's."""
        return name not in self._encoder_names

    @property
    def cards(self) -> list[ModelCard]:
        """What clients are told of each model."""
        return list(self._cards.values())

    def card(self, name: str) -> ModelCard:
        """What clients are told of one model. Raises ApiError (404) for one that is not served."""
        try:
            return self._cards[name]
        except KeyError:
            served = ", ".join(self._cards)
            raise ApiError(
                HTTPStatus.NOT_FOUND,
                f"the model {quoted(name)} is not served here; served: {served}",
                param="model",
                code="model_not_found",
            ) from None


def _root(source: str, name: str) -> str:
    """What clients are told of a model's source. A folder says more of the machine than of the model."""
    return name if os.path.isabs(source) or os.path.exists(source) else source
