"""Tokenizers of sentencepiece's models, by the tokenizers library where it splits texts as sentencepiece does."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import tokenizers
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers

from ..errors import ModelError
from ..files.reading import is_there
from .added_tokens import add_ends, add_tokens, listed_tokens, named_tokens, put_around, special_tokens, text_of
from .piece_merges import MergedPieces
from .piece_texts import SPACE, first_spaces
from .sentencepiece_model import CONTROL, UNIGRAM, UNKNOWN, USER_DEFINED, SentencePieceModel, read_sentencepiece_model
from .tokenizer_backends import SentencePieceBackend, TokenizerBackend, TokenizersBackend, reading_tokenizer

PrefixScheme = Literal["first", "always"]
"""Before a text, or also behind each added token in it."""

_MODEL = "tokenizer.model"
SENTENCEPIECE_MODELS = (_MODEL, "spiece.model", "sentencepiece.bpe.model", "spm.model")
_EXTRA_ID, _NUM_EXTRA_IDS, _MAX_EXTRA_IDS = "<extra_id_{}>", 100, 1 << 14


def sentencepiece_file(folder: Path) -> Path | None:
    """The file in a model folder that is a model of sentencepiece."""
    return next((path for name in SENTENCEPIECE_MODELS if is_there(path := folder / name)), None)


def load_sentencepieces(path: Path, config: Mapping[str, Any], class_name: str | None) -> TokenizerBackend | None:
    """The tokenizer of a file that `sentencepiece_file` has found. None if its class has rules of its own.

    Raises ModelError for files that are broken, or do not fit each other.
    """
    own = {"T5Tokenizer": _t5, "XLMRobertaTokenizer": _xlm_roberta}.get(class_name or "")
    if own is None and path.name != _MODEL:
        return None
    model = read_sentencepiece_model(path)
    added = listed_tokens(path.parent, config)
    with reading_tokenizer(path):
        if own is None:
            made = _merged(model, path, config, added)
        elif model.model_type == UNIGRAM:
            made = own(model, path, config)
        else:
            return None
        if made is None:
            return SentencePieceBackend(
                path,
                {**config, "added_tokens_decoder": _all_added(model, path, config, added)},
                first_spaces=None
                if model.denormalizes or model.whitespace_is_suffix
                else first_spaces(model.add_dummy_prefix, model.remove_extra_whitespaces),
            )
        backend = TokenizersBackend(made)
        backend.decode(backend.encode("a", add_special_tokens=True), skip_special_tokens=False)
        return backend


def _all_added(
    model: SentencePieceModel, path: Path, config: Mapping[str, Any], added: Mapping[int, AddedToken]
) -> dict[str, dict[str, object]]:
    """All tokens that a text is searched for, as `added_tokens_decoder` has them."""
    found = {i: (piece, True) for i, piece in enumerate(model.pieces) if model.kinds[i] in (CONTROL, UNKNOWN)}
    found |= {i: (token.content, token.special) for i, token in added.items()}
    ids = {**{piece: i for i, piece in enumerate(model.pieces)}, **{text: i for i, (text, _) in found.items()}}
    free = max(len(model.pieces), *(i + 1 for i in found))
    for token in named_tokens(path.parent, config, {})[0]:
        found[ids.setdefault(token.content, free)] = token.content, True
        free = max(free, ids[token.content] + 1)
    return {str(i): {"content": text, "special": special} for i, (text, special) in found.items()}


def _merged(
    model: SentencePieceModel, path: Path, config: Mapping[str, Any], added: Mapping[int, AddedToken]
) -> tokenizers.Tokenizer | None:
    """As Llama and Gemma have it: pairs are merged by score. None if sentencepiece would split some texts otherwise."""
    pieces = MergedPieces(model, added)
    has_prefix = model.add_dummy_prefix and config.get("add_prefix_space") is not False
    user_defined = pieces.of_kind(USER_DEFINED)
    spaced = [piece for piece in user_defined if SPACE in piece]
    contents = {token.content for token in added.values()}
    # With spaces changed at the ends, or one put before the text, such a piece would be looked for too early.
    changes_ends = has_prefix or model.remove_extra_whitespaces
    if not pieces.is_exact or (changes_ends and (spaced or not contents.issuperset(user_defined))):
        return None
    scheme: PrefixScheme = "first" if config.get("legacy") is False else "always"
    made = merging(model, pieces, scheme if has_prefix else None)
    steps = [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    made.decoder = decoders.Sequence([*steps, decoders.Strip(" ", 1, 0)] if changes_ends else steps)
    _add_structure(made, pieces.of_kind(CONTROL, UNKNOWN))
    made.add_tokens([AddedToken(piece, special=False, normalized=True) for piece in user_defined])
    add_tokens(made, path.parent, config)
    # What a file says of a piece with spaces is about texts whose spaces are such characters already.
    special = {token.content for token in added.values() if token.special}
    made.add_tokens([AddedToken(piece, special=piece in special, normalized=True) for piece in spaced])
    named = {"bos_token": model.control(model.bos_piece), "eos_token": model.control(model.eos_piece)}
    add_ends(made, path.parent, config, named, begins=True)
    return made


def merging(model: SentencePieceModel, pieces: MergedPieces, prefix: PrefixScheme | None) -> tokenizers.Tokenizer:
    """What splits texts into pieces whose merges are exact, without added tokens. `prefix` says where a space comes
    before texts.
    """
    made = tokenizers.Tokenizer(
        models.BPE(
            {name: i for i, name in enumerate(pieces.names)},
            pieces.merges,
            unk_token=pieces.names[model.unknown],
            fuse_unk=True,
            byte_fallback=model.byte_fallback,
        )
    )
    spaces = normalizers.Replace(" ", SPACE)
    if model.remove_extra_whitespaces:
        # Each run is looked at from its first character alone: a text may have many thousands.
        ends = normalizers.Replace(Regex(rf"\A +|(?<![ {SPACE}])[ {SPACE}]+\z"), "")
        made.normalizer = normalizers.Sequence([ends, normalizers.Replace(Regex(" {2,}"), " "), spaces])
    else:
        made.normalizer = spaces
    if prefix is not None:
        # In two steps, because a Metaspace puts no space before a text that begins with one.
        first = pre_tokenizers.Metaspace(" ", prepend_scheme=prefix, split=False)
        replaced = pre_tokenizers.Metaspace(SPACE, prepend_scheme="never", split=False)
        made.pre_tokenizer = pre_tokenizers.Sequence([first, replaced])
    return made


def _t5(model: SentencePieceModel, path: Path, config: Mapping[str, Any]) -> tokenizers.Tokenizer:
    """T5's: words, their end, and sentinels behind the pieces, the first of them last."""
    number = config.get("extra_ids", _NUM_EXTRA_IDS)
    if type(number) is not int or not 0 <= number <= _MAX_EXTRA_IDS:
        raise ModelError(f"{path.parent}: extra_ids in tokenizer_config.json must be from 0 to {_MAX_EXTRA_IDS}")
    sentinels = [_EXTRA_ID.format(i) for i in reversed(range(number))]
    pieces = [*zip(model.pieces, model.scores, strict=True), *((sentinel, 0.0) for sentinel in sentinels)]
    made = _words(model, pieces, model.unknown)
    _add_structure(made, [*model.of_kind(CONTROL), *model.of_kind(UNKNOWN), *sentinels])
    add_tokens(made, path.parent, config)
    put_around(made, None, text_of(special_tokens(path.parent, config).get("eos_token", model.eos_piece)))
    return made


