"""Models of sentencepiece: split by the tokenizers library as by sentencepiece itself, with what the files add."""

from __future__ import annotations

import functools
import io
import json
import struct
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import sentencepiece
from engine.text.mistral_files import sentencepiece_v1
from engine.tiny_tokenizers import TEXT
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from sentencepiece import sentencepiece_model_pb2

from tidewheel.engine.errors import ModelError
from tidewheel.engine.text.sentencepiece_model import read_sentencepiece_model
from tidewheel.engine.text.tokenizer import Tokenizer
from tidewheel.engine.text.tokenizer_backends import SentencePieceBackend

SPACES = [" " * count for count in (2, 3, 5, 15, 16, 17, 33)]
PARTS = [
    *"aeinorst .,-_<>1\n\t\0\u2581\u0301\u200béüÇßшÅ潮車回。が😀👍🏽🇩🇪ﬁ½Ａ한",
    *" the| wheel|tide| turns|corn.|def f(x):\n    return|<0x41>|[UNUSED]|e\u0301|\r\n".split("|"),
    *SPACES,
]
texts = st.lists(st.sampled_from(PARTS) | st.text(max_size=3), max_size=12).map("".join)
CHECKED = settings(max_examples=100, deadline=None, suppress_health_check=list(HealthCheck))


@functools.cache
def trained(**settings: Any) -> bytes:
    model = io.BytesIO()
    given: dict[str, Any] = {
        "sentence_iterator": iter([*TEXT, "    four        eight                sixteen spaces"] * 2),
        "model_writer": model,
        "vocab_size": 420,
        "hard_vocab_limit": False,
        "character_coverage": 0.98,
        "model_type": "bpe",
        "normalization_rule_name": "identity",
        "minloglevel": 2,
    }
    sentencepiece.SentencePieceTrainer.Train(**{**given, **settings})
    return model.getvalue()


def llama() -> bytes:
    return trained(byte_fallback=True, remove_extra_whitespaces=False, allow_whitespace_only_pieces=True)


def gemma() -> bytes:
    return trained(
        byte_fallback=True,
        remove_extra_whitespaces=False,
        add_dummy_prefix=False,
        user_defined_symbols="[UNUSED],\t,\u2581\u2581,\u2581\u2581\u2581\u2581",
        pad_id=0,
        eos_id=1,
        bos_id=2,
        unk_id=3,
    )


def plain() -> bytes:
    """Extra spaces are removed, and characters without a piece are unknown."""
    return trained()


def words() -> bytes:
    """As T5 has it."""
    return trained(model_type="unigram", pad_id=0, eos_id=1, unk_id=2, bos_id=-1, normalization_rule_name="nmt_nfkc")


def write(folder: Path, model: bytes, settings: dict[str, Any] | None = None, **files: Any) -> Tokenizer:
    """`files` are the contents of JSON files by their names without the ending."""
    return write_as("tokenizer.model", folder, model, settings, **files)


def write_as(name: str, folder: Path, model: bytes, settings: dict[str, Any] | None = None, **files: Any) -> Tokenizer:
    (folder / name).write_bytes(model)
    for stem, content in {"tokenizer_config": settings or {}, **files}.items():
        (folder / f"{stem}.json").write_text(json.dumps(content))
    return Tokenizer.load(folder)


def is_by_sentencepiece(tokenizer: Tokenizer) -> bool:
    return isinstance(tokenizer.backend, SentencePieceBackend)


def oracle_of(folder: Path) -> Any:
    return pytest.importorskip("transformers").AutoTokenizer.from_pretrained(str(folder))


def require_same(tokenizer: Tokenizer, oracle: Any, text: str) -> None:
    """The ids, their text, and the text of their stream are as transformers has them."""
    ids = tokenizer.encode(text)
    assert ids == oracle.encode(text), text
    for skips in (True, False):
        decoded = oracle.decode(ids, skip_special_tokens=skips, clean_up_tokenization_spaces=False)
        assert tokenizer.decode(ids, skip_special_tokens=skips) == decoded, text
        detokenizer = tokenizer.detokenizer(skip_special_tokens=skips)
        assert "".join([*map(detokenizer.push, ids), detokenizer.flush()]) == decoded, text


