"""A model that has been found: what it will be computed with, and what it takes, before its weights are read."""

from __future__ import annotations

import functools
import logging
import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from msgspec import structs

from ..cancellation import Cancellation
from ..declaring.record import record
from ..devices import get_device, require
from ..devices.base import Device
from ..devices.cache_split import GroupBytes
from ..devices.coverage import require_mixers
from ..devices.executor import Executor
from ..devices.limits import ExecutorOptions, LoraLimits
from ..devices.load_plan import LoadPlan
from ..errors import DeviceError, ModelError
from ..files.wording import shown
from ..machine.memory import read_memory
from ..models import ModelDescription, describe
from ..models.overrides import idle_fields, overridden
from ..models.rope import BY_LENGTH, rope_type
from ..models.spec import DecoderSpec, tensor_shapes
from ..models.text_part import seeing_both_ways
from ..options import EngineOptions
from ..speculation.options import Eagle3, Mtp
from ..weights import ModelSource, StoredSource, open_source
from ..weights.dequantized import DequantizedWeights
from ..weights.drafts import no_mtp
from ..weights.dtypes import STORAGE, DType, KvCacheDType
from ..weights.kv_scales import KvScales
from ..weights.quantization import Quantization, parse_quantization
from ..weights.quantized import method_to_load_with
from ..weights.tensor import WeightSource
from .kv_cache_choice import KvCacheChoice, choose_kv_cache
from .load_progress import LoadProgress, ReportedWeights
from .vision import OpenedVision, find_vision, require_towers

if TYPE_CHECKING:
    from ..adapters.long_context import LongContexts
    from ..adapters.options import LoraOptions
    from ..text.tokenizer import Tokenizer
    from ..weights.lora import LoraAdapter

logger = logging.getLogger(__name__)

_GIB = 2**30
_MIN_ADAPTER_BYTES = 64 * 2**20


