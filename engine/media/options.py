"""The options of images and videos in prompts: how many, where they may come from, and how they are processed."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from ..declaring.option import Options, option
from ..declaring.record import record
from ..declaring.values import above, at_least, between, count, json_object, number
from .decode_settings import DEFAULT_MAX_BYTES, LEAST_FPS, MAX_FRAMES, MOST_FPS, DecodeSettings

if TYPE_CHECKING:
    from .media import Modality

DEFAULT_MAX_IMAGES = 16
DEFAULT_MAX_VIDEOS = 2
_MOST_IMAGES = 1024
_MOST_PIXELS = 2**28  # for which decoding may take 4 GiB
_MOST_BYTES = 2**30
_MOST_TOKENS = 2**16
_KINDS = ("image", "video", "audio")
_DOMAIN = re.compile(r"([a-z0-9_.-]+|\[[0-9a-f:.]+\])(:[0-9]{1,5})?", re.IGNORECASE)


def _are_limits(value: Mapping[str, Any]) -> str | None:
    for name, limit in value.items():
        if name not in _KINDS or type(limit) is not int or not 0 <= limit <= _MOST_IMAGES:
            return f'must have numbers of at most {_MOST_IMAGES} for image, video and audio, such as {{"image": 4}}'
    return None


def _limits(text: str) -> dict[str, int]:
    """{"image": 4}, or image=4 as in vLLM 0.6; a limit may be {"count": 4}. Raises ValueError."""
    if text.lstrip().startswith("{"):
        given = json_object(text)
    else:
        pairs = [part.partition("=") for part in text.split(",")]
        given = {name.strip(): int(count) if count.strip().isdecimal() else count for name, _, count in pairs}
    limits: dict[str, Any] = {}
    for name, value in given.items():
        usual = DEFAULT_MAX_VIDEOS if name == "video" else DEFAULT_MAX_IMAGES
        limits[name] = value.get("count", usual) if isinstance(value, dict) else value
    return limits


def _io_error(value: Mapping[str, Any]) -> str | None:
    """What is wrong with --media-io-kwargs, in words that follow the option."""
    for kind, settings in value.items():
        checks = _IO_CHECKS.get(kind)
        if checks is None or not isinstance(settings, Mapping):
            return f'must have objects for {" and ".join(_IO_CHECKS)}, such as {{"video": {{"num_frames": 16}}}}'
        for name, given in settings.items():
            if name not in checks:
                return f"must have no {kind}.{name}: what is supported for {kind} is {', '.join(checks)}"
            is_right, wanted = checks[name]
            if not is_right(given):
                return f"must have {wanted} as {kind}.{name}"
    return None


def _is_color(value: object) -> bool:
    return (
        isinstance(value, list | tuple)
        and len(value) == 3
        and all(type(level) is int and 0 <= level <= 255 for level in value)
    )


def _is_number_of_frames(value: object) -> bool:
    return type(value) is int and (value == -1 or 1 <= value <= MAX_FRAMES)


def _is_rate(value: object) -> bool:
    return type(value) in (int, float) and LEAST_FPS <= cast(float, value) <= MOST_FPS


_IO_CHECKS: Mapping[str, Mapping[str, tuple[Callable[[object], bool], str]]] = {
    "image": {
        "image_mode": (lambda value: value == "RGB", "RGB"),
        "rgba_background_color": (_is_color, "three numbers from 0 to 255"),
    },
    "video": {
        "num_frames": (_is_number_of_frames, f"a number from 1 to {MAX_FRAMES}, or -1 for as many as there are,"),
        "fps": (_is_rate, f"a number from {LEAST_FPS:g} to {MOST_FPS:g}"),
    },
}


def _domain(text: str) -> list[str]:
    """A host's name, or a JSON list of those. Raises ValueError."""
    names: list[Any] = [text]
    if text.startswith('["'):
        try:
            names = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise ValueError(f"is not valid JSON: {error}") from None
    for name in names:
        if not isinstance(name, str) or not _DOMAIN.fullmatch(name):
            raise ValueError(f"must be a host's name such as images.example.org, with no scheme or path, got {name!r}")
    return [name.lower() for name in names]


def _is_domain(name: str) -> str | None:
    return None if name else "must be a host's name"