@pytest.mark.parametrize("made", [llama, gemma, plain])
def test_texts_are_split_as_by_sentencepiece(tmp_path: Path, made: Callable[[], bytes]) -> None:
    require_split_as_by_sentencepiece(tmp_path, made())


def test_a_real_vocabulary_is_split_as_by_sentencepiece(tmp_path: Path) -> None:
    """Mistral's, whose runs of spaces have equal scores, and lack the run of 15."""
    require_split_as_by_sentencepiece(tmp_path, sentencepiece_v1().read_bytes())


def require_split_as_by_sentencepiece(folder: Path, model: bytes) -> None:
    oracle = sentencepiece.SentencePieceProcessor(model_proto=model)
    tokenizer = write(folder, model)
    assert not is_by_sentencepiece(tokenizer)

    @CHECKED
    @given(texts)
    def check(text: str) -> None:
        ids = tokenizer.encode(text, add_special_tokens=False)
        assert ids == oracle.EncodeAsIds(text)
        if oracle.unk_id() not in ids:  # which sentencepiece shows as a sign of its own
            assert tokenizer.decode(ids) == oracle.DecodeIds(ids)
        detokenizer = tokenizer.detokenizer()
        assert "".join([*map(detokenizer.push, ids), detokenizer.flush()]) == tokenizer.decode(ids)

    check()


def handmade(pieces: list[tuple[str, float]], kinds: dict[str, int] | None = None, **normalizer: Any) -> bytes:
    """A model that merges by score, and adds no spaces. `kinds` has the kinds of pieces that are not normal."""
    model = sentencepiece_model_pb2.ModelProto()
    model.trainer_spec.model_type = 2
    wanted = {"add_dummy_prefix": False, "remove_extra_whitespaces": False, **normalizer}
    for name, value in wanted.items():
        setattr(model.normalizer_spec, name, value)
    for piece, score in [("<unk>", 0.0), *pieces]:
        model.pieces.add(piece=piece, score=score, type={"<unk>": 2, **(kinds or {})}.get(piece, 1))
    return model.SerializeToString()


@pytest.mark.parametrize("lengths", [[2], [2, 3], [2, 4, 8], [2, 3, 4, 5, 6, 7], [2, 3, 5, 8], [2, 4, 6, 9]])
def test_runs_of_equal_scores_are_joined_from_the_left(tmp_path: Path, lengths: list[int]) -> None:
    model = handmade([*(("\u2581" * length, -9.0) for length in (1, *lengths)), ("a", -1.0), ("\u2581a", -2.0)])
    oracle = sentencepiece.SentencePieceProcessor(model_proto=model)
    tokenizer = write(tmp_path, model)
    assert not is_by_sentencepiece(tokenizer)
    for count in range(40):
        for text in (" " * count, "a" + " " * count + "a"):
            assert tokenizer.encode(text) == oracle.EncodeAsIds(text)


@st.composite
def vocabularies(draw: st.DrawFn) -> list[tuple[str, float]]:
    """Letters and what they can be joined to, each with a score of its own."""
    pieces = ["a", "b", "c"]
    for _ in range(draw(st.integers(1, 12))):
        joined = draw(st.sampled_from(pieces)) + draw(st.sampled_from(pieces))
        if joined not in pieces and len(joined) < 8:
            pieces.append(joined)
    scores = draw(st.permutations(range(len(pieces))))
    return [(piece, -float(score)) for piece, score in zip(pieces, scores, strict=True)]


def test_any_scores_are_the_order_of_merges(tmp_path: Path) -> None:
    @CHECKED
    @given(vocabularies(), st.lists(st.text("abc", max_size=30), min_size=1, max_size=10))
    def check(pieces: list[tuple[str, float]], given: list[str]) -> None:
        model = handmade(pieces)
        oracle = sentencepiece.SentencePieceProcessor(model_proto=model)
        tokenizer = write(tmp_path, model)
        assert not is_by_sentencepiece(tokenizer)
        assert [tokenizer.encode(text) for text in given] == oracle.EncodeAsIds(given)

    check()


