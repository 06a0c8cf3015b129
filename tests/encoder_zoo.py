"""Tiny random encoders in sentence-transformers' layout, made with transformers, and what transformers computes with
them. They lie in a temporary folder, in ONNX or as safetensors."""

from __future__ import annotations

import atexit
import functools
import json
import shutil
import tempfile
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

TYPED = ("bert", "deberta", "deberta-v2", "gte", "nomic_bert")  # families with token types
WORDS = "the tide turns a wheel and grinds corn 潮車 Köln über naïve rain ! ? 12 3.5 x-ray".split()
HIDDEN = 32


@dataclass(frozen=True)
class Case:
    """An encoder to make: transformers' name of the family and its config's fields, and the folder's other files.

    `files` are JSON files by name, `outputs` the graph's; sentence_embedding is a Dense layer over the mean. The config
    may name another `architecture` than that of the weights. A model `of` tokens or words is one with that head.
    """

    model_type: str
    config: dict[str, Any] = field(default_factory=dict)
    files: dict[str, Any] = field(default_factory=dict)
    outputs: tuple[str, ...] = ("last_hidden_state",)
    classifies: bool = False
    graph: str = "onnx/model.onnx"
    architecture: str = ""
    of: Literal["text", "tokens", "words"] = "text"


_SIZES = {
    "hidden_size": HIDDEN,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 64,
    "max_position_embeddings": 96,
}
_DISTIL = {"dim": HIDDEN, "n_layers": 2, "n_heads": 2, "hidden_dim": 64, "max_position_embeddings": 96}


def modules(*names: str) -> dict[str, Any]:
    """modules.json with a transformer and these, and their folders' configs."""
    listed = [{"idx": 0, "name": "0", "path": "", "type": "sentence_transformers.models.Transformer"}]
    for i, name in enumerate(names, 1):
        module = {"idx": i, "name": str(i), "path": f"{i}_{name}", "type": f"sentence_transformers.models.{name}"}
        listed.append(module)
    return {"modules.json": listed}


def pooling(**config: Any) -> dict[str, Any]:
    """The config of a Pooling that comes first."""
    return {"1_Pooling/config.json": {"word_embedding_dimension": HIDDEN, **config}}


_ROPE = {"rope_type": "default"}
_GEMMA = {
    **_SIZES,
    "head_dim": 16,
    "num_hidden_layers": 3,
    "num_key_value_heads": 1,
    "query_pre_attn_scalar": 16,
    "use_bidirectional_attention": True,
    "sliding_window": 8,
    "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
}
_MODERN = {
    **_SIZES,
    "num_hidden_layers": 4,
    "local_attention": 8,
    "bos_token_id": None,
    "eos_token_id": None,
    "cls_token_id": None,
    "sep_token_id": None,
}
# As version 3 has it, with distances in few buckets.
_DEBERTA = {
    **_SIZES,
    "relative_attention": True,
    "position_biased_input": False,
    "pos_att_type": ["p2c", "c2p"],
    "position_buckets": 8,
    "share_att_key": True,
    "norm_rel_ebd": "layer_norm",
}
_MEAN = {**modules("Pooling", "Normalize"), **pooling(pooling_mode="mean")}
_LAST = {**modules("Pooling", "Normalize"), **pooling(pooling_mode="lasttoken")}
_DECODER = {**_SIZES, "num_key_value_heads": 1, "head_dim": 16}
PROMPTS = {"query": "the query : ", "passage": "corn ", "plain": ""}

