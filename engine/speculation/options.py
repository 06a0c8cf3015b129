"""The options of drafts: tokens that are drafted, and kept where the model samples the same."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any, cast, get_args

from msgspec import Struct

from ..declaring.option import OptionError, Options, option, options_of
from ..declaring.record import record
from ..declaring.values import at_least, count, json_object
from ..weights.quantization import Method
from ..weights.quantized import QUANTIZATION_ALIASES, CheckpointMethod
from .option_keys import CONFIG, SpeculativeKeys
from .suffix_options import SUFFIX_KEYS, SuffixOptions, suffix_options

_NGRAM = ("ngram", "[ngram]")
_SUFFIX, _DRAFT_MODEL, _MTP, _EAGLE3 = "suffix", "draft_model", "mtp", "eagle3"
_OF_FAMILY = "_mtp"  # behind a family's name, vLLM's name for the same
_MAX_TOKENS, _LONGEST_RUN = 64, 32
_DEFAULT_TOKENS, _DEFAULT_RUN, _DEFAULT_HEAD = 8, 4, 3
_COMMON_KEYS = ("method", "model", "num_speculative_tokens", "disable_by_batch_size", "max_model_len")
_KEYS = {
    "ngram": (*_COMMON_KEYS, "prompt_lookup_max", "prompt_lookup_min"),
    _SUFFIX: (*_COMMON_KEYS, *SUFFIX_KEYS),
    _MTP: tuple(key for key in _COMMON_KEYS if key != "model"),
    _EAGLE3: (*_COMMON_KEYS, "revision", "draft_tensor_parallel_size"),
    _DRAFT_MODEL: (*_COMMON_KEYS, "revision", "quantization", "draft_tensor_parallel_size"),
}

_METHODS = (
    '{"method": "ngram"} drafts from the text itself, {"method": "suffix"} from earlier answers too, '
    '{"method": "mtp"} with the checkpoint\'s own layer for it, '
    '{"method": "eagle3", "model": "..."} with a layer that was trained for the model, and '
    '{"method": "draft_model", "model": "..."} with a small model'
)


class Speculation(Struct, frozen=True):
    """Drafts from runs of `shortest` to `longest` tokens that were seen before, of at most `num_tokens` tokens.

    With `suffix` they are made by that method instead.

    None are made for sequences of more than `max_context` tokens, nor while more than `max_sequences` decode.
    """

    num_tokens: int
    longest: int
    shortest: int
    max_sequences: int | None = None
    max_context: int | None = None
    suffix: SuffixOptions | None = None


class DraftModel(Struct, frozen=True):
    """Drafts of at most `num_tokens` tokens from a small model: a folder, a .gguf file or a hub id.

    Its weights are stored as the large one's if `quantization` is None. The rest is as in Speculation.
    """

    model: str
    num_tokens: int
    revision: str | None = None
    quantization: Method | CheckpointMethod | None = None
    tensor_parallel_size: int = 1
    max_sequences: int | None = None
    max_context: int | None = None


class Mtp(Struct, frozen=True):
    """Drafts of at most `num_tokens` tokens from the checkpoint's own layer for that. The rest is as in Speculation."""

    num_tokens: int
    max_sequences: int | None = None
    max_context: int | None = None


class Eagle3(Struct, frozen=True):
    """Drafts of at most `num_tokens` tokens from a layer that was trained for the model: a folder or a hub id.

    The rest is as in Speculation.
    """

    model: str
    num_tokens: int
    revision: str | None = None
    max_sequences: int | None = None
    max_context: int | None = None


@record(frozen=True)
class SpeculativeOptions(Options):
    """How tokens are drafted. Raises OptionError for a method that is not there, and for keys that it does not have."""

    speculative_config: Mapping[str, Any] | None = option(
        None,
        'draft upcoming tokens, e.g. {"method": "ngram", "num_speculative_tokens": 8}; answers stay the same',
        parse=json_object,
        metavar="JSON",
    )
    speculative_model: str | None = option(
        None, "what makes drafts: a small model's folder or hub id, [ngram] or suffix", metavar="NAME"
    )
    speculative_model_quantization: str | None = option(
        None, "--quantization of the small model [the same]", metavar="METHOD"
    )
    speculative_draft_tensor_parallel_size: int | None = option(
        None,
        "1, or the value of --tensor-parallel-size: both models share the cores",
        parse=count,
        check=at_least(1),
        metavar="N",
    )
    num_speculative_tokens: int | None = option(
        None, f"most tokens to draft at a time [{_DEFAULT_TOKENS}]", parse=count, check=at_least(1), metavar="N"
    )
    ngram_prompt_lookup_max: int | None = option(
        None,
        f"the longest n-gram to look for [{_DEFAULT_RUN}]",
        parse=count,
        check=at_least(1),
        metavar="N",
    )
    ngram_prompt_lookup_min: int | None = option(
        None, "the shortest n-gram to look for [1]", parse=count, check=at_least(1), metavar="N"
    )
    speculative_disable_by_batch_size: int | None = option(
        None,
        "draft nothing while more than this many sequences decode [no limit]",
        parse=count,
        check=at_least(1),
        metavar="N",
    )
    speculative_max_model_len: int | None = option(
        None,
        "draft nothing for sequences longer than this [the context]",
        parse=count,
        check=at_least(1),
        metavar="TOKENS",
    )

    @property
    def speculation(self) -> Speculation | DraftModel | Mtp | Eagle3 | None:
        """What was asked for; None: nothing is drafted. Raises OptionError, which lists all that is wrong."""
        asked = SpeculativeKeys(self.speculative_config or {}, self._flags())
        if not asked:
            return None
        found = _found(asked)
        asked.mistakes.raise_any()
        return found

    def without_effect(self) -> list[str]:
        """What to tell of the keys that were given and have no effect."""
        return SpeculativeKeys(self.speculative_config or {}, {}).notes

    def _flags(self) -> dict[str, tuple[str, Any]]:
        """The values of the older flags, by the config's keys."""
        flags = {declared.field: declared.flag for declared in options_of(type(self))}
        given = {key: (flags[name], getattr(self, name)) for name, key in _KEY_OF.items()}
        return {key: (flag, value) for key, (flag, value) in given.items() if value is not None}

    def _contradictions(self) -> Iterator[str]:
        try:
            self.speculation  # noqa: B018
        except OptionError as error:
            yield from error.sentences


