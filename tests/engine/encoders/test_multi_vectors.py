"""Vectors and weights of tokens: ColBERT's in both layouts of files, BGE-M3's, and a plain embedder's."""

from __future__ import annotations

import json
import pickle
import shutil
import string
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import encoder_zoo as zoo
import numpy as np
import pytest
import torch
from optional_packages import require_packages
from safetensors.numpy import load_file, save_file

from tidewheel.engine.encoders.description import _check_reach, describe_encoder
from tidewheel.engine.encoders.inspection import inspect_encoder
from tidewheel.engine.encoders.load import load_encoders
from tidewheel.engine.encoders.multi_vector import MultiVectorEncoder
from tidewheel.engine.encoders.pooling import Floats
from tidewheel.engine.encoders.settings import EncoderSettings
from tidewheel.engine.encoders.tokenization import EncoderInput
from tidewheel.engine.errors import InvalidRequestError, ModelError
from tidewheel.engine.options import EngineOptions

pytest.importorskip("tidewheel._native")
require_packages("transformers")

SIZE = 12
QUERIES = ["the tide !", "", "corn ? " * 9]
DOCUMENTS = ["a wheel turns , and grinds corn !", "! ?", "naïve rain"]
RANDOM = np.random.default_rng(5)
MATRIX = (RANDOM.standard_normal((SIZE, zoo.HIDDEN)) / 6).astype(np.float32)
ROW = RANDOM.standard_normal((1, zoo.HIDDEN)).astype(np.float32)
BIAS = RANDOM.standard_normal(SIZE).astype(np.float32)


@pytest.fixture(scope="module", autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


def load(folder: Path) -> Any:
    return load_encoders([str(folder)], ["it"]).encoders["it"]


def with_marks(source: Path, target: Path, marks: list[str]) -> Path:
    """A copy of a folder whose tokenizer also knows a mask and these tokens, which the model has vectors for."""
    from tokenizers import AddedToken, Tokenizer

    shutil.copytree(source, target)
    tokenizer = Tokenizer.from_file(str(target / "tokenizer.json"))
    before = tokenizer.get_vocab_size()
    tokenizer.add_special_tokens([AddedToken("[MASK]", normalized=False)])
    tokenizer.add_tokens([AddedToken(mark, normalized=False) for mark in marks])
    tokenizer.save(str(target / "tokenizer.json"))
    for name in ("tokenizer_config", "config"):
        path = target / f"{name}.json"
        content = json.loads(path.read_text())
        content |= {"mask_token": "[MASK]"} if name == "tokenizer_config" else {"vocab_size": before + 1 + len(marks)}
        path.write_text(json.dumps(content))
    tensors = load_file(target / "model.safetensors")
    name = next(name for name in tensors if name.endswith(("word_embeddings.weight", "tok_embeddings.weight")))
    added = np.random.default_rng(2).standard_normal((1 + len(marks), zoo.HIDDEN)).astype(np.float32) / 6
    save_file({**tensors, name: np.concatenate([tensors[name], added])}, target / "model.safetensors")
    return target


def stanford(target: Path, metadata: dict[str, Any] | None = None) -> Path:
    folder = with_marks(zoo.native_folder("bert"), target, ["[unused0]", "[unused1]"])
    tensors = {f"bert.{name}": tensor for name, tensor in load_file(folder / "model.safetensors").items()}
    save_file({**tensors, "linear.weight": MATRIX}, folder / "model.safetensors")
    for name in ("modules.json", "sentence_bert_config.json"):
        (folder / name).unlink()
    shutil.rmtree(folder / "1_Pooling")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "architectures": ["HF_ColBERT"]}))
    if metadata is not None:
        (folder / "artifact.metadata").write_text(json.dumps(metadata))
    return folder