# Models that are saved as safetensors alone.
NATIVE: dict[str, Case] = {
    "distilbert": Case("distilbert", _DISTIL, _MEAN),
    "distilbert-cross": Case("distilbert", {**_DISTIL, "num_labels": 1}, classifies=True),
    "xlm-roberta": Case("xlm-roberta", {**_SIZES, "type_vocab_size": 1, "layer_norm_eps": 1e-5}, _MEAN),
    "xlm-roberta-cross": Case(
        "xlm-roberta", {**_SIZES, "type_vocab_size": 1, "num_labels": 1, "num_hidden_layers": 1}, classifies=True
    ),
    "mpnet": Case("mpnet", {**_SIZES, "max_position_embeddings": 300}, _MEAN),
    "mpnet-cross": Case("mpnet", {**_SIZES, "num_labels": 1}, classifies=True),
    "nomic_bert": Case("nomic_bert", {**_SIZES, "rope_parameters": {**_ROPE, "rope_theta": 1000.0}}, _MEAN),
    "gte": Case("gte", {**_SIZES, "rope_parameters": {**_ROPE, "rope_theta": 20000.0}}, _MEAN),
    "gte-cross": Case("gte", {**_SIZES, "type_vocab_size": 2, "num_labels": 1}, classifies=True),
    "modernbert": Case("modernbert", _MODERN, _MEAN),
    "modernbert-cross": Case("modernbert", {**_MODERN, "num_labels": 1, "classifier_bias": True}, classifies=True),
    "modernbert-mean-cross": Case(
        "modernbert",
        {**_MODERN, "num_labels": 1, "classifier_pooling": "mean", "norm_bias": True, "attention_bias": True}
        | {"mlp_bias": True},
        classifies=True,
    ),
    "gemma": Case("gemma3_text", _GEMMA, _MEAN),
    "deberta-3": Case("deberta-v2", _DEBERTA, _MEAN),
    "deberta-3-cross": Case("deberta-v2", {**_DEBERTA, "num_labels": 1}, classifies=True),
    "deberta-2": Case(
        "deberta-v2",
        {**_SIZES, "relative_attention": True, "max_relative_positions": 20, "pos_att_type": "c2p|p2c"}
        | {"type_vocab_size": 2},
        _MEAN,
    ),
    "deberta-2-p2c": Case(
        "deberta-v2",
        {**_DEBERTA, "pos_att_type": ["p2c"], "share_att_key": False, "norm_rel_ebd": "none"},
        _MEAN,
    ),
    "deberta-2-conv": Case("deberta-v2", {**_DEBERTA, "conv_kernel_size": 3, "conv_act": "gelu"}, _MEAN),
    "deberta": Case("deberta", {**_DEBERTA, "max_relative_positions": 64}, _MEAN),
    "deberta-cross": Case("deberta", {**_DEBERTA, "pos_att_type": ["c2p"], "num_labels": 1}, classifies=True),
    # As Qwen3-Embedding and E5-Mistral have it.
    "qwen3": Case(
        "qwen3",
        _DECODER,
        {**_LAST, "config_sentence_transformers.json": {"prompts": PROMPTS, "default_prompt_name": "query"}},
        architecture="Qwen3ForCausalLM",
    ),
    "mistral": Case("mistral", {**_DECODER, "sliding_window": 8}, _LAST),
    "llama-cross": Case("llama", {**_DECODER, "num_labels": 1}, classifies=True),
}

_SPLADE = {**modules("SpladePooling"), "1_SpladePooling/config.json": {"pooling_strategy": "max"}}
_SUM = {"1_SpladePooling/config.json": {"pooling_strategy": "sum", "activation_function": "log1p_relu"}}
_LABELS = {"num_labels": 3}

# Models with a row of logits for each token, or with several labels of a text.
HEADS: dict[str, Case] = {
    "bert-tokens": Case("bert", {**_SIZES, **_LABELS}, of="tokens"),
    "roberta-tokens": Case("roberta", {**_SIZES, **_LABELS}, of="tokens"),
    "camembert-tokens": Case("camembert", {**_SIZES, **_LABELS}, of="tokens"),
    "distilbert-tokens": Case("distilbert", {**_DISTIL, **_LABELS}, of="tokens"),
    "mpnet-tokens": Case("mpnet", {**_SIZES, **_LABELS}, of="tokens"),
    "gte-tokens": Case("gte", {**_SIZES, **_LABELS}, of="tokens"),
    "deberta-tokens": Case("deberta", {**_DEBERTA, **_LABELS}, of="tokens"),
    "deberta-3-tokens": Case("deberta-v2", {**_DEBERTA, **_LABELS}, of="tokens"),
    "deberta-3-labels": Case("deberta-v2", {**_DEBERTA, **_LABELS}, classifies=True),
    "modernbert-tokens": Case("modernbert", {**_MODERN, **_LABELS}, of="tokens"),
    "bert-labels": Case("bert", {**_SIZES, **_LABELS, "problem_type": "multi_label_classification"}, classifies=True),
    "xlm-roberta-labels": Case("xlm-roberta", {**_SIZES, **_LABELS}, classifies=True),
    "camembert-labels": Case("camembert", {**_SIZES, **_LABELS}, classifies=True),
    "distilbert-labels": Case("distilbert", {**_DISTIL, **_LABELS, "problem_type": "regression"}, classifies=True),
    "mpnet-labels": Case("mpnet", {**_SIZES, **_LABELS}, classifies=True),
    "gte-labels": Case("gte", {**_SIZES, **_LABELS}, classifies=True),
    "modernbert-labels": Case("modernbert", {**_MODERN, **_LABELS}, classifies=True),
    "bert-splade": Case("bert", _SIZES, _SPLADE, of="words"),
    "distilbert-splade": Case("distilbert", _DISTIL, _SPLADE, of="words"),
    "roberta-splade": Case("roberta", _SIZES, {**_SPLADE, **_SUM}, of="words"),
    "mpnet-splade": Case("mpnet", _SIZES, _SPLADE, of="words"),
    "modernbert-splade": Case("modernbert", _MODERN, {**_SPLADE, **_SUM}, of="words"),
}

