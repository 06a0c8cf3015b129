"""The tokenizer, chat template and special tokens of a GGUF file's metadata."""

from __future__ import annotations

import functools

import numpy as np
import tokenizers
from tokenizers import AddedToken, decoders, models, normalizers, processors

from ...errors import ModelError
from ...files.reading import MAX_TEMPLATE_BYTES
from ...files.wording import shown
from ...text.piece_texts import SPACE, first_spaces
from ...text.splitting import SPLITTINGS
from ...text.tokenizer import ChatTemplate, Tokenizer
from ...text.tokenizer_backends import (
    SentencePieceBackend,
    TokenizerBackend,
    TokenizersBackend,
    reading_tokenizer,
)
from .fields import Fields
from .reader import GgufFile

_NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED, _UNUSED, _BYTE = 1, 2, 3, 4, 5, 6
# The library has a state for each of their characters, and takes microseconds for each token.
_MAX_ADDED, _MAX_ADDED_CHARACTERS = 1 << 18, 1 << 22
_SPECIAL = {"bos": "bos", "eos": "eos", "unk": "unknown", "pad": "padding", "sep": "seperator", "mask": "mask"}


def tokenizer_of(file: GgufFile) -> Tokenizer:
    """The tokenizer. Raises ModelError, naming the file, for a kind that is not supported or a broken one."""
    fields = Fields(file, "tokenizer.ggml.")
    vocabulary = Vocabulary(file, fields)
    kind = fields.text("model")
    if kind == "gpt2":
        made, begins = byte_level(file, fields, vocabulary)
        with reading_tokenizer(file.path):
            backend: TokenizerBackend = _finished(made, vocabulary, begins)
    elif kind == "llama":
        backend = _sentencepiece(file, fields, vocabulary)
    elif kind == "gemma4":
        backend = _merged_sentencepieces(file, fields, vocabulary)
    else:
        raise ModelError(
            f"{file.path}: tokenizer {shown(kind)} is not supported; supported are gpt2, llama and gemma4; "
            "name the original model's folder or hub id with --tokenizer"
        )
    names: dict[str, str | list[str]] = {}
    for name in _SPECIAL:
        if (token := vocabulary.special(name)) is not None:
            names[f"{name}_token"] = token
    return Tokenizer(backend, names, _chat_template(file))


class Vocabulary:
    """Tokens with their types, without the unused ones at the end that only fill up the embedding.

    All methods raise ModelError, naming the file and the key.
    """

    def __init__(self, file: GgufFile, fields: Fields) -> None:
        self._fields = fields
        count, embedding = len(fields.strings("tokens")), file.tensors.get("token_embd.weight")
        if embedding is not None and count > embedding.shape[0]:
            raise ModelError(
                f"{file.path}: tokenizer.ggml.tokens has {count} tokens, but tensor token_embd.weight has "
                f"{embedding.shape[0]} rows"
            )
        self.tokens = fields.texts("tokens")
        types: list[int] = fields.numbers("token_type", count) or [_NORMAL] * count
        if not {*types} <= {*range(_NORMAL, _BYTE + 1)}:
            raise fields.error("token_type", f"numbers from {_NORMAL} to {_BYTE}")
        if types.count(_UNKNOWN) > 1:  # which early converters called what fills up the embedding
            kept = fields.optional_integer("unknown_token_id")
            kept = types.index(_UNKNOWN) if kept is None else kept
            types = [_UNUSED if kind == _UNKNOWN and i != kept else kind for i, kind in enumerate(types)]
        self.scores: list[float] = fields.numbers("scores", count, "f") or [0.0] * count
        while count and types[count - 1] == _UNUSED:
            count -= 1
        if not count:
            raise ModelError(f"{file.path}: tokenizer.ggml.tokens has no tokens")
        self.tokens, self.types, self.scores = self.tokens[:count], types[:count], self.scores[:count]
        self._kinds = np.array(self.types, np.uint8)
        added = self.of_type(_UNKNOWN, _CONTROL, _USER_DEFINED)
        characters = sum(len(self.tokens[token_id]) for token_id in added)
        if len(added) > _MAX_ADDED or characters > _MAX_ADDED_CHARACTERS:
            raise ModelError(
                f"{file.path}: {len(added)} tokens with {characters} characters are found in texts before all others "
                f"(tokenizer.ggml.token_type); there may be {_MAX_ADDED} with {_MAX_ADDED_CHARACTERS} characters"
            )

    def of_type(self, *kinds: int) -> list[int]:
        """The ids of the tokens of these types, ascending."""
        return np.flatnonzero(np.isin(self._kinds, kinds)).tolist()

    @functools.cached_property
    def ids(self) -> dict[str, int]:
        """By token. Raises ModelError if one is there twice."""
        ids = dict(zip(self.tokens, range(len(self.tokens)), strict=True))
        if len(ids) < len(self.tokens):
            raise ModelError(f"{self._fields.path}: tokenizer.ggml.tokens has a token twice")
        return ids

    def special(self, name: str) -> str | None:
        """The token that has a part of its own, such as bos; None if the file names none."""
        key = f"{_SPECIAL[name]}_token_id"
        token_id = self._fields.optional_integer(key)
        if token_id is None:
            return None
        if token_id >= len(self.tokens):
            raise self._fields.error(key, f"one of {len(self.tokens)} tokens")
        return self.tokens[token_id]

    def around(self, begins: bool) -> tuple[str | None, str | None]:
        """The tokens before and after every text."""
        bos = self.special("bos") if self._fields.flag("add_bos_token", begins) else None
        return bos, self.special("eos") if self._fields.flag("add_eos_token", False) else None