@record(frozen=True)
class OpenedModel:
    """A model that has been found, and the device that will compute it. Its weights are not read yet.

    `plan` says what the weights will be in memory, `kv_bytes_per_token` what a token will take there, and `kv_groups`
    each cache group's part of that. `quantization` is what the device uses; it may be None although the options name
    one. `tokenizer_source` None leaves the tokenizer out.
    """

    source: ModelSource
    tokenizer_source: ModelSource | None
    spec: DecoderSpec
    weights: WeightSource
    device: Device
    dtype: DType
    quantization: Quantization | None
    kv_cache: KvCacheChoice
    plan: LoadPlan
    kv_bytes_per_token: int
    kv_groups: Sequence[GroupBytes]
    description: ModelDescription
    vision: OpenedVision | None = None  # None: it takes no images
    contexts: LongContexts | None = None  # None: all adapters have the model's own
    tokenizer_mode: str = "auto"

    @property
    def weight_bytes(self) -> int:
        """What the weights will take in memory."""
        return self.plan.weight_bytes + self.tower_bytes

    @functools.cached_property
    def tower_bytes(self) -> int:
        """What a tower for images will take beside the decoder; 0: there is none."""
        return 0 if self.vision is None else self.vision.num_bytes(self.device, self.dtype, self.quantization)

    @property
    def kv_cache_dtype(self) -> KvCacheDType:
        """What K and V are cached as."""
        return self.kv_cache.dtype

    @functools.cached_property
    def kv_scales(self) -> KvScales | None:
        """What K and V of each layer are divided by in the cache; None: by nothing. Raises ModelError."""
        return self.kv_cache.read_scales()

    @property
    def slot_bytes(self) -> int:
        """What the device keeps of a sequence's recurrent state; 0: no layer is recurrent."""
        return self.device.slot_bytes(self.spec)

    @property
    def keeps_bits(self) -> bool:
        """Whether matrices stay in the bits of a quantized checkpoint."""
        return any(format.is_stored for format in self.plan.formats.values())

    @property
    def kept_as(self) -> str:
        """The formats of the matrices in memory, in words. Those that take most come first."""
        if self.quantization is not None:
            return str(self.quantization)
        shapes, num_bytes = tensor_shapes(self.spec), Counter[str]()
        for name, format in self.plan.formats.items():
            num_bytes[str(format)] += format.num_bytes(shapes[name])
        return ", ".join(name for name, _ in num_bytes.most_common())

    def tokenizer(self) -> Tokenizer:
        """The tokenizer, read from its files. Raises ModelError if there is none, or it is broken."""
        if self.tokenizer_source is not None:
            source = self.tokenizer_source
            return source.mistral_tokenizer() if self.tokenizer_mode == "mistral" else source.tokenizer()
        from ..text.no_tokenizer import NoTokenizer

        return NoTokenizer(self.spec.vocab_size)

    def dequantized(self) -> OpenedModel:
        """The same model with no matrix in the bits of a quantized checkpoint: each becomes floats of `dtype`."""
        weights = DequantizedWeights(self.weights)
        plan = self.device.plan(self.spec, weights, self.dtype, self.quantization)
        return replace(self, weights=weights, plan=plan)

    def load(
        self,
        options: EngineOptions,
        *,
        kv_cache_bytes: int | None,
        max_model_len: int,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        num_blocks: int | None = None,
        cancellation: Cancellation | None = None,
        told: Callable[[float], None] | None = None,
    ) -> Executor:
        """Load the weights and reserve the cache. If `num_blocks` is given, `kv_cache_bytes` has no effect. `told` is
        called with the fraction that was read.

        Raises DeviceError, naming what is not supported.
        """
        executor_options = self.executor_options(
            options,
            kv_cache_bytes=kv_cache_bytes,
            max_model_len=max_model_len,
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=max_num_batched_tokens,
            num_blocks=num_blocks,
        )
        with LoadProgress(options.model, self.weight_bytes, told=told) as progress:
            weights = ReportedWeights(self.weights, self.spec, progress)
            return self.device.load(self.spec, weights, executor_options, cancellation)

    def executor_options(
        self,
        options: EngineOptions | None,
        *,
        max_model_len: int,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        num_blocks: int | None,
        kv_cache_bytes: int | None = None,
    ) -> ExecutorOptions:
        """Its device's options. Without `options` they are a draft model's, which has no adapters."""
        asked = None if options is None else options.speculative.speculation
        return ExecutorOptions(
            dtype=self.dtype,
            kv_cache_bytes=kv_cache_bytes,
            max_model_len=max_model_len,
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=max_num_batched_tokens,
            kv_cache_dtype=self.kv_cache_dtype,
            kv_scales=self.kv_scales,
            quantization=self.quantization,
            lora=None if options is None else self._lora_room(options),
            num_blocks=num_blocks,
            layer_draft_tokens=asked.num_tokens if isinstance(asked, Mtp | Eagle3) else 0,
        )

    def lora_limits(self, options: LoraOptions) -> LoraLimits | None:
        """The limits of adapters; None: there are no adapters."""
        if not options.enable_lora:
            return None
        dtype = self.dtype if options.lora_dtype == "auto" else options.lora_dtype
        return LoraLimits(options.max_loras, options.max_lora_rank, dtype)

    def _lora_room(self, options: EngineOptions) -> LoraLimits | None:
        """The limits, with room for adapters of experts if one that is served from the start needs it."""
        limits = self.lora_limits(options.lora)
        if limits is None:
            return None
        from ..adapters.reading import changes_experts

        of_experts = any(changes_experts(path, self.description) for path in _lora_paths(options))
        return structs.replace(limits, of_experts=of_experts)

    def read_lora(self, path: Path, limits: LoraLimits, *, copies: int = 1) -> LoraAdapter:
        """The adapter at `path`. Raises ModelError for one that is broken, of another model, or too large.

        Until it is loaded, `copies` copies of what is read are in memory.
        """
        from ..adapters.reading import load_bytes, read_adapter, stored_bytes

        available = read_memory().available
        _require_room(path, stored_bytes(path, self._max_adapter_bytes), available)  # before any of it is copied
        _require_room(path, load_bytes(path, self.description, STORAGE[limits.dtype].itemsize, copies), available)
        from ..weights.gguf.source import GgufSource

        in_gguf = isinstance(self.source, GgufSource)
        return read_adapter(
            path, self.description, limits.max_rank, base=self.weights, base_is_gguf=in_gguf, contexts=self.contexts
        )

    @property
    def _max_adapter_bytes(self) -> int:
        """The most bytes of an adapter's file: the whole model's as float32, and some more for tiny models."""
        return 4 * sum(map(math.prod, tensor_shapes(self.description.spec).values())) + _MIN_ADAPTER_BYTES

    def lora_bytes(self, options: EngineOptions) -> int:
        """About what adapters of the options take: the `max_in_memory` largest of them. Raises ModelError."""
        limits = self.lora_limits(options.lora)
        if limits is None:
            return 0
        from ..adapters.reading import packed_bytes

        itemsize = STORAGE[limits.dtype].itemsize
        sizes = sorted((packed_bytes(path, self.description, itemsize) for path in _lora_paths(options)), reverse=True)
        return sum(sizes[: options.lora.max_in_memory])