def pylate(name: str, target: Path, settings: dict[str, Any], marks: tuple[str, ...] = ("[Q] ", "[D] ")) -> Path:
    folder = with_marks(zoo.native_folder(name), target, list(marks))
    listed = zoo.modules("Dense")["modules.json"]
    listed[1]["type"] = "pylate.models.Dense.Dense"
    (folder / "modules.json").write_text(json.dumps(listed))
    (folder / "1_Dense").mkdir()
    dense = {"in_features": zoo.HIDDEN, "out_features": SIZE, "bias": True, "use_residual": False}
    dense["activation_function"] = "torch.nn.modules.linear.Identity"
    (folder / "1_Dense" / "config.json").write_text(json.dumps(dense))
    save_file({"linear.weight": MATRIX, "linear.bias": BIAS}, folder / "1_Dense" / "model.safetensors")
    (folder / "config_sentence_transformers.json").write_text(json.dumps({"similarity_fn_name": "MaxSim", **settings}))
    return folder


def reference(name: str, folder: Path, ids: list[int], num_seen: int) -> Floats:
    """Transformers' rows of one text, of which only the first ones are attended to."""
    import transformers

    made = zoo.model(name)
    config = transformers.AutoConfig.from_pretrained(folder)
    own = type(made)._from_config(config, attn_implementation="eager").eval()
    tensors = {key.removeprefix("bert."): torch.from_numpy(value) for key, value in
               load_file(folder / "model.safetensors").items() if not key.startswith("linear")}  # fmt: skip
    own.load_state_dict(tensors, strict=False)
    mask = torch.tensor([[1] * num_seen + [0] * (len(ids) - num_seen)])
    with torch.no_grad():
        return own(input_ids=torch.tensor([ids]), attention_mask=mask)[0][0].numpy()


def assert_colbert(
    name: str, folder: Path, *, marks: tuple[str, str], length: int, attends: bool, skips: str, bias: Floats | float = 0
) -> None:
    """Compare queries, documents and scores with what ColBERT's code does."""
    from tokenizers import Tokenizer

    encoder, tokenizer = load(folder), Tokenizer.from_file(str(folder / "tokenizer.json"))
    assert isinstance(encoder, MultiVectorEncoder)
    assert encoder.tasks == {"token_embed"}
    assert encoder.width == SIZE
    texts: list[tuple[str, str]] = [("query", text) for text in QUERIES] + [("document", text) for text in DOCUMENTS]
    inputs = [encoder.encode(text, prompt_name=role) for role, text in texts]
    results, wanted = encoder.run("token_embed", inputs), []
    for (role, text), item in zip(texts, inputs, strict=True):
        ids = tokenizer.encode(text).ids
        ids = [ids[0], tokenizer.token_to_id(marks[role == "document"]), *ids[1:]]
        seen = len(ids)
        if role == "query":
            ids += [tokenizer.token_to_id("[MASK]")] * (length - len(ids))
        assert [*item.token_ids] == ids
        rows = reference(name, folder, ids, len(ids) if attends else seen) @ MATRIX.T + bias
        if role == "document":
            skipped = {tokenizer.token_to_id(word) for word in skips} - {None}
            assert bool(skipped & {*ids}) == (bool(skips) and text != DOCUMENTS[2])
            rows = rows[[i not in skipped for i in ids]]
        wanted.append(rows / np.linalg.norm(rows, axis=1, keepdims=True))
    for ours, theirs, item in zip(results, wanted, inputs, strict=True):
        np.testing.assert_allclose(encoder.vectors(ours), theirs, atol=1e-5)
        np.testing.assert_array_equal(encoder.run("token_embed", [item])[0], ours)
    plan = encoder.plan_scores(QUERIES[:1], DOCUMENTS)
    scores = [(wanted[0] @ document.T).max(1).sum() for document in wanted[len(QUERIES) :]]
    np.testing.assert_allclose(plan.scores(encoder.run(plan.task, plan.inputs)), scores, atol=1e-4)


def test_stanford_s_colbert(tmp_path: Path) -> None:
    folder = stanford(tmp_path / "model")
    encoder = load(folder)
    assert encoder.max_length == 96  # of 220 tokens, as many as there are positions
    assert encoder.default_prompt_name == "document"
    assert_colbert("bert", folder, marks=("[unused0]", "[unused1]"), length=32, attends=False, skips=string.punctuation)
    metadata = {"query_maxlen": 9, "doc_maxlen": 40, "attend_to_mask_tokens": True, "mask_punctuation": False}
    folder = stanford(tmp_path / "attends", {**metadata, "dim": SIZE, "similarity": "cosine"})
    assert load(folder).max_length == 40
    assert_colbert("bert", folder, marks=("[unused0]", "[unused1]"), length=9, attends=True, skips="")


