"""Encoders in GGUF files give the bits and the tokens of the folders that the files are made of."""

from __future__ import annotations

import io
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import encoder_zoo as zoo
import gguf
import gguf_encoders
import gguf_files
import models_zoo
import numpy as np
import pytest
import tokenizers
from numpy.typing import NDArray
from optional_packages import require_packages
from safetensors.numpy import load_file, save_file
from tokenizers import models, normalizers, pre_tokenizers, processors, trainers

from engine import tiny_tokenizers
from tidewheel.engine.encoders.detection import is_encoder
from tidewheel.engine.encoders.embedder import Embedder
from tidewheel.engine.encoders.encoder import Encoder
from tidewheel.engine.encoders.inspection import inspect_encoder
from tidewheel.engine.encoders.load import load_encoders
from tidewheel.engine.encoders.options import EncoderDType
from tidewheel.engine.encoders.settings import EncoderSettings
from tidewheel.engine.encoders.tokenization import EncoderInput, EncoderTokenizer
from tidewheel.engine.errors import ModelError
from tidewheel.engine.options import EngineOptions
from tidewheel.engine.text.sentencepiece_model import read_sentencepiece_model

pytest.importorskip("tidewheel._native")
sentencepiece = pytest.importorskip("sentencepiece")
require_packages("transformers")

Floats = NDArray[np.float32]
Config = dict[str, Any]

TEXTS = [
    "", " ", "The tide turns.", "Ça, naïve Köln\t12 3.5 x-ray!", "潮車 rain [MASK] <mask>.", "a \n\n <unk> b  c \u00a0",
]  # fmt: skip


def load(path: Path, dtype: EncoderDType = "auto") -> Encoder:
    return load_encoders([str(path)], ["it"], dtype=dtype).encoders["it"]


def inputs(encoder: Encoder) -> list[EncoderInput]:
    texts, limit = zoo.texts(6, most=60), encoder.max_length
    if isinstance(encoder, Embedder):
        return [encoder.encode(text, truncate_to=limit) for text in texts]
    return encoder.plan_scores(texts, texts[::-1], truncate_to=limit).inputs


def rows(encoder: Encoder, items: Sequence[EncoderInput]) -> Floats:
    return np.stack(encoder.run(encoder.task, items))


def assert_same_bits(ours: Encoder, theirs: Encoder) -> None:
    items = inputs(theirs)
    assert ours.task == theirs.task
    np.testing.assert_array_equal(rows(ours, items), rows(theirs, items))


@pytest.mark.parametrize(
    ("name", "architecture"),
    [
        ("bert", "bert"),
        ("roberta-cls", "bert"),
        ("roberta-cross", "bert"),
        ("distilbert-cross", "bert"),
        ("nomic_bert", "nomic-bert"),
        ("modernbert", "modern-bert"),
        ("modernbert-mean-cross", "modern-bert"),
    ],
)
def test_bits_and_tokens_are_the_folders(name: str, architecture: str, tmp_path: Path) -> None:
    folder, file = zoo.native_folder(name), tmp_path / "model.gguf"
    if name.startswith("roberta"):
        folder = with_a_merge(folder, tmp_path / "folder")
    gguf_encoders.write(folder, file)
    theirs, ours = load(folder), load(file)
    assert_same_bits(ours, theirs)
    assert ours.labels == theirs.labels
    limit = min(ours.max_length, theirs.max_length)
    for text in TEXTS:
        for pair in (None, "grinds corn"):
            wanted = theirs.tokenizer.encode(text, pair, truncate_to=limit)
            assert ours.tokenizer.encode(text, pair, truncate_to=limit).token_ids == wanted.token_ids
    assert is_encoder(file)
    found = inspect_encoder(EngineOptions("it"), file, whole=True)
    assert (found.refusal, found.format, found.architecture) == (None, "GGUF", architecture)
    assert (found.files, found.bytes) == (["model.gguf"], file.stat().st_size)
    if isinstance(ours, Embedder):
        assert found.width == ours.width
        assert np.linalg.norm(ours.vectors(rows(ours, inputs(ours))), axis=1) == pytest.approx(1)


