"""The type that K and V are cached in, and the scales that they are divided by."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Mapping
from typing import Any, Literal

from msgspec import Struct

from ..devices.base import Device
from ..errors import DeviceError, ModelError
from ..files.wording import shown
from ..models.spec import DecoderSpec
from ..weights.dtypes import DType, KvCacheDType
from ..weights.kv_scales import KvScales, ScaledWeights, is_static_fp8, kv_cache_scheme, read_scales_file
from ..weights.tensor import WeightSource

logger = logging.getLogger(__name__)


class KvCacheChoice(Struct, frozen=True):
    """The type, and what reads the scales of `fp8_e4m3`: None are all 1. It raises ModelError for broken ones."""

    dtype: KvCacheDType
    read_scales: Callable[[], KvScales | None]


def choose_kv_cache(
    asked: KvCacheDType | Literal["auto"],
    scales_file: str | None,
    dtype: DType,
    config: Mapping[str, Any],
    spec: DecoderSpec,
    weights: WeightSource,
    device: Device,
) -> KvCacheChoice:
    """What `--kv-cache-dtype` and `--quantization-param-path` ask for, or else the checkpoint's `kv_cache_scheme`.

    The log says which of them are not used. Raises ModelError for a `kv_cache_scheme` that is not valid. If nothing
    else was asked for, it also raises it for one that is not supported.
    """
    scheme = kv_cache_scheme(config)
    in_checkpoint = scheme is not None and is_static_fp8(scheme)
    if scheme is not None and not in_checkpoint:
        if asked == "auto":
            raise ModelError(
                f"config.json: kv_cache_scheme {shown(dict(scheme))} is not supported; supported is FP8 with a "
                "static scale for each layer. Choose a type for the KV cache instead, such as --kv-cache-dtype "
                f"{dtype}"
            )
        logger.info("K and V are cached as %s instead of the type of the checkpoint's kv_cache_scheme", asked)
    chosen: KvCacheDType = dtype if asked == "auto" else asked
    if asked == "auto" and in_checkpoint and _caches(device, spec, "fp8_e4m3"):
        chosen = "fp8_e4m3"
    if chosen != "fp8_e4m3":
        if scales_file is not None:
            logger.warning(
                "--quantization-param-path has no effect: K and V are cached as %s, and its scales are for "
                "--kv-cache-dtype fp8_e4m3",
                chosen,
            )
        if in_checkpoint or (isinstance(weights, ScaledWeights) and weights.has_kv_scales()):
            logger.info(
                "The checkpoint's scales of K and V are not needed: they are for a cache of fp8_e4m3, and the %s "
                "device caches K and V as %s",
                device.name,
                chosen,
            )
        return KvCacheChoice(chosen, lambda: None)
    if scales_file is not None:
        read = functools.partial(read_scales_file, scales_file, spec, config.get("model_type"))
        return KvCacheChoice(chosen, read)
    if isinstance(weights, ScaledWeights):
        return KvCacheChoice(chosen, functools.partial(_read, weights, in_checkpoint))
    return KvCacheChoice(chosen, _without_scales)


def _caches(device: Device, spec: DecoderSpec, dtype: KvCacheDType) -> bool:
    try:
        device.kv_bytes_per_token(spec, dtype)
    except DeviceError:
        return False
    return True


def _read(weights: ScaledWeights, required: bool) -> KvScales | None:
    scales = weights.kv_scales(required=required)
    if scales is None:
        _report_none()
        return None
    logger.info("K and V are cached as fp8_e4m3 with the checkpoint's scales")
    return scales


def _without_scales() -> KvScales | None:
    _report_none()
    return None


def _report_none() -> None:
    logger.info(
        "K and V are cached as fp8_e4m3 with scales of 1, because the checkpoint has none: --quantization-param-path "
        "names a file of scales"
    )
