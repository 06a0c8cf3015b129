"""Tells from a model's headers alone what it is, whether it would be served, and the memory that it would take."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, get_args

import numpy as np

from ..devices import SERVING_DEVICES
from ..devices.cache_split import BLOCK_TOKENS, CacheSplit, GroupBytes
from ..devices.coverage import require_mixers
from ..encoders.detection import is_encoder
from ..encoders.inspection import EncoderInspection, inspect_encoder
from ..errors import DeviceError, ModelError
from ..media.picture import Picture
from ..models import describe
from ..models.spec import (
    AttentionSpec,
    DecoderSpec,
    ExpertsSpec,
    LatentAttentionSpec,
    MixerSpec,
    mixers,
    tensor_shapes,
    tower_shapes,
)
from ..options import EngineOptions
from ..speculation.options import SpeculativeOptions
from ..weights import StoredSource, source_at
from ..weights.contents import Contents
from ..weights.dtypes import KvCacheDType
from ..weights.hub import UnreachableError, cached_model, is_cached, local_model
from ..weights.hub_headers import NoHeadersError, hub_headers
from ..weights.measured_quality import mean_divergence
from ..weights.quantization import Method
from ..weights.quantized import method_in_words
from .opened_model import OpenedModel, open_model

_CONTEXTS = (4096, 32768)  # tokens
_IMAGE_SIZES = ((512, 512), (1024, 768), (1920, 1080))  # width and height in pixels


@dataclass(frozen=True, slots=True)
class Verdict:
    """Whether a device runs a kind of model; if not, `reason` says why."""

    device: str
    runs: bool
    reason: str | None = None


@dataclass(frozen=True, slots=True)
class WeightMemory:
    """What all weights take on the device if they are kept like this. `chosen`: with the options that were given.

    `divergence` is what that cost another model: see `mean_divergence`.
    """

    kept_as: str
    bytes: int
    chosen: bool
    divergence: float | None = None


@dataclass(frozen=True, slots=True)
class KvMemory:
    """What the KV cache of one sequence of `tokens` tokens takes, in each type that the device can keep it in.

    Recurrent state is a part of it.
    """

    tokens: int
    bytes: Mapping[str, int]


@dataclass(frozen=True, slots=True)
class StageMemory:
    """What the weights of a pipeline's stage take. `layers` is in words."""

    layers: str
    bytes: int


@dataclass(frozen=True, slots=True)
class VisionMemory:
    """A tower for images: its parameters, its bytes with what the largest image takes meanwhile, and how many tokens
    images have, by their size in words.
    """

    parameters: int
    bytes: int
    tokens: Mapping[str, int]


@dataclass(frozen=True, slots=True)
class Shape:
    """A model's measures. `layers` counts them, `mixers` their parts by kind. `context` is in tokens.

    `active` counts the parameters that a token is computed with, without the experts that it is not sent to.
    `state_bytes` is the recurrent state of one sequence; 0 if there is none.
    """

    family: str
    parameters: int
    active: int
    layers: int
    mixers: Mapping[str, int]
    heads: Sequence[str]
    hidden_size: int
    vocab_size: int
    context: int
    state_bytes: int


@dataclass(frozen=True, slots=True)
class Inspection:
    """All that is known of a model. If it is refused, fields that cannot be known are None or empty.

    `refusal` is the error that serving it with the given options would give. Memory is counted for `device`, where
    `kv_cache_dtype` is the type of K and V. `mtp_bytes` is the size of the checkpoint's layer for drafts (MTP), where
    the device runs it. It is a part of `weights` if the options use the layer.
    """

    model: str
    architecture: str | None
    quantization: str | None
    contents: Contents | None
    shape: Shape | None
    verdicts: Sequence[Verdict]
    device: str | None
    weights: Sequence[WeightMemory]
    kv_cache_dtype: str | None
    kv_cache: Sequence[KvMemory]
    refusal: str | None
    mtp_bytes: int | None = None
    stages: Sequence[StageMemory] = ()  # of a pipeline; none if all layers are in one process
    vision: VisionMemory | None = None  # None: it takes no images


@contextmanager
def opened_headers(options: EngineOptions) -> Iterator[OpenedModel]:
    """The model that the options name. Nothing is loaded; from the hub only headers are fetched.

    Raises ModelError and DeviceError for what would not be served.
    """
    with _headers(options) as (path, _):
        try:
            opened = open_model(options, source_at(path, "auto"))
        except (ModelError, DeviceError) as error:
            raise type(error)(_named(error, path, options.model)) from error
        yield opened