LETTERS = [("a", -1.0), ("b", -1.0), ("c", -1.0)]
INEXACT: dict[str, tuple[bytes, dict[str, Any]]] = {
    "equal scores": (handmade([*LETTERS, ("bc", -2.0), ("ab", -2.0)]), {}),
    "unused": (handmade([*LETTERS, ("ab", -2.0), ("abc", -3.0)], {"ab": 5}), {}),
    "parts that are no pieces": (handmade([("a", -1.0), ("bc", -2.0), ("abc", -3.0)]), {}),
    "pieces of the user after a prefix": (handmade([*LETTERS, ("ab", 0.0)], {"ab": 4}, add_dummy_prefix=True), {}),
    "ids with a gap": (handmade(LETTERS), {"added_tokens_decoder": {"9": {"content": "<|x|>"}}}),
    "a name that is there twice": (handmade([*LETTERS, ("|", 0.0)]), {"added_tokens_decoder": {"5": {"content": "|"}}}),
}


@pytest.mark.parametrize("name", INEXACT)
def test_what_ranks_cannot_say_is_left_to_sentencepiece(tmp_path: Path, name: str) -> None:
    model, config = INEXACT[name]
    oracle = sentencepiece.SentencePieceProcessor(model_proto=model)
    tokenizer = write(tmp_path, model, config)
    assert is_by_sentencepiece(tokenizer)
    for text in ("abcabc", "bcab", "aab abc"):
        assert tokenizer.encode(text) == oracle.EncodeAsIds(text)
    for number, token in config.get("added_tokens_decoder", {}).items():
        assert tokenizer.encode(token["content"]) == [int(number)]


def test_characters_that_are_only_joined_keep_the_ids_of_their_bytes(tmp_path: Path) -> None:
    """The first Gemma has two tabs as a piece, but not one."""
    bytes_of = {f"<0x{byte:02X}>": 6 for byte in range(256)}
    model = sentencepiece_model_pb2.ModelProto.FromString(
        handmade([*((name, 0.0) for name in bytes_of), ("a", -1.0), ("\t\t", -2.0), ("\t\t\t", -3.0)], bytes_of)
    )
    model.trainer_spec.byte_fallback = True
    oracle = sentencepiece.SentencePieceProcessor(model_proto=model.SerializeToString())
    tokenizer = write(tmp_path, model.SerializeToString())
    assert not is_by_sentencepiece(tokenizer)
    for text in ("\t", "a\ta", "\t\t", "\t\t\ta\t\n", "é\t"):
        assert tokenizer.encode(text) == oracle.EncodeAsIds(text)
        assert tokenizer.decode(tokenizer.encode(text)) == text


def test_special_tokens_within_texts_are_found_by_either_library(tmp_path: Path) -> None:
    """Chat templates write them."""
    model = trained(model_type="unigram", byte_fallback=True)
    config = {"eos_token": "</s>", "additional_special_tokens": ["<|im_start|>", "the"]}
    tokenizer = write(tmp_path, model, config, added_tokens={"<tool>": tokens_in(model)})
    assert is_by_sentencepiece(tokenizer)
    ids = tokenizer.encode("<s><|im_start|>the<tool></s>", add_special_tokens=False)
    assert [tokenizer.id_to_token(i) for i in ids] == ["<s>", "<|im_start|>", "the", "<tool>", "</s>"]
    assert ids[1] == tokenizer.vocab_size - 2 == tokens_in(model) + 1
    assert tokenizer.decode(ids) == "<tool>"


def tokens_in(model: bytes) -> int:
    return int(sentencepiece.SentencePieceProcessor(model_proto=model).GetPieceSize())


@pytest.mark.parametrize("made", [llama, gemma, plain])
def test_any_tokens_are_streamed_as_they_are_decoded(tmp_path: Path, made: Callable[[], bytes]) -> None:
    tokenizer = write(tmp_path, made())

    @CHECKED
    @given(st.lists(st.integers(0, tokenizer.vocab_size - 1), max_size=20), st.booleans())
    def check(ids: list[int], skips: bool) -> None:
        detokenizer = tokenizer.detokenizer(skip_special_tokens=skips)
        assert "".join([*map(detokenizer.push, ids), detokenizer.flush()]) == tokenizer.decode(ids, skips)

    check()


