"""Checkpoints that are written as GGUF files for peers give the same numbers from both."""

from __future__ import annotations

import sys
import types
from pathlib import Path

import numpy as np
import pytest
from harness import Harness, load, make_device
from shapes import Shape, make

_SIZES = {
    "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 4, "num_attention_heads": 2,
    "num_key_value_heads": 1, "head_dim": 32,
}  # fmt: skip
_TINY = {
    "llama": Shape("llama", (), _SIZES),
    "experts": Shape("qwen3_moe", (), _SIZES | {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32,
                                              "norm_topk_prob": True}),
    "delta-net": Shape("qwen3_5_text", (), _SIZES | {
        "linear_num_key_heads": 2, "linear_num_value_heads": 2, "linear_key_head_dim": 16, "linear_value_head_dim": 16,
    }),
    "more-values": Shape("qwen3_5_text", (), _SIZES | {
        "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 16, "linear_value_head_dim": 16,
    }),
    "other": Shape("gpt_neox", (), {
        "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 1, "num_attention_heads": 2,
    }),
}  # fmt: skip


@pytest.fixture
def made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> Path:
    """The checkpoint of a tiny shape."""
    monkeypatch.setattr("shapes.SHAPES", _TINY)
    monkeypatch.setattr("shapes._texts", lambda: ["What the tokenizer is trained on."])
    monkeypatch.setitem(sys.modules, "llama_cpp", types.ModuleType("llama_cpp"))  # only quantizing needs the real one
    return make(request.param, tmp_path / "checkpoint")


@pytest.mark.parametrize("made", ["llama", "experts", "delta-net"], indirect=True)
def test_a_file_gives_the_checkpoints_logits(made: Path, tmp_path: Path) -> None:
    from peer_runners import make_gguf

    target = tmp_path / "BF16.gguf"
    make_gguf.write_base(made, target)
    ids = list(np.random.default_rng(0).integers(0, 49152, 24))
    logits = []
    for path in (made, target):
        executor = load(make_device("cpu"), path)
        try:
            logits.append(Harness(executor).logits(ids))
        finally:
            executor.close()
    np.testing.assert_allclose(logits[1], logits[0], atol=1e-4)
    assert np.ptp(logits[0]) > 0.1


@pytest.mark.parametrize(
    ("made", "why"),
    [
        ("more-values", "2 key heads and 4 value heads cannot be written as GGUF"),
        ("other", "GPTNeoXForCausalLM cannot be written as GGUF: only LlamaForCausalLM, Qwen3MoeForCausalLM"),
    ],
    indirect=["made"],
)
def test_what_cannot_be_written_is_refused(made: Path, why: str, tmp_path: Path) -> None:
    from peer_runners import make_gguf

    with pytest.raises(ValueError, match=why):
        make_gguf.write_base(made, tmp_path / "BF16.gguf")
