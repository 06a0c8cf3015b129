"""The options of drafts: tokens that are guessed, and kept where the model samples the same."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, cast, get_args

from msgspec import Struct

from .declaring.option import OptionError, Options, option
from .declaring.values import at_least, count, json_object
from .suffix_options import SUFFIX_KEYS, SuffixOptions, suffix_options
from .weights.quantization import Method
from .weights.quantized import QUANTIZATION_ALIASES, CheckpointMethod

_NGRAM = ("ngram", "[ngram]")
_SUFFIX, _DRAFT_MODEL, _MTP, _EAGLE3 = "suffix", "draft_model", "mtp", "eagle3"
# vLLM's names for the same, by the family that has the layer.
_MTP_NAMES = (
    *(_MTP, "deepseek_mtp", "mimo_mtp", "glm4_moe_mtp", "glm4_moe_lite_mtp", "ernie_mtp", "qwen3_next_mtp"),
    *("qwen3_5_mtp", "exaone_moe_mtp", "longcat_flash_mtp", "nemotron_h_mtp"),
)
_MOST_TOKENS, _LONGEST_RUN = 64, 32
_DEFAULT_TOKENS, _DEFAULT_RUN, _DEFAULT_PREDICTED = 8, 4, 3
_COMMON_KEYS = ("method", "model", "num_speculative_tokens", "disable_by_batch_size", "max_model_len")
_KEYS = {
    "ngram": (*_COMMON_KEYS, "prompt_lookup_max", "prompt_lookup_min"),
    _SUFFIX: (*_COMMON_KEYS, *SUFFIX_KEYS),
    _MTP: tuple(key for key in _COMMON_KEYS if key != "model"),
    _EAGLE3: (*_COMMON_KEYS, "revision", "draft_tensor_parallel_size"),
    _DRAFT_MODEL: (*_COMMON_KEYS, "revision", "quantization", "draft_tensor_parallel_size"),
}


class Speculation(Struct, frozen=True):
    """Drafts from runs of `shortest` to `longest` tokens that were seen before, of at most `num_tokens` tokens.

    With `suffix` they are made by that method instead.

    None are made for sequences of more than `most_context` tokens, nor while more than `most_sequences` decode.
    """

    num_tokens: int
    longest: int
    shortest: int
    most_sequences: int | None = None
    most_context: int | None = None
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
    most_sequences: int | None = None
    most_context: int | None = None


class Mtp(Struct, frozen=True):
    """Drafts of at most `num_tokens` tokens from the checkpoint's own layer for that. The rest is as in Speculation."""

    num_tokens: int
    most_sequences: int | None = None
    most_context: int | None = None


class Eagle3(Struct, frozen=True):
    """Drafts of at most `num_tokens` tokens from a layer that was trained for the model: a folder or a hub id.

    The rest is as in Speculation.
    """

    model: str
    num_tokens: int
    revision: str | None = None
    most_sequences: int | None = None
    most_context: int | None = None


@dataclass(frozen=True)
class SpeculativeOptions(Options):
    """How tokens are guessed. Raises OptionError for a method that is not there, and for keys that it does not have."""

    speculative_config: Mapping[str, Any] | None = option(
        None,
        'guess tokens that come, e.g. {"method": "ngram", "num_speculative_tokens": 8}; answers stay the same',
        parse=json_object,
        metavar="JSON",
    )
    speculative_model: str | None = option(
        None, "what guesses: a small model's folder or hub id, [ngram] or suffix", metavar="NAME"
    )
    speculative_model_quantization: str | None = option(
        None, "as --quantization, of the small model [the same]", metavar="METHOD"
    )
    speculative_draft_tensor_parallel_size: int | None = option(
        None,
        "1, or as --tensor-parallel-size: both models share the cores",
        parse=count,
        check=at_least(1),
        metavar="N",
    )
    num_speculative_tokens: int | None = option(
        None, f"most tokens to guess at a time [{_DEFAULT_TOKENS}]", parse=count, check=at_least(1), metavar="N"
    )
    ngram_prompt_lookup_max: int | None = option(
        None,
        f"the longest run of last tokens to look for [{_DEFAULT_RUN}]",
        parse=count,
        check=at_least(1),
        metavar="N",
    )
    ngram_prompt_lookup_min: int | None = option(
        None, "the shortest such run [1]", parse=count, check=at_least(1), metavar="N"
    )
    speculative_disable_by_batch_size: int | None = option(
        None, "guess nothing while more sequences decode [any number]", parse=count, check=at_least(1), metavar="N"
    )
    speculative_max_model_len: int | None = option(
        None, "guess nothing for longer sequences [the context]", parse=count, check=at_least(1), metavar="TOKENS"
    )

    @property
    def speculation(self) -> Speculation | DraftModel | Mtp | Eagle3 | None:
        """What was asked for; None: nothing is guessed. Raises OptionError."""
        asked = self._asked()
        if not asked:
            return None
        method = asked.get("method") or (asked.get("model") if asked.get("model") in (*_NGRAM, _SUFFIX) else None)
        if method is None and asked.get("model") is not None:
            method = _DRAFT_MODEL
        method = "ngram" if method in _NGRAM else _MTP if method in _MTP_NAMES else method
        if method not in _KEYS:
            raise OptionError(
                f"--speculative-config: the method {method!r} is not supported; "
                '{"method": "ngram"} guesses from the text itself, {"method": "suffix"} from earlier answers too, '
                '{"method": "mtp"} with the checkpoint\'s own layer for it, '
                '{"method": "eagle3", "model": "..."} with a layer that was trained for the model, and '
                '{"method": "draft_model", "model": "..."} with a small model'
            )
        if unknown := sorted(asked.keys() - {*_KEYS[method]}):
            raise OptionError(
                f"--speculative-config: {', '.join(unknown)} is not supported with {method}; there are "
                f"{', '.join(_KEYS[method])}"
            )
        if method == _DRAFT_MODEL:
            return _draft_model(asked)
        if method == _MTP:
            return _mtp(asked)
        if method == _EAGLE3:
            return _eagle3(asked)
        return _suffix(asked) if method == _SUFFIX else _ngram(asked)

    def _asked(self) -> dict[str, Any]:
        """The config, with what the older flags say in its words."""
        flags = {
            "model": self.speculative_model,
            "quantization": self.speculative_model_quantization,
            "draft_tensor_parallel_size": self.speculative_draft_tensor_parallel_size,
            "num_speculative_tokens": self.num_speculative_tokens,
            "prompt_lookup_max": self.ngram_prompt_lookup_max,
            "prompt_lookup_min": self.ngram_prompt_lookup_min,
            "disable_by_batch_size": self.speculative_disable_by_batch_size,
            "max_model_len": self.speculative_max_model_len,
        }
        return {**{key: value for key, value in flags.items() if value is not None}, **(self.speculative_config or {})}

    def _contradiction(self) -> str | None:
        try:
            self.speculation  # noqa: B018
        except OptionError as error:
            return str(error)
        return None


