"""Tokenizers as model folders bring them."""

from __future__ import annotations

import io
import json
import sys
from pathlib import Path
from typing import Any

import pytest
import sentencepiece
import tokenizers
from engine.tiny_tokenizers import TEXT, save

from tidewheel.engine.errors import ModelError
from tidewheel.engine.text.tokenizer import Tokenizer
from tidewheel.engine.text.tokenizer_backends import TokenizersBackend


def write(path: Path, value: Any) -> None:
    path.parent.mkdir(exist_ok=True)
    path.write_text(value if isinstance(value, str) else json.dumps(value))


@pytest.fixture(scope="module")
def spm(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.Train(
        sentence_iterator=iter(TEXT),
        model_writer=model,
        vocab_size=420,
        model_type="bpe",
        byte_fallback=True,
        character_coverage=0.98,
        minloglevel=2,
    )
    return model.getvalue()


def test_the_post_processor_of_tokenizer_json_decides_about_special_tokens(tmp_path: Path) -> None:
    save("byte-fallback", tmp_path)
    tokenizer = Tokenizer.load(tmp_path)
    ids = tokenizer.encode("The tide")
    assert tokenizer.id_to_token(ids[0]) == "<s>"
    assert tokenizer.encode("The tide", add_special_tokens=False) == ids[1:]
    assert tokenizer.decode(ids) == "The tide"
    assert tokenizer.decode(ids, skip_special_tokens=False) == "<s> The tide"
    assert tokenizer.id_to_token(tokenizer.vocab_size) is None
    assert tokenizer.chat_template is None
    assert tokenizer.bos_token is None


def test_special_tokens_by_name_from_both_files(tmp_path: Path) -> None:
    save("byte-level", tmp_path)
    write(tmp_path / "special_tokens_map.json", {"bos_token": "<pad>", "unk_token": {"content": "<pad>"}})
    write(
        tmp_path / "tokenizer_config.json",
        {
            "bos_token": "<s>",
            "eos_token": {"content": "</s>", "lstrip": False},
            "pad_token": None,
            "additional_special_tokens": ["<|im_start|>", {"content": "<|late|>"}],
        },
    )
    tokenizer = Tokenizer.load(tmp_path)
    assert tokenizer.bos_token == "<s>"
    assert tokenizer.eos_token == "</s>"
    assert tokenizer.eos_token_id == 1
    assert tokenizer.special_tokens_map == {
        "bos_token": "<s>",
        "unk_token": "<pad>",
        "eos_token": "</s>",
        "additional_special_tokens": ["<|im_start|>", "<|late|>"],
    }


@pytest.mark.parametrize(
    ("files", "template"),
    [
        ({}, None),
        ({"tokenizer_config.json": {"chat_template": "inline"}}, "inline"),
        ({"tokenizer_config.json": {"chat_template": "inline"}, "chat_template.jinja": "file"}, "file"),
        ({"chat_template.json": {"chat_template": "a"}}, "a"),
        ({"tokenizer_config.json": {"chat_template": "inline"}, "processor_config.json": {"chat_template": "b"}}, "b"),
        ({"chat_template.json": {"chat_template": "a"}, "processor_config.json": {"chat_template": "b"}}, "a"),
        ({"chat_template.json": {"chat_template": "a"}, "chat_template.jinja": "c"}, "c"),
        (
            {"chat_template.json": {"chat_template": {"default": "a", "tool_use": "b"}}},
            {"default": "a", "tool_use": "b"},
        ),
        (
            {"tokenizer_config.json": {"chat_template": [{"name": "default", "template": "a"}]}},
            "a",
        ),
        (
            {
                "tokenizer_config.json": {
                    "chat_template": [{"name": "default", "template": "a"}, {"name": "tool_use", "template": "b"}]
                },
                "chat_template.jinja": "c",
                "additional_chat_templates/rag.jinja": "d",
            },
            {"default": "c", "tool_use": "b", "rag": "d"},
        ),
    ],
)
def test_chat_templates(tmp_path: Path, files: dict[str, Any], template: Any) -> None:
    save("byte-level", tmp_path)
    for name, content in files.items():
        write(tmp_path / name, content)
    assert Tokenizer.load(tmp_path).chat_template == template


def test_sentencepiece_models(tmp_path: Path, spm: bytes) -> None:
    (tmp_path / "tokenizer.model").write_bytes(spm)
    added = {"420": {"content": "<|im_start|>", "special": True}, "421": {"content": "<tool>", "special": False}}
    write(tmp_path / "tokenizer_config.json", {"eos_token": "</s>", "added_tokens_decoder": added})
    tokenizer = Tokenizer.load(tmp_path)
    ids = tokenizer.encode("The tide 🦩")
    assert tokenizer.id_to_token(ids[0]) == "<s>"
    assert tokenizer.decode(ids) == "The tide 🦩"
    assert tokenizer.vocab_size == 422
    assert tokenizer.eos_token_id == 2
    chat = tokenizer.encode("<|im_start|>The<tool>", add_special_tokens=False)
    assert chat[0] == 420
    assert chat[-1] == 421
    assert tokenizer.decode(chat) == "The<tool>"
    assert tokenizer.decode(chat, skip_special_tokens=False) == "<|im_start|>The<tool>"
    detokenizer = tokenizer.detokenizer()
    parts = [*(detokenizer.push(token) for token in ids), detokenizer.flush()]
    assert "".join(parts) == "The tide 🦩"
    assert "🦩" in parts


def test_added_tokens_of_sentencepiece_models_are_found_anywhere(
    tmp_path: Path, spm: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "tokenizer.model").write_bytes(spm)
    added = {"420": {"content": "<|im_start|>"}, "421": {"content": "<|im"}, "422": {"content": "<"}}
    write(tmp_path / "tokenizer_config.json", {"added_tokens_decoder": added})
    tokenizer = Tokenizer.load(tmp_path)
    texts = ["the tide "[:i] + text for i in range(9) for text in ("<|im_start|><|im_<<|im_star", "<|im_start|>" * 3)]
    wanted = [tokenizer.encode(text) for text in texts]
    assert wanted[0].count(420) == 1
    assert wanted[0].count(421) == 2
    for step in (1, 2, 5):
        monkeypatch.setattr("tidewheel.engine.text.tokenizer_backends._SEARCH_STEP", step)
        assert [tokenizer.encode(text) for text in texts] == wanted


def test_sentencepiece_models_obey_add_bos_token(tmp_path: Path, spm: bytes) -> None:
    (tmp_path / "tokenizer.model").write_bytes(spm)
    write(tmp_path / "tokenizer_config.json", {"add_bos_token": False, "add_eos_token": True})
    tokenizer = Tokenizer.load(tmp_path)
    ids = tokenizer.encode("The")
    assert [tokenizer.id_to_token(i) for i in (ids[0], ids[-1])] == ["▁T", "</s>"]


NAMES = {"eos_token": "</s>", "unk_token": "</s>", "pad_token": "<pad>"}
MASK = {"content": "<|im_start|>", "lstrip": True, "__type": "AddedToken"}
FRAME = {"bos_token": "<s>", "cls_token": "<s>", "sep_token": "</s>", "mask_token": MASK}
BYTE_LEVEL: list[tuple[dict[str, Any], dict[str, Any]]] = [
    ({"tokenizer_class": "GPT2Tokenizer", "eos_token": "</s>", "bos_token": "<s>", "unk_token": "</s>"}, {}),
    (
        {
            "tokenizer_class": "GPT2Tokenizer",
            "add_bos_token": True,
            "bos_token": {"content": "</s>", "normalized": True, "__type": "AddedToken"},
            "eos_token": {"content": "</s>", "normalized": True, "__type": "AddedToken"},
            "unk_token": {"content": "</s>", "normalized": True, "__type": "AddedToken"},
        },
        {"special_tokens_map.json": {"pad_token": "<pad>"}},
    ),
    (
        {"tokenizer_class": "GPT2Tokenizer", "bos_token": "<s>", "eos_token": "<|new|>", "unk_token": "<s>"},
        {"added_tokens.json": {"<|new|>": 400, "<|more|>": 401}},
    ),
    (
        {"tokenizer_class": "GPT2Tokenizer", "eos_token": "</s>", "bos_token": "<s>", "unk_token": "</s>"},
        {"special_tokens_map.json": {"additional_special_tokens": ["<|im_start|>", "<|late|>"]}},
    ),
    (
        {"tokenizer_class": "GPT2Tokenizer", "add_bos_token": True, "add_eos_token": True, **NAMES, "bos_token": "<s>"},
        {},
    ),
    (
        {
            "tokenizer_class": "Qwen2TokenizerFast",
            **NAMES,
            "added_tokens_decoder": {
                "400": {"content": "<|new|>", "special": True, "__type": "AddedToken"},
                "401": {"content": "<|more|>", "special": False, "__type": "AddedToken"},
            },
        },
        {},
    ),
    ({"add_prefix_space": True, **NAMES}, {"config.json": {"model_type": "qwen3"}}),
    ({"tokenizer_class": "RobertaTokenizer", **NAMES, **FRAME}, {}),
    ({**NAMES, **FRAME, "add_prefix_space": True}, {"config.json": {"model_type": "roberta"}}),
    ({"tokenizer_class": "BartTokenizer", **NAMES, **FRAME}, {}),
]


@pytest.mark.parametrize(("config", "files"), BYTE_LEVEL)
def test_vocabularies_with_merges_are_read_as_by_transformers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, config: dict[str, Any], files: dict[str, Any]
) -> None:
    """OPT, older GPT-2, Qwen and RoBERTa folders have a vocabulary and merges, and no tokenizer.json.

    transformers takes seconds to import.
    """
    transformers = pytest.importorskip("transformers")
    save("byte-level", tmp_path)
    whole = tmp_path / "tokenizer.json"
    model = json.loads(whole.read_text())["model"]
    whole.unlink()
    write(tmp_path / "vocab.json", model["vocab"])
    write(tmp_path / "merges.txt", "\n".join(["#version: 0.2", *(" ".join(pair) for pair in model["merges"])]))
    for name, content in {"tokenizer_config.json": config, **files}.items():
        write(tmp_path / name, content)
    oracle = transformers.AutoTokenizer.from_pretrained(str(tmp_path))
    monkeypatch.setitem(sys.modules, "transformers", None)
    tokenizer = Tokenizer.load(tmp_path)
    assert tokenizer.vocab_size == len(oracle)
    for text in (
        *TEXT[:5],
        " The  tide",
        "IT'S e\u0301 12345\n\n  x\r\n",
        "<s>a</s> b<pad><|im_start|> c <|new|><|late|><|more|>d",
        "",
    ):
        ids = tokenizer.encode(text)
        assert ids == oracle.encode(text), text
        assert tokenizer.encode(text, add_special_tokens=False) == oracle.encode(text, add_special_tokens=False)
        for skips in (True, False):
            expected = oracle.decode(ids, skip_special_tokens=skips, clean_up_tokenization_spaces=False)
            assert tokenizer.decode(ids, skip_special_tokens=skips) == expected
    assert tokenizer.eos_token_id == oracle.eos_token_id


