"""The numbers that K and V of each layer are divided by before they are cached as e4m3, from checkpoints and files."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from msgspec import Struct

from ..errors import ModelError
from ..files.folder import read_json
from ..files.wording import shown
from ..models import ModelDescription
from ..models.spec import AttentionSpec, DecoderSpec, LatentAttentionSpec, mixers
from .stored import StoredTensor
from .tensor import to_float32

_LEAST, _LARGEST = 2.0**-64, 2.0**64  # so that no product overflows or underflows float32
_FILE_DTYPE = "float8_e4m3fn"


class KvScale(Struct, frozen=True):
    """A layer's: its K and V are cached as K / k and V / v. A layer with latents in place of both has `k` alone."""

    k: float = 1.0
    v: float = 1.0


KvScales = tuple[KvScale, ...]
"""By layer of the model. Layers that cache nothing have scales of 1."""


@runtime_checkable
class ScaledWeights(Protocol):
    """Weights that may come with scales of K and V."""

    def has_kv_scales(self) -> bool:
        """Whether any layer has some."""

    def kv_scales(self, *, required: bool) -> KvScales | None:
        """The checkpoint's scales; None if it has none. Raises ModelError, naming file and tensor, for scales that are
        broken or missing: if they are `required`, or other layers have them.
        """


class StoredKvScales:
    """The scales among the tensors that `find` finds, in the files `where`: what `ScaledWeights` says of them."""

    def __init__(self, description: ModelDescription, find: Callable[[str], StoredTensor | None], where: str) -> None:
        self._layers = {
            index: _Layer(description, index, latent, find) for index, latent in _caching(description.spec).items()
        }
        self._num_layers, self._where = len(description.spec.layers), where

    def there(self) -> bool:
        """Whether any layer has some."""
        return any(layer.has_any for layer in self._layers.values())

    def read(self, *, required: bool) -> KvScales | None:
        """As `ScaledWeights.kv_scales`."""
        if not required and not self.there():
            return None
        scales = {index: layer.scale(self._where) for index, layer in self._layers.items()}
        return tuple(scales.get(index, KvScale()) for index in range(self._num_layers))


def read_scales_file(path: str, spec: DecoderSpec, model_type: object) -> KvScales:
    """The scales of a file as vLLM's --quantization-param-path names it: of each rank and layer, for both K and V.

    Raises ModelError for a file that is broken, or of another model.
    """
    found = read_json(Path(path))
    owner = f"--quantization-param-path: {path}"
    of_type = found.get("model_type")
    if of_type is not None and of_type != model_type:
        raise ModelError(f"{owner} is for models of type {shown(of_type)}, and this one is of {shown(model_type)}")
    cache = found.get("kv_cache")
    if not isinstance(cache, dict) or not isinstance(cache.get("scaling_factor"), dict):
        raise ModelError(f"{owner} must have kv_cache.scaling_factor, an object of ranks, each with a scale by layer")
    if cache.get("dtype") != _FILE_DTYPE:
        raise ModelError(f"{owner} has scales for {shown(cache.get('dtype'))}; supported is {_FILE_DTYPE}")
    ranks = cache["scaling_factor"]
    caching = _caching(spec)
    by_rank = {rank: _rank(f"{owner}: scaling_factor of rank {shown(rank)}", ranks[rank], caching) for rank in ranks}
    if not by_rank:
        raise ModelError(f"{owner} has no rank in kv_cache.scaling_factor")
    first, *others = by_rank.values()
    if any(other != first for other in others):
        raise ModelError(
            f"{owner} has {len(by_rank)} ranks whose scales differ, but here all KV heads of a layer have one: "
            "take a file that was made for tensor parallelism of 1"
        )
    return tuple(KvScale(first.get(index, 1.0), first.get(index, 1.0)) for index in range(len(spec.layers)))