def byte_level(file: GgufFile, fields: Fields, vocabulary: Vocabulary) -> tuple[tokenizers.Tokenizer, bool]:
    """A byte-level tokenizer without added tokens, and whether texts begin with bos where the file does not say."""
    pre = fields.optional_text("pre")
    if pre is None:
        raise ModelError(
            f"{file.path}: there is no tokenizer.ggml.pre, which says how texts are split, as in files from before May "
            "2024: take a newer file, or name the original model's folder or hub id with --tokenizer"
        )
    if pre not in SPLITTINGS:
        raise ModelError(
            f"{file.path}: tokenizer.ggml.pre {shown(pre)} is not supported; supported are {', '.join(SPLITTINGS)}; "
            "name the original model's folder or hub id with --tokenizer"
        )
    splitting = SPLITTINGS[pre]
    ids, merges = vocabulary.ids, _merges(fields)
    with reading_tokenizer(file.path):
        made = tokenizers.Tokenizer(models.BPE(ids, merges, ignore_merges=splitting.whole_words))
        made.pre_tokenizer = splitting.pre_tokenizer()
        made.decoder = decoders.ByteLevel()
        if splitting.nfc:
            made.normalizer = normalizers.NFC()
        return made, splitting.begins


def _merged_sentencepieces(file: GgufFile, fields: Fields, vocabulary: Vocabulary) -> TokenizersBackend:
    """Gemma 4's: pieces of SentencePiece that are merged by rank, not by score. What is not in them is bytes."""
    ids, merges = vocabulary.ids, _merges(fields)
    with reading_tokenizer(file.path):
        unknown = vocabulary.special("unk")
        made = tokenizers.Tokenizer(models.BPE(ids, merges, unk_token=unknown, fuse_unk=True, byte_fallback=True))
        made.normalizer = normalizers.Replace(" ", SPACE)
        made.decoder = decoders.Sequence([decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse()])
        return _finished(made, vocabulary, begins=True)


def _merges(fields: Fields) -> list[tuple[str, str]]:
    merges = fields.strings("merges").to_pairs()
    if merges is None:
        raise fields.error("merges", "pairs of tokens with one space between them")
    return merges


