"""LentTokenizer: what another process has made is the same tokenizer, whatever becomes of that process."""

from __future__ import annotations

import io
import json
import random
from collections.abc import Iterator
from pathlib import Path

import pytest
import sentencepiece_gguf
import tiny_gguf
from engine.lending import lend
from engine.tiny_tokenizers import TEXT, save

from tidewheel.engine.errors import ModelError
from tidewheel.engine.loading.lent_tokenizer import LentTokenizer, can_be_lent
from tidewheel.engine.loading.tokenizer_process import tokenizer_at
from tidewheel.engine.text.tokenizer import Tokenizer
from tidewheel.engine.weights.gguf.source import GgufSource

TEXTS = [
    *TEXT[:5], "", " ", "  <tag> <turn>  a\n", "<|im_start|>user\n<s>", "plainly added\x00é▁odd", "\ufffd",
    "long " * 2000,
]  # fmt: skip


def save_folder(kind: str, folder: Path) -> Path:
    save(kind, folder)
    config = {"bos_token": "<s>", "chat_template": "{{ messages }}", "tokenizer_class": "TinyTokenizer"}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder


def save_pieces(path: Path, *, prefix: bool, extra: bool) -> Path:
    """A GGUF file of Llama 2's kind."""
    sentencepiece, made = pytest.importorskip("sentencepiece"), io.BytesIO()
    sentencepiece.SentencePieceTrainer.Train(
        sentence_iterator=iter(TEXT), model_writer=made, model_type="bpe", vocab_size=420, hard_vocab_limit=False,
        byte_fallback=True, character_coverage=0.98, normalization_rule_name="identity", minloglevel=2,
        remove_extra_whitespaces=extra, add_dummy_prefix=prefix, user_defined_symbols=["<tag>", "▁▁"],
        control_symbols=["<turn>"],
    )  # fmt: skip
    return sentencepiece_gguf.write(path, made.getvalue(), ("<tag>", "▁▁"), prefix=prefix, extra=extra)


PIECES = {
    "llama": {"prefix": True, "extra": False},
    "gemma": {"prefix": False, "extra": False},
    "sentencepiece": {"prefix": True, "extra": True},
}


@pytest.fixture(scope="module", params=["byte-level", "byte-fallback", "metaspace", *PIECES])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Or a file."""
    folder = tmp_path_factory.mktemp("lent")
    if request.param in PIECES:
        return save_pieces(folder / "model.gguf", **PIECES[request.param])
    return save_folder(request.param, folder)


@pytest.fixture(scope="module")
def own(folder: Path) -> Tokenizer:
    return tokenizer_at(folder)


@pytest.fixture(scope="module")
def lent(folder: Path) -> Iterator[LentTokenizer]:
    lent, process = lend(lambda: LentTokenizer(folder))
    yield lent
    assert process.poll() is None
    lent.settle()
    assert process.poll() is not None
    assert lent.encode(TEXT[0]) == tokenizer_at(folder).encode(TEXT[0])


def test_it_is_the_tokenizer_of_the_files(folder: Path, lent: LentTokenizer, own: Tokenizer) -> None:
    assert lent.is_lent
    assert can_be_lent(folder)
    for text in TEXTS:
        for special in (False, True):
            assert lent.encode(text, special) == own.encode(text, special), text
    chance = random.Random(1)
    of_texts = [own.encode(text) for text in TEXTS]
    for _ in range(300):
        ids = [chance.randrange(own.vocab_size + 2) for _ in range(chance.randrange(9))]
        some = chance.choice(of_texts)
        start = chance.randrange(len(some) + 1)
        ids += some[start : start + chance.randrange(20)]
        for skip in (False, True):
            assert lent.decode(ids, skip) == own.decode(ids, skip), ids
            theirs, ours = lent.detokenizer((), skip), own.detokenizer((), skip)
            assert [*map(theirs.push, ids), theirs.flush()] == [*map(ours.push, ids), ours.flush()]
    assert lent.token_texts() == own.token_texts()
    assert lent.special_ids() == own.special_ids()
    for token in (own.id_to_token(7), "</s>", "no token"):
        assert token is not None
        assert lent.token_to_id(token) == own.token_to_id(token)
    for name in ("vocab_size", "eos_token_id", "bos_token", "special_tokens_map", "chat_template", "class_name"):
        assert getattr(lent, name) == getattr(own, name), name


def test_what_it_cannot_encode_is_an_error_and_no_more(lent: LentTokenizer, own: Tokenizer) -> None:
    with pytest.raises(UnicodeEncodeError):
        lent.encode("\ud800")
    assert lent.encode(TEXT[0]) == own.encode(TEXT[0])


def test_without_its_process_it_is_made_here(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    folder = save_folder("byte-level", tmp_path)
    own = Tokenizer.load(folder)
    lent, process = lend(lambda: LentTokenizer(folder))
    process.kill()
    kept = (folder / "tokenizer.json").rename(folder / "kept")
    save("metaspace", folder)
    with pytest.raises(ModelError, match="another tokenizer than when it was loaded"):
        lent.encode(TEXT[0])
    kept.rename(folder / "tokenizer.json")
    for text in TEXTS:
        assert lent.encode(text) == own.encode(text)
    assert not lent.is_lent
    assert caplog.text.count("its process has ended") == 1


def test_that_of_a_gguf_file_is_lent_too(tmp_path: Path) -> None:
    path = tiny_gguf.write(tmp_path / "model.gguf")
    assert can_be_lent(path)
    lent, own = LentTokenizer(path), GgufSource(path).tokenizer()
    for text in ("tide", "<|im_start|>a tide", TEXT[1]):
        assert lent.encode(text) == own.encode(text)
    assert (lent.vocab_size, lent.eos_token_id) == (own.vocab_size, own.eos_token_id)
    assert lent.chat_template == own.chat_template is not None
    lent.settle()


def test_what_the_library_does_not_make_is_not_lent(tmp_path: Path) -> None:
    path = tiny_gguf.write(tmp_path / "model.gguf")
    path.write_bytes(path.read_bytes().replace(b"gpt2", b"bert"))
    assert not can_be_lent(path)
    with pytest.raises(ModelError, match="the process that makes a tokenizer has ended"):
        LentTokenizer(tmp_path / "nothing")
