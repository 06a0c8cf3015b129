"""SuffixOptions: the options of the method `suffix`, under vLLM's names."""

from __future__ import annotations

from msgspec import Struct

from .option_keys import SpeculativeKeys

_MAX_DEPTH, _MAX_REQUESTS = 256, 100_000
_PREFIX = "suffix_decoding_"


class SuffixOptions(Struct, frozen=True):
    """How suffixes are matched.

    The run that was found and the draft tokens have at most `max_tree_depth` tokens together, and there are at most
    `max_spec_factor` draft tokens for each token of the run. The answers of `max_cached_requests` are kept, the last
    ones. Draft tokens end before the first whose probability, by how often it came, is below `min_token_prob`.
    """

    max_tree_depth: int = 24
    max_cached_requests: int = 10_000
    max_spec_factor: float = 1.0
    min_token_prob: float = 0.1


SUFFIX_KEYS = tuple(_PREFIX + name for name in SuffixOptions.__struct_fields__)


def suffix_options(asked: SpeculativeKeys) -> SuffixOptions:
    """The options in a speculative config, which notes the values that are out of range."""
    default = SuffixOptions()
    return SuffixOptions(
        max_tree_depth=asked.whole(_PREFIX + "max_tree_depth", default.max_tree_depth, 2, _MAX_DEPTH),
        max_cached_requests=asked.whole(_PREFIX + "max_cached_requests", default.max_cached_requests, 0, _MAX_REQUESTS),
        max_spec_factor=asked.real(_PREFIX + "max_spec_factor", default.max_spec_factor, 0.1, 16.0),
        min_token_prob=asked.real(_PREFIX + "min_token_prob", default.min_token_prob, 0.0, 1.0),
    )
