"""A GGUF file of a tiny Llama with a byte-level tokenizer, written without torch."""

from __future__ import annotations

from pathlib import Path

import gguf
import numpy as np
import tokenizers

_HIDDEN, _INNER, _LAYERS, _CONTEXT = 32, 64, 1, 128
_TEMPLATE = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}<|im_start|>"


def write(path: Path, seed: int = 0) -> Path:
    """Its weights are random numbers from `seed`."""
    alphabet = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    special = ["<|im_start|>", "<|im_end|>"]
    tokens = [*alphabet, "ti", "de", "tide", *special]
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_context_length(_CONTEXT)
    writer.add_embedding_length(_HIDDEN)
    writer.add_block_count(_LAYERS)
    writer.add_feed_forward_length(_INNER)
    writer.add_head_count(2)
    writer.add_head_count_kv(1)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_dimension_count(_HIDDEN // 2)
    writer.add_vocab_size(len(tokens))
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(tokens)
    writer.add_token_types([gguf.TokenType.NORMAL] * (len(tokens) - 2) + [gguf.TokenType.CONTROL] * 2)
    writer.add_token_merges(["t i", "d e", "ti de"])
    writer.add_eos_token_id(len(tokens) - 1)
    writer.add_chat_template(_TEMPLATE)
    shapes = {"token_embd.weight": (len(tokens), _HIDDEN), "output_norm.weight": (_HIDDEN,)}
    for layer in range(_LAYERS):
        of_layer = {
            "attn_norm": (_HIDDEN,),
            "attn_q": (_HIDDEN, _HIDDEN),
            "attn_k": (_HIDDEN // 2, _HIDDEN),
            "attn_v": (_HIDDEN // 2, _HIDDEN),
            "attn_output": (_HIDDEN, _HIDDEN),
            "ffn_norm": (_HIDDEN,),
            "ffn_gate": (_INNER, _HIDDEN),
            "ffn_up": (_INNER, _HIDDEN),
            "ffn_down": (_HIDDEN, _INNER),
        }
        shapes |= {f"blk.{layer}.{name}.weight": shape for name, shape in of_layer.items()}
    random = np.random.default_rng(seed)
    for name, shape in shapes.items():
        writer.add_tensor(name, random.standard_normal(shape, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path