def _ngram(asked: Mapping[str, Any]) -> Speculation:
    if asked.get("model") not in (None, *_NGRAM):
        raise OptionError("--speculative-config: ngram has no model; leave it out")
    shortest = _number(asked, "prompt_lookup_min", _LONGEST_RUN) or 1
    longest = _number(asked, "prompt_lookup_max", _LONGEST_RUN) or max(_DEFAULT_RUN, shortest)
    if shortest > longest:
        raise OptionError(
            f"--speculative-config: prompt_lookup_min {shortest} is more than prompt_lookup_max {longest}"
        )
    return Speculation(
        num_tokens=_number(asked, "num_speculative_tokens", _MOST_TOKENS) or _DEFAULT_TOKENS,
        longest=longest,
        shortest=shortest,
        most_sequences=_number(asked, "disable_by_batch_size"),
        most_context=_number(asked, "max_model_len"),
    )


def _suffix(asked: Mapping[str, Any]) -> Speculation:
    if asked.get("model") not in (None, _SUFFIX):
        raise OptionError("--speculative-config: suffix has no model; leave it out")
    suffix = suffix_options(asked)
    return Speculation(
        num_tokens=_number(asked, "num_speculative_tokens", _MOST_TOKENS) or min(suffix.max_tree_depth, _MOST_TOKENS),
        longest=1,
        shortest=1,
        most_sequences=_number(asked, "disable_by_batch_size"),
        most_context=_number(asked, "max_model_len"),
        suffix=suffix,
    )


def _mtp(asked: Mapping[str, Any]) -> Mtp:
    return Mtp(
        num_tokens=_number(asked, "num_speculative_tokens", _MOST_TOKENS) or _DEFAULT_PREDICTED,
        most_sequences=_number(asked, "disable_by_batch_size"),
        most_context=_number(asked, "max_model_len"),
    )


def _eagle3(asked: Mapping[str, Any]) -> Eagle3:
    model = _text(asked, "model")
    if model is None:
        raise OptionError("--speculative-config: eagle3 needs a model: the folder or hub id of an EAGLE3 checkpoint")
    if (_number(asked, "draft_tensor_parallel_size") or 1) != 1:
        raise OptionError(
            "--speculative-config: draft_tensor_parallel_size must be 1 with eagle3: its layer computes on the model's "
            "cores"
        )
    return Eagle3(
        model=model,
        num_tokens=_number(asked, "num_speculative_tokens", _MOST_TOKENS) or _DEFAULT_PREDICTED,
        revision=_text(asked, "revision"),
        most_sequences=_number(asked, "disable_by_batch_size"),
        most_context=_number(asked, "max_model_len"),
    )


def _draft_model(asked: Mapping[str, Any]) -> DraftModel:
    model = _text(asked, "model")
    if model is None or model in _NGRAM:
        raise OptionError("--speculative-config: draft_model needs a model: a folder, a .gguf file or a hub id")
    quantization, methods = _text(asked, "quantization"), (*get_args(Method), *get_args(CheckpointMethod))
    quantization = QUANTIZATION_ALIASES.get(quantization, quantization) if quantization else None
    if quantization is not None and quantization not in methods:
        raise OptionError(
            f"--speculative-config: quantization must be one of {', '.join(methods)}, not {quantization!r}"
        )
    return DraftModel(
        model=model,
        num_tokens=_number(asked, "num_speculative_tokens", _MOST_TOKENS) or _DEFAULT_TOKENS,
        revision=_text(asked, "revision"),
        quantization=cast("Method | CheckpointMethod | None", quantization),
        tensor_parallel_size=_number(asked, "draft_tensor_parallel_size") or 1,
        most_sequences=_number(asked, "disable_by_batch_size"),
        most_context=_number(asked, "max_model_len"),
    )


def _text(asked: Mapping[str, Any], key: str) -> str | None:
    value = asked.get(key)
    if value is not None and not isinstance(value, str):
        raise OptionError(f"--speculative-config: {key} must be a string, not {value!r}")
    return value or None


def _number(asked: Mapping[str, Any], key: str, most: int | None = None) -> int | None:
    value = asked.get(key)
    if value is None:
        return None
    if type(value) is not int or value < 1 or (most is not None and value > most):
        limit = "" if most is None else f" and at most {most}"
        raise OptionError(f"--speculative-config: {key} must be a number of at least 1{limit}, not {value!r}")
    return value
