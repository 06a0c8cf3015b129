"""GGUF files of tiny encoders, as llama.cpp's converter makes them of folders with safetensors."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import tokenizers
from gguf_files import Quantize, as_float32, finish
from numpy.typing import NDArray
from safetensors.numpy import load_file

Tensors = Iterator[tuple[str, NDArray[np.float32]]]

_ARCHITECTURES = {
    "bert": gguf.MODEL_ARCH.BERT,
    "distilbert": gguf.MODEL_ARCH.BERT,
    "roberta": gguf.MODEL_ARCH.BERT,
    "xlm-roberta": gguf.MODEL_ARCH.BERT,
    "nomic_bert": gguf.MODEL_ARCH.NOMIC_BERT,
    "jina_bert": gguf.MODEL_ARCH.JINA_BERT_V2,
    "modernbert": gguf.MODEL_ARCH.MODERN_BERT,
    "gemma3_text": gguf.MODEL_ARCH.GEMMA_EMBEDDING,
}
_PREFIXES = ("distilbert.", "roberta.", "bert.", "model.")
_LEFT_OUT = ("pooler.", "embeddings.position_ids")
_POOLING = {"mean": gguf.PoolingType.MEAN, "cls": gguf.PoolingType.CLS}
_SIZES: dict[str, tuple[str, ...]] = {
    "add_context_length": ("max_position_embeddings", "max_trained_positions"),
    "add_embedding_length": ("hidden_size", "dim", "n_embd"),
    "add_block_count": ("num_hidden_layers", "n_layers", "n_layer"),
    "add_head_count": ("num_attention_heads", "n_heads", "n_head"),
    "add_feed_forward_length": ("intermediate_size", "hidden_dim", "n_inner"),
}


def write(
    folder: Path,
    path: Path,
    quantize: Quantize = as_float32,
    change: Callable[[Any], None] = lambda writer: None,
    *,
    has_tokenizer: bool = True,
) -> Path:
    """The model of a folder in one file. `change` may add to what its writer has, and take away."""
    config = json.loads((folder / "config.json").read_text())
    arch = _architecture(config)
    writer = gguf.GGUFWriter(path, gguf.MODEL_ARCH_NAMES[arch])
    _write_config(writer, folder, config)
    names = gguf.get_tensor_name_map(arch, 8)
    for name, data in _tensors(folder, config):
        found = names.get_name(name, (".weight", ".bias"))
        assert found is not None, name
        stored, kind = quantize(found, np.ascontiguousarray(data))
        writer.add_tensor(found, stored, raw_dtype=kind)
    if has_tokenizer:
        write_tokenizer(writer, tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json")))
    change(writer)
    return finish(writer)


def _architecture(config: dict[str, Any]) -> Any:
    if config.get("num_experts"):
        return gguf.MODEL_ARCH.NOMIC_BERT_MOE
    if config.get("position_embedding_type") == "rotary":
        return gguf.MODEL_ARCH.JINA_BERT_V3
    return _ARCHITECTURES[config["model_type"]]


def _tensors(folder: Path, config: dict[str, Any]) -> Tensors:
    kind = config.get("model_type")
    offset = config["pad_token_id"] + 1 if kind in ("roberta", "xlm-roberta") else 0
    for name, data in load_file(folder / "model.safetensors").items():
        for prefix in _PREFIXES:
            name = name.removeprefix(prefix)
        if name.startswith(_LEFT_OUT) or name.endswith("experts.bias"):
            continue
        if "experts.mlp.w" in name:
            data = data.reshape(config["num_experts"], config["n_inner"], config["n_embd"])
            data, name = data.swapaxes(1, 2) if name.endswith("w2") else data, f"{name}.weight"
        if name == "embeddings.position_embeddings.weight":
            data = data[offset:]
        if name.startswith("classifier.") and name.count(".") == 1:
            name = name.replace("classifier", "classifier.out_proj")
        if kind == "gemma3_text" and name.endswith("norm.weight"):
            data = data + 1
        yield name if kind != "gemma3_text" else f"model.{name}", data
    for index in (2, 3):
        if (dense := folder / f"{index}_Dense" / "model.safetensors").exists():
            yield f"dense_{index}.weight", load_file(dense)["linear.weight"]


def _write_config(writer: Any, folder: Path, config: dict[str, Any]) -> None:
    kind = config.get("model_type")
    for method, fields in _SIZES.items():
        size = next(config[field] for field in fields if field in config)
        if method == "add_context_length" and kind in ("roberta", "xlm-roberta"):
            size -= config["pad_token_id"] + 1
        getattr(writer, method)(size)
    writer.add_causal_attention(False)
    if "norm_eps" not in config and "rms_norm_eps" not in config:
        writer.add_layer_norm_eps(config.get("layer_norm_eps", config.get("layer_norm_epsilon", 1e-12)))
    rope = config.get("rope_parameters") or {}
    if base := rope.get("full_attention", rope).get("rope_theta"):
        writer.add_rope_freq_base(base)
    if local := rope.get("sliding_attention"):
        writer.add_rope_freq_base_swa(local["rope_theta"])
        full = config["layer_types"].index("full_attention")
        writer.add_sliding_window_pattern(3 if full == 0 else full + 1)
    if base := config.get("rotary_emb_base"):
        writer.add_rope_freq_base(base)
    if config.get("num_experts"):
        writer.add_expert_count(config["num_experts"])
        writer.add_expert_used_count(config["moe_top_k"])
        writer.add_moe_every_n_layers(config["moe_every_n_layers"])
    if kind == "modernbert":
        writer.add_layer_norm_eps(config["norm_eps"])
        writer.add_sliding_window(config["local_attention"])
        writer.add_uint32("modern-bert.classifier.pooling_type", _POOLING[config["classifier_pooling"]].value)
        writer.add_string("modern-bert.hidden_activation", config["hidden_activation"])
    if kind == "gemma3_text":
        writer.add_sliding_window(config["sliding_window"])
        writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
        writer.add_key_length(config["head_dim"])
        writer.add_value_length(config["head_dim"])
        writer.add_head_count_kv(config["num_key_value_heads"])
    if (pooling := folder / "1_Pooling" / "config.json").exists():
        said = json.loads(pooling.read_text())
        writer.add_pooling_type(_POOLING["cls" if said.get("pooling_mode_cls_token") else "mean"])
    if "ForSequenceClassification" in config["architectures"][0]:
        writer.add_classifier_output_labels([*config["id2label"].values()])


def write_tokenizer(writer: Any, made: tokenizers.Tokenizer, pre: str = "roberta-bpe") -> None:
    """A tokenizer with BERT's, RoBERTa's or ModernBERT's pairs. `pre` counts only for bytes."""
    described = json.loads(made.to_str())
    model = described["model"]
    added = {entry["id"]: entry["special"] for entry in described["added_tokens"]}
    tokens = [str(made.id_to_token(token_id)) for token_id in range(made.get_vocab_size())]
    kinds = [gguf.TokenType.NORMAL] * len(tokens)
    for token_id, special in added.items():
        kinds[token_id] = gguf.TokenType.CONTROL if special else gguf.TokenType.USER_DEFINED
    if model["type"] == "WordPiece":
        writer.add_tokenizer_model("bert")
        tokens = [
            token if i in added else token[2:] if token.startswith("##") else f"\u2581{token}"
            for i, token in enumerate(tokens)
        ]
    elif model["type"] == "Unigram":
        writer.add_tokenizer_model("t5")
        writer.add_token_scores([score for _, score in model["vocab"]])
        kinds[model["unk_id"]] = gguf.TokenType.UNKNOWN
        if charsmap := _charsmap(described["normalizer"]):
            writer.add_precompiled_charsmap(charsmap)
    else:
        writer.add_tokenizer_model("gpt2")
        writer.add_tokenizer_pre(pre)
        writer.add_token_merges([" ".join(merge) for merge in model["merges"]])
    writer.add_token_list(tokens)
    writer.add_token_types(kinds)
    for name in ("bos", "eos", "sep", "unk", "pad", "mask"):
        token = _special(made, name)
        if token is not None:
            getattr(writer, f"add_{name}_token_id")(token)
    first, *_, last = made.encode("a", "b").ids
    pair = made.encode("a", "b", add_special_tokens=True).ids
    writer.add_add_bos_token(first == _special(made, "bos"))
    writer.add_add_eos_token(last == _special(made, "eos"))
    writer.add_bool("tokenizer.ggml.add_sep_token", pair.count(last) == 3)
    normalizer = described["normalizer"] or {}
    for name in ("lowercase", "strip_accents"):
        if normalizer.get(name) is not None:
            writer.add_bool(f"tokenizer.ggml.normalizer.{name}", normalizer[name])


def _special(made: tokenizers.Tokenizer, name: str) -> int | None:
    texts = {
        "bos": ("[CLS]", "<s>"),
        "eos": ("[SEP]", "</s>"),
        "sep": ("[SEP]", "</s>"),
        "unk": ("[UNK]", "<unk>"),
        "pad": ("[PAD]", "<pad>"),
        "mask": ("[MASK]", "<mask>"),
    }
    found = [token_id for text in texts[name] if (token_id := made.token_to_id(text)) is not None]
    return found[0] if found else None


def _charsmap(normalizer: dict[str, Any] | None) -> bytes:
    import base64

    return base64.b64decode((normalizer or {}).get("precompiled_charsmap") or "")