def with_a_merge(source: Path, folder: Path) -> Path:
    """A folder whose tokenizer has one: files of GGUF cannot have none."""
    zoo.changed_folder(source, folder)
    described = json.loads((folder / "tokenizer.json").read_text())
    vocabulary = described["model"]["vocab"]
    vocabulary["th"] = vocabulary.pop("\u00ff")
    described["model"]["merges"] = [["t", "h"]]
    (folder / "tokenizer.json").write_text(json.dumps(described))
    return folder


def changed(name: str, folder: Path, config: Config, change: Callable[[dict[str, Any]], None]) -> Path:
    """A copy of a folder with other tensors and other fields of the config."""
    own = json.loads((zoo.native_folder(name) / "config.json").read_text())
    zoo.changed_folder(zoo.native_folder(name), folder, config=own | config)
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors")
    return folder


@pytest.mark.parametrize(("is_split", "for_code"), [(False, False), (True, False), (True, True)])
def test_jina_bert(is_split: bool, for_code: bool, tmp_path: Path) -> None:
    """Files have gate and up in one matrix, or in two. The model for code has more norms, and up before gate."""
    gated, down = ("up_gated_layer", "down_layer") if for_code else ("gated_layers", "wo")
    last = "layer_norm_2" if for_code else "mlp.layernorm"
    more = ("layer_norm_1", "attention.self.layer_norm_q", "attention.self.layer_norm_k") if for_code else ()

    def change(tensors: dict[str, Any]) -> None:
        del tensors["embeddings.position_embeddings.weight"]
        for layer in ("encoder.layer.0.", "encoder.layer.1."):
            up = tensors.pop(f"{layer}intermediate.dense.weight")
            del tensors[f"{layer}intermediate.dense.bias"]
            tensors[f"{layer}mlp.{gated}.weight"] = np.concatenate([up, up[::-1] / 2])
            for kind in ("weight", "bias"):
                tensors[f"{layer}mlp.{down}.{kind}"] = tensors.pop(f"{layer}output.dense.{kind}")
                tensors[f"{layer}{last}.{kind}"] = tensors.pop(f"{layer}output.LayerNorm.{kind}")
                tensors |= {f"{layer}{name}.{kind}": tensors[f"{layer}{last}.{kind}"] / 2 for name in more}

    words = {"model_type": "jina_bert", "position_embedding_type": "alibi", "feed_forward_type": "geglu"}
    words |= {"_name_or_path": "jinaai/jina-bert-v2-qk-post-norm"} if for_code else {}
    folder = changed("bert", tmp_path / "folder", {**words, "architectures": ["JinaBertModel"]}, change)

    def split(writer: Any) -> None:
        for name, info in [*writer.tensors[0].items()]:
            if is_split and "ffn_up" in name:
                gate, up = np.split(info.tensor, 2)[:: -1 if for_code else 1]
                del writer.tensors[0][name]
                writer.add_tensor(name, np.ascontiguousarray(up))
                writer.add_tensor(name.replace("up", "gate"), np.ascontiguousarray(gate))

    assert_same_bits(load(gguf_encoders.write(folder, tmp_path / "model.gguf", change=split)), load(folder))
    if for_code:
        with pytest.raises(ModelError, match="gate and up in one matrix"):
            load(gguf_encoders.write(folder, tmp_path / "fused.gguf"))


def test_embedding_gemma(tmp_path: Path) -> None:
    """With two Dense modules; the norms of files have 1 added."""
    folder, random = tmp_path / "folder", np.random.default_rng(0)
    listed = zoo.modules("Pooling", "Dense", "Dense", "Normalize")["modules.json"]
    zoo.changed_folder(zoo.native_folder("gemma"), folder, modules=listed)
    for index, (outputs, width) in enumerate(((48, zoo.HIDDEN), (zoo.HIDDEN, 48)), 2):
        listed[index]["path"] = f"{index}_Dense"
        module = {"in_features": width, "out_features": outputs, "bias": False, "activation_function": "Identity"}
        (folder / f"{index}_Dense").mkdir()
        (folder / f"{index}_Dense" / "config.json").write_text(json.dumps(module))
        weight = random.standard_normal((outputs, width)).astype(np.float32)
        save_file({"linear.weight": weight}, folder / f"{index}_Dense" / "model.safetensors")
    (folder / "modules.json").write_text(json.dumps(listed))
    assert_same_bits(load(gguf_encoders.write(folder, tmp_path / "model.gguf")), load(folder))


