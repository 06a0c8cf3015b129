"""Harnesses of the files in model folders."""

from __future__ import annotations

import base64
import io
import json
import struct
import zipfile
from pathlib import Path
from typing import Any

import sentencepiece
import tokenizers
from fuzz.encoder_folders import ENCODERS
from fuzz.gguf_files import GGUF
from fuzz.harness import Harness, in_folder, written
from fuzz.quantized_files import QUANTIZED

import tidewheel.engine.text.other_files  # noqa: F401  # else it is imported later, and not instrumented
from tidewheel.engine.files.folder import read_config
from tidewheel.engine.models import describe
from tidewheel.engine.models.generation import read_generation_config, sampling_defaults
from tidewheel.engine.models.spec import tensor_shapes
from tidewheel.engine.text.byte_level import load_byte_level
from tidewheel.engine.text.tokenizer import Tokenizer
from tidewheel.engine.weights.checkpoint import CheckpointWeights, open_checkpoint
from tidewheel.engine.weights.finite import require_finite
from tidewheel.server.chat.templates import ChatTemplate

TEMPLATE = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}"
    "{% for c in m.tool_calls or [] %}[{{ c.function.name }} {{ c.function.arguments | tojson }}]{% endfor %}"
    "{% endfor %}{% if tools %}{{ tools | tojson }}{% endif %}"
)
CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 8, "intermediate_size": 12,
    "num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 1, "vocab_size": 20,
    "max_position_embeddings": 64, "rms_norm_eps": 1e-5, "rope_theta": 10000.0, "hidden_act": "silu",
    "rope_scaling": {"rope_type": "linear", "factor": 2.0}, "eos_token_id": [1, 2], "tie_word_embeddings": True,
}  # fmt: skip
CONFIGS = [
    CONFIG,
    CONFIG | {"rope_scaling": {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
                               "original_max_position_embeddings": 32}},
    CONFIG | {"rope_scaling": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}},
    CONFIG | {"architectures": ["Qwen2ForCausalLM"], "use_sliding_window": True, "sliding_window": 16},
    CONFIG | {"architectures": ["Qwen3ForCausalLM"], "head_dim": 4},
    {"architectures": ["GPT2LMHeadModel"], "vocab_size": 20, "n_embd": 8, "n_layer": 1, "n_head": 2, "n_positions": 64},
    {"architectures": ["OPTForCausalLM"], "vocab_size": 20, "hidden_size": 8, "ffn_dim": 12, "num_hidden_layers": 1,
     "num_attention_heads": 2, "max_position_embeddings": 64, "word_embed_proj_dim": 8, "activation_function": "relu"},
]  # fmt: skip
GENERATION_CONFIG: dict[str, Any] = {
    "bos_token_id": 1, "eos_token_id": [2, 3], "do_sample": True, "temperature": 0.6, "top_p": 0.95, "top_k": 20,
    "min_p": 0.05, "repetition_penalty": 1.1,
}  # fmt: skip


def checkpoint() -> bytes:
    """A file with all weights of CONFIG."""
    description = describe(CONFIG)
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    size = 0
    for name, shape in tensor_shapes(description.spec).items():
        count = 4
        for length in shape:
            count *= length
        header[description.tensors[name].name] = {
            "dtype": "F32", "shape": shape, "data_offsets": [size, size + count],
        }  # fmt: skip
        size += count
    head = json.dumps(header).encode()
    return struct.pack("<Q", len(head)) + head + bytes(size)


def read_checkpoint(folder: Path) -> None:
    weights = CheckpointWeights(open_checkpoint(folder), describe(CONFIG))
    require_finite([weights[name] for name in weights])


def read_description(folder: Path) -> None:
    config = read_config(folder)
    spec = describe(config).spec
    tensor_shapes(spec)
    sampling_defaults(read_generation_config(folder, config))


def use_tokenizer(folder: Path) -> None:
    tokenizer = Tokenizer.load(folder)
    tokenizer.decode(tokenizer.encode("hi there <|end|>")[:20])
    tokenizer.eos_token_id  # noqa: B018
    if tokenizer.chat_template is not None:
        ChatTemplate(tokenizer.chat_template, tokenizer.special_tokens_map)


def use_byte_level(folder: Path) -> None:
    made = load_byte_level(folder, {"add_bos_token": True}, "GPT2Tokenizer")
    if made is not None:
        made.decode(made.encode("hi there <|end|>", True)[:20], False)


def tokenizer_json() -> bytes:
    alphabet = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    made = tokenizers.Tokenizer(
        tokenizers.models.BPE({c: i for i, c in enumerate(alphabet)} | {"hi": 256}, [("h", "i")])
    )
    made.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = tokenizers.decoders.ByteLevel()
    made.add_special_tokens(["<|start|>", "<|end|>"])
    made.post_processor = tokenizers.processors.TemplateProcessing(
        single="<|start|> $A", special_tokens=[("<|start|>", 257)]
    )
    return made.to_str().encode()