def _rank(owner: str, scales: object, caching: Mapping[int, bool]) -> dict[int, float]:
    if not isinstance(scales, dict):
        raise ModelError(f"{owner} must be an object with a scale by layer")
    needed = {str(index): index for index in caching}
    if missing := [index for name, index in needed.items() if name not in scales]:
        raise ModelError(f"{owner} lacks layer {missing[0]}, and {len(caching)} layers of this model need a scale")
    if beyond := [name for name in scales if name not in needed]:
        raise ModelError(f"{owner} has layer {shown(beyond[0])}, which this model does not have")
    return {index: _checked(scales[str(index)], f"{owner}, layer {index},") for index in caching}


def _checked(value: object, owner: str) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ModelError(f"{owner} is {shown(value)}, not a number")
    if not (value > 0 and math.isfinite(value)):
        raise ModelError(f"{owner} is {shown(value)}, but K and V can only be divided by a number above 0")
    if not _LEAST <= value <= _LARGEST:
        raise ModelError(f"{owner} is {value:g}, which is not a scale for K and V: supported are 2^-64 to 2^64")
    return float(value)


def _caching(spec: DecoderSpec) -> dict[int, bool]:
    """The layers that have K and V of their own, and whether those are latents."""
    caching = {}
    for index, layer in enumerate(spec.layers):
        for mixer in mixers(layer):
            if isinstance(mixer, AttentionSpec | LatentAttentionSpec) and mixer.cached is not None:
                caching[index] = isinstance(mixer, LatentAttentionSpec)
    return caching


class _Layer:
    """One layer's tensors. They lie beside the projection of K, or under it, by one of several names."""

    def __init__(
        self,
        description: ModelDescription,
        index: int,
        latent: bool,
        find: Callable[[str], StoredTensor | None],
    ) -> None:
        projection = f"layers.{index}.{'latent_kv_down' if latent else 'k'}.weight"
        self._find, self._latent = find, latent
        self._names = {which: _names(description.tensors[projection].name, which) for which in ("k", "v")}

    @property
    def has_any(self) -> bool:
        return any(self._find(name) is not None for names in self._names.values() for name in names)

    def scale(self, where: str) -> KvScale:
        k = self._number("k", where)
        return KvScale(k, k if self._latent else self._number("v", where))

    def _number(self, which: str, where: str) -> float:
        names = self._names[which]
        for name in names:
            stored = self._find(name)
            if stored is not None:
                break
        else:
            raise ModelError(f"{where}: tensor {names[0]} is missing, the divisor of {which.upper()}")
        owner = f"{stored.path}: tensor {name}"
        if math.prod(stored.shape) != 1:
            raise ModelError(f"{owner} has shape {stored.shape}; supported is one scale for a layer")
        return _checked(float(to_float32(stored.floats(name)).reshape(-1)[0]), owner)


def _names(projection: str, which: str) -> list[str]:
    """Where the scale may be: as vLLM's own checkpoints have it, then as compressed-tensors had it once, and fp8."""
    module = projection.rsplit(".", 2)[0]
    own = f"{module}.{which}_proj"
    return [
        f"{module}.{which}_scale",
        f"{own}.{which}_scale",
        f"{own}.output_scale",
        f"{module}.qkv_proj.{which}_scale",
        f"{module}.attn.{which}_scale",
        f"{module}.kv_scale",
    ]


def kv_cache_scheme(config: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """What the config.json of a quantized checkpoint says of cached K and V; None: nothing. Raises ModelError."""
    fields = config.get("quantization_config") or config.get("compression_config")
    scheme = fields.get("kv_cache_scheme") if isinstance(fields, dict) else None
    if scheme is not None and not isinstance(scheme, dict):
        raise ModelError(f"config.json: kv_cache_scheme must be an object, got {shown(scheme)}")
    return scheme


def is_static_fp8(scheme: Mapping[str, Any]) -> bool:
    """Whether it is e4m3 with a scale in the checkpoint for each layer."""
    return (
        scheme.get("num_bits") == 8
        and scheme.get("type") == "float"
        and scheme.get("symmetric", True) is True
        and not scheme.get("dynamic")
        and scheme.get("strategy") in ("tensor", None)
        and scheme.get("group_size") is None
        and scheme.get("block_structure") is None
    )