def inspect_model(options: EngineOptions) -> Inspection | EncoderInspection:
    """Look at the model that the options name; nothing is loaded, and of a hub id only headers are fetched.

    A folder with an encoder's safetensors, or with the ONNX graph of a model that does not generate text, is looked at
    as an encoder.

    Raises ModelError if there is no such model, or nothing at all can be said of it.
    """
    with _headers(options) as (path, whole):
        if is_encoder(path):
            return inspect_encoder(options, path, whole=whole)
        try:
            return _Look(options, path, whole).inspection()
        except (ModelError, DeviceError) as error:
            raise type(error)(_named(error, path, options.model)) from error


@contextmanager
def _headers(options: EngineOptions) -> Iterator[tuple[Path, bool]]:
    """The folder or file of the model, or one that has only the headers of a hub id's; and whether it is whole."""
    with ExitStack() as stack:
        path, whole = local_model(options.model, ".gguf"), True
        if path is None:
            try:
                headers = hub_headers(options.model, options.revision, with_mmproj=options.media.wants_mmproj)
                path, whole = stack.enter_context(headers), False
            except UnreachableError:
                path = cached_model(options.model, options.revision, options.download_dir)
            except NoHeadersError:
                if not is_cached(options.model, options.revision, options.download_dir):
                    raise
                path = cached_model(options.model, options.revision, options.download_dir)
        yield path, whole


def _named(error: Exception, path: Path, model: str) -> str:
    """The error's words, with the model's name in place of where its headers lie for the moment."""
    return str(error) if Path(model).expanduser() == path else str(error).replace(str(path), model)


class _Look:
    """One look at a model: what fails on the way is kept, and the rest is looked at all the same."""

    def __init__(self, options: EngineOptions, path: Path, whole: bool) -> None:
        self._options, self._path = options, path
        self._has_tokenizer = whole or path.is_file()
        self._source = source_at(path, "auto")
        self._refusal: str | None = None

    def inspection(self) -> Inspection:
        contents: Contents | None = None
        config: Mapping[str, Any] = {}
        spec: DecoderSpec | None = None
        opened: OpenedModel | None = None
        quantization: str | None = None
        try:
            contents = self._source.contents()
        except ModelError as error:
            self._refused(error)
        try:
            config = self._source.config
        except ModelError as error:
            if contents is None:
                raise
            self._refused(error)
        stages: Sequence[StageMemory] = ()
        try:
            if config:
                quantization = method_in_words(config)
                spec = describe(config, self._options.max_model_len).spec
                opened = open_model(self._options, self._source)
                stages = _stages(self._options, opened)
                if self._has_tokenizer or self._options.tokenizer is not None:
                    opened.tokenizer()
        except (ModelError, DeviceError) as error:
            self._refused(error)
        architectures = config.get("architectures")
        return Inspection(
            model=self._options.model,
            architecture=str(architectures[0]) if architectures else None,
            quantization=quantization,
            contents=contents,
            shape=None if spec is None else shape_of(spec),
            verdicts=[] if spec is None else [_verdict(device, spec) for device in SERVING_DEVICES],
            device=None if opened is None else opened.device.name,
            weights=[] if opened is None else list(self._weights(opened)),
            kv_cache_dtype=None if opened is None else opened.kv_cache_dtype,
            kv_cache=[] if opened is None else _kv_cache(opened),
            refusal=self._refusal,
            mtp_bytes=None if opened is None else self._mtp_bytes(opened),
            stages=stages,
            vision=None if opened is None else _vision(opened),
        )

    def _mtp_bytes(self, opened: OpenedModel) -> int | None:
        """The bytes of the layer for drafts, in addition to the other weights; None: there is none to use."""
        if opened.description.mtp is None:
            return None
        with_it = SpeculativeOptions(speculative_config={"method": "mtp"})
        options = replace(self._options, device=opened.device.name)
        try:
            used = open_model(replace(options, speculative=with_it), self._source).weight_bytes
        except (ModelError, DeviceError):
            return None
        return used - open_model(replace(options, speculative=SpeculativeOptions()), self._source).weight_bytes

    def _refused(self, error: Exception) -> None:
        if self._refusal is None:
            self._refusal = _named(error, self._path, self._options.model)

    def _weights(self, chosen: OpenedModel) -> Iterator[WeightMemory]:
        """As the options say, and as --dtype and --quantization could say otherwise."""
        yield WeightMemory(chosen.kept_as, chosen.weight_bytes, True, _divergence(chosen))
        seen = {chosen.kept_as}
        methods: tuple[Method | None, ...] = (None, *chosen.device.capabilities.quantizes)
        for method in methods:
            options = replace(
                self._options,
                device=chosen.device.name,
                dtype="bfloat16",
                quantization=method,
                quantization_group_size=None,
                quantization_zero_points=False,
            )
            other = open_model(options, self._source)
            if (kept_as := other.kept_as) not in seen:
                seen.add(kept_as)
                yield WeightMemory(kept_as, other.weight_bytes, False, _divergence(other))


