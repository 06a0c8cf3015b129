"""Decoders that embed, classify, or score pairs by their answer, as transformers computes it."""

from __future__ import annotations

import json
import os
from functools import cache
from pathlib import Path
from typing import Any

import encoder_zoo as zoo
import numpy as np
import pytest
import tokenizers
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from optional_packages import require_packages
from safetensors.torch import save_file

from tidewheel.engine.encoders.classifier import Classifier
from tidewheel.engine.encoders.description import describe_encoder
from tidewheel.engine.encoders.detection import is_encoder
from tidewheel.engine.encoders.embedder import Embedder
from tidewheel.engine.encoders.encoder import Encoder
from tidewheel.engine.encoders.families.decoder import decoder_of
from tidewheel.engine.encoders.inspection import tasks_of
from tidewheel.engine.encoders.load import load_encoders
from tidewheel.engine.encoders.options import Convert
from tidewheel.engine.encoders.pair_reader import PairReader
from tidewheel.engine.encoders.pair_template import PairTemplate, qwen3_template, read_template
from tidewheel.engine.encoders.settings import EncoderSettings
from tidewheel.engine.encoders.tokenization import EncoderInput, EncoderTokenizer
from tidewheel.engine.errors import InvalidRequestError, ModelError
from tidewheel.server.options.model import DEMO_MODEL

pytest.importorskip("tidewheel._native")
require_packages("transformers")

SIZES = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "intermediate_size": 64,
    "max_position_embeddings": 512,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
TOKENS = ["<|pad|>", "<|im_start|>", "<|im_end|>", "<think>", "</think>", "yes", "no"]


ROLE = '{{ messages | selectattr("role", "eq", "%s") | map(attribute="content") | first }}'


