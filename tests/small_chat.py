"""A small chat model with made weights, for tests of what computes beside it."""

from __future__ import annotations

import json
from pathlib import Path

from tidewheel.engine.options import EngineOptions

CONFIG = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 64, "intermediate_size": 128,
    "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 320,
    "max_position_embeddings": 2048, "rms_norm_eps": 1e-5, "rope_theta": 10000.0, "hidden_act": "silu",
    "tie_word_embeddings": True,
}  # fmt: skip


def small_chat(folder: Path) -> EngineOptions:
    """The options that load it on the CPU, from a folder where this writes its config."""
    (folder / "config.json").write_text(json.dumps(CONFIG))
    return EngineOptions(str(folder), device="cpu", load_format="dummy", skip_tokenizer_init=True, kv_cache_space=0.01)
