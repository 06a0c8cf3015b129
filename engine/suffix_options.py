"""SuffixOptions: what the method `suffix` is told, under the names that vLLM gave it."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from msgspec import Struct

from .declaring.option import OptionError

_MOST_DEPTH, _MOST_REQUESTS = 256, 100_000
_PREFIX = "suffix_decoding_"


class SuffixOptions(Struct, frozen=True):
    """How suffixes are matched.

    The run that was found and the guesses have at most `max_tree_depth` tokens together, and there are at most
    `max_spec_factor` guesses for each token of the run. The answers of `max_cached_requests` are kept, the last ones.
    Guesses end before the first whose probability, by how often it came, is below `min_token_prob`.
    """

    max_tree_depth: int = 24
    max_cached_requests: int = 10_000
    max_spec_factor: float = 1.0
    min_token_prob: float = 0.1


SUFFIX_KEYS = tuple(_PREFIX + name for name in SuffixOptions.__struct_fields__)


def suffix_options(asked: Mapping[str, Any]) -> SuffixOptions:
    """The options in a speculative config. Raises OptionError for a value that is out of range."""
    default = SuffixOptions()
    return SuffixOptions(
        max_tree_depth=_whole(asked, "max_tree_depth", default.max_tree_depth, 2, _MOST_DEPTH),
        max_cached_requests=_whole(asked, "max_cached_requests", default.max_cached_requests, 0, _MOST_REQUESTS),
        max_spec_factor=_real(asked, "max_spec_factor", default.max_spec_factor, 0.1, 16.0),
        min_token_prob=_real(asked, "min_token_prob", default.min_token_prob, 0.0, 1.0),
    )


def _whole(asked: Mapping[str, Any], name: str, default: int, least: int, most: int) -> int:
    value = asked.get(_PREFIX + name, default)
    if type(value) is not int or not least <= value <= most:
        raise OptionError(
            f"--speculative-config: {_PREFIX}{name} must be a number from {least} to {most}, not {value!r}"
        )
    return value


def _real(asked: Mapping[str, Any], name: str, default: float, least: float, most: float) -> float:
    value = asked.get(_PREFIX + name, default)
    if type(value) not in (int, float) or not math.isfinite(value) or not least <= value <= most:
        raise OptionError(
            f"--speculative-config: {_PREFIX}{name} must be a number from {least:g} to {most:g}, not {value!r}"
        )
    return float(value)