CASES: dict[str, Case] = {
    # As all-MiniLM and bge have it.
    "bert": Case(
        "bert",
        _SIZES,
        {
            **modules("Pooling", "Normalize"),
            **pooling(pooling_mode_cls_token=False, pooling_mode_mean_tokens=True, pooling_mode_max_tokens=False),
            "sentence_bert_config.json": {"max_seq_length": 64, "do_lower_case": False},
        },
    ),
    "bert-prompts": Case(
        "bert",
        _SIZES,
        {
            **modules("Pooling", "Normalize"),
            **pooling(pooling_mode="mean"),
            "config_sentence_transformers.json": {"prompts": PROMPTS, "default_prompt_name": None},
        },
    ),
    # As INSTRUCTOR has it.
    "bert-instructor": Case(
        "bert",
        _SIZES,
        {
            **modules("Pooling"),
            **pooling(pooling_mode="weightedmean", include_prompt=False),
            "config_sentence_transformers.json": {"prompts": PROMPTS, "default_prompt_name": "query"},
        },
    ),
    "roberta-cls": Case("roberta", _SIZES, {**modules("Pooling"), **pooling(pooling_mode_cls_token=True)}),
    "distilbert-all": Case(
        "distilbert",
        _DISTIL,
        {
            **modules("Pooling"),
            **pooling(pooling_mode=["cls", "max", "mean", "mean_sqrt_len_tokens", "weightedmean", "lasttoken"]),
            "sentence_distilbert_config.json": {"max_seq_length": 80, "do_lower_case": True},
        },
    ),
    # Without modules.json, and with the graph where other exporters put it.
    "mpnet-plain": Case("mpnet", _SIZES, graph="model.onnx"),
    # The whole of a model with a Dense layer, in the graph.
    "bert-dense": Case(
        "bert",
        _SIZES,
        {**modules("Pooling", "Dense", "Normalize"), **pooling(pooling_mode="mean")},
        ("token_embeddings", "sentence_embedding"),
    ),
    "bert-cross": Case(
        "bert",
        {**_SIZES, "num_labels": 1},
        {"config_sentence_transformers.json": {"activation_fn": "torch.nn.modules.activation.Sigmoid"}},
        ("logits",),
        classifies=True,
    ),
    "roberta-cross": Case(
        "roberta",
        {**_SIZES, "num_labels": 1, "sbert_ce_default_activation_function": "torch.nn.modules.linear.Identity"},
        outputs=("logits",),
        classifies=True,
    ),
    # Tells three labels apart.
    "bert-classes": Case(
        "bert",
        {**_SIZES, "id2label": {0: "calm", 1: "rough", 2: "stormy"}},
        outputs=("logits",),
        classifies=True,
    ),
}

_AUTO_MODELS = {"text": "AutoModel", "tokens": "AutoModelForTokenClassification", "words": "AutoModelForMaskedLM"}
_root = Path(tempfile.mkdtemp(prefix="tidewheel-encoders-"))
atexit.register(shutil.rmtree, _root, ignore_errors=True)


def case_of(name: str) -> Case:
    """The case of that name."""
    return CASES.get(name) or NATIVE.get(name) or HEADS[name]


@functools.cache
def model(name: str) -> Any:
    """The transformers model of CASES[name], with weights large enough to tell texts apart."""
    import transformers
    from transformers import AutoConfig, AutoModelForSequenceClassification

    case = case_of(name)
    known = {"vocab_size": tokenizer(name).vocab_size, "pad_token_id": tokenizer(name).pad_token_id}
    config = AutoConfig.for_model(case.model_type, **known, **case.config)
    factory = AutoModelForSequenceClassification if case.classifies else getattr(transformers, _AUTO_MODELS[case.of])
    made = factory.from_config(config, attn_implementation="eager").eval()
    fill(made)
    return made