@record(frozen=True, kw_only=True)
class MediaOptions(Options):
    """Which images requests may have. `mm_processor_cache_gb` is in GiB, `image_fetch_timeout` in seconds.

    Raises OptionError.
    """

    limit_mm_per_prompt: Mapping[str, int] | None = option(
        None,
        'most images and videos of a request, e.g. {"image": 4} '
        f'[{{"image": {DEFAULT_MAX_IMAGES}, "video": {DEFAULT_MAX_VIDEOS}}}]',
        parse=_limits,
        check=_are_limits,
        metavar="JSON",
    )
    mm_processor_kwargs: Mapping[str, Any] | None = option(
        None,
        'settings that override those of the model\'s image processor, e.g. {"max_pixels": 1003520}',
        parse=json_object,
        metavar="JSON",
    )
    media_io_kwargs: Mapping[str, Any] | None = option(
        None,
        "how images and videos are decoded: of an image its rgba_background_color, of a video num_frames and fps, e.g. "
        '{"video": {"num_frames": 16}} [{"image": {"rgba_background_color": [255, 255, 255]}, "video": {"num_frames": '
        '32, "fps": 2}}]',
        parse=json_object,
        check=_io_error,
        metavar="JSON",
    )
    image_min_tokens: int | None = option(
        None,
        "least tokens of an image, for models whose images have more or fewer of them by their sizes [as the model's "
        "image processor says]",
        parse=count,
        check=between(1, _MOST_TOKENS),
        metavar="TOKENS",
    )
    image_max_tokens: int | None = option(
        None,
        "most tokens of an image, for the same models",
        parse=count,
        check=between(1, _MOST_TOKENS),
        metavar="TOKENS",
    )
    max_image_pixels: int = option(
        DecodeSettings().max_pixels,
        "most pixels of an image, or of a frame of a video; others are refused before they are decoded, which takes up "
        "to 16 bytes of memory for a pixel",
        parse=count,
        check=between(1, _MOST_PIXELS),
        metavar="PIXELS",
        env_aliases=("VLLM_MAX_IMAGE_PIXELS",),
    )
    max_image_bytes: int = option(
        DEFAULT_MAX_BYTES,
        "largest file of an image, or of a video with all its frames",
        parse=count,
        check=between(1, _MOST_BYTES),
        metavar="BYTES",
    )
    mm_processor_cache_gb: float = option(
        4.0,
        "memory in GiB for images that were processed and for their embeddings, which later requests with the same "
        "image reuse; 0 keeps none",
        parse=number,
        check=at_least(0),
        metavar="GIB",
    )
    allowed_media_domains: Sequence[str] = option(
        (),
        "hosts from which images are fetched for requests with a URL, each as NAME or NAME:PORT; without any, requests "
        "bring their images",
        parse=_domain,
        check=_is_domain,
        metavar="HOST",
    )
    media_url_allow_redirects: bool = option(
        True,
        "follow redirects of --allowed-media-domains to another of these hosts",
        env_aliases=("VLLM_MEDIA_URL_ALLOW_REDIRECTS",),
    )
    image_fetch_timeout: float = option(
        5.0,
        "how long fetching an image may take",
        parse=number,
        check=above(0),
        metavar="SECONDS",
        env_aliases=("VLLM_IMAGE_FETCH_TIMEOUT",),
    )
    allowed_local_media_path: str | None = option(
        None,
        "a folder of this machine from which requests may name images, as file:///... [none]",
        parse=lambda text: text or None,
        metavar="FOLDER",
    )
    interleave_mm_strings: bool = option(
        False,
        "keep images in their places among a message's texts for chat templates that take contents as texts; otherwise "
        "they come before the texts",
    )
    language_model_only: bool = option(
        False,
        "load only the language model of a model that takes images",
        flag_aliases=("--no-mmproj",),
    )
    mmproj: str | None = option(
        None,
        "the GGUF file of a GGUF model's vision tower [an mmproj file beside the model, or in its repository]",
        parse=lambda text: text or None,
        metavar="FILE",
        flag_aliases=("-mm",),
    )

    @property
    def limits(self) -> dict[Modality, int]:
        """Most media of each kind that a request may have. Without images it has no videos, unless they are allowed."""
        given = self.limit_mm_per_prompt or {}
        images = given.get("image", DEFAULT_MAX_IMAGES)
        return {"image": images, "video": given.get("video", min(images, DEFAULT_MAX_VIDEOS))}

    @property
    def wants_vision(self) -> bool:
        """Whether a model that takes images is to have its tower."""
        return not self.language_model_only and any(self.limits.values())

    @property
    def decoding(self) -> DecodeSettings:
        """How files become pixels."""
        usual, given = DecodeSettings(self.max_image_pixels), self.media_io_kwargs or {}
        background = given.get("image", {}).get("rgba_background_color", usual.background)
        video = {"num_frames": usual.max_frames, "fps": usual.fps, **given.get("video", {})}
        most = MAX_FRAMES if video["num_frames"] == -1 else video["num_frames"]
        return replace(usual, background=tuple(background), max_frames=most, fps=float(video["fps"]))

    @property
    def frames_per_second(self) -> float | None:
        """How fast frames are shown that are sent one by one; None: as the form in which they are sent has it."""
        fps: float | None = (self.media_io_kwargs or {}).get("video", {}).get("fps")
        return fps

    @property
    def wants_mmproj(self) -> bool:
        """Whether a GGUF model is to have the tower that its repository has for it."""
        return self.wants_vision and self.mmproj is None

    def _contradictions(self) -> Iterator[str]:
        if (self.limit_mm_per_prompt or {}).get("audio"):
            yield "--limit-mm-per-prompt: audio is not served; leave it out, or set it to 0"
        if (self.image_min_tokens or 1) > (self.image_max_tokens or _MOST_TOKENS):
            yield "--image-min-tokens must be at most --image-max-tokens"
        if self.allowed_local_media_path is not None:
            path = Path(self.allowed_local_media_path)
            if not path.is_absolute():
                yield f"--allowed-local-media-path must be an absolute path, got {str(path)!r:.200}"

    def without_effect(self) -> Iterator[str]:
        """What to tell of the flags that were given and have no effect."""
        if self.wants_vision:
            return
        why = "with --language-model-only" if self.language_model_only else "with no images (--limit-mm-per-prompt)"
        yield from (f"{flag} has no effect {why}" for flag in self.given_flags(_OF_IMAGES))


_OF_IMAGES = (
    "mmproj",
    "mm_processor_kwargs",
    "media_io_kwargs",
    "image_min_tokens",
    "image_max_tokens",
    "max_image_pixels",
    "max_image_bytes",
    "allowed_media_domains",
    "allowed_local_media_path",
    "interleave_mm_strings",
)
