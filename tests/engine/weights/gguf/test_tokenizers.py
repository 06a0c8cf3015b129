"""Tokenizers in GGUF files give the same ids as the tokenizers that they were written from."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import gguf
import gguf_files
import numpy as np
import pytest
import sentencepiece_gguf
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import decoders, models, normalizers, pre_tokenizers, processors, trainers

from engine import tiny_tokenizers
from tidewheel.engine.errors import ModelError
from tidewheel.engine.text.tokenizer import Tokenizer
from tidewheel.engine.weights import open_source

sentencepiece = pytest.importorskip("sentencepiece")

SPECIALS = ["<|begin|>", "<|im_start|>", "<|im_end|>"]
TEMPLATE = "{% for m in messages %}<|im_start|>{{ m.content }}<|im_end|>{% endfor %}"
TEXTS = [
    "", " ", "The tide turns.", "  two spaces,   three\n\n\n lines \t", "I'll say IT'S we'VE 12345 67 x9",
    "Köln naïve e\u0301", "潮車が回る。😀👍🏽", "a<|im_start|>b <|im_end|>\n", "plain<tag> text",
    "\r\n\u00a0é\u3000 ...!?", "<s> [INST] x </s>",
]  # fmt: skip
WORD = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|"
REST = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"


def pre_tokenizer(pre: str) -> Any:
    """As the models' own tokenizer.json have it."""
    if pre == "gpt-2":
        return pre_tokenizers.ByteLevel(add_prefix_space=False)
    if pre == "smollm":
        digits = pre_tokenizers.Digits(individual_digits=True)
        return pre_tokenizers.Sequence([digits, pre_tokenizers.ByteLevel(add_prefix_space=False)])
    pattern = tokenizers.Regex(WORD + (r"\p{N}{1,3}" if pre == "llama-bpe" else r"\p{N}") + REST)
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    return pre_tokenizers.Sequence([pre_tokenizers.Split(pattern, "isolated"), byte_level])


def trained(pre: str) -> tokenizers.Tokenizer:
    made = tokenizers.Tokenizer(models.BPE(ignore_merges=pre == "llama-bpe"))
    made.normalizer = normalizers.NFC() if pre == "qwen2" else None
    made.pre_tokenizer, made.decoder = pre_tokenizer(pre), decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=420, initial_alphabet=alphabet, special_tokens=SPECIALS, show_progress=False
    )
    made.train_from_iterator(tiny_tokenizers.TEXT + ["123 456 12 345 1234"] * 9, trainer)
    made.add_tokens(["<tag>"])
    if pre == "llama-bpe":
        begin = [(SPECIALS[0], made.token_to_id(SPECIALS[0]))]
        made.post_processor = processors.TemplateProcessing(single=f"{SPECIALS[0]} $A", special_tokens=begin)
    return made


def byte_level_file(path: Path, pre: str) -> tokenizers.Tokenizer:
    from transformers import PreTrainedTokenizerFast

    made = trained(pre)
    fast = PreTrainedTokenizerFast(tokenizer_object=made, bos_token=SPECIALS[0], eos_token=SPECIALS[0])
    fast.chat_template = TEMPLATE
    writer = gguf.GGUFWriter(path, "llama")
    gguf_files.write_tokenizer(writer, fast, pre)
    gguf_files.finish(writer)
    return made


def opened(path: Path) -> Tokenizer:
    return open_source(str(path)).tokenizer()


@pytest.mark.parametrize("pre", ["gpt-2", "llama-bpe", "qwen2", "smollm"])
def test_byte_level_tokenizers_give_the_same_ids(pre: str, tmp_path: Path) -> None:
    theirs = byte_level_file(tmp_path / "m.gguf", pre)
    ours = opened(tmp_path / "m.gguf")
    for text in TEXTS:
        for special in (True, False):
            ids = theirs.encode(text, add_special_tokens=special).ids
            assert ours.encode(text, add_special_tokens=special) == ids
            for skip in (True, False):
                assert ours.decode(ids, skip) == theirs.decode(ids, skip_special_tokens=skip)
    assert ours.vocab_size == theirs.get_vocab_size()
    assert ours.bos_token == SPECIALS[0]
    assert ours.chat_template == TEMPLATE
    assert ours.special_ids() == {name: theirs.token_to_id(name) for name in SPECIALS}