def distances(ours: Floats, wanted: Floats) -> NDArray[np.float64]:
    a, b = ours.astype(np.float64), wanted.astype(np.float64)
    cosines: NDArray[np.float64] = (a * b).sum(1) / np.linalg.norm(a, axis=1) / np.linalg.norm(b, axis=1)
    return 1 - cosines


def test_blocks_stay_or_become_what_is_asked_for(tmp_path: Path) -> None:
    folder, q8_0 = zoo.native_folder("bert"), gguf.GGMLQuantizationType.Q8_0

    def dequantized(name: str, data: Floats) -> tuple[Floats, Any]:
        blocks = gguf.quants.quantize(data, q8_0) if data.ndim > 1 else None
        return gguf_files.as_float32(name, data if blocks is None else gguf.quants.dequantize(blocks, q8_0))

    file = gguf_encoders.write(folder, tmp_path / "model.gguf", gguf_files.quantized(q8_0))
    floats = gguf_encoders.write(folder, tmp_path / "floats.gguf", dequantized)
    exact = load(folder)
    items = inputs(exact)
    wanted = rows(exact, items)
    np.testing.assert_array_equal(rows(load(file, "float32"), items), rows(load(floats, "float32"), items))
    np.testing.assert_array_equal(rows(load(file, "bfloat16"), items), rows(load(floats, "bfloat16"), items))
    kept = load(file)
    found = rows(kept, items)
    assert 0 < distances(found, wanted).max() < 1e-3
    np.testing.assert_array_equal(kept.run("embed", items[2:3])[0], found[2])
    assert not np.array_equal(found, rows(load(floats, "bfloat16"), items))
    assert 0 < distances(rows(load(file, "int8"), items), wanted).max() < 1e-2


def test_a_folder_with_one_file_is_served_and_a_chat_model_is_none(tmp_path: Path) -> None:
    file = gguf_encoders.write(zoo.native_folder("bert"), tmp_path / "bert-F32.gguf")
    assert load(tmp_path).width == load(Path(f"{tmp_path}:F32")).width == zoo.HIDDEN
    assert is_encoder(tmp_path)
    writer = gguf.GGUFWriter(tmp_path / "other.gguf", "llama")
    gguf_files.finish(writer)
    assert not is_encoder(tmp_path / "other.gguf")
    file.unlink()
    with pytest.raises(ModelError, match="is no embedding model that is supported"):
        load(tmp_path)


def decoder_file(path: Path, name: str, change: Callable[[Any], None]) -> Path:
    """A decoder of the zoo. `change` adds to what its writer has."""

    class Writer(gguf.GGUFWriter):  # type: ignore[misc]
        def write_header_to_file(self, *arguments: Any) -> None:
            change(self)
            super().write_header_to_file(*arguments)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gguf, "GGUFWriter", Writer)
        return gguf_files.zoo_file(path, name)


@pytest.mark.parametrize("name", ["qwen3", "llama", "gemma"])
def test_decoders_embed(name: str, tmp_path: Path) -> None:
    """Their queries and keys lie in another order in files, or their norms have 1 added."""
    file = decoder_file(tmp_path / "model.gguf", name, lambda w: w.add_pooling_type(gguf.PoolingType.LAST))
    folder = models_zoo.folder(name, tokenizer=True)
    (theirs,) = load_encoders([str(folder)], ["it"], first=EncoderSettings(convert="embed")).encoders.values()
    ours = load(file)
    assert_same_bits(ours, theirs)
    assert ours.task == "embed"
    for text in TEXTS:
        assert ours.tokenizer.encode(text).token_ids == theirs.tokenizer.encode(text).token_ids
    plain = decoder_file(tmp_path / "plain.gguf", name, lambda w: None)
    with pytest.raises(ModelError, match="embed with a chat model by converting it"):
        load(plain)
    (converted,) = load_encoders([str(plain)], ["it"], first=EncoderSettings(convert="embed")).encoders.values()
    assert_same_bits(converted, theirs)


