"""Harnesses of the files of an encoder in ONNX, beside each other in sentence-transformers' layout."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import tokenizers
from fuzz import described_gguf
from fuzz.harness import Harness, in_folder, written

from tidewheel.engine.encoders.load import load_encoders
from tidewheel.engine.errors import InvalidRequestError

WORDS = ["[PAD]", "[CLS]", "[SEP]", "[UNK]", "hi", "there"]
HIDDEN = 4
CONFIG = {"architectures": ["BertModel"], "model_type": "bert", "vocab_size": len(WORDS), "pad_token_id": 0,
          "max_position_embeddings": 32}  # fmt: skip
CROSS_CONFIG = CONFIG | {
    "architectures": ["BertForSequenceClassification"], "id2label": {"0": "LABEL_0"}, "num_labels": 1,
    "sentence_transformers": {"activation_fn": "torch.nn.modules.linear.Identity"},
    "sbert_ce_default_activation_function": "torch.nn.modules.linear.Identity",
}  # fmt: skip
MODULES = [
    {"idx": 0, "name": "0", "path": "", "type": "sentence_transformers.models.Transformer"},
    {"idx": 1, "name": "1", "path": "1_Pooling", "type": "sentence_transformers.models.Pooling"},
    {"idx": 2, "name": "2", "path": "2_Normalize", "type": "sentence_transformers.models.Normalize"},
]
POOLING = {"word_embedding_dimension": HIDDEN, "pooling_mode_cls_token": False, "pooling_mode_mean_tokens": True}
SETTINGS: dict[str, Any] = {"prompts": {"query": "hi hi ", "passage": ""}, "default_prompt_name": "query"}
TOKENIZER_CONFIG: dict[str, Any] = {"model_max_length": 16, "model_input_names": ["input_ids", "attention_mask"]}


def graph(output: str) -> bytes:
    """The embedding of each token; or with `logits` its first number, for the first token."""
    weights = np.arange(len(WORDS) * HIDDEN, dtype=np.float32).reshape(-1, HIDDEN) / 10
    initializers = [onnx.numpy_helper.from_array(weights, "weights")]
    nodes = [onnx.helper.make_node("Gather", ["weights", "input_ids"], ["tokens"])]
    if output == "logits":
        for name, values in (("start", [0, 0]), ("end", [1, 1]), ("axes", [1, 2])):
            initializers.append(onnx.numpy_helper.from_array(np.array(values), name))
        nodes.append(onnx.helper.make_node("Slice", ["tokens", "start", "end", "axes"], ["slice"]))
        initializers.append(onnx.numpy_helper.from_array(np.array([-1, 1]), "shape"))
        nodes.append(onnx.helper.make_node("Reshape", ["slice", "shape"], [output]))
    else:
        nodes.append(onnx.helper.make_node("Identity", ["tokens"], [output]))
    inputs = [
        onnx.helper.make_tensor_value_info(name, onnx.TensorProto.INT64, ["batch", "sequence"])
        for name in ("input_ids", "attention_mask")
    ]
    outputs = [onnx.helper.make_tensor_value_info(output, onnx.TensorProto.FLOAT, None)]
    made = onnx.helper.make_model(
        onnx.helper.make_graph(nodes, "encoder", inputs, outputs, initializers),
        opset_imports=[onnx.helper.make_opsetid("", 17)],
        ir_version=8,
    )
    return bytes(made.SerializeToString())


def tokenizer_json() -> bytes:
    vocabulary = {word: i for i, word in enumerate(WORDS)}
    made = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, unk_token="[UNK]"))
    made.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    made.post_processor = tokenizers.processors.TemplateProcessing(
        single="[CLS] $A [SEP]", pair="[CLS] $A [SEP] $B:1 [SEP]:1", special_tokens=[("[CLS]", 1), ("[SEP]", 2)]
    )
    made.enable_padding(pad_id=0, pad_token="[PAD]")
    return made.to_str().encode()


def use_gguf_encoder(folder: Path) -> None:
    """Loads the encoder in a GGUF file and computes two texts."""
    (encoder,) = load_encoders([str(folder)], dtype="float32").encoders.values()
    try:
        inputs = [encoder.encode(text, truncate_to=8) for text in ("hi there", "Köln 12")]
        for item in inputs:
            encoder.check(item, "input")
        encoder.finished(encoder.task, encoder.run(encoder.task, inputs))
    except InvalidRequestError:
        return
    finally:
        encoder.close()


def use_encoder(folder: Path) -> None:
    """Loads an encoder and makes inputs of texts; a graph may fail on some of them, which fails their request alone."""
    (encoder,) = load_encoders([str(folder)]).encoders.values()
    try:
        plan = encoder.plan_scores(["hi there"], ["hi"], truncate_to=8)
        for item in plan.inputs:
            encoder.check(item, "input")
    except InvalidRequestError:
        return
    plan.scores([np.ones(encoder.width, np.float32)] * len(plan.inputs))


EMBEDDER: dict[str, Any] = {
    "config.json": CONFIG,
    "modules.json": MODULES,
    "1_Pooling/config.json": POOLING,
    "sentence_bert_config.json": {"max_seq_length": 12, "do_lower_case": True},
    "config_sentence_transformers.json": SETTINGS,
    "tokenizer_config.json": TOKENIZER_CONFIG,
    "tokenizer.json": json.loads(tokenizer_json()),
}
INSTRUCTED = EMBEDDER | {
    "1_Pooling/config.json": {"pooling_mode": ["cls", "max", "weightedmean"], "include_prompt": False},
    "tokenizer_config.json": {},
}
CROSS_ENCODER: dict[str, Any] = {
    "config.json": CROSS_CONFIG,
    "config_sentence_transformers.json": {"activation_fn": "torch.nn.modules.activation.Sigmoid"},
    "tokenizer_config.json": TOKENIZER_CONFIG,
    "tokenizer.json": json.loads(tokenizer_json()),
}
GRAPHS = {output: graph(output) for output in ("last_hidden_state", "logits")}


def beside_graph(data: bytes) -> dict[str, bytes]:
    """A folder of `data`, which has the JSON of all other files by their names; or else is config.json itself."""
    try:
        listed = json.loads(data)
    except ValueError:
        listed = None
    if not isinstance(listed, dict):
        return folder_of(EMBEDDER) | {"config.json": data}
    known = {name: content for name, content in listed.items() if name in EMBEDDER}
    return folder_of(known, "logits" if "modules.json" not in known else "last_hidden_state")


def folder_of(files: dict[str, Any], output: str = "last_hidden_state") -> dict[str, bytes]:
    return {"onnx/model.onnx": GRAPHS[output], **{name: written(content)[0] for name, content in files.items()}}


ENCODERS: dict[str, Harness] = {
    "encoder-graph": Harness(
        in_folder(lambda data: folder_of(EMBEDDER) | {"onnx/model.onnx": data}, use_encoder, names_files=True),
        [*GRAPHS.values()],
    ),
    "encoder-files": Harness(
        in_folder(beside_graph, use_encoder, names_files=True), written(EMBEDDER, INSTRUCTED, CROSS_ENCODER)
    ),
    "encoder-gguf": Harness(
        in_folder(described_gguf.files, use_gguf_encoder, names_files=True),
        described_gguf.seeds(described_gguf.ENCODER_SEEDS),
    ),
}