@pytest.mark.parametrize("expands", [True, False])
def test_pylate_s_colbert(expands: bool, tmp_path: Path) -> None:
    settings = {"query_prefix": "[Q] ", "document_prefix": "[D] ", "query_length": 5, "document_length": 60}
    settings |= {"do_query_expansion": expands, "attend_to_expansion_tokens": False, "skiplist_words": ["!"]}
    folder = pylate("modernbert", tmp_path / "model", settings)
    length = 5 if expands else 0
    assert_colbert("modernbert", folder, marks=("[Q] ", "[D] "), length=length, attends=False, skips="!", bias=BIAS)
    encoder = load(folder)
    assert len(encoder.encode("corn " * 50, truncate_to=20, prompt_name="query")) == 20
    with pytest.raises(InvalidRequestError, match="it has query, document"):
        encoder.encode("corn", prompt_name="passage")
    with pytest.raises(InvalidRequestError, match="beside 3 special tokens, got 3"):
        encoder.encode("corn", truncate_to=3)


def test_colbert_s_scores_are_of_as_many_dimensions_as_asked_and_bounded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, settings = stanford(tmp_path / "model"), EncoderSettings(pooler={"dimensions": 4})
    encoder: Any = load_encoders([str(folder)], ["it"], first=settings).encoders["it"]
    plan = encoder.plan_scores(QUERIES[:1], DOCUMENTS)
    results = encoder.run(plan.task, plan.inputs)
    query, *documents = (encoder.vectors(rows) for rows in results)
    assert query.shape[1] == 4
    scores = [(query @ document.T).max(1).sum() for document in documents]
    np.testing.assert_allclose(plan.scores(results), scores, rtol=1e-5)
    lengths = [len(item) for item in plan.inputs]
    monkeypatch.setattr("tidewheel.engine.encoders.multi_vector._MOST_PRODUCTS", lengths[0] * sum(lengths[1:]))
    encoder.plan_scores(QUERIES[:1], DOCUMENTS)
    with pytest.raises(InvalidRequestError, match="too many tokens to compare each with each"):
        encoder.plan_scores(QUERIES[:1], [*DOCUMENTS[:2], DOCUMENTS[2] + " rain"])


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"query_length": 40}, "longer than the model's attention reaches, 5 tokens"),
        ({"query_length": 2}, "query_length must be a number of tokens from 4"),
        ({"query_length": 5, "query_prefix": "[R] "}, r"the mark of a query must be a token .* '\[R\] ' is none"),
        ({"query_length": 100, "attend_to_expansion_tokens": True}, "longer than the 96 that"),
        ({"skiplist_words": "!"}, "skiplist_words must be a list"),
        ({"do_query_expansion": "yes"}, "do_query_expansion must be true or false"),
    ],
)
def test_what_colbert_cannot_have_is_said(settings: dict[str, Any], said: str, tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=said):
        load(pylate("modernbert", tmp_path / "model", settings))


def test_masks_of_causal_models_must_be_attended_to() -> None:
    causal: Any = SimpleNamespace(tower=SimpleNamespace(reach=1))
    attended, unseen = (SimpleNamespace(expands=True, attends=attends, query_length=5) for attends in (True, False))
    _check_reach(causal, cast(Any, attended))
    with pytest.raises(ModelError, match=r"attention is causal, .*: set attend_to_expansion_tokens to true"):
        _check_reach(causal, cast(Any, unseen))


def bge_m3(target: Path, *, suffix: str) -> Path:
    folder = zoo.changed_folder(zoo.native_folder("xlm-roberta"), target)
    layers = {"sparse_linear": (ROW, np.full(1, 0.2, np.float32)), "colbert_linear": (MATRIX, BIAS)}
    for name, (weight, bias) in layers.items():
        tensors = {"weight": weight, "bias": bias}
        if suffix == "pt":
            torch.save({key: torch.from_numpy(value) for key, value in tensors.items()}, folder / f"{name}.pt")
        else:
            save_file(tensors, folder / f"{name}.safetensors")
    if suffix == "pt":  # as BGE-M3 is published
        tensors = load_file(folder / "model.safetensors")
        torch.save({key: torch.from_numpy(value) for key, value in tensors.items()}, folder / "pytorch_model.bin")
        (folder / "model.safetensors").unlink()
        (folder / "onnx").mkdir()
        (folder / "onnx" / "model.onnx").write_bytes(b"the dense vectors alone")
    return folder