def _vision(opened: OpenedModel) -> VisionMemory | None:
    if opened.vision is None:
        return None
    vision = opened.vision.vision
    black = {f"{width} x {height}": np.zeros((height, width, 3), np.uint8) for width, height in _IMAGE_SIZES}
    return VisionMemory(
        sum(math.prod(shape) for shape in tower_shapes(vision.spec).values()),
        opened.tower_bytes,
        {size: vision.num_tokens(vision.process(Picture(image))[1]) for size, image in black.items()},
    )


def _divergence(opened: OpenedModel) -> float | None:
    """Of the file or folder's own format, or of what it is quantized to if it has floats."""
    contents = opened.source.contents() if isinstance(opened.source, StoredSource) else None
    stored = (contents.title if contents else None) or method_in_words(opened.source.config)
    if opened.quantization is None:
        return None if stored is None else mean_divergence(stored.split()[0])
    in_floats = stored is None or stored.upper() in ("F32", "F16", "BF16")
    return mean_divergence(opened.quantization.method) if in_floats else None


def _stages(options: EngineOptions, opened: OpenedModel) -> list[StageMemory]:
    """The stages of a pipeline. Raises ModelError and DeviceError if the model cannot be split so."""
    if options.pipeline.stages == 1:
        return []
    from .stages.pipeline import plan_stages
    from .stages.split import stage_bytes

    planned = plan_stages(options, opened, None)
    return [StageMemory(str(stage), stage_bytes(opened.spec, stage, opened.plan.formats)) for stage in planned]


def shape_of(spec: DecoderSpec) -> Shape:
    """The measures of a spec."""
    kinds = Counter(mixer.kind for layer in spec.layers for mixer in mixers(layer))
    heads = Counter(words for layer in spec.layers for mixer in mixers(layer) if (words := _heads(mixer)) is not None)
    parameters = sum(math.prod(shape) for shape in tensor_shapes(spec).values())
    return Shape(
        family=spec.family,
        parameters=parameters,
        active=parameters - sum(_idle(mixer, spec.hidden_size) for layer in spec.all_layers for mixer in mixers(layer)),
        layers=len(spec.layers),
        mixers=dict(kinds),
        heads=[f"{count} x {words}" if len(heads) > 1 else words for words, count in heads.items()],
        hidden_size=spec.hidden_size,
        vocab_size=spec.vocab_size,
        context=spec.max_positions,
        state_bytes=spec.state_bytes,
    )


def _heads(mixer: MixerSpec) -> str | None:
    if isinstance(mixer, LatentAttentionSpec):
        return f"{mixer.num_heads} heads, for all of them a latent of {mixer.kv_rank} and a key of {mixer.rope_dim}"
    if not isinstance(mixer, AttentionSpec):
        return None
    window = f", window of {mixer.sliding_window} tokens" if mixer.sliding_window else ""
    return f"{mixer.num_heads} heads of {mixer.head_dim}, {mixer.num_kv_heads} for K and V{window}"


def _idle(mixer: MixerSpec, hidden_size: int) -> int:
    """Parameters of experts that a token is not sent to."""
    if not isinstance(mixer, ExpertsSpec):
        return 0
    expert = sum(math.prod(shape) for name, shape in mixer.shapes(hidden_size).items() if name.startswith("experts.0."))
    return expert * (mixer.num_experts - mixer.experts_per_token)


def _verdict(device: str, spec: DecoderSpec) -> Verdict:
    try:
        require_mixers(device, spec)
    except DeviceError as error:
        return Verdict(device, False, str(error))
    return Verdict(device, True)


def _kv_cache(model: OpenedModel) -> list[KvMemory]:
    longest = model.spec.max_positions
    groups: dict[str, Sequence[GroupBytes]] = {model.kv_cache_dtype: model.kv_groups}
    others: tuple[KvCacheDType, ...] = get_args(KvCacheDType)
    for dtype in others:
        try:
            groups.setdefault(dtype, model.device.kv_group_bytes(model.spec, dtype))
        except DeviceError:  # a type that the device does not have
            continue
    lengths = sorted({min(tokens, longest) for tokens in (*_CONTEXTS, longest)})
    return [
        KvMemory(tokens, {dtype: model.slot_bytes + _sequence_bytes(sizes, tokens) for dtype, sizes in groups.items()})
        for tokens in lengths
    ]


def _sequence_bytes(groups: Sequence[GroupBytes], tokens: int) -> int:
    if not groups:
        return 0
    split = CacheSplit(groups, BLOCK_TOKENS, 1, EngineOptions.max_num_batched_tokens)
    return split.bytes_with(split.first_blocks_of(1, tokens, 0))