def test_a_vocabulary_of_bytes_needs_no_config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "transformers", None)
    save("byte-level", tmp_path)
    expected = Tokenizer.load(tmp_path).encode("The tide turns")
    model = json.loads((tmp_path / "tokenizer.json").read_text())["model"]
    (tmp_path / "tokenizer.json").unlink()
    write(tmp_path / "vocab.json", model["vocab"])
    write(tmp_path / "merges.txt", "\n".join(" ".join(pair) for pair in model["merges"]))
    assert Tokenizer.load(tmp_path).encode("The tide turns") == expected


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("vocab.json", {"a": 0, "b": 0}),
        ("vocab.json", {"a": -1}),
        ("vocab.json", {"a": "b"}),
        ("merges.txt", "no such"),
        ("merges.txt", "three words here"),
        ("added_tokens.json", {"<|x|>": 7}),
    ],
)
def test_a_broken_vocabulary_is_refused_by_its_file(tmp_path: Path, name: str, content: object) -> None:
    files: dict[str, Any] = {
        "vocab.json": {"a": 0, "b": 1},
        "merges.txt": "",
        "tokenizer_config.json": {"tokenizer_class": "GPT2Tokenizer"},
    }
    for file, value in (files | {name: content}).items():
        write(tmp_path / file, value)
    with pytest.raises(ModelError, match=str(tmp_path)):
        Tokenizer.load(tmp_path)