def test_end_tokens_sampling_and_templates_are_the_files(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    class Suggesting(gguf.GGUFWriter):  # type: ignore[misc]
        def write_header_to_file(self, *arguments: Any) -> None:
            self.add_sampling_temp(0.5)
            self.add_sampling_top_k(7)
            self.add_sampling_mirostat(2)
            self.add_string("tokenizer.chat_template.tool_use", "{{ tools }}")
            super().write_header_to_file(*arguments)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gguf, "GGUFWriter", Suggesting)
        theirs = byte_level_file(tmp_path / "m.gguf", "qwen2")
    generation = open_source(str(tmp_path / "m.gguf")).generation()
    other = open_source(str(tmp_path / "m.gguf")).generation({"eos_token_id": 5, "bos_token_id": 6})
    assert (other.eos_token_ids, other.bos_token_id, other.top_k) == ((5,), 6, 7)
    # The template's end of a turn counts beside the end of a text.
    assert generation.eos_token_ids == (theirs.token_to_id(SPECIALS[0]), theirs.token_to_id("<|im_end|>"))
    assert (generation.temperature, generation.top_k, generation.top_p) == (0.5, 7, None)
    assert "suggests sampling by mirostat, which is not supported and has no effect" in caplog.text
    assert opened(tmp_path / "m.gguf").chat_template == {"default": TEMPLATE, "tool_use": "{{ tools }}"}


@pytest.mark.parametrize("is_harmony", [True, False])
def test_a_message_ends_an_answer_unless_the_template_has_many_in_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_harmony: bool
) -> None:
    monkeypatch.setitem(globals(), "SPECIALS", ["<|end|>", "<|return|>", "<|call|>"])
    monkeypatch.setitem(globals(), "TEMPLATE", "<|channel|>final<|message|><|end|>" if is_harmony else "<|end|>")
    theirs = byte_level_file(tmp_path / "m.gguf", "qwen2")
    ends = ("<|return|>", "<|call|>") if is_harmony else ("<|end|>",)
    ids = open_source(str(tmp_path / "m.gguf")).generation().eos_token_ids
    assert ids == tuple(map(theirs.token_to_id, ends))


def sentencepiece_files(folder: Path, prefix: bool, filling: gguf.TokenType = gguf.TokenType.UNUSED) -> None:
    """The same vocabulary as tokenizer.model with its config, and as a GGUF file, filled up with tokens of a type."""
    made = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(tiny_tokenizers.TEXT), model_writer=made, model_type="bpe", vocab_size=500,
        byte_fallback=True, normalization_rule_name="identity", remove_extra_whitespaces=False, minloglevel=2,
        user_defined_symbols=["<tag>"], add_dummy_prefix=prefix, control_symbols=["<turn>"],
    )  # fmt: skip
    (folder / "tokenizer.model").write_bytes(made.getvalue())
    model = sentencepiece.SentencePieceProcessor(model_proto=made.getvalue())
    ids = range(model.GetPieceSize())
    added = {
        i: {"content": model.IdToPiece(i), "special": True} for i in ids if model.IsUnknown(i) or model.IsControl(i)
    }
    (folder / "tokenizer_config.json").write_text(json.dumps({"added_tokens_decoder": added}))
    sentencepiece_gguf.write(folder / "m.gguf", made.getvalue(), ("<tag>",), filling, prefix=prefix)


@pytest.mark.parametrize(
    ("prefix", "filling"),
    [(True, gguf.TokenType.UNUSED), (False, gguf.TokenType.UNUSED), (True, gguf.TokenType.UNKNOWN)],
)
def test_sentencepiece_tokenizers_give_the_same_ids(prefix: bool, filling: gguf.TokenType, tmp_path: Path) -> None:
    sentencepiece_files(tmp_path, prefix, filling)
    theirs, ours = Tokenizer.load(tmp_path), opened(tmp_path / "m.gguf")
    assert ours.vocab_size == theirs.vocab_size
    assert (ours.bos_token, ours.eos_token) == ("<s>", "</s>")

    @given(st.sampled_from(TEXTS) | st.text(st.sampled_from("the wl車é1<tag>▁ \n"), max_size=30))
    @settings(max_examples=100, deadline=None)
    def check(text: str) -> None:
        ids = theirs.encode(text)
        assert ours.encode(text) == ids
        assert ours.encode(text, add_special_tokens=False) == theirs.encode(text, add_special_tokens=False)
        assert ours.decode(ids) == theirs.decode(ids)

    check()
    assert ours.token_texts(range(5)) == theirs.token_texts(range(5))


