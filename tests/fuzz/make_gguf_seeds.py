"""Makes gguf_seeds.json and gguf_encoder_seeds.json: files of families that differ most, as llama.cpp's converter
writes them, described in JSON.

    cd tests && python -m fuzz.make_gguf_seeds

Needs transformers, which fuzzing does not. Models are as in models_zoo, but wide enough for blocks of 256 elements.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import encoder_zoo
import gguf
import gguf_encoders
import gguf_files
import models_zoo
import mtp_zoo
import stored_zoo
from fuzz import described_gguf

NAMES = (
    "qwen3_5", "qwen3_next-experts", "granitemoehybrid-experts", "lfm2-experts", "falcon-h1", "mamba2",
    "nemotron-h-experts", "gemma2", "gemma3", "gemma3n", "gemma4-experts", "qwen3-moe", "gpt-oss", "deepseek-v3",
    "llama4", "phi3-longrope", "falcon-grouped",
)  # fmt: skip
ENCODERS = ("bert", "roberta-cross", "nomic_bert", "modernbert", "xlm-roberta", "gemma")
UNLIKE: dict[str, dict[str, Any]] = {
    "gpt-oss": {"swiglu_limit": 7.0},
    "llama4": {"no_rope_layers": None, "num_hidden_layers": 4, "floor_scale": 8192},
}
EMBEDDINGS = ("token_embd.weight", "output.weight", "per_layer_token_embd.weight")
ROWS = 12  # of the embedding
PRES = ("qwen35", "llama-bpe", "gpt-4o", "tekken", "deepseek-v3", "falcon", "smollm", "deepseek-coder", "bloom")
_KIND = gguf.GGMLQuantizationType
_SMALL = ("Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "IQ4_NL", "MXFP4", "F16", "BF16")
_LARGE = ("Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K", "IQ4_XS", *_SMALL)
_LEFT = ("ssm_conv1d", "ssm_a", "ssm_d", "ssm_norm", "ffn_gate_inp", "shortconv.conv")  # as llama.cpp leaves them


def tokenizer(turn: int) -> dict[str, list[Any]]:
    """The metadata of a tokenizer; they take turns."""
    said: dict[str, list[Any]] = {"bos_token_id": [4, 1], "eos_token_id": [4, 2], "add_bos_token": [7, True]}
    words, space = ["a", "b", "h", "i", "ab"], "Ġ" if turn % 3 else "▁"
    tokens = ["<unk>", "<b>", "<e>", *words, space, "<t>", "[PAD]"]
    types = [2, 3, 3, *[1] * 6, 4, 5]
    if turn % 3 == 0:
        said |= {"model": [8, "llama"], "scores": [9, [6, [-float(i) for i in range(len(tokens))]]]}
        said |= {"unknown_token_id": [4, 0], "add_space_prefix": [7, False]}
    elif turn % 3 == 1:
        said |= {"model": [8, "gpt2"], "pre": [8, PRES[turn // 3 % len(PRES)]], "merges": [9, [8, ["a b"]]]}
    else:
        said |= {"model": [8, "gemma4"], "merges": [9, [8, ["a b"]]], "unknown_token_id": [4, 0]}
    said |= {"tokens": [9, [8, tokens]], "token_type": [9, [5, types]]}
    template = {"tokenizer.chat_template": [8, "{% for m in messages %}<b>{{ m.content }}<e>{% endfor %}"]}
    return {f"tokenizer.ggml.{key}": value for key, value in said.items()} | template


def described(path: Path, turn: int, *, own_tokenizer: bool = False) -> dict[str, Any]:
    """The file at `path` with its own tokenizer or that of the turn, and matrices in one type after the other."""
    reader = gguf.GGUFReader(path)
    metadata = {name: _value(field) for name, field in reader.fields.items() if not name.startswith("GGUF.")}
    tensors: dict[str, list[Any]] = {}
    for i, tensor in enumerate(reader.tensors, turn):
        dims = [int(size) for size in tensor.shape]
        if not own_tokenizer and tensor.name in EMBEDDINGS:
            dims[-1] = ROWS
        kind, content = _KIND.F32, tensor.data.reshape(-1)[:1].tobytes()
        if len(dims) > 1 and dims[0] % 32 == 0 and not any(part in tensor.name for part in _LEFT):
            kinds = _SMALL if dims[0] % 256 else _LARGE
            kind, content = _KIND[kinds[i % len(kinds)]], b"\1"
        tensors[tensor.name] = [int(kind), dims, list(content)]
    return {"metadata": metadata if own_tokenizer else metadata | tokenizer(turn), "tensors": tensors}


def _value(field: Any) -> list[Any]:
    kind, value = int(field.types[0]), field.contents()
    return [kind, [int(field.types[-1]), value]] if kind == int(gguf.GGUFValueType.ARRAY) else [kind, value]


def split(whole: dict[str, Any]) -> dict[str, Any]:
    """The same model in two files."""
    tensors, half = list(whole["tensors"].items()), len(whole["tensors"]) // 2
    parts = []
    for number, some in enumerate((tensors[:half], tensors[half:])):
        said = {"split.no": [2, number], "split.count": [2, 2], "split.tensors.count": [5, len(tensors)]}
        parts.append({"metadata": said | ({} if number else whole["metadata"]), "tensors": dict(some)})
    return {"parts": parts}


def made() -> Iterator[dict[str, Any]]:
    """All of them."""
    with tempfile.TemporaryDirectory() as folder:
        for turn, name in enumerate(NAMES):
            case = models_zoo.CASES[name]
            fields = stored_zoo.wider(case) | UNLIKE.get(name, {})
            fields |= {field: 32 for field in fields if field.startswith("moe_")}  # small files are read in less time
            model = models_zoo.build(replace(case, config=case.config | fields))
            whole = described(gguf_files.write(Path(folder, f"{name}.gguf"), model), turn)
            yield whole
        yield split(whole)
        yield described(mtp_zoo.gguf_file("qwen3_5"), len(NAMES))


def encoders() -> Iterator[dict[str, Any]]:
    """Encoders with their own tokenizers. XLM-R's has pieces of SentencePiece, and RoBERTa's a merge."""
    with tempfile.TemporaryDirectory() as folder:
        for turn, name in enumerate(ENCODERS):
            file = gguf_encoders.write(encoder_zoo.native_folder(name), Path(folder, f"{name}.gguf"))
            seed = described(file, turn, own_tokenizer=True)
            said, prefix = seed["metadata"], "tokenizer.ggml."
            if name == "roberta-cross":
                said[f"{prefix}tokens"][1][1][-1] = "th"
                said[f"{prefix}merges"] = [9, [8, ["t h"]]]
            elif name == "xlm-roberta":
                count = len(said[f"{prefix}tokens"][1][1])
                said |= {f"{prefix}model": [8, "t5"], f"{prefix}scores": [9, [6, [-float(i) for i in range(count)]]]}
                said[f"{prefix}token_type"][1][1][3] = 2
            yield seed


def write(path: Path, seeds: Iterator[dict[str, Any]]) -> None:
    text = ",\n".join(json.dumps(seed, ensure_ascii=False, separators=(",", ":")) for seed in seeds)
    path.write_text(f"[{text}]\n")


if __name__ == "__main__":
    write(described_gguf.ENCODER_SEEDS, encoders())
    write(described_gguf.SEEDS, made())