def fill(made: Any) -> None:
    """Give a transformers model random weights."""
    import torch

    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for key, weight in made.named_parameters():
            noise = torch.randn(weight.shape, generator=generator)
            if weight.ndim == 1:
                weight.copy_(0.2 * noise + (1.0 if "norm" in key.lower() and key.endswith("weight") else 0.0))
            else:
                weight.copy_(noise / weight.shape[-1] ** 0.5)


@functools.cache
def tokenizer(name: str) -> Any:
    """The transformers tokenizer of CASES[name]: WordPiece as BERT has it, or bytes as RoBERTa has them."""
    from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast

    is_roberta = case_of(name).model_type in ("roberta", "xlm-roberta", "camembert", "mpnet")
    specials = ["<s>", "<pad>", "</s>", "<unk>"] if is_roberta else ["[PAD]", "[CLS]", "[SEP]", "[UNK]"]
    vocabulary = {token: i for i, token in enumerate(specials)}
    first, pad, last, unknown = specials if is_roberta else (specials[1], specials[0], *specials[2:])
    edges = [(first, vocabulary[first]), (last, vocabulary[last])]
    if is_roberta:
        for character in sorted(pre_tokenizers.ByteLevel.alphabet()):
            vocabulary[character] = len(vocabulary)
        inner = Tokenizer(models.BPE(vocabulary, [], unk_token=unknown))
        inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        inner.post_processor = processors.RobertaProcessing(edges[1], edges[0], add_prefix_space=False)
    else:
        characters = sorted({c for word in [*WORDS, "abcdefghijklmnopqrstuvwxyz:"] for c in word})
        for token in [*WORDS, *characters, *(f"##{c}" for c in characters)]:
            vocabulary.setdefault(token, len(vocabulary))
        inner = Tokenizer(models.WordPiece(vocabulary, unk_token=unknown))
        inner.normalizer = normalizers.BertNormalizer(lowercase=False, strip_accents=False)
        inner.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
        inner.post_processor = processors.TemplateProcessing(
            single=f"{first} $A {last}", pair=f"{first} $A {last} $B:1 {last}:1", special_tokens=edges
        )
    inner.add_special_tokens(specials)
    return PreTrainedTokenizerFast(
        tokenizer_object=inner, pad_token=pad, cls_token=first, sep_token=last, unk_token=unknown
    )


@functools.cache
def folder(name: str) -> Path:
    """The model folder of CASES[name], with its graph. Tests must not change it."""
    path = _root / name
    _write_files(name, path)
    export(name, path / CASES[name].graph)
    return path


@functools.cache
def native_folder(name: str) -> Path:
    """The model folder of a case with safetensors. Tests must not change it."""
    path = _root / f"{name}-native"
    _write_files(name, path)
    model(name).save_pretrained(_root / f"{name}-saved")
    shutil.move(_root / f"{name}-saved" / "model.safetensors", path)
    return path


def _write_files(name: str, path: Path) -> None:
    """All files but that of the weights."""
    case = case_of(name)
    path.mkdir()
    model(name).config.save_pretrained(path)
    config = json.loads((path / "config.json").read_text())
    # Transformers halves Gemma's window whenever it makes a config.
    config |= {key: value for key, value in case.config.items() if key == "sliding_window"}
    architecture = case.architecture or type(model(name)).__name__
    (path / "config.json").write_text(json.dumps({**config, "architectures": [architecture]}))
    tokenizer(name).save_pretrained(path)
    for file, content in case.files.items():
        (path / file).parent.mkdir(exist_ok=True)
        (path / file).write_text(json.dumps(content))


def changed(name: str, target: Path, **files: Any) -> Path:
    """A copy of a model folder with other JSON files; None takes one away. `__` stands for a folder's slash."""
    return changed_folder(folder(name), target, **files)


def changed_folder(source: Path, target: Path, **files: Any) -> Path:
    """The same of any folder."""
    shutil.copytree(source, target)
    for key, content in files.items():
        path = target / (key.replace("__", "/") + ".json")
        if content is None:
            path.unlink()
        else:
            path.parent.mkdir(exist_ok=True)
            path.write_text(content if isinstance(content, str) else json.dumps(content))
    return target