def gemma_files(path: Path) -> Any:
    """A tokenizer of transformers, and the same in a GGUF file."""
    from transformers import GemmaTokenizer

    made = tokenizers.Tokenizer(models.BPE(byte_fallback=True))
    made.normalizer = normalizers.Replace(" ", "\u2581")
    specials = ["<pad>", "<eos>", "<bos>", "<unk>", "<mask>"]
    trainer = trainers.BpeTrainer(
        vocab_size=500, special_tokens=[*specials, *(f"<0x{byte:02X}>" for byte in range(256))], show_progress=False
    )
    made.train_from_iterator(tiny_tokenizers.TEXT, trainer)
    state = json.loads(made.to_str())["model"]
    merges = [tuple(merge) for merge in state["merges"]]
    theirs = GemmaTokenizer(vocab=state["vocab"], merges=merges)
    theirs.add_tokens(["<|turn>", "<turn|>"], special_tokens=True)
    fast = theirs.backend_tokenizer
    tokens = [fast.id_to_token(i) for i in range(fast.get_vocab_size())]
    added = {token.content: token.special for token in fast.get_added_tokens_decoder().values()}
    writer = gguf.GGUFWriter(path, "gemma4")
    writer.add_tokenizer_model("gemma4")
    writer.add_token_list(tokens)
    writer.add_token_scores([0.0] * len(tokens))
    writer.add_token_types([
        gguf.TokenType.CONTROL if added.get(token) else gguf.TokenType.BYTE if token.startswith("<0x")
        else gguf.TokenType.NORMAL for token in tokens
    ])  # fmt: skip
    writer.add_token_merges([" ".join(merge) for merge in merges])
    for name in ("bos", "eos", "unk", "pad"):
        getattr(writer, f"add_{name}_token_id")(state["vocab"][f"<{name}>"])
    writer.add_add_bos_token(True)
    writer.add_chat_template("{% for m in messages %}<|turn>{{ m.content }}<turn|>{% endfor %}")
    gguf_files.finish(writer)
    return fast


def test_gemma_4s_tokenizer_gives_the_same_ids(tmp_path: Path) -> None:
    theirs, ours = gemma_files(tmp_path / "m.gguf"), opened(tmp_path / "m.gguf")
    for text in [*TEXTS, "a<|turn> b\n<bos>", "\u2581 x  \u2581"]:
        ids = theirs.encode(text, add_special_tokens=False).ids
        assert ours.encode(text, add_special_tokens=False) == ids
        assert ours.encode(text) == [ours.special_ids()["<bos>"], *ids]
        for skip in (True, False):
            assert ours.decode(ids, skip) == theirs.decode(ids, skip_special_tokens=skip)
    assert ours.vocab_size == theirs.get_vocab_size()
    ends = open_source(str(tmp_path / "m.gguf")).generation().eos_token_ids
    assert ends == (theirs.token_to_id("<eos>"), theirs.token_to_id("<turn|>"))


@pytest.mark.parametrize(
    ("model", "pre", "message"),
    [
        ("bert", None, "tokenizer 'bert' is not supported; supported are gpt2, llama and gemma4"),
        ("gpt2", "chameleon", "tokenizer.ggml.pre 'chameleon' is not supported; supported are gpt-2"),
        ("gpt2", None, "there is no tokenizer.ggml.pre, .*name the original model's folder"),
    ],
)
def test_other_tokenizers_are_refused_by_name(tmp_path: Path, model: str, pre: str | None, message: str) -> None:
    writer = gguf.GGUFWriter(tmp_path / "m.gguf", "llama")
    writer.add_tokenizer_model(model)
    writer.add_token_list(["a", "b"])
    writer.add_token_merges([])
    if pre is not None:
        writer.add_tokenizer_pre(pre)
    gguf_files.finish(writer)
    with pytest.raises(ModelError, match=f"m.gguf: {message}"):
        opened(tmp_path / "m.gguf")


def test_more_tokens_than_the_embedding_has_are_refused(tmp_path: Path) -> None:
    class Small(gguf.GGUFWriter):  # type: ignore[misc]
        def write_header_to_file(self, *arguments: Any) -> None:
            self.add_tensor("token_embd.weight", np.zeros((200, 4), np.float32))
            super().write_header_to_file(*arguments)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gguf, "GGUFWriter", Small)
        byte_level_file(tmp_path / "m.gguf", "gpt-2")
    with pytest.raises(
        ModelError, match=r"m.gguf: tokenizer.ggml.tokens has \d+ tokens, but tensor token_embd.weight has 200 rows"
    ):
        opened(tmp_path / "m.gguf")