def made(tmp_path: Path, kind: str, factory: str = "AutoModel", **config: Any) -> tuple[Path, Any]:
    """A folder with a random model of a kind of decoder and a tokenizer of bytes, and the model."""
    import transformers
    from tokenizers import Tokenizer, models, pre_tokenizers

    vocabulary = {token: i for i, token in enumerate([*TOKENS, *sorted(pre_tokenizers.ByteLevel.alphabet())])}
    tokenizer = Tokenizer(models.BPE(vocabulary, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.add_special_tokens(TOKENS[:3])
    tokenizer.add_tokens(TOKENS[3:])
    fields = {**SIZES, "vocab_size": len(vocabulary), **config}
    made_config = transformers.AutoConfig.for_model(kind, **fields)
    model = getattr(transformers, factory).from_config(made_config, attn_implementation="eager").eval()
    zoo.fill(model)
    model.save_pretrained(tmp_path)
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    edit(tmp_path / "tokenizer_config.json", model_max_length=400, eos_token="<|im_end|>")
    return tmp_path, model


def edit(path: Path, **fields: Any) -> None:
    """Set fields of a JSON file, which may not be there yet."""
    path.parent.mkdir(exist_ok=True)
    path.write_text(json.dumps({**(json.loads(path.read_text()) if path.exists() else {}), **fields}))


def load(folder: Path, convert: Convert = "auto", **overrides: Any) -> Encoder:
    settings = EncoderSettings(convert=convert, hf_overrides=overrides)
    return load_encoders([str(folder)], ["it"], first=settings).encoders["it"]


def hidden(model: Any, ids: list[int]) -> Any:
    """The vectors of tokens of the model without its head."""
    with torch.no_grad():
        return model.base_model(torch.tensor([ids]))[0][0].numpy()


@pytest.mark.parametrize(
    ("kind", "config"),
    [
        ("qwen2", {"is_causal": False}),  # as gte-Qwen2's
        ("gemma2", {"sliding_window": 6, "layer_types": ["sliding_attention", "full_attention"]}),
        ("qwen3_moe", {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}),
    ],
)
def test_any_decoder_of_attention_mlps_and_experts_can_embed(kind: str, config: dict[str, Any], tmp_path: Path) -> None:
    folder, model = made(tmp_path, kind, "AutoModelForCausalLM", **config)
    with pytest.raises(ModelError, match="--convert embed"):
        load(folder)
    encoder = load(folder, "embed")
    assert isinstance(encoder, Embedder)
    inputs = [encoder.encode(text) for text in ("turns", "a tide turns the wheel and grinds corn " * 4)]
    ours = encoder.vectors(encoder.run("embed", inputs))
    for vector, item in zip(ours, inputs, strict=True):
        wanted = hidden(model, [*item.token_ids])[-1]
        np.testing.assert_allclose(vector, wanted / np.linalg.norm(wanted), atol=1e-5)


def test_attention_of_bidirectional_models_is_that_of_their_architecture(tmp_path: Path) -> None:
    folder, model = made(tmp_path, "llama", is_causal=False)
    edit(folder / "config.json", architectures=["LlamaBidirectionalModel"], is_causal=None, pooling="avg")
    encoder = load(folder)
    assert isinstance(encoder, Embedder)
    item = encoder.encode("the wheel turns")
    wanted = hidden(model, [*item.token_ids]).mean(0)
    ours = encoder.vectors(encoder.run("embed", [item]))[0]
    np.testing.assert_allclose(ours, wanted / np.linalg.norm(wanted), atol=1e-5)
    edit(folder / "config.json", architectures=["LlamaModel"])
    causal = load(folder).run("token_embed", [item])[0]
    assert np.abs(causal - hidden(model, [*item.token_ids])).max() > 0.01


def test_a_classifier_reads_the_last_token_that_is_no_padding(tmp_path: Path) -> None:
    folder, model = made(tmp_path, "qwen3", "AutoModelForSequenceClassification", num_labels=3)
    encoder = load(folder)
    assert isinstance(encoder, Classifier)
    assert len(encoder.labels) == 3
    ids = encoder.encode("grinds corn").token_ids
    inputs = [EncoderInput(ids), EncoderInput([*ids, 0, 0]), EncoderInput([0, 0])]
    for logits, item in zip(encoder.run("classify", inputs), inputs, strict=True):
        with torch.no_grad():
            wanted = model(torch.tensor([item.token_ids])).logits[0].numpy()
        np.testing.assert_allclose(logits, wanted, atol=1e-4)


def test_a_classifier_also_says_what_it_thinks_at_each_token(tmp_path: Path) -> None:
    folder, model = made(tmp_path, "qwen3", "AutoModelForSequenceClassification", num_labels=1)
    encoder = load(folder)
    item = encoder.encode("grinds corn")
    rewards = encoder.run("token_classify", [item])[0]
    with torch.no_grad():
        wanted = [model(torch.tensor([item.token_ids[:end]])).logits[0].numpy() for end in range(1, len(item) + 1)]
    np.testing.assert_allclose(rewards, wanted, atol=1e-4)
    assert encoder.task == "classify"
    assert tasks_of(describe_encoder(folder)) == ("classify", "token_classify")


def test_a_classifier_of_tokens_has_a_head_with_a_bias(tmp_path: Path) -> None:
    folder, model = made(tmp_path, "qwen2", "AutoModelForTokenClassification", num_labels=3)
    encoder = load(folder)
    item = encoder.tokenizer.encode("grinds corn")
    with torch.no_grad():
        wanted = model(torch.tensor([item.token_ids])).logits[0].numpy()
    np.testing.assert_allclose(encoder.run("token_classify", [item])[0], wanted, atol=1e-4)


@pytest.mark.parametrize(("architecture", "labels"), [("Qwen2ForRewardModel", 1), ("Qwen2ForProcessRewardModel", 2)])
def test_a_reward_model_scores_each_token(architecture: str, labels: int, tmp_path: Path) -> None:
    folder, model = made(tmp_path, "qwen2")
    head = torch.nn.Sequential(torch.nn.Linear(32, 32), torch.nn.ReLU(), torch.nn.Linear(32, labels))
    zoo.fill(head)
    own = {f"model.{name}": weight for name, weight in model.state_dict().items()}
    save_file(
        own | {f"score.{name}": weight for name, weight in head.state_dict().items()}, folder / "model.safetensors"
    )
    edit(folder / "config.json", architectures=[architecture])
    encoder = load(folder)
    assert isinstance(encoder, Classifier)
    assert encoder.activation == (None if labels == 1 else "softmax")
    item = encoder.tokenizer.encode("grinds corn")
    with torch.no_grad():
        wanted = head(torch.tensor(hidden(model, [*item.token_ids]))).numpy()
    np.testing.assert_allclose(encoder.run("token_classify", [item])[0], wanted, atol=1e-4)


def test_a_classifier_can_embed(tmp_path: Path) -> None:
    folder, model = made(tmp_path, "mistral", "AutoModelForSequenceClassification", num_labels=1, sliding_window=4)
    encoder = load(folder, "embed")
    item = encoder.tokenizer.encode("the wheel turns")
    wanted = hidden(model, [*item.token_ids])[-1]
    np.testing.assert_allclose(encoder.run("embed", [item])[0], wanted, atol=1e-4)


def prompt(query: str, document: str, instruction: str) -> str:
    """What Qwen3-Reranker's model card says to ask."""
    return (
        "<|im_start|>system\nJudge whether the Document meets the requirements based on the Query and the Instruct "
        'provided. Note that the answer can only be "yes" or "no".<|im_end|>\n<|im_start|>user\n'
        f"<Instruct>: {instruction}\n<Query>: {query}\n<Document>: {document}<|im_end|>\n"
        "<|im_start|>assistant\n<think>\n\n</think>\n\n"
    )


TEMPLATE = (
    prompt(ROLE % "query", ROLE % "document", ROLE % "system").replace(
        "<|im_end|>\n<|im_start|>assistant", ("<|im_end|>\n{% if add_generation_prompt %}{{ '<|im_start|>assistant' }}")
    )
    + "{% endif %}"
)


@pytest.mark.parametrize("tied", [True, False])
def test_a_reranker_scores_by_its_answer(tied: bool, tmp_path: Path) -> None:
    folder, model = made(tmp_path, "qwen3", "AutoModelForCausalLM", tie_word_embeddings=tied)
    query, documents = "what turns the wheel", ["the tide", "corn is ground by it", ""]
    backend = EncoderTokenizer.load(folder)

    def wanted(instruction: str) -> list[float]:
        logits = []
        for document in documents:
            ids = backend.encode(prompt(query, document, instruction)).token_ids
            with torch.no_grad():
                row = model(torch.tensor([ids])).logits[0, -1]
            logits.append(float(row[TOKENS.index("yes")] - row[TOKENS.index("no")]))
        return logits

    # As vLLM has it, with --hf-overrides.
    asked = {"classifier_from_token": ["no", "yes"], "is_original_qwen3_reranker": True}
    encoder = load(folder, architectures=["Qwen3ForSequenceClassification"], **asked)
    assert encoder.is_cross_encoder
    by_default = wanted("Given a web search query, retrieve relevant passages that answer the query")
    plan = encoder.plan_scores([query], documents)
    found = plan.scores(encoder.run(plan.task, plan.inputs))
    np.testing.assert_allclose(found, 1 / (1 + np.exp(-np.array(by_default))), atol=1e-4)
    # As sentence-transformers has it.
    modules = zoo.modules("LogitScore")["modules.json"]
    (folder / "modules.json").write_text(json.dumps(modules))
    edit(folder / "1_LogitScore" / "config.json", true_token_id=TOKENS.index("yes"), false_token_id=TOKENS.index("no"))
    prompts = {"find": "Find corn"}
    edit(folder / "config_sentence_transformers.json", prompts=prompts, default_prompt_name="find")
    with pytest.raises(ModelError, match="no chat template"):
        load(folder)
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    edit(folder / "sentence_bert_config.json", processing_kwargs={"chat_template": {"add_generation_prompt": True}})
    encoder = load(folder)
    plan = encoder.plan_scores([query], documents, use_activation=False)
    np.testing.assert_allclose(plan.scores(encoder.run(plan.task, plan.inputs)), wanted("Find corn"), atol=1e-4)


def test_a_template_must_write_a_query_and_then_a_document() -> None:
    contents = "{{ messages[0].content[0].text }} or {{ messages[1].content[0].text }}{{ eos_token }}"
    assert read_template(contents, {"eos_token": "!"}, None) == PairTemplate("", " or ", "!")
    twice = "{{ messages[0].content }}{{ messages[0].content }}!"
    for wrong in ("{% for m in messages | reverse %}{{ m.content }}{% endfor %}!", twice, "neither"):
        with pytest.raises(ModelError, match="once each and in this order"):
            read_template(wrong, {}, None)
    with pytest.raises(ModelError, match="only pairs"):
        read_template("{{ raise_exception('only pairs') }}", {}, "Find corn")


def test_cutting_a_pair_keeps_what_is_behind_the_document(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder, _ = made(tmp_path / "qwen3-reranker-tiny", "qwen3", "AutoModelForCausalLM")
    encoder = load(folder)
    assert isinstance(encoder, Classifier)
    whole, cut = (encoder.encode_pair("wheel", "corn " * 20, truncate_to=size).token_ids for size in (None, 320))
    assert len(whole) > len(cut) == 320
    end = encoder.tokenizer.encode(prompt("", "", "").partition("<Document>: ")[2], add_special_tokens=False).token_ids
    assert cut == [*whole[: 320 - len(end)], *end]
    with pytest.raises(InvalidRequestError, match="behind a document"):
        encoder.encode_pair("wheel", "corn", truncate_to=len(end))
    assert encoder.encode_pair("wheel", "corn " * 2000).is_too_long
    monkeypatch.setattr("tidewheel.engine.encoders.pair_reader.MOST_QUERY_TOKENS", 2000)
    assert len(encoder.plan_scores(["wheel"], ["corn"] * 3).inputs) == 3
    with pytest.raises(InvalidRequestError, match="too long for so many documents"):
        encoder.plan_scores(["wheel " * 100], ["corn"] * 3)


def whole(tokenizer: EncoderTokenizer, query: str, document: str) -> list[int]:
    start, _, end = prompt(query, document, "I").rpartition("<|im_end|>\n<|im_start|>assistant")
    parts = (start, "<|im_end|>\n<|im_start|>assistant" + end)
    return [i for part in parts for i in tokenizer.encode(part, add_special_tokens=False).token_ids]


NEAR_A_CUT = st.text(st.sampled_from("aB \n\r\t.:<>'7\u4e16\u0301\U0001f30a"), max_size=8)


@settings(deadline=None, max_examples=50)
@given(NEAR_A_CUT, st.lists(NEAR_A_CUT, min_size=1, max_size=3))
def test_a_query_that_is_read_once_has_the_tokens_of_the_whole_text(query: str, documents: list[str]) -> None:
    tokenizer = demo_tokenizer()
    inputs = demo_reader().encode([query], documents)
    assert [item.token_ids for item in inputs] == [whole(tokenizer, query, document) for document in documents]


@pytest.mark.parametrize("is_cut", [True, False])
def test_a_query_is_read_once_where_no_token_reaches_over(is_cut: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer, documents = demo_tokenizer(), ["corn", "tide", "wheel"]
    if not is_cut:  # one that puts a space before each text
        inner = tokenizers.Tokenizer.from_file(str(DEMO_MODEL / "tokenizer.json"))
        inner.normalizer = tokenizers.normalizers.Prepend(" ")
        tokenizer = EncoderTokenizer(inner)
    reader, read = PairReader(qwen3_template("I"), tokenizer), list[str]()
    part = tokenizer.part
    monkeypatch.setattr(tokenizer, "part", lambda text, *rest: read.append(text) or part(text, *rest))
    inputs = reader.encode(["what turns it"], documents)
    assert sum("what turns it" in text for text in read) == (1 if is_cut else 3)
    assert [item.token_ids for item in inputs] == [
        whole(tokenizer, "what turns it", document) for document in documents
    ]


@cache
def demo_tokenizer() -> EncoderTokenizer:
    return EncoderTokenizer.load(DEMO_MODEL)


@cache
def demo_reader() -> PairReader:
    return PairReader(qwen3_template("I"), demo_tokenizer())


def test_texts_end_in_eos_where_the_tokenizer_is_told_so(tmp_path: Path) -> None:
    folder, _ = made(tmp_path, "qwen2")
    plain = EncoderTokenizer.load(folder).encode("corn")
    edit(folder / "tokenizer_config.json", add_eos_token=True)
    tokenizer = EncoderTokenizer.load(folder)
    assert tokenizer.encode("corn").token_ids == [*plain.token_ids, TOKENS.index("<|im_end|>")]
    assert tokenizer.encode("corn", truncate_to=3).token_ids == [*plain.token_ids[:2], TOKENS.index("<|im_end|>")]
    assert tokenizer.encode("corn", add_special_tokens=False).token_ids == plain.token_ids


def test_what_cannot_be_served_is_refused_by_its_name(tmp_path: Path) -> None:
    folder, _ = made(tmp_path, "qwen2")
    config = folder / "config.json"
    original = json.loads(config.read_text())

    def refused(match: str, convert: Convert = "auto", **fields: Any) -> None:
        config.write_text(json.dumps({**original, **fields}))
        with pytest.raises(ModelError, match=match):
            describe_encoder(folder, convert=convert)

    refused("no classifier's head", "classify")
    refused("generates text", "none", architectures=["Qwen2ForCausalLM"])
    refused("two tokens", classifier_from_token=["yes"])
    refused("does not have both tokens", classifier_from_token=["yes", "perhaps"])
    refused("quantization_config", quantization_config={"quant_method": "awq"})
    refused("is_causal", is_causal="maybe")
    refused("pooling must be", architectures=["LlamaBidirectionalModel"], pooling="max")
    refused("pooling must be", architectures=["LlamaBidirectionalModel"], pooling=["avg"])
    refused("with sinks", architectures=["GptOssModel"], num_local_experts=2, num_experts_per_tok=1)
    edit(folder / "1_LogitScore" / "config.json", true_token_id=10**6, false_token_id=None)
    (folder / "modules.json").write_text(json.dumps(zoo.modules("LogitScore")["modules.json"]))
    refused("token 1000000")
    (folder / "modules.json").unlink()
    (folder / "tokenizer.json").unlink()
    os.mkfifo(folder / "tokenizer.json")
    refused("is a named pipe", classifier_from_token=["yes", "no"])
    with pytest.raises(ModelError, match="is a named pipe"):
        EncoderTokenizer.load(folder)


def test_a_family_of_encoders_needs_no_conversion() -> None:
    folder = zoo.native_folder("gemma")
    assert describe_encoder(folder, convert="embed") == describe_encoder(folder)


def test_a_folder_says_whether_it_is_an_encoder(tmp_path: Path) -> None:
    folder, _ = made(tmp_path, "qwen2")
    assert is_encoder(folder)
    edit(folder / "config.json", architectures=["Qwen2ForCausalLM"])
    assert not is_encoder(folder)
    (folder / "modules.json").write_text(json.dumps(zoo.modules("Pooling")["modules.json"]))
    assert is_encoder(folder)


def test_architectures_are_found_by_their_names() -> None:
    assert decoder_of("Qwen3Model") == ("Qwen3ForCausalLM", "bare", False)
    assert decoder_of("GPT2ForSequenceClassification") == ("GPT2LMHeadModel", "classifies", False)
    assert decoder_of("LlamaBidirectionalForSequenceClassification") == ("LlamaForCausalLM", "classifies", True)
    assert decoder_of("Gemma3TextForSequenceClassification") == ("Gemma3ForCausalLM", "classifies", False)
    assert decoder_of("InternLM2ForRewardModel") == ("InternLM2ForCausalLM", "classifies tokens", False)
    assert decoder_of("BertModel") is None
