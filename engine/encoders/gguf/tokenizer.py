"""The tokenizer of an encoder in a GGUF file, for texts and for pairs of them, as the original model's is."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import tokenizers
from tokenizers import AddedToken, models, normalizers, pre_tokenizers, processors

from ...errors import ModelError
from ...files.wording import shown
from ...text.piece_merges import MergedPieces
from ...text.sentencepiece_model import BPE, BYTE, CONTROL, UNKNOWN, USER_DEFINED, SentencePieceModel, check
from ...text.sentencepieces import merging
from ...text.tokenizer_backends import reading_tokenizer
from ...weights.gguf.fields import Fields
from ...weights.gguf.reader import GgufFile
from ...weights.gguf.tokenizer import Vocabulary, byte_level
from .models import ARCHITECTURES

_SPACE = "\u2581"  # how sentencepiece writes a space; in files of WordPiece it is before words


def tokenizer_in(file: GgufFile) -> tokenizers.Tokenizer:
    """The tokenizer. Raises ModelError, naming the file and the key, for a kind that is not supported or a broken one.

    Inputs have token types if it is a WordPiece, whose second text of a pair is of type 1.
    """
    fields = Fields(file, "tokenizer.ggml.")
    kind = fields.text("model")
    if kind not in _KINDS:
        raise ModelError(
            f"{file.path}: tokenizer {shown(kind)} is not supported in an embedding model; supported are "
            f"{', '.join(_KINDS)}"
        )
    vocabulary = Vocabulary(file, fields)
    with reading_tokenizer(file.path):
        return _KINDS[kind](file, fields, vocabulary)


def _word_pieces(file: GgufFile, fields: Fields, vocabulary: Vocabulary) -> tokenizers.Tokenizer:
    """BERT's. Files have a character before the pieces that begin words, in place of ## before all others."""
    added = {*vocabulary.of_type(UNKNOWN, CONTROL, USER_DEFINED)}
    ids: dict[str, int] = {}
    for token_id, token in enumerate(vocabulary.tokens):
        if token_id not in added:
            begins = token.startswith(_SPACE) and token != _SPACE
            token = token[1:] if begins else f"##{token}"
        if ids.setdefault(token, token_id) != token_id:
            raise ModelError(f"{file.path}: tokenizer.ggml.tokens has a token twice")
    unknown = vocabulary.special("unk")
    if unknown not in ids:
        raise fields.error("unknown_token_id", "the id of a token")
    made = tokenizers.Tokenizer(models.WordPiece(ids, unk_token=unknown))
    # Older files do not say it.
    cased = any(token != token.lower() for token_id, token in enumerate(vocabulary.tokens) if token_id not in added)
    lower = fields.flag("normalizer.lowercase", not cased)
    made.normalizer = normalizers.BertNormalizer(
        lowercase=lower, strip_accents=fields.flag("normalizer.strip_accents", lower)
    )
    made.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    ends = vocabulary.special("bos"), vocabulary.special("sep") or vocabulary.special("eos")
    return _finished(made, vocabulary, ends, second_type=1)


def _unigram(file: GgufFile, fields: Fields, vocabulary: Vocabulary) -> tokenizers.Tokenizer:
    """XLM-RoBERTa's: words are split into the pieces that have the best sum of scores."""
    if not (unknown := vocabulary.of_type(UNKNOWN)):
        raise fields.error("token_type", f"{UNKNOWN} for one token")
    pieces = [*zip(vocabulary.tokens, vocabulary.scores, strict=True)]
    made = tokenizers.Tokenizer(models.Unigram(pieces, unknown[0], bool(vocabulary.of_type(BYTE))))
    charsmap = fields.raw("precompiled_charsmap")
    if charsmap is not None:
        if not isinstance(charsmap, np.ndarray) or charsmap.dtype.itemsize != 1:
            raise fields.error("precompiled_charsmap", "an array of bytes")
        made.normalizer = normalizers.Precompiled(charsmap.tobytes())
    made.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.WhitespaceSplit(), pre_tokenizers.Metaspace(_SPACE)])
    return _finished(made, vocabulary, _ends(fields, vocabulary), between=2)


