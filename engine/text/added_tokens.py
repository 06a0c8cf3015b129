"""The tokens that a folder's JSON files add to a vocabulary, which texts are searched for before they are split."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import AddedToken, processors

from ..errors import ModelError
from ..files.folder import read_json_if_there
from ..files.wording import shown

_ADDED = "added_tokens.json"
_SPECIAL = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
_MAX_ID = 1 << 22  # several times the largest that there are
# The library has a state for each of their characters, and takes microseconds for each token.
_MAX_ADDED, _MAX_ADDED_CHARACTERS = 1 << 18, 1 << 22
# The classes of models that have one, where no file names it.
_OF_MODELS = {
    **dict.fromkeys(("bart", "led", "longformer", "roberta"), "RobertaTokenizer"),
    **dict.fromkeys(("mt5", "t5"), "T5Tokenizer"),
    **dict.fromkeys(("qwen2", "qwen2_moe", "qwen3", "qwen3_moe"), "Qwen2Tokenizer"),
    "xlm-roberta": "XLMRobertaTokenizer",
}
_FURTHER = ("additional_special_tokens", "extra_special_tokens")


def tokenizer_class(folder: Path, config: Mapping[str, Any]) -> str | None:
    """The class that transformers would take, by `tokenizer_config.json`, else by `config.json`, if they tell."""
    model = read_json_if_there(folder / "config.json") if config.get("tokenizer_class") is None else {}
    named = (
        config.get("tokenizer_class") or model.get("tokenizer_class") or _OF_MODELS.get(str(model.get("model_type")))
    )
    return named.removesuffix("Fast") if isinstance(named, str) else None


def listed_tokens(folder: Path, config: Mapping[str, Any]) -> dict[int, AddedToken]:
    """The tokens that the files give ids, by these: of `tokenizer_config.json` first, then of `added_tokens.json`.

    Raises ModelError for entries that are not valid, and for too many.
    """
    by_id: dict[int, AddedToken] = {}
    try:
        for number, value in (config.get("added_tokens_decoder") or {}).items():
            by_id[_id(int(number))] = _added(value["content"], value.get("special") is True, value)
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise ModelError(
            f"{folder / 'tokenizer_config.json'}: added_tokens_decoder must have entries like "
            '"32000": {"content": "<|im_end|>"}'
        ) from error
    try:
        for text, number in read_json_if_there(folder / _ADDED).items():
            by_id.setdefault(_id(number), _added(text, False, {}))
    except (TypeError, ValueError) as error:
        raise ModelError(f'{folder / _ADDED} must have entries like "<|im_end|>": 32000') from error
    if len(by_id) > _MAX_ADDED or sum(len(token.content) for token in by_id.values()) > _MAX_ADDED_CHARACTERS:
        raise ModelError(
            f"{folder}: tokenizer_config.json and {_ADDED} may add at most {_MAX_ADDED} tokens with "
            f"{_MAX_ADDED_CHARACTERS} characters, and add {len(by_id)}"
        )
    return by_id


def special_tokens(folder: Path, config: Mapping[str, Any]) -> dict[str, Any]:
    """What `special_tokens_map.json` and `tokenizer_config.json` name: `bos_token` and the others."""
    return {**read_json_if_there(folder / "special_tokens_map.json"), **config}


def add_tokens(
    made: tokenizers.Tokenizer, folder: Path, config: Mapping[str, Any], names: Mapping[str, str] | None = None
) -> None:
    """Add the tokens that a text is searched for: those with ids, in the order of these, and special ones.

    `names` are a class's own special tokens, for those that no file names. Raises ModelError for an id that a token
    cannot have.
    """
    by_id = listed_tokens(folder, config)
    made.add_tokens([token for _, token in sorted(by_id.items(), key=lambda item: item[0])])
    for number, token in by_id.items():
        if made.token_to_id(token.content) != number:
            raise ModelError(
                f"{folder}: the added token {shown(token.content)} cannot have the id {number}, which "
                f"tokenizer_config.json or {_ADDED} gives it"
            )
    tokens, drafted = named_tokens(folder, config, names or {})
    made.add_tokens([t for t in tokens if t.content not in drafted or made.token_to_id(t.content) is not None])


def named_tokens(
    folder: Path, config: Mapping[str, Any], names: Mapping[str, str]
) -> tuple[list[AddedToken], set[str]]:
    """The special tokens, and those that no file names: a class guesses these, and they may not exist."""
    special = special_tokens(folder, config)
    further = [one for name in _FURTHER if isinstance(texts := special.get(name), list) for one in texts]
    named = [*(special.get(name, names.get(name)) for name in _SPECIAL), *further]
    drafted = {*names.values()} - {text_of(value) for value in (*special.values(), *further)}
    return [token for token in map(_token, named) if token is not None], drafted


def add_ends(
    made: tokenizers.Tokenizer,
    folder: Path,
    config: Mapping[str, Any],
    names: Mapping[str, str | None] | None = None,
    *,
    begins: bool = False,
) -> None:
    """Put bos and eos around a text if `add_bos_token` and `add_eos_token` say so.

    `names` are the names of the two tokens if no file has them. `begins` is the default of `add_bos_token`.
    """
    named = {**(names or {}), **special_tokens(folder, config)}
    bos = text_of(named.get("bos_token")) if config.get("add_bos_token", begins) else None
    put_around(made, bos, text_of(named.get("eos_token")) if config.get("add_eos_token", False) else None)


def put_around(made: tokenizers.Tokenizer, before: str | None, after: str | None) -> None:
    """Have special tokens put around a text, as far as the vocabulary has them."""
    first, last = ([t] if t is not None and made.token_to_id(t) is not None else [] for t in (before, after))
    if first or last:
        made.post_processor = processors.TemplateProcessing(
            single=[*first, "$A", *last],
            special_tokens=[(token, made.token_to_id(token)) for token in {*first, *last}],
        )


def _id(number: int) -> int:
    if type(number) is not int or not 0 <= number < _MAX_ID:
        raise ValueError
    return number


def _token(value: object) -> AddedToken | None:
    """A special token, as a config writes it: a text, or an object with one and how it is found."""
    text, fields = text_of(value), value if isinstance(value, dict) else {}
    return _added(text, fields.get("special") is not False, fields) if text else None


def _added(text: str, special: bool, fields: Mapping[str, object]) -> AddedToken:
    if not text:
        raise ValueError
    flags = {name: fields.get(name) is True for name in ("lstrip", "rstrip", "single_word", "normalized")}
    return AddedToken(text, special=special, **flags)


def text_of(value: object) -> str | None:
    """The text of a token, as a config writes it."""
    if isinstance(value, dict):
        value = value.get("content")
    return value if isinstance(value, str) else None