MARKED = [
    "hi <s> the</s>tide <|im_start|>the\n<tool>  wheel <|late|>", "<|im_start|>", "</s>the", "the <unk> é", "", " ",
    "潮車<s>が😀", "a \0 b", "[UNUSED]<|im_start|>the",
]  # fmt: skip
SPECIAL = {"content": "<|im_start|>", "special": True, "normalized": False, "__type": "AddedToken"}
TOOL = {"content": "<tool>", "lstrip": True, "rstrip": True, "special": False, "__type": "AddedToken"}
CONFIGS: list[tuple[dict[str, Any], dict[str, Any]]] = [
    ({}, {}),
    ({"add_bos_token": False, "add_eos_token": True}, {}),
    ({"legacy": False}, {}),
    ({"legacy": True, "eos_token": "<|im_start|>", "added_tokens_decoder": {"0": SPECIAL, "1": TOOL}}, {}),
    ({"added_tokens_decoder": {"-1": SPECIAL}}, {}),
    ({}, {"added_tokens": {"<tool>": 0, "<|late|>": 1}, "special_tokens_map": {"eos_token": "<|late|>"}}),
]


@pytest.mark.parametrize(("config", "files"), CONFIGS)
def test_what_the_files_add_is_as_in_transformers(
    tmp_path: Path, config: dict[str, Any], files: dict[str, Any]
) -> None:
    """transformers has a class for each model; the general class follows the model's own settings.

    It takes seconds to import.
    """
    model = llama()
    size = tokens_in(model)
    config = {"tokenizer_class": "TokenizersBackend", "add_bos_token": True, **config}
    if "added_tokens_decoder" in config:
        config["added_tokens_decoder"] = {str(size + int(i)): t for i, t in config["added_tokens_decoder"].items()}
    if "added_tokens" in files:
        files = {**files, "added_tokens": {token: size + i for token, i in files["added_tokens"].items()}}
    tokenizer = write(tmp_path, model, config, **files)
    assert not is_by_sentencepiece(tokenizer)
    oracle = oracle_of(tmp_path)
    assert tokenizer.vocab_size == len(oracle)
    assert tokenizer.eos_token_id is None or tokenizer.eos_token_id == oracle.eos_token_id
    for text in (*TEXT[:5], *MARKED):
        if config.get("legacy") is not False or not text.startswith(" "):  # else transformers removes a space
            require_same(tokenizer, oracle, text)


def test_a_prefix_may_be_left_out(tmp_path: Path) -> None:
    tokenizer = write(tmp_path, llama(), {"add_prefix_space": False, "add_bos_token": False})
    assert tokenizer.encode("the") == tokenizer.encode("the</s>the")[-len(tokenizer.encode("the")) :]
    assert tokenizer.decode(tokenizer.encode(" the")) == " the"


T5 = {"tokenizer_class": "T5Tokenizer"}
MASK = {"content": "<mask>", "lstrip": True, "special": True, "__type": "AddedToken"}
CLASSES: list[tuple[str, dict[str, Any], dict[str, Any]]] = [
    ("spiece.model", T5, {}),
    ("spiece.model", {}, {"model_type": "mt5"}),
    ("spiece.model", {**T5, "extra_ids": 3, "additional_special_tokens": [f"<extra_id_{i}>" for i in range(3)]}, {}),
    ("sentencepiece.bpe.model", {"tokenizer_class": "XLMRobertaTokenizerFast"}, {}),
    ("sentencepiece.bpe.model", {"mask_token": MASK}, {"model_type": "xlm-roberta"}),
]


@pytest.mark.parametrize(("name", "config", "of_model"), CLASSES)
def test_classes_of_words_are_as_in_transformers(
    tmp_path: Path, name: str, config: dict[str, Any], of_model: dict[str, Any]
) -> None:
    tokenizer = write_as(name, tmp_path, words(), config, **({"config": of_model} if of_model else {}))
    oracle = oracle_of(tmp_path)
    assert tokenizer.vocab_size == len(oracle)

    @CHECKED
    @given(texts)
    def check(text: str) -> None:
        require_same(tokenizer, oracle, text)

    check()
    for text in ("a<extra_id_0> the<extra_id_2></s> b", "the <mask> <pad>b<s>", *MARKED):
        require_same(tokenizer, oracle, text)