_KEY_OF = {
    "speculative_model": "model",
    "speculative_model_quantization": "quantization",
    "speculative_draft_tensor_parallel_size": "draft_tensor_parallel_size",
    "num_speculative_tokens": "num_speculative_tokens",
    "ngram_prompt_lookup_max": "prompt_lookup_max",
    "ngram_prompt_lookup_min": "prompt_lookup_min",
    "speculative_disable_by_batch_size": "disable_by_batch_size",
    "speculative_max_model_len": "max_model_len",
}
"""The config's keys, by the options that say the same."""


def _found(asked: SpeculativeKeys) -> Speculation | DraftModel | Mtp | Eagle3 | None:
    """What was asked for; None for an unknown method. That and all other mistakes are noted."""
    model, method = asked.text("model"), asked.text("method")
    if any(asked.get(key) and value is None for key, value in (("model", model), ("method", method))):
        return None  # it is no text
    if method is None and model is not None:
        # As vLLM has it, the name of a checkpoint tells the layer from a small model.
        of_checkpoint = _EAGLE3 if _EAGLE3 in model.lower() else _DRAFT_MODEL
        method = model if model in (*_NGRAM, _SUFFIX) else of_checkpoint
    if method is not None:
        method = "ngram" if method in _NGRAM else _MTP if method.endswith(_OF_FAMILY) else method
    if method is None:
        asked.lack(f"a method, which {CONFIG} names: {_METHODS}")
        return None
    if method not in _KEYS:
        asked.mistakes.add(f"{CONFIG}: the method {method!r} is not supported; {_METHODS}")
        return None
    asked.allow_only(_KEYS[method], method)
    return _READERS[method](asked)


def _ngram(asked: SpeculativeKeys) -> Speculation:
    if asked.get("model") not in (None, *_NGRAM):
        asked.mistakes.add(f"{CONFIG}: ngram has no model; leave it out")
    shortest = asked.number("prompt_lookup_min", _LONGEST_RUN) or 1
    longest = asked.number("prompt_lookup_max", _LONGEST_RUN) or max(_DEFAULT_RUN, shortest)
    if shortest > longest:
        asked.add("prompt_lookup_min", f"{shortest} is more than prompt_lookup_max {longest}")
    return Speculation(longest=longest, shortest=shortest, **_common(asked, _DEFAULT_TOKENS))


def _suffix(asked: SpeculativeKeys) -> Speculation:
    if asked.get("model") not in (None, _SUFFIX):
        asked.mistakes.add(f"{CONFIG}: suffix has no model; leave it out")
    suffix = suffix_options(asked)
    num_tokens = min(suffix.max_tree_depth, _MAX_TOKENS)
    return Speculation(longest=1, shortest=1, suffix=suffix, **_common(asked, num_tokens))


def _mtp(asked: SpeculativeKeys) -> Mtp:
    return Mtp(**_common(asked, _DEFAULT_HEAD))


def _eagle3(asked: SpeculativeKeys) -> Eagle3:
    model = asked.text("model") or ""
    if not model:
        asked.mistakes.add(f"{CONFIG}: eagle3 needs a model: the folder or hub id of an EAGLE3 checkpoint")
    if (asked.number("draft_tensor_parallel_size") or 1) != 1:
        asked.add("draft_tensor_parallel_size", "must be 1 with eagle3: its layer computes on the model's cores")
    return Eagle3(model=model, revision=asked.text("revision"), **_common(asked, _DEFAULT_HEAD))


def _draft_model(asked: SpeculativeKeys) -> DraftModel:
    model = asked.text("model") or ""
    if not model or model in _NGRAM:
        asked.mistakes.add(f"{CONFIG}: draft_model needs a model: a folder, a .gguf file or a hub id")
    quantization, methods = asked.text("quantization"), (*get_args(Method), *get_args(CheckpointMethod))
    quantization = QUANTIZATION_ALIASES.get(quantization, quantization) if quantization else None
    if quantization is not None and quantization not in methods:
        asked.add("quantization", f"must be one of {', '.join(methods)}, not {quantization!r}")
    return DraftModel(
        model=model,
        revision=asked.text("revision"),
        quantization=cast("Method | CheckpointMethod | None", quantization),
        tensor_parallel_size=asked.number("draft_tensor_parallel_size") or 1,
        **_common(asked, _DEFAULT_TOKENS),
    )


def _common(asked: SpeculativeKeys, default_tokens: int) -> dict[str, Any]:
    return {
        "num_tokens": asked.number("num_speculative_tokens", _MAX_TOKENS) or default_tokens,
        "max_sequences": asked.number("disable_by_batch_size"),
        "max_context": asked.number("max_model_len"),
    }


_READERS: Mapping[str, Callable[[SpeculativeKeys], Speculation | DraftModel | Mtp | Eagle3]] = {
    "ngram": _ngram,
    _SUFFIX: _suffix,
    _MTP: _mtp,
    _EAGLE3: _eagle3,
    _DRAFT_MODEL: _draft_model,
}