def test_a_reranker_answers_yes_or_no(tmp_path: Path) -> None:
    """Qwen3-Reranker's: the rows of its two answers, and its template."""
    random = np.random.default_rng(0)
    model = models_zoo.model("qwen3")
    answers = random.standard_normal((2, model.config.hidden_size)).astype(np.float32)

    def change(writer: Any) -> None:
        writer.add_pooling_type(gguf.PoolingType.RANK)
        writer.add_classifier_output_labels(["yes", "no"])
        writer.add_string("tokenizer.chat_template.rerank", "Q: {query} D: {document} A:")
        writer.add_tensor("cls.output.weight", answers)

    reranker = load(decoder_file(tmp_path / "model.gguf", "qwen3", change))
    plan = reranker.plan_scores(["the tide"], ["turns", "grinds corn"])
    scores = plan.scores(reranker.run(plan.task, plan.inputs))
    (embedder,) = load_encoders(
        [str(models_zoo.folder("qwen3", tokenizer=True))], ["it"], first=EncoderSettings(convert="embed")
    ).encoders.values()
    rows = np.stack(embedder.run("embed", plan.inputs)) @ answers.T
    np.testing.assert_allclose(scores, np.exp(rows[:, 0]) / np.exp(rows).sum(1), atol=1e-5)
    texts = ["Q: the tide D: turns", "Q: the tide D: grinds corn"]
    ends = reranker.tokenizer.encode(" A:", add_special_tokens=False).token_ids
    wanted = [[*reranker.tokenizer.encode(text).token_ids, *ends] for text in texts]
    assert [list(item.token_ids) for item in plan.inputs] == wanted


BAD: dict[str, tuple[Callable[[Any], None], str]] = {
    "causal": (lambda w: replaced(w, "bert.attention.causal", True), "bert.attention.causal must be false in an encod"),
    "pooling": (lambda w: replaced(w, "bert.pooling_type", 9), r"bert.pooling_type must be 0, 4 or one of 1, 2, 3"),
    "rank": (lambda w: replaced(w, "bert.pooling_type", 4), "has no tensor cls.output.weight, which"),
    "width": (lambda w: replaced(w, "bert.embedding_length", 2**30), r"token_embd.weight has shape \(\d+, 32\), but"),
    "heads": (lambda w: replaced(w, "bert.attention.head_count", 5), "read as a config.json: .* not a multiple of num"),
    "layers": (lambda w: replaced(w, "bert.block_count", 2**30), "num_hidden_layers must be at most 10000"),
    "more layers": (lambda w: replaced(w, "bert.block_count", 3), r"has no tensor blk.2.\w+.weight, which is needed"),
    "inner": (lambda w: replaced(w, "bert.feed_forward_length", 2**30), r"blk.0.ffn_up.weight has shape \(64, 32\)"),
    "length": (lambda w: replaced(w, "bert.context_length", 2**30), "bert.context_length must be at most 1000000"),
    "eps": (lambda w: replaced(w, "bert.attention.layer_norm_epsilon", None), "layer_norm_epsilon must be a number"),
    "other kind": (
        lambda w: w.add_tensor("blk.0.attn_q_norm.weight", np.ones(32, np.float32)),
        "layers of this architecture have no tensor blk.0.attn_q_norm.weight",
    ),
    "labels": (
        lambda w: (classifies(w), w.add_tensor("cls.weight", np.ones((32, 32), np.float32))),
        "bert.classifier.output_labels must be 2 labels, one for each row of cls.output.weight",
    ),
    "pooler": (lambda w: classifies(w), "has no tensor cls.weight: converters leave out the pooler"),
    "tokenizer": (lambda w: replaced(w, "tokenizer.ggml.model", "rwkv"), "tokenizer 'rwkv' is not supported in an emb"),
    "unknown": (lambda w: replaced(w, "tokenizer.ggml.unknown_token_id", None), "unknown_token_id must be the id of a"),
}  # fmt: skip


