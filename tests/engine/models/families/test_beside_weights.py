"""Families whose code lies beside their weights: they are models of transformers with other names."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import models_zoo
import numpy as np
import pytest
from harness import Harness, load, make_device
from model_configs import MINICPM
from safetensors.numpy import save_file

from tidewheel.engine.errors import ModelError
from tidewheel.engine.models import describe

pytest.importorskip("torch")
pytest.importorskip("transformers")

_INTERNLM2 = {
    "embed_tokens": "tok_embeddings",
    "lm_head": "output",
    "self_attn.o_proj": "attention.wo",
    "mlp.gate_proj": "feed_forward.w1",
    "mlp.up_proj": "feed_forward.w3",
    "mlp.down_proj": "feed_forward.w2",
    "input_layernorm": "attention_norm",
    "post_attention_layernorm": "ffn_norm",
}


def saved(folder: Path, config: dict[str, Any], state: dict[str, Any]) -> Path:
    save_file({name: np.ascontiguousarray(data) for name, data in state.items()}, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(config), "utf-8")
    return folder


def check(name: str, folder: Path) -> None:
    tokens = models_zoo.prompts()[-1]
    expected = models_zoo.reference_logits(name, tokens)
    executor = load(make_device("torch"), folder)
    logits = Harness(executor).logits(tokens)
    executor.close()
    assert np.abs(logits - expected).max() <= 1e-4 * np.abs(expected).max()


def test_internlm2_is_llama_with_one_matrix_for_q_k_and_v(tmp_path: Path) -> None:
    model, config = models_zoo.model("llama"), models_zoo.model("llama").config
    state = {name: tensor.numpy() for name, tensor in model.state_dict().items()}
    for layer in range(config.num_hidden_layers):
        prefix = f"model.layers.{layer}.self_attn"
        parts = [state.pop(f"{prefix}.{part}_proj.weight") for part in "qkv"]
        by_kv_head = [part.reshape(config.num_key_value_heads, -1, config.hidden_size) for part in parts]
        fused = np.concatenate(by_kv_head, axis=1).reshape(-1, config.hidden_size)
        state[f"model.layers.{layer}.attention.wqkv.weight"] = fused
    for ours, theirs in _INTERNLM2.items():
        state = {name.replace(ours, theirs): data for name, data in state.items()}
    fields = {**config.to_dict(), "architectures": ["InternLM2ForCausalLM"], "bias": False}
    check("llama", saved(tmp_path, fields, state))


def test_minicpm_is_granite_with_other_multipliers(tmp_path: Path) -> None:
    case = models_zoo.Case(
        "granite",
        {
            **models_zoo._LLAMA,
            "rms_norm_eps": 1e-4,
            "attention_multiplier": 0.25,
            "embedding_multiplier": 6.0,
            "residual_multiplier": 1.4 / 2**0.5,
            "logits_scaling": 4.0,
            "tie_word_embeddings": True,
        },
    )
    model = models_zoo.build(case)
    state = {name: tensor.numpy() for name, tensor in model.state_dict().items() if name != "lm_head.weight"}
    fields = {**model.config.to_dict(), "scale_emb": 6, "scale_depth": 1.4, "dim_model_base": 16}
    folder = saved(tmp_path, {**fields, "architectures": ["MiniCPMForCausalLM"]}, state)
    tokens = models_zoo.prompts()[-1]
    import torch

    with torch.no_grad():
        expected = model(torch.tensor([tokens])).logits[0].numpy()
    executor = load(make_device("torch"), folder)
    logits = Harness(executor).logits(tokens)
    executor.close()
    assert np.abs(logits - expected).max() <= 1e-4 * np.abs(expected).max()


def test_what_minicpm_does_beyond_that_is_refused() -> None:
    with pytest.raises(ModelError, match="sparse_config"):
        describe({**MINICPM, "sparse_config": {"kernel_size": 32}})
    with pytest.raises(ModelError, match="num_experts"):
        describe({**MINICPM, "num_experts": 8})