def export(name: str, path: Path, *, with_mask: bool = True, fixed_shape: bool = False) -> None:
    """Write a model's graph, also one that ignores its mask, or that takes one shape only."""
    import torch

    case, made = case_of(name), model(name)
    names = ["input_ids", "attention_mask"] + (["token_type_ids"] if case.model_type == "bert" else [])

    class Graph(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.made = made

        def forward(self, *inputs: Any) -> Any:
            arguments = dict(zip(names, inputs, strict=True))
            if not with_mask:
                arguments["attention_mask"] = torch.ones_like(inputs[0])
            values = self.made(**arguments)[0]
            return (values, dense(values, inputs[1])) if "sentence_embedding" in case.outputs else values

    ids = torch.randint(3, 20, (2, 5))
    mask = torch.tensor([[1, 1, 1, 1, 1], [1, 1, 1, 0, 0]])
    examples = (ids, mask, torch.zeros_like(ids))[: len(names)]
    path.parent.mkdir(exist_ok=True)
    axes = {} if fixed_shape else {key: {0: "batch", 1: "sequence"} for key in (*names, *case.outputs)}
    for key in ("sentence_embedding", "logits"):
        axes.get(key, {}).pop(1, None)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the exporter that needs seconds warns of the one that needs minutes
        torch.onnx.export(
            Graph().eval(),
            examples,
            str(path),
            input_names=names,
            output_names=list(case.outputs),
            dynamic_axes=axes,
            dynamo=False,
        )


def dense(tokens: Any, mask: Any) -> Any:
    """The mean of the token embeddings through a fixed Dense layer. Torch, shape [B, 8]."""
    import torch

    weights = mask.unsqueeze(-1).float()
    mean = (tokens * weights).sum(1) / weights.sum(1)
    linear = torch.arange(HIDDEN * 8).mul(1.7).sin().reshape(HIDDEN, 8)
    return torch.nn.functional.normalize(torch.tanh(mean @ linear), dim=1)


def reference(
    name: str, texts: Sequence[str] | Sequence[tuple[str, str]], *, prompt: str = "", max_length: int | None = None
) -> NDArray[np.float32]:
    """Transformers' result for each text or pair alone: its pooled vector, or its logit. Shape [N, width]."""
    rows = [_reference(name, text, prompt, max_length) for text in texts]
    return np.concatenate(rows)


def _reference(name: str, text: str | tuple[str, str], prompt: str, max_length: int | None) -> NDArray[np.float32]:
    import torch

    case = case_of(name)
    texts = (prompt + text,) if isinstance(text, str) else text
    if any(content.get("do_lower_case") for file, content in case.files.items() if file.startswith("sentence_")):
        texts = tuple(text.lower() for text in texts)
    fields = tokenizer(name)(
        *([text] for text in texts),  # a list each, or transformers would take an empty second text for none
        return_tensors="pt",
        return_token_type_ids=True,
        max_length=max_length,
        truncation=max_length is not None,
    )
    if case.model_type not in TYPED:
        fields.pop("token_type_ids", None)
    with torch.no_grad():
        values = model(name)(**fields)[0]
    if case.classifies:
        return values.numpy()
    if "sentence_embedding" in case.outputs:
        return dense(values, fields["attention_mask"]).numpy()
    config = case.files.get("1_Pooling/config.json", {})
    skipped = 0
    if config.get("include_prompt") is False and prompt:
        skipped = len(tokenizer(name)(prompt)["input_ids"]) - 1  # all but the separator at the end
    pooled = _pooled(values[0, skipped:], config, skipped)
    if "Normalize" in json.dumps(case.files.get("modules.json")):
        pooled = torch.nn.functional.normalize(pooled, dim=0)
    return pooled[None].numpy()


def _pooled(tokens: Any, config: dict[str, Any], skipped: int) -> Any:
    import torch

    modes = config.get("pooling_mode", "cls" if config.get("pooling_mode_cls_token") else "mean")
    positions = torch.arange(skipped + 1, skipped + 1 + len(tokens)).float()
    parts = {
        "cls": tokens[0],
        "max": tokens.max(0).values,
        "mean": tokens.mean(0),
        "mean_sqrt_len_tokens": tokens.sum(0) / len(tokens) ** 0.5,
        "weightedmean": (tokens * positions[:, None]).sum(0) / positions.sum(),
        "lasttoken": tokens[-1],
    }
    return torch.cat([parts[mode] for mode in ([modes] if isinstance(modes, str) else modes)])


def texts(count: int, seed: int = 0, most: int = 24) -> list[str]:
    """Texts of very different lengths, some of them empty."""
    random = np.random.default_rng(seed)
    return [" ".join(random.choice(WORDS, random.integers(0, most))) for _ in range(count)]