def _bytes(file: GgufFile, fields: Fields, vocabulary: Vocabulary) -> tokenizers.Tokenizer:
    """RoBERTa's, which has two separators in a pair, ModernBERT's, which has one, or a decoder's, which has none."""
    made, begins = byte_level(file, fields, vocabulary)
    if Fields(file).raw("general.architecture") not in ARCHITECTURES:
        return _finished(made, vocabulary, vocabulary.around(begins), between=0)
    steps = [] if made.normalizer is None else [made.normalizer]
    lower = fields.flag("normalizer.lowercase", False)
    if lower:
        steps.append(normalizers.Lowercase())
    if fields.flag("normalizer.strip_accents", False):
        steps += [normalizers.NFD(), normalizers.StripAccents()]
    if len(steps) > 1 or lower:
        made.normalizer = normalizers.Sequence(steps)
    return _finished(made, vocabulary, _ends(fields, vocabulary), between=1 + fields.flag("add_sep_token", False))


def _merged(file: GgufFile, fields: Fields, vocabulary: Vocabulary) -> tokenizers.Tokenizer:
    """Gemma's and Mistral's: pieces are merged by score. What is not in them is bytes."""
    model = SentencePieceModel(
        pieces=vocabulary.tokens,
        scores=vocabulary.scores,
        kinds=vocabulary.types,
        model_type=BPE,
        byte_fallback=bool(vocabulary.of_type(BYTE)),
        remove_extra_whitespaces=fields.flag("remove_extra_whitespaces", False),
    )
    check(model)
    has_prefix = fields.flag("add_space_prefix", True)
    pieces = MergedPieces(model, {})
    changes_ends = has_prefix or model.remove_extra_whitespaces
    if not pieces.is_exact or (changes_ends and vocabulary.of_type(USER_DEFINED)):
        raise ModelError(f"{file.path}: texts would be split into other pieces than by sentencepiece")
    made = merging(model, pieces, "always" if has_prefix else None)
    return _finished(made, vocabulary, vocabulary.around(begins=True), between=0)


_KINDS: dict[str, Callable[[GgufFile, Fields, Vocabulary], tokenizers.Tokenizer]] = {
    "bert": _word_pieces,
    "t5": _unigram,
    "gpt2": _bytes,
    "llama": _merged,
}


def _ends(fields: Fields, vocabulary: Vocabulary) -> tuple[str | None, str | None]:
    """The tokens before and after a text. Where the file is silent there are both."""
    bos = vocabulary.special("bos") if fields.flag("add_bos_token", True) else None
    eos = vocabulary.special("sep") or vocabulary.special("eos") if fields.flag("add_eos_token", True) else None
    return bos, eos


def _finished(
    made: tokenizers.Tokenizer,
    vocabulary: Vocabulary,
    ends: tuple[str | None, str | None],
    *,
    between: int = 1,
    second_type: int = 0,
) -> tokenizers.Tokenizer:
    """With the tokens that texts are cut at first, and those around every text: its last one also stands `between` the
    texts of a pair, as often as that says. A mask takes the space before it, except in BERT.
    """
    mask = None if second_type else vocabulary.special("mask")
    for kinds, special in (((UNKNOWN, CONTROL), True), ((USER_DEFINED,), False)):
        texts = [vocabulary.tokens[token_id] for token_id in vocabulary.of_type(*kinds)]
        made.add_tokens([
            AddedToken(text, special=special, normalized=not special, lstrip=text == mask) for text in texts if text
        ])  # fmt: skip
    first, last = ([] if token is None else [token] for token in ends)
    second = [f"{piece}:{second_type}" for piece in ("$B", *last)]
    made.post_processor = processors.TemplateProcessing(
        single=[*first, "$A", *last],
        pair=[*first, "$A", *last * between, *second],
        special_tokens=[(token, made.token_to_id(token)) for token in {*first, *last}],
    )
    return made
