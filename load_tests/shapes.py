"""Models of known shapes with random weights, for measuring speed without a checkpoint.

Making one needs torch and transformers, which `make test` installs.
"""

from __future__ import annotations

import shutil
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

VOCAB_SIZE = 49152
_BOS, _EOS, _PAD = "<|im_start|>", "<|im_end|>", "<|endoftext|>"
_TRAINED_CHARACTERS = 20_000_000
_GROUP = 128  # inputs that share a scale in a GPTQ checkpoint
_GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": _GROUP, "sym": True, "desc_act": False, "lm_head": False}


@dataclass(frozen=True)
class Shape:
    """A model's config, with transformers' names of fields, and the formats that peers are measured with by default.

    `formats` are Tidewheel's: names in capitals are types of GGUF files, others belong to the checkpoint.
    """

    family: str
    formats: tuple[str, ...]
    config: dict[str, Any]
    gptq: bool = False


_LLAMA_1B = {
    "hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16,
    "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 64,
}  # fmt: skip
_SMOL360 = {
    "hidden_size": 960, "intermediate_size": 2560, "num_hidden_layers": 32,
    "num_attention_heads": 15, "num_key_value_heads": 5,
}  # fmt: skip
SHAPES = {
    "smol360": Shape("llama", ("Q4_K_M", "Q8_0", "Q6_K", "IQ4_XS"), _SMOL360),
    "smol360-long": Shape("llama", ("Q8_0",), _SMOL360 | {"num_hidden_layers": 4, "max_position_embeddings": 65536}),
    "llama1b": Shape("llama", ("Q4_K_M",), _LLAMA_1B),
    "llama1b-gptq": Shape("llama", ("gptq",), _LLAMA_1B, gptq=True),
    "qwen3-moe": Shape("qwen3_moe", ("bfloat16", "Q8_0", "Q4_K_M"), {
        "hidden_size": 1024, "num_hidden_layers": 16, "num_attention_heads": 16, "num_key_value_heads": 4,
        "head_dim": 64, "num_experts": 32, "num_experts_per_tok": 4, "moe_intermediate_size": 768,
        "intermediate_size": 3072, "norm_topk_prob": True,
    }),
    "qwen35": Shape("qwen3_5_text", ("bfloat16", "Q8_0", "Q4_K_M"), {
        "hidden_size": 1024, "intermediate_size": 3584, "num_hidden_layers": 24, "num_attention_heads": 8,
        "num_key_value_heads": 2, "head_dim": 256, "linear_num_key_heads": 16, "linear_num_value_heads": 16,
        "linear_key_head_dim": 128, "linear_value_head_dim": 128,
    }),
}  # fmt: skip
"""SmolLM2-360M; 4 of its 32 layers, for contexts of up to 65,536 tokens; Llama 3.2 1B, also as GPTQ in 4 bits; 32
experts of which 4, 1.3 B in all; Qwen3.5, 0.5 B."""


def make(name: str, folder: Path) -> Path:
    """Write the model of a shape into a folder, unless it is there. Returns the folder."""
    if folder.exists():
        return folder
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    shape = SHAPES[name]
    torch.manual_seed(0)
    config = AutoConfig.for_model(
        shape.family, vocab_size=VOCAB_SIZE, tie_word_embeddings=True,
        bos_token_id=1, eos_token_id=2, pad_token_id=0, **{"max_position_embeddings": 8192} | shape.config,
    )  # fmt: skip
    model: Any = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    part = folder.with_name(f"{folder.name}.part")
    shutil.rmtree(part, ignore_errors=True)
    if shape.gptq:
        model.config.architectures = [type(model).__name__]
        model.config.quantization_config = _GPTQ
        model.config.save_pretrained(part)
        _save_gptq(model, part)
    else:
        model.save_pretrained(part)
    tokenizer().save_pretrained(part)
    part.rename(folder)
    return folder


def _save_gptq(model: Any, folder: Path) -> None:
    """All of the model's matrices but the embedding, as random 4-bit GPTQ integers, which take as long as real ones."""
    import torch
    from safetensors.torch import save_file

    tensors = {}
    for name, weight in model.state_dict().items():
        if not name.endswith("proj.weight"):
            if name != "lm_head.weight":
                tensors[name] = weight.contiguous()
            continue
        (rows, columns), stem = weight.shape, name.removesuffix("weight")
        groups = columns // _GROUP
        tensors[f"{stem}qweight"] = torch.randint(-(2**31), 2**31, (columns // 8, rows), dtype=torch.int32)
        tensors[f"{stem}qzeros"] = torch.full((groups, rows // 8), 0x77777777, dtype=torch.int32)
        tensors[f"{stem}scales"] = torch.full((groups, rows), 0.005, dtype=torch.float16)
        tensors[f"{stem}g_idx"] = torch.arange(columns, dtype=torch.int32) // _GROUP
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def tokenizer(*special_tokens: str) -> Any:
    """A byte-level BPE, trained on Python's standard library. Further special tokens have the ids from 3 on."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=[_PAD, _BOS, _EOS, *special_tokens],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    bpe.train_from_iterator(_texts(), trainer)
    return PreTrainedTokenizerFast(tokenizer_object=bpe, bos_token=_BOS, eos_token=_EOS, pad_token=_PAD)


def _texts() -> Iterator[str]:
    seen = 0
    for file in sorted(Path(sysconfig.get_paths()["stdlib"]).rglob("*.py")):
        text = file.read_text(errors="ignore")
        seen += len(text)
        if seen > _TRAINED_CHARACTERS:
            return
        yield text