def classifies(writer: Any) -> None:
    replaced(writer, "bert.pooling_type", None)
    writer.add_classifier_output_labels(["one"])
    writer.add_tensor("cls.output.weight", np.ones((2, 32), np.float32))


def replaced(writer: Any, key: str, value: object) -> None:
    writer.kv_data[0].pop(key)
    if isinstance(value, str):
        writer.add_string(key, value)
    elif isinstance(value, bool):
        writer.add_bool(key, value)
    elif isinstance(value, int):
        writer.add_uint32(key, value)


@pytest.mark.parametrize("name", BAD)
def test_what_cannot_be_served_is_said(name: str, tmp_path: Path) -> None:
    change, said = BAD[name]
    file = gguf_encoders.write(zoo.native_folder("bert"), tmp_path / "model.gguf", change=change)
    with pytest.raises(ModelError, match=said) as error:
        load(file)
    assert str(file) in str(error.value)


def opened(path: Path, made: tokenizers.Tokenizer, pre: str = "roberta-bpe") -> EncoderTokenizer:
    writer = gguf.GGUFWriter(path, "bert")
    gguf_encoders.write_tokenizer(writer, made, pre)
    return EncoderTokenizer.load(gguf_files.finish(writer))


def word_pieces(lower: bool) -> tokenizers.Tokenizer:
    from transformers import BertTokenizer

    ids = {token: i for i, token in enumerate(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "The", "tide", "##ides"])}
    for character in "abcdefghijklmnopqrstuvwxyzéçC潮12,.!-":
        ids |= {character: len(ids), f"##{character}": len(ids) + 1}
    made: tokenizers.Tokenizer = BertTokenizer(vocab=ids, do_lower_case=lower).backend_tokenizer
    return made


def pieces(folder: Path) -> tokenizers.Tokenizer:
    from transformers import XLMRobertaTokenizer

    made = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(tiny_tokenizers.TEXT), model_writer=made, model_type="unigram", vocab_size=150,
        hard_vocab_limit=False, minloglevel=2,
    )  # fmt: skip
    (folder / "spm.model").write_bytes(made.getvalue())
    model = read_sentencepiece_model(folder / "spm.model")
    listed = [*zip(model.pieces, model.scores, strict=True)][3:]
    vocabulary = [("<s>", 0.0), ("<pad>", 0.0), ("</s>", 0.0), ("<unk>", 0.0), *listed, ("<mask>", 0.0)]
    fast: tokenizers.Tokenizer = XLMRobertaTokenizer(
        vocab=vocabulary, _spm_precompiled_charsmap=model.charsmap
    ).backend_tokenizer
    return fast


def bytes_of(specials: list[str], *, is_modern: bool) -> tokenizers.Tokenizer:
    """RoBERTa's, or ModernBERT's with one separator in pairs."""
    made = tokenizers.Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=400, initial_alphabet=alphabet, special_tokens=specials, show_progress=False
    )
    made.train_from_iterator(tiny_tokenizers.TEXT, trainer)
    made.add_special_tokens([tokenizers.AddedToken(specials[-1], lstrip=True, normalized=False)])
    first, last = ((token, made.token_to_id(token)) for token in (specials[0], specials[2]))
    made.post_processor = processors.RobertaProcessing(last, first, add_prefix_space=False)
    if is_modern:
        made.normalizer = normalizers.NFC()
        made.add_tokens(["   "])
        made.post_processor = processors.TemplateProcessing(
            single=[first[0], "$A", last[0]],
            pair=[first[0], "$A", last[0], "$B", last[0]],
            special_tokens=[first, last],
        )
    return made