@pytest.mark.parametrize("suffix", ["pt", "safetensors"])
def test_bge_m3_gives_three_kinds_of_vectors(suffix: str, tmp_path: Path) -> None:
    encoder = load(bge_m3(tmp_path / "model", suffix=suffix))
    plain = load(zoo.native_folder("xlm-roberta"))
    assert encoder.tasks == {"embed", "token_embed", "sparse"}
    inputs = [encoder.encode(text) for text in [*DOCUMENTS, ""]] + [EncoderInput([0, 30, 1, 3, 30, 31, 2])]
    for ours, theirs in zip(encoder.run("embed", inputs), plain.run("embed", inputs), strict=True):
        np.testing.assert_array_equal(ours, theirs)
    vectors, weights = encoder.run("token_embed", inputs), encoder.run("sparse", inputs)
    for item, rows, own, sparse in zip(inputs, plain.run("token_embed", inputs), vectors, weights, strict=True):
        np.testing.assert_allclose(own, rows[1:] @ MATRIX.T + BIAS, atol=1e-5)
        np.testing.assert_allclose(np.linalg.norm(encoder.vectors(own), axis=1), 1, rtol=1e-5)
        found: dict[int, float] = {}
        for token, row in zip(item.token_ids, rows, strict=True):
            weight = float(row @ ROW[0] + 0.2)
            if token > 3 and weight > 0:  # 0 to 3 are special
                found[token] = max(found.get(token, 0), weight)
        assert sparse[:, 0].tolist() == sorted(found)
        np.testing.assert_allclose(sparse[:, 1], [found[token] for token in sorted(found)], atol=1e-4)
        np.testing.assert_array_equal(encoder.run("sparse", [item])[0], sparse)


def test_pytorch_s_files_are_inspected(tmp_path: Path) -> None:
    folder = bge_m3(tmp_path / "model", suffix="pt")
    found = inspect_encoder(EngineOptions("own/model"), folder, whole=True)
    assert (found.refusal, found.files) == (None, ["pytorch_model.bin"])
    assert found.bytes == (folder / "pytorch_model.bin").stat().st_size


def test_files_of_layers_that_hold_anything_else_are_refused(tmp_path: Path) -> None:
    folder = bge_m3(tmp_path / "model", suffix="pt")
    (folder / "sparse_linear.pt").write_bytes(pickle.dumps({"weight": 1}))
    with pytest.raises(ModelError, match=r"sparse_linear.pt holds more than tensors.* as sparse_linear.safetensors"):
        load(folder)
    torch.save({"weight": torch.zeros(2, zoo.HIDDEN)}, folder / "sparse_linear.pt")
    with pytest.raises(ModelError, match="must have a matrix of one row"):
        load(folder)
    torch.save({"bias": torch.zeros(2)}, folder / "colbert_linear.pt")
    with pytest.raises(ModelError, match=r"colbert_linear.pt must have a matrix weight"):
        load(folder)
    torch.save({"weight": torch.zeros(3, 5)}, folder / "colbert_linear.pt")
    with pytest.raises(ModelError, match="takes 5 numbers, and gets 32"):
        load(folder)


def test_a_plain_embedder_s_tokens_are_its_rows() -> None:
    encoder = load(zoo.native_folder("bert"))
    item = encoder.encode(DOCUMENTS[0])
    with torch.no_grad():
        rows = zoo.model("bert")(torch.tensor([[*item.token_ids]]))[0][0].numpy()
    wanted = rows / np.linalg.norm(rows, axis=1, keepdims=True)
    np.testing.assert_allclose(encoder.vectors(encoder.run("token_embed", [item])[0]), wanted, atol=1e-5)


def test_descriptions_of_plain_folders_have_no_layers_of_tokens() -> None:
    assert not describe_encoder(zoo.native_folder("bert")).token_layers
