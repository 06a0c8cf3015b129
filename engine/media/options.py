"""The options of images in prompts: how many, where they may come from, and how they are processed."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..declaring.option import Options, option
from ..declaring.values import above, at_least, json_object, number

DEFAULT_MAX_IMAGES = 16
_MOST_IMAGES = 1024
_OTHERS = ("video", "audio")
_DOMAIN = re.compile(r"([a-z0-9_.-]+|\[[0-9a-f:.]+\])(:[0-9]{1,5})?", re.IGNORECASE)


def _are_limits(value: Mapping[str, Any]) -> str | None:
    for name, limit in value.items():
        if name not in ("image", *_OTHERS) or type(limit) is not int or not 0 <= limit <= _MOST_IMAGES:
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
        limits[name] = value.get("count", DEFAULT_MAX_IMAGES) if isinstance(value, dict) else value
    return limits


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


@dataclass(frozen=True, kw_only=True)
class MediaOptions(Options):
    """Which images requests may have. `mm_processor_cache_gb` is in GiB, `image_fetch_timeout` in seconds.

    Raises OptionError.
    """

    limit_mm_per_prompt: Mapping[str, int] | None = option(
        None,
        f'most images of a request, e.g. {{"image": 4}} [{{"image": {DEFAULT_MAX_IMAGES}}}]',
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
    language_model_only: bool = option(False, "load only the language model of a model that takes images")

    @property
    def max_images(self) -> int:
        """Most images of a request."""
        return (self.limit_mm_per_prompt or {}).get("image", DEFAULT_MAX_IMAGES)

    @property
    def wants_vision(self) -> bool:
        """Whether a model that takes images is to have its tower."""
        return not self.language_model_only and self.max_images > 0

    def _contradictions(self) -> Iterator[str]:
        for name in _OTHERS:
            if (self.limit_mm_per_prompt or {}).get(name):
                yield f"--limit-mm-per-prompt: {name} is not served; leave it out, or set it to 0"
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


_OF_IMAGES = ("mm_processor_kwargs", "allowed_media_domains", "allowed_local_media_path", "interleave_mm_strings")