def _lora_paths(options: EngineOptions) -> list[Path]:
    """Where the adapters of the options lie."""
    from ..adapters.hub import AdapterHub

    hub = AdapterHub(options.download_dir)
    return [hub.path(module) for module in options.lora.lora_modules]


def _require_room(path: Path, needed: int, available: int | None) -> None:
    if available is not None and needed > available:
        raise ModelError(
            f"{path}: the adapter takes {needed / _GIB:.2f} GiB while it is loaded, more than the "
            f"{available / _GIB:.2f} GiB of memory that are left: lower --kv-cache-space or --max-cpu-loras"
        )


def open_model(options: EngineOptions, source: ModelSource | None = None) -> OpenedModel:
    """Find the model that the options name, or take its `source`. Raises ModelError and DeviceError, saying what to
    change.
    """
    require(options.device)  # before weights are downloaded for nothing
    if source is None:
        seed = options.seed or 0
        source = open_source(
            options.model,
            options.revision,
            options.download_dir,
            options.load_format,
            seed,
            with_mmproj=options.media.wants_mmproj,
        )
    config = overridden(source.config, options.hf_overrides, options.rope_scaling, options.rope_theta)
    contexts = None
    if options.lora.enable_lora and options.lora.long_lora_scaling_factors:
        from ..adapters.long_context import with_longer_contexts

        factors, wanted = tuple(options.lora.long_lora_scaling_factors), options.max_model_len
        description, contexts = with_longer_contexts(describe(config), config, factors, wanted)
    else:
        description = describe(config, options.max_model_len)
    _warn_of_idle_overrides(options, source.config)
    if options.rope_scaling is not None and options.max_model_len is None and rope_type(config) in BY_LENGTH:
        logger.warning(
            "--rope-scaling: a rope of type %s changes nothing within the %d tokens that the model was trained with, "
            "which are the context: a longer --max-model-len makes use of it",
            rope_type(config),
            description.spec.max_positions,
        )
    if options.disable_sliding_window:
        description = _within_windows(description, options.max_model_len)
    asked = options.speculative.speculation
    if isinstance(asked, Mtp):
        if description.mtp is None:
            raise no_mtp(f"a model of type {description.spec.family}")
        description = description.with_mtp()
    if (vision := find_vision(options, source, config)) is not None:
        description = replace(description, tower_tensors=vision.tensors)
        if vision.vision.two_way and not description.text_part:  # a file's config does not tell what it sees
            in_windows = config.get("use_bidirectional_attention") == "vision"
            description = seeing_both_ways(description, in_windows=in_windows)
    stored_weights = weights = source.weights(description, config)
    spec = description.spec
    if isinstance(asked, Eagle3):
        _require_watched(spec)
        from ..weights.eagle3 import open_eagle3

        layer = open_eagle3(asked.model, asked.revision, options.download_dir, spec)
        spec, weights = replace(spec, eagle3=layer.spec), layer.beside(weights)
    shapes = tensor_shapes(spec)
    stored = STORAGE[weights.dtype if options.dtype == "auto" else options.dtype].itemsize
    dense_bytes = stored * sum(map(math.prod, shapes.values()))
    device = get_device(options.device, options.device_options, dense_bytes)
    require_mixers(device.name, spec)
    if isinstance(asked, Mtp | Eagle3) and not device.capabilities.draft_heads:
        raise DeviceError(
            f"--speculative-config: the {device.name} device does not run layers that predict further tokens (MTP, "
            'EAGLE3); take --device cpu, or {"method": "ngram"}'
        )
    if options.lora.enable_lora and not device.capabilities.lora:
        raise DeviceError(f"the {device.name} device has no LoRA adapters: drop --enable-lora or take --device cpu")
    adapters = options.lora.lora_resolver_cache_dir
    if options.lora.enable_lora and adapters is not None and not Path(adapters).is_dir():
        wrong = "is not a folder" if Path(adapters).exists() else "does not exist"
        raise ModelError(
            f"--lora-resolver-cache-dir {adapters} {wrong}: name the folder that has the adapters' folders"
        )
    images = options.media.allowed_local_media_path
    if images is not None and not Path(images).is_dir():
        raise ModelError(f"--allowed-local-media-path {images} is not a folder: name the one that has the images")
    idle = (*options.lora.without_effect(), *options.speculative.without_effect(), *options.media.without_effect())
    for said in idle:
        logger.warning("%s", said)
    dtype = device.default_dtype(weights.dtype) if options.dtype == "auto" else options.dtype
    contents = source.contents if isinstance(source, StoredSource) else None
    method = method_to_load_with(options.quantization, config, contents)
    quantization = parse_quantization(method, options.quantization_group_size, options.quantization_zero_points)
    able = device.capabilities.quantizes
    if quantization is not None and able and quantization.method not in able:
        raise DeviceError(
            f"the {device.name} device does not quantize to {quantization.method}: take --quantization with one of "
            f"{', '.join(able)}, or leave it out"
        )
    if quantization is not None and not able:
        logger.warning(
            "--quantization %s has no effect on the %s device: weights are kept, and take memory, as %s",
            quantization,
            device.name,
            dtype,
        )
        quantization = None
    kv_cache = choose_kv_cache(
        options.kv_cache_dtype,
        options.quantization_param_path,
        dtype,
        config,
        description.spec,
        stored_weights,
        device,
    )
    return OpenedModel(
        source=source,
        tokenizer_source=_tokenizer_source(options, source),
        spec=spec,
        weights=weights,
        device=device,
        dtype=dtype,
        quantization=quantization,
        kv_cache=kv_cache,
        plan=device.plan(spec, weights, dtype, quantization),
        kv_bytes_per_token=device.kv_bytes_per_token(spec, kv_cache.dtype),
        kv_groups=device.kv_group_bytes(spec, kv_cache.dtype),
        description=description,
        vision=require_towers(vision, spec, device),
        contexts=contexts,
        tokenizer_mode=options.tokenizer_mode,
    )