def test_words_are_split_as_by_sentencepiece(tmp_path: Path) -> None:
    """Where the two normalize alike: the tokenizers library looks at a few characters at once otherwise."""
    oracle = sentencepiece.SentencePieceProcessor(model_proto=words())
    tokenizer = write_as("spiece.model", tmp_path, words(), T5)
    for text in (*TEXT[:5], "  the tide\n\n turns ", "\uff11\uff12 ﬁ ½", ""):
        assert tokenizer.encode(text) == [*oracle.EncodeAsIds(text), oracle.eos_id()]


def test_other_classes_of_words_need_transformers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(ModelError, match="needs transformers"):
        write_as("spm.model", tmp_path, words(), {"tokenizer_class": "DebertaV2Tokenizer"})


@pytest.mark.parametrize("made", [llama, gemma, plain, words])
def test_the_reader_finds_what_protobuf_finds(tmp_path: Path, made: Callable[[], bytes]) -> None:
    (tmp_path / "a.model").write_bytes(made())
    model, expected = read_sentencepiece_model(tmp_path / "a.model"), sentencepiece_model_pb2.ModelProto()
    expected.ParseFromString(made())
    assert model.pieces == [piece.piece for piece in expected.pieces]
    assert model.scores == [piece.score for piece in expected.pieces]
    assert model.kinds == [piece.type for piece in expected.pieces]
    trainer, normalizer = expected.trainer_spec, expected.normalizer_spec
    assert (model.model_type, model.byte_fallback) == (trainer.model_type, trainer.byte_fallback)
    assert (model.bos_piece, model.eos_piece) == (trainer.bos_piece, trainer.eos_piece)
    assert model.charsmap == normalizer.precompiled_charsmap
    assert model.add_dummy_prefix == normalizer.add_dummy_prefix
    assert model.remove_extra_whitespaces == normalizer.remove_extra_whitespaces


def piece(text: bytes, kind: int = 1) -> bytes:
    inner = b"\x0a" + bytes([len(text)]) + text + b"\x15" + struct.pack("<f", -1.0) + b"\x18" + bytes([kind])
    return b"\x0a" + bytes([len(inner)]) + inner


UNKNOWN = piece(b"<unk>", 2)
BROKEN = {
    "it has no pieces": b"",
    "it has 0 unknown pieces": piece(b"a"),
    "it has 2 unknown pieces": UNKNOWN + piece(b"a", 2),
    "a piece occurs twice": UNKNOWN + piece(b"a") + piece(b"a"),
    "a piece is empty": UNKNOWN + piece(b""),
    "kinds of pieces": UNKNOWN + piece(b"a", 7),
    "its pieces of bytes must be none": UNKNOWN + piece(b"<0x00>", 6),
    "its pieces of bytes must be <0x00> to <0xFF>": UNKNOWN + b"\x12\x03\x98\x02\x01",
    "characters each": UNKNOWN + b"\x0a\x86\x10\x0a\x83\x10" + b"a" * 2051,
    "longer than the message that contains it": UNKNOWN + b"\x0a\x50\x0a",
    "ends within a number": UNKNOWN + b"\x0a" + b"\xff" * 20,
    "a field of type 3": UNKNOWN + b"\x0b",
    "more than 16 fields": UNKNOWN + b"\x0a\x28" + b"\x18\x01" * 20,
    "utf-8": UNKNOWN + piece(b"\xff"),
}


@pytest.mark.parametrize("said", BROKEN)
def test_broken_models_are_refused_by_their_file(tmp_path: Path, said: str) -> None:
    with pytest.raises(ModelError, match=rf"tokenizer\.model is not a sentencepiece model: .*{said}"):
        write(tmp_path, BROKEN[said])


def test_half_a_surrogate_pair_is_no_text(tmp_path: Path) -> None:
    with pytest.raises(TypeError):
        write(tmp_path, llama()).encode("a\ud800b")