def _finished(made: tokenizers.Tokenizer, vocabulary: Vocabulary, begins: bool) -> TokenizersBackend:
    """With the tokens that texts are cut at first, and those around every text, which may begin with bos."""
    for kind, special in (((_UNKNOWN, _CONTROL), True), ((_USER_DEFINED,), False)):
        texts = [vocabulary.tokens[token_id] for token_id in vocabulary.of_type(*kind)]
        made.add_tokens([AddedToken(text, special=special, normalized=False) for text in texts if text])
    bos, eos = vocabulary.around(begins)
    if bos is not None or eos is not None:
        pieces, ids = [bos, "$A", eos], vocabulary.ids
        made.post_processor = processors.TemplateProcessing(
            single=[piece for piece in pieces if piece is not None],
            special_tokens=[(token, ids[token]) for token in (bos, eos) if token is not None],
        )
    made.encode("a")  # some errors appear only now
    return TokenizersBackend(made)


def _sentencepiece(file: GgufFile, fields: Fields, vocabulary: Vocabulary) -> SentencePieceBackend:
    structure = vocabulary.of_type(_UNKNOWN, _CONTROL)
    added = {str(i): {"content": vocabulary.tokens[i], "special": True} for i in structure if vocabulary.tokens[i]}
    config = {
        "added_tokens_decoder": added,
        "add_bos_token": fields.flag("add_bos_token", True),
        "add_eos_token": fields.flag("add_eos_token", False),
    }
    prefix, extra = fields.flag("add_space_prefix", True), fields.flag("remove_extra_whitespaces", False)
    model = _sentencepiece_model(vocabulary, prefix, extra)
    return SentencePieceBackend(file.path, config, model, first_spaces(prefix, extra))


def _sentencepiece_model(vocabulary: Vocabulary, add_dummy_prefix: bool, remove_extra_whitespaces: bool) -> bytes:
    """The vocabulary as sentencepiece's own file, whose pieces have the same types.

    The fields: https://github.com/google/sentencepiece/blob/master/src/sentencepiece_model.proto.
    """
    scores, kinds = np.array(vocabulary.scores, "<f4").tobytes(), [_number(3, kind) for kind in range(_BYTE + 1)]
    pieces = [
        _message(1, _text(1, token) + b"\x15" + scores[4 * i : 4 * i + 4] + kinds[kind])
        for i, (token, kind) in enumerate(zip(vocabulary.tokens, vocabulary.types, strict=True))
    ]
    bpe = 2
    trainer = _number(3, bpe) + _number(35, bool(vocabulary.of_type(_BYTE)))
    for number, name in ((45, "unk"), (46, "bos"), (47, "eos"), (48, "pad")):
        if (token := vocabulary.special(name)) is not None:
            trainer += _text(number, token)
    if unknown := vocabulary.of_type(_UNKNOWN):
        trainer += _text(45, vocabulary.tokens[unknown[0]])
    normalizer = _text(1, "identity") + _number(3, add_dummy_prefix) + _number(4, remove_extra_whitespaces)
    return b"".join([*pieces, _message(2, trainer), _message(3, normalizer)])


def _varint(value: int) -> bytes:
    encoded = bytearray()
    while value > 127:
        encoded.append(value & 127 | 128)
        value >>= 7
    encoded.append(value)
    return bytes(encoded)


def _message(field: int, content: bytes) -> bytes:
    length = len(content)
    if length < 128 and field < 16:  # as nearly all are: each number is one byte
        return bytes((field << 3 | 2, length)) + content
    return _varint(field << 3 | 2) + _varint(length) + content


def _text(field: int, text: str) -> bytes:
    return _message(field, text.encode())


def _number(field: int, value: int) -> bytes:
    return _varint(field << 3) + _varint(value)


def _chat_template(file: GgufFile) -> ChatTemplate | None:
    fields, prefix = Fields(file), "tokenizer.chat_template."
    templates = {"default": fields.optional_text("tokenizer.chat_template")}
    for key in file.metadata:
        if key.startswith(prefix):
            templates[key.removeprefix(prefix)] = fields.text(key)
    found = {name: text for name, text in templates.items() if text is not None}
    for name, text in found.items():
        if len(text) > MAX_TEMPLATE_BYTES:
            raise ModelError(
                f"{file.path}: the chat template {shown(name)} has more than {MAX_TEMPLATE_BYTES} characters"
            )
    return found.get("default") if set(found) <= {"default"} else found


def supported_pre() -> list[str]:
    """The values of `tokenizer.ggml.pre` whose texts are cut as they have to be."""
    return list(SPLITTINGS)