def _xlm_roberta(model: SentencePieceModel, path: Path, config: Mapping[str, Any]) -> tokenizers.Tokenizer:
    """XLM-RoBERTa's: other special tokens before the pieces, and a mask behind them."""
    names = {
        "bos_token": "<s>",
        "pad_token": "<pad>",
        "eos_token": "</s>",
        "unk_token": "<unk>",
        "mask_token": "<mask>",
    }
    named = {**names, "cls_token": "<s>", "sep_token": "</s>"}
    *first, last = names.values()
    pieces = [*zip(model.pieces, model.scores, strict=True)][3:]
    made = _words(model, [*((name, 0.0) for name in first), *pieces, (last, 0.0)], len(first) - 1)
    add_tokens(made, path.parent, config, named)
    named |= special_tokens(path.parent, config)
    put_around(made, text_of(named["bos_token"]), text_of(named["eos_token"]))
    return made


def _words(model: SentencePieceModel, pieces: list[tuple[str, float]], unknown: int) -> tokenizers.Tokenizer:
    """Words are split into the pieces that have the best sum of scores."""
    made = tokenizers.Tokenizer(models.Unigram(pieces, unknown, False))
    if model.charsmap:
        made.normalizer = normalizers.Precompiled(model.charsmap)
    made.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.WhitespaceSplit(), pre_tokenizers.Metaspace(SPACE)])
    made.decoder = decoders.Metaspace(SPACE)
    return made


def _add_structure(made: tokenizers.Tokenizer, texts: list[str]) -> None:
    made.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in texts])