def _warn_of_idle_overrides(options: EngineOptions, config: Mapping[str, Any]) -> None:
    def described(fields: Mapping[str, Any]) -> ModelDescription:
        return describe(overridden(config, fields, options.rope_scaling, options.rope_theta))

    if options.hf_overrides and (idle := [*idle_fields(config, options.hf_overrides, described)]):
        logger.warning(
            "--hf-overrides: %s would change nothing, because this model has no such fields: check the spelling, or "
            "leave it out",
            ", ".join(map(shown, idle)),
        )


def _require_watched(spec: DecoderSpec) -> None:
    """Raises ModelError for a model that no EAGLE3 layer can draft for."""
    embedding = spec.embedding
    plain = embedding.size == spec.hidden_size and embedding.scale == 1.0 and not embedding.num_positions
    if spec.windows() != [None] or spec.streams is not None or not plain or embedding.norm or embedding.per_layer:
        raise ModelError(
            f"--speculative-config: no EAGLE3 layer can draft for a {spec.family} model: all of the model's layers "
            'must see all tokens, and its inputs must be only token embeddings; take {"method": "ngram"}'
        )


def _tokenizer_source(options: EngineOptions, model: ModelSource) -> ModelSource | None:
    revision = options.tokenizer_revision
    if options.skip_tokenizer_init:
        for name in options.given_flags(["tokenizer", "tokenizer_revision", "tokenizer_mode"]):
            logger.warning("%s has no effect: --skip-tokenizer-init turns the tokenizer off", name)
        return None
    if options.tokenizer is None and revision in (None, options.revision):
        return model
    name = options.tokenizer or options.model
    return open_source(name, revision, options.download_dir, load_format="dummy")  # without its weights


def _within_windows(description: ModelDescription, max_model_len: int | None) -> ModelDescription:
    """The model with a context in which no window hides a token. Raises ModelError for a longer `max_model_len`."""
    spec = description.spec
    longest = min(window for window in (spec.max_positions, *spec.windows()) if window is not None)
    if max_model_len is not None and max_model_len > longest:
        raise ModelError(
            f"--disable-sliding-window cuts the context to the smallest window of {longest} tokens: lower "
            f"--max-model-len {max_model_len}, or leave it out"
        )
    return replace(description, spec=replace(spec, max_positions=longest))