@pytest.mark.parametrize("kind", ["uncased", "cased", "pieces", "bytes", "modern"])
def test_tokens_are_transformers(kind: str, tmp_path: Path) -> None:
    pre = "modern-bert" if kind == "modern" else "roberta-bpe"
    if kind in ("uncased", "cased"):
        theirs = word_pieces(lower=kind == "uncased")
    elif kind == "pieces":
        theirs = pieces(tmp_path)
    elif kind == "bytes":
        theirs = bytes_of(["<s>", "<pad>", "</s>", "<unk>", "<mask>"], is_modern=False)
    else:
        theirs = bytes_of(["[CLS]", "[PAD]", "[SEP]", "[UNK]", "[MASK]"], is_modern=True)
    ours = opened(tmp_path / "model.gguf", theirs, pre)
    for text in [*TEXTS, *tiny_tokenizers.TEXT[:5], "e\u0301  x    y"]:
        for pair in (None, "The tides, 12", ""):
            wanted = theirs.encode(text, pair)
            assert ours.encode(text, pair) == EncoderInput(wanted.ids, wanted.type_ids), (text, pair)
        assert (
            ours.encode(text, add_special_tokens=False).token_ids == theirs.encode(text, add_special_tokens=False).ids
        )


def test_words_are_lowered_where_an_older_file_has_no_capitals(tmp_path: Path) -> None:
    for lower in (True, False):
        writer = gguf.GGUFWriter(tmp_path / f"{lower}.gguf", "bert")
        made = word_pieces(lower)
        gguf_encoders.write_tokenizer(writer, made)
        replaced(writer, "tokenizer.ggml.normalizer.lowercase", None)
        if lower:
            tokens = writer.kv_data[0]["tokenizer.ggml.tokens"].value
            tokens[:] = [f"{token.lower()}_" if token in ("\u2581The", "\u2581C", "C") else token for token in tokens]
        found = EncoderTokenizer.load(gguf_files.finish(writer)).encode("TIDE").token_ids
        assert found == (made.encode("tide").ids if lower else made.encode("TIDE").ids)


@pytest.mark.parametrize("has_prefix", [False, True])
def test_merged_pieces_are_sentencepieces(has_prefix: bool, tmp_path: Path) -> None:
    """As EmbeddingGemma has them, and as Mistral, with a space before texts."""
    own = [] if has_prefix else ["<tag>", "\u2581\u2581"]
    made = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(tiny_tokenizers.TEXT), model_writer=made, model_type="bpe", vocab_size=500,
        byte_fallback=True, normalization_rule_name="identity", remove_extra_whitespaces=False, minloglevel=2,
        user_defined_symbols=own, add_dummy_prefix=has_prefix,
    )  # fmt: skip
    theirs = sentencepiece.SentencePieceProcessor(model_proto=made.getvalue())
    count = theirs.GetPieceSize()
    kinds = [
        gguf.TokenType.UNKNOWN if theirs.IsUnknown(i) else gguf.TokenType.CONTROL if theirs.IsControl(i)
        else gguf.TokenType.BYTE if theirs.IsByte(i) else gguf.TokenType.NORMAL for i in range(count)
    ]  # fmt: skip
    for piece in own:
        kinds[theirs.PieceToId(piece)] = gguf.TokenType.USER_DEFINED
    writer = gguf.GGUFWriter(tmp_path / "model.gguf", "gemma-embedding")
    writer.add_tokenizer_model("llama")
    writer.add_token_list([theirs.IdToPiece(i) for i in range(count)])
    writer.add_token_scores([theirs.GetScore(i) for i in range(count)])
    writer.add_token_types(kinds)
    writer.add_bos_token_id(theirs.bos_id())
    writer.add_eos_token_id(theirs.eos_id())
    writer.add_add_bos_token(True)
    writer.add_add_eos_token(True)
    writer.add_add_space_prefix(has_prefix)
    ours = EncoderTokenizer.load(gguf_files.finish(writer))
    for text in [*TEXTS, *tiny_tokenizers.TEXT[:5], "a <tag>b   c    d"]:
        ids = theirs.EncodeAsIds(text.replace("<unk>", "-"))
        found = ours.encode(text.replace("<unk>", "-"))
        assert found.token_ids == [theirs.bos_id(), *ids, theirs.eos_id()], text
