"""Which names are served, and the check that a request asks for one of them."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from http import HTTPStatus

from tidewheel.engine.adapters.options import LoraModule
from tidewheel.engine.adapters.registry import LoraLease, LoraRegistry, UnknownLoraError
from tidewheel.engine.encoders.encoder import Encoder
from tidewheel.engine.errors import BusyError, ModelError, TidewheelError, quoted

from .errors import ApiError, bad_request
from .model_cards import ModelCards, root_of
from .protocol.models import ModelCard
from .shared_adapters import SharedAdapters

_RETRY_AFTER_S = 10  # for an adapter that cannot be downloaded yet


class ServedModels(ModelCards):
    """The names that the chat model is served under. Answers always have the first one.

    Models are found by their paths too: `paths`, and the sources of encoders that are named by them. With
    `accepts_any` the chat model answers to names that nothing is served under, too. `source` is the folder or hub id
    that it came from; clients see a hub id as the `root`, but no folder. `context_of` gives a context in tokens, by how
    many times an adapter makes it longer: see Engine. `encoders` and the adapters in `loras` are listed beside it;
    `shared` are adapters that replicas share. People's clients get `chat_sampling`, and send it. Raises ModelError if
    two models have the same name.
    """

    def __init__(
        self,
        names: Sequence[str],
        source: str,
        context_of: Callable[[float], int],
        encoders: Collection[Encoder] = (),
        loras: LoraRegistry | None = None,
        *,
        shared: SharedAdapters | None = None,
        paths: Collection[str] = (),
        accepts_any: bool = False,
        chat_sampling: Mapping[str, float | int] | None = None,
        sees_images: bool = False,
    ) -> None:
        super().__init__(encoders)
        self._context_of = context_of
        self._loras = loras
        self._shared = shared
        self._accepts_any = accepts_any
        self.chat_sampling = dict(chat_sampling or {})
        self._modalities = ["text", *(["image"] if sees_images else [])]
        if taken := self._encoder_names & {*names}:
            raise ModelError(
                f"{taken.pop()} names the chat model and an embedding model: use --served-embedding-model-name"
            )
        own = {
            name: ModelCard(
                id=name,
                created=self._created,
                root=root_of(source, names[0]),
                max_model_len=context_of(1.0),
                chat_sampling=self.chat_sampling or None,
                input_modalities=self._modalities,
            )
            for name in names
        }
        self._cards = {**own, **self._cards}
        self.default = names[0]
        self._names = {*names, *paths}
        self._paths |= dict.fromkeys(paths, self.default)
        for module in [] if loras is None else loras.modules:
            self.check_new(module.name)

    async def refresh(self) -> None:
        """Learns which adapters other replicas have loaded. Raises StoreError."""
        if self._shared is not None:
            await self._shared.refresh()

    async def resolve(self, name: str | None) -> str:
        """The name to answer with. Raises ApiError (404) for a model that is not served, 400 for an encoder."""
        if name in self._names:
            return self.default
        if name is not None and self._shared is not None and name not in self._cards:
            await self._shared.refresh_one(name)
        if name is None or (self._accepts_any and not self._serves(name)):
            return self.default
        card = self.card(name)
        if card.id in self._encoder_names:
            raise bad_request(
                f"the model {quoted(name)} generates no text; use it with /v1/embeddings or /v1/score", "model"
            )
        return card.id

    async def lease(self, name: str) -> LoraLease | None:
        """The adapter of a name that `resolve` gave, in memory until it is released; None for the model itself.

        Raises ApiError: 404 for one that was removed meanwhile, 400 for one that was found and cannot be served, 429
        for one that cannot be downloaded yet, 500 for one that is served and cannot be read any more.
        """
        if self._loras is None or name in self._cards:
            return None
        try:
            if self._shared is not None:
                await self._shared.load(name)
            return await self._loras.lease(name)
        except UnknownLoraError:
            raise self._not_served(name) from None
        except BusyError as error:
            raise too_many_downloads(error) from None
        except TidewheelError as error:
            said = f"the adapter {quoted(name)} cannot be loaded: {error}"
            if isinstance(error, ModelError) and all(module.name != name for module in self._lora_modules):
                raise bad_request(said, "model") from error
            raise ApiError(HTTPStatus.INTERNAL_SERVER_ERROR, said) from error

    async def context(self, name: str) -> int:
        """How many tokens a sequence may have with a name that `resolve` gave. Raises what `lease` raises."""
        if self._loras is None or not self._loras.has_longer_contexts or name in self._cards:
            return self._context_of(1.0)
        factor = self._loras.rope_factor(name)
        if factor is None and (lease := await self.lease(name)) is not None:
            factor = lease.lora.rope_factor
            lease.release()
        return self._context_of(factor or 1.0)

    def check_new(self, name: str) -> None:
        """Raises ModelError if a model that is no adapter has that name."""
        if name in self._cards or name in self._paths:
            raise ModelError(f"{quoted(name)} names a model already: give the adapter another name")

    @property
    def cards(self) -> list[ModelCard]:
        """See ModelCards."""
        return [*self._cards.values(), *(self._lora_card(one.name, one.base_model_name) for one in self._lora_modules)]

    def card(self, name: str) -> ModelCard:
        """See ModelCards. Adapters have one, too."""
        if name in self._cards or not self._serves(name):
            return super().card(name)
        parents = {module.name: module.base_model_name for module in self._lora_modules}
        return self._lora_card(name, parents.get(name))

    @property
    def _lora_modules(self) -> list[LoraModule]:
        known = [] if self._loras is None else self._loras.modules
        return known if self._shared is None else [*known, *self._shared.modules]

    def _serves(self, name: str) -> bool:
        if name in self._cards or (self._loras is not None and self._loras.knows(name)):
            return True
        return self._shared is not None and any(module.name == name for module in self._shared.modules)

    def _lora_card(self, name: str, parent: str | None) -> ModelCard:
        return ModelCard(
            id=name,
            created=self._created,
            root=name,
            parent=parent or self.default,
            chat_sampling=dict(self.chat_sampling) or None,
            input_modalities=self._modalities,
            max_model_len=self._context_of((self._loras and self._loras.rope_factor(name)) or 1.0),
        )


def too_many_downloads(error: BusyError) -> ApiError:
    """What a client reads."""
    return ApiError(
        HTTPStatus.TOO_MANY_REQUESTS,
        str(error),
        code="too_many_downloads",
        headers={"retry-after": str(_RETRY_AFTER_S)},
    )