TOKENIZER = tokenizer_json()
VOCABULARY = json.dumps(json.loads(TOKENIZER)["model"]["vocab"]).encode()
TOKENIZER_CONFIG: dict[str, Any] = {
    "bos_token": {"content": "<|start|>"}, "eos_token": "<|end|>", "additional_special_tokens": ["<|end|>"],
    "chat_template": [{"name": "default", "template": TEMPLATE}], "add_bos_token": True,
    "added_tokens_decoder": {"257": {"content": "<|end|>", "special": True}}, "tokenizer_class": "PreTrainedTokenizer",
}  # fmt: skip


def sentencepiece_model(kind: str, normalization: str = "identity") -> bytes:
    made = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(["hi there", "the heir hit the tier", "there is a hat"] * 5), model_writer=made,
        model_type=kind, vocab_size=300, hard_vocab_limit=False, byte_fallback=kind == "bpe",
        normalization_rule_name=normalization, add_dummy_prefix=kind != "bpe", user_defined_symbols=["<|x|>"],
        minloglevel=2,
    )  # fmt: skip
    return made.getvalue()


UNIGRAM = sentencepiece_model("unigram")
SENTENCEPIECE_CONFIG: dict[str, Any] = {
    "bos_token": "<s>", "eos_token": {"content": "</s>"}, "add_bos_token": True, "add_eos_token": False,
    "added_tokens_decoder": {"0": {"content": "<unk>", "special": True}, "300": {"content": "<|end|>", "special": True},
                             "301": {"content": "plain", "special": False}},
}  # fmt: skip


RANKS = b"".join(base64.b64encode(bytes([byte])) + b" %d\n" % byte for byte in range(256))
TIKTOKEN_CONFIG = json.dumps({"auto_map": {"AutoTokenizer": ["tokenization_kimi.TikTokenTokenizer", None]}}).encode()


def pytorch_file() -> bytes:
    """A file of one tensor, as torch.save writes it."""
    storage = b"(X\x07\0\0\0storagectorch\nFloatStorage\nX\x01\0\0\x000X\x03\0\0\0cpuK\x02tQ"
    program = b"\x80\x02}q\0X\x01\0\0\0actorch._utils\n_rebuild_tensor_v2\n("
    program += storage + b"K\0K\x02\x85K\x01\x85\x89ccollections\nOrderedDict\n)RtRs."
    made = io.BytesIO()
    with zipfile.ZipFile(made, "w") as archive:
        for name, content in {"data.pkl": program, "data/0": bytes(8), "byteorder": b"little"}.items():
            archive.writestr(f"archive/{name}", content)
    return made.getvalue()


FOLDERS: dict[str, Harness] = {
    "safetensors": Harness(in_folder(lambda data: {"model.safetensors": data}, read_checkpoint), [checkpoint()]),
    "pytorch": Harness(in_folder(lambda data: {"pytorch_model.bin": data}, open_checkpoint), [pytorch_file()]),
    "config": Harness(in_folder(lambda data: {"config.json": data}, read_description), written(*CONFIGS)),
    "generation-config": Harness(
        in_folder(
            lambda data: {"config.json": json.dumps(CONFIG).encode(), "generation_config.json": data}, read_description
        ),
        written(GENERATION_CONFIG),
    ),
    "tokenizer": Harness(in_folder(lambda data: {"tokenizer.json": data}, use_tokenizer), [TOKENIZER]),
    "tokenizer-config": Harness(
        in_folder(lambda data: {"tokenizer_config.json": data, "tokenizer.json": TOKENIZER}, use_tokenizer),
        written(TOKENIZER_CONFIG),
    ),
    "vocabulary": Harness(
        in_folder(lambda data: {"vocab.json": data, "merges.txt": b"h i\n"}, use_byte_level), [VOCABULARY]
    ),
    "tiktoken": Harness(
        in_folder(
            lambda data: {"tiktoken.model": RANKS + data, "tokenizer_config.json": TIKTOKEN_CONFIG},
            use_tokenizer,
            names_files=True,
        ),
        [b"aGk= 256\nIGhp 257\n"],
    ),
    "merges": Harness(
        in_folder(lambda data: {"vocab.json": VOCABULARY, "merges.txt": data}, use_byte_level),
        [b"#version: 0.2\nh i\n"],
    ),
    "added-tokens": Harness(
        in_folder(
            lambda data: {"vocab.json": VOCABULARY, "merges.txt": b"h i\n", "special_tokens_map.json": data},
            use_byte_level,
        ),
        written({"bos_token": {"content": "<|end|>", "lstrip": True}, "additional_special_tokens": ["<|x|>"]}),
    ),
    "sentencepiece": Harness(
        in_folder(lambda data: {"tokenizer.model": data}, use_tokenizer, names_files=True),
        [UNIGRAM, sentencepiece_model("bpe")],
    ),
    "sentencepiece-t5": Harness(
        in_folder(
            lambda data: {"spiece.model": data, "tokenizer_config.json": b'{"tokenizer_class": "T5Tokenizer"}'},
            use_tokenizer,
            names_files=True,
        ),
        [UNIGRAM, sentencepiece_model("unigram", "nmt_nfkc")],
    ),
    "sentencepiece-config": Harness(
        in_folder(
            lambda data: {"tokenizer_config.json": data, "tokenizer.model": UNIGRAM}, use_tokenizer, names_files=True
        ),
        written(SENTENCEPIECE_CONFIG),
    ),
    **ENCODERS,
    **GGUF,
    **QUANTIZED,
}