def test_without_transformers_such_a_folder_says_how_to_get_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "transformers", None)
    write(tmp_path / "vocab.json", {})
    with pytest.raises(ModelError, match=r"needs transformers, .*pip install 'transformers.*EXTRAS=transformers"):
        Tokenizer.load(tmp_path)


def test_without_sentencepiece_such_a_folder_says_what_to_add(
    tmp_path: Path, spm: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only it normalizes characters as this model says."""
    monkeypatch.setitem(sys.modules, "sentencepiece", None)
    (tmp_path / "tokenizer.model").write_bytes(spm)
    with pytest.raises(ModelError, match=r"needs sentencepiece, .*add a tokenizer\.json"):
        Tokenizer.load(tmp_path)


def test_a_tokenizer_json_needs_no_transformers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "transformers", None)
    monkeypatch.setitem(sys.modules, "sentencepiece", None)
    save("byte-level", tmp_path)
    assert Tokenizer.load(tmp_path).encode("The tide")


def test_a_folder_without_tokenizer_says_what_to_add(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"no tokenizer: add the model's tokenizer\.json"):
        Tokenizer.load(tmp_path)


@pytest.mark.parametrize(("name", "content"), [("tokenizer.json", b'{"model": '), ("tokenizer.model", b"garbage")])
def test_broken_files_are_named(tmp_path: Path, name: str, content: bytes) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ModelError, match=name):
        Tokenizer.load(tmp_path)


@pytest.mark.parametrize(
    "added",
    [
        [1], "a", {"x": {"content": "a"}}, {"420": "a"}, {"420": {}}, {"420": {"content": ""}}, {"420": {"content": 5}},
        {"-1": {"content": "a"}}, {str(2**40): {"content": "a"}}, {"420": {"content": "\ud800"}},
    ],
)  # fmt: skip
def test_tokens_that_cannot_be_added(tmp_path: Path, spm: bytes, added: Any) -> None:
    (tmp_path / "tokenizer.model").write_bytes(spm)
    write(tmp_path / "tokenizer_config.json", {"added_tokens_decoder": added})
    with pytest.raises(ModelError, match=r"tokenizer_config\.json"):
        Tokenizer.load(tmp_path)


def test_a_sentencepiece_model_of_what_is_no_text(tmp_path: Path, spm: bytes) -> None:
    (tmp_path / "tokenizer.model").write_bytes(spm.replace(b"<unk>", b"<\xffnk>", 1))
    with pytest.raises(ModelError, match=r"tokenizer\.model"):
        Tokenizer.load(tmp_path)


def save_panicking(folder: Path) -> Path:
    """A tokenizer whose library panics when it is to add special tokens."""
    save("byte-fallback", folder)
    path = folder / "tokenizer.json"
    made = json.loads(path.read_text())
    made["post_processor"]["special_tokens"] = {}
    write(path, made)
    return path


def test_a_tokenizer_that_its_library_panics_at(tmp_path: Path) -> None:
    save_panicking(tmp_path)
    with pytest.raises(ModelError, match=r"tokenizer\.json"):
        Tokenizer.load(tmp_path)


def test_a_text_that_its_library_panics_at_is_an_exception(tmp_path: Path) -> None:
    backend = TokenizersBackend(tokenizers.Tokenizer.from_file(str(save_panicking(tmp_path))))
    assert backend.encode("The tide", add_special_tokens=False)
    with pytest.raises(RuntimeError, match="tokenizers library failed"):
        backend.encode("The tide", add_special_tokens=True)
