"""Whether a model takes images, and what that needs: see OpenedVision."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from ..cancellation import Cancellation
from ..declaring.option import OptionError
from ..declaring.record import record
from ..devices.base import Device
from ..devices.executor import Executor
from ..devices.tower import TowerExecutor, TowerOptions
from ..errors import ModelError
from ..files.wording import shown
from ..media.options import MediaOptions
from ..models.spec import DecoderSpec
from ..options import EngineOptions
from ..weights.dtypes import DType
from ..weights.quantization import Quantization
from ..weights.source import ModelSource, TowerSource, VisionSource
from ..weights.tensor import WeightSource

if TYPE_CHECKING:
    from ..media.loaded import LoadedVision
    from ..media.media import Modality
    from ..media.request_settings import RequestSettings
    from ..media.vision import Vision
    from ..text.tokenizer import Tokenizer

logger = logging.getLogger(__name__)

_GIB = 2**30


@record(frozen=True)
class OpenedVision:
    """How a model sees images, and the weights of its tower, which are not read yet.

    One that `is_found` is left out where it cannot be used: see TowerSource.
    """

    vision: Vision
    weights: WeightSource
    for_requests: RequestSettings
    is_found: bool = False

    @property
    def tensors(self) -> frozenset[str]:
        """The names by which a checkpoint may have the tower's tensors."""
        parts = [part for places in self.vision.tensors.values() for ref in places for part in ref.parts()]
        return frozenset(name for part in parts for name in (part.name, part.scaled_by) if name)

    def num_bytes(self, device: Device, dtype: DType, quantization: Quantization | None) -> int:
        """About what the tower will take in memory."""
        return device.tower_bytes(self.vision.spec, self.weights, self._options(dtype, quantization))

    def load(
        self,
        device: Device,
        dtype: DType,
        quantization: Quantization | None,
        beside: Executor | None,
        cancellation: Cancellation,
    ) -> TowerExecutor:
        """Load the tower, with threads of its own without an executor `beside` it.

        Raises DeviceError, and LoadCancelledError soon after it was cancelled.
        """
        options = self._options(dtype, quantization)
        return device.load_tower(self.vision.spec, self.weights, options, beside, cancellation)

    def _options(self, dtype: DType, quantization: Quantization | None) -> TowerOptions:
        return TowerOptions(dtype, self.vision.max_rows, quantization, threads=None)

    def loaded(self, tower: TowerExecutor, tokenizer: Tokenizer, options: EngineOptions) -> LoadedVision | None:
        """What an engine with that tower needs.

        Raises ModelError for a tokenizer without a token for images; for a tower that `is_found` it is None, and a
        warning.
        """
        from ..media.loaded import LoadedVision
        from ..media.reader import MediaReader

        vision, media = self.vision, options.media
        if vision.video is not None and tokenizer.token_to_id(vision.video.slot) is None:
            logger.warning("videos are not taken: the tokenizer has no token %s", vision.video.slot)
            vision.video = None
        slot_ids: dict[Modality, int] = {}
        for modality, marks in vision.marks.items():
            slot_id = tokenizer.token_to_id(marks.slot)
            if slot_id is None:
                said = f"the tokenizer has no token {marks.slot}, which stands for {modality}s: take the model's own"
                if not self.is_found:
                    raise ModelError(f"{said}, or serve text alone with --language-model-only")
                logger.warning("images are not taken, only text: %s", said)
                tower.close()
                return None
            slot_ids[modality] = slot_id
        max_bytes = int(media.mm_processor_cache_gb * _GIB)
        reader = MediaReader(
            vision,
            slot_ids,
            settings=media.decoding,
            for_requests=self.for_requests,
            max_bytes=media.max_image_bytes,
            cache_bytes=max_bytes // 2,
        )
        return LoadedVision(vision, tower, reader, max_bytes // 2)


def find_vision(options: EngineOptions, source: ModelSource, config: Mapping[str, Any]) -> OpenedVision | None:
    """How the model sees images; None if it does not, if that is not wanted, or, with a warning, not possible.

    Raises OptionError if the options bound the tokens of images, and the model's have no such bounds, and for settings
    of the options that the model's image processor cannot have. Raises ModelError if the tower is in a file that the
    options name, which cannot be used.
    """
    media = options.media
    if not media.wants_vision or not isinstance(source, VisionSource):
        return None
    try:
        tower = source.tower(media.mmproj)
        return None if tower is None else _vision_in(tower, config, media)
    except ModelError as error:
        if media.mmproj is not None:
            raise
        logger.warning("images are not taken, only text: %s", error)
        return None


def _vision_in(tower: TowerSource, config: Mapping[str, Any], media: MediaOptions) -> OpenedVision | None:
    """How the model sees with that tower. Raises as `find_vision`, and ModelError for one that is not supported."""
    from ..media.families import vision_of
    from ..media.request_settings import RequestSettings, overridden

    config = tower.vision_config(config)
    try:
        processor = _processor(tower, config, media.mm_processor_kwargs or {})
        vision = vision_of(config, processor)
        if vision is None:
            return None
        if media.image_min_tokens is not None or media.image_max_tokens is not None:
            processor = overridden(processor, _fields_of_tokens(vision, media), videos=False)
            vision = vision_of(config, processor)
            assert vision is not None
    except ModelError as error:
        raise ModelError(f"{tower.origin}{error}") from error
    weights = tower.tower_weights(vision.spec, vision.tensors)
    changed = RequestSettings(vision, lambda fields: vision_of(config, overridden(processor, fields)))
    return OpenedVision(vision, weights, changed, tower.is_found)


def _processor(tower: TowerSource, config: Mapping[str, Any], fields: Mapping[str, Any]) -> Mapping[str, Any]:
    """The settings of the model's image processor with those of --mm-processor-kwargs.

    Raises OptionError for those, and ModelError for the model's own.
    """
    from ..media.families import vision_of
    from ..media.request_settings import fault, idle_fields, overridden

    processor = tower.processor()
    if not fields:
        return processor
    try:
        idle = idle_fields(processor, fields, lambda settings: vision_of(config, settings))
    except ModelError as error:
        vision_of(config, processor)  # raises ModelError if the model's own settings are no better
        raise OptionError(f"--mm-processor-kwargs: {fault(error)}") from error
    if idle:
        logger.warning(
            "--mm-processor-kwargs: %s would change nothing, because this model's image processor has no such "
            "settings: check the spelling, or leave it out",
            ", ".join(map(shown, idle)),
        )
    return overridden(processor, fields)


def _fields_of_tokens(vision: Vision, options: MediaOptions) -> Mapping[str, Any]:
    try:
        return vision.fields_of_tokens(options.image_min_tokens, options.image_max_tokens)
    except ValueError as error:
        raise OptionError(
            f"--image-min-tokens, --image-max-tokens: {error}; leave them out, or use --mm-processor-kwargs"
        ) from error


def require_towers(vision: OpenedVision | None, spec: DecoderSpec, device: Device) -> OpenedVision | None:
    """The same where the device can run towers beside this decoder; else None, and a warning that says what would."""
    if vision is None:
        return None
    ropes = [attention.rope for attention in spec.attentions() if attention.rope is not None]
    if vision.vision.positions([]) is not None and not all(rope.axes for rope in ropes):
        logger.warning("images are not taken, only text: the model's rope has no sections for the positions of images")
        return None
    if max(vision.vision.added_after, default=0) >= len(spec.layers):
        logger.warning(
            "images are not taken, only text: config.json adds features of images after layer %d, and the model has %d",
            max(vision.vision.added_after),
            len(spec.layers),
        )
        return None
    if not device.capabilities.media:
        logger.warning("images are not taken, only text: the %s device has no towers; take --device cpu", device.name)
        return None
    return vision
