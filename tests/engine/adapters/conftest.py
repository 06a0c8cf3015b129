"""A tiny Llama's config, for weights that are made up."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

_CONFIG = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 64, "intermediate_size": 128,
    "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 320,
    "max_position_embeddings": 256, "rms_norm_eps": 1e-5, "tie_word_embeddings": True, "torch_dtype": "float32",
}  # fmt: skip


@pytest.fixture(scope="session")
def dummy_llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a config alone."""
    folder = tmp_path_factory.mktemp("dummy-llama")
    (folder / "config.json").write_text(json.dumps(_CONFIG))
    return folder
