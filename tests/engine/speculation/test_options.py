"""The meaning of vLLM's speculative config here, key by key."""

from __future__ import annotations

from typing import Any

import pytest

from tidewheel.engine.declaring.option import OptionError
from tidewheel.engine.speculation.options import DraftModel, Eagle3, Mtp, Speculation, SpeculativeOptions

WITHOUT_EFFECT = {
    "enforce_eager": True,
    "code_revision": "main",
    "moe_backend": "auto",
    "attention_backend": "FLASH_ATTN",
    "disable_padded_drafter_batch": True,
    "disable_eagle_block_drop": True,
    "use_local_argmax_reduction": True,
    "disable_mqa_scorer": True,
    "disable_logprobs": False,
    "disable_log_stats": True,
    "draft_sample_method": "probabilistic",
    "rejection_sample_method": "standard",
    "acceptance_method": "rejection_sampler",
}


def options(**config: Any) -> SpeculativeOptions:
    return SpeculativeOptions(speculative_config=config)


def test_keys_that_change_nothing_here_are_accepted_and_named() -> None:
    given = options(method="draft_model", model="a/b", num_speculative_tokens=5, **WITHOUT_EFFECT)
    assert given.speculation == DraftModel("a/b", 5)
    said = given.without_effect()
    assert len(said) == len(WITHOUT_EFFECT)
    for key in WITHOUT_EFFECT:
        assert any(sentence.startswith(f"--speculative-config: {key} has no effect: ") for sentence in said)
    assert options(method="ngram").without_effect() == []


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("rejection_sample_method", "synthetic"),
        ("acceptance_method", "typical_acceptance_sampler"),
        ("kv_cache_dtype", "fp8"),
        ("parallel_drafting", True),
    ],
)
def test_keys_that_would_change_something_are_refused(key: str, value: Any) -> None:
    with pytest.raises(OptionError, match=f"{key} is not supported with draft_model"):
        options(method="draft_model", model="a/b", **{key: value})


def test_null_is_as_if_a_key_were_left_out() -> None:
    nothing = {"quantization": None, "prompt_lookup_max": None, "enforce_eager": None, "max_model_len": None}
    given = options(method="eagle3", model="a/b", **nothing)
    assert given.speculation == Eagle3("a/b", 3)
    assert given.without_effect() == []
    suffix = options(method="suffix", suffix_decoding_max_tree_depth=None).speculation
    assert suffix == options(method="suffix").speculation
    assert options(method=None).speculation is None


@pytest.mark.parametrize(
    ("config", "asked"),
    [
        ({"model": "[ngram]"}, Speculation(8, 4, 1)),
        ({"model": "yuhuili/EAGLE3-LLaMA3.1-Instruct-8B"}, Eagle3("yuhuili/EAGLE3-LLaMA3.1-Instruct-8B", 3)),
        ({"model": "RedHatAI/Qwen3-8B-speculator.eagle3"}, Eagle3("RedHatAI/Qwen3-8B-speculator.eagle3", 3)),
        ({"model": "Qwen/Qwen3-0.6B"}, DraftModel("Qwen/Qwen3-0.6B", 8)),
        ({"model": "my/eagle3", "method": "draft_model"}, DraftModel("my/eagle3", 8)),
        ({"method": "step3p5_mtp"}, Mtp(3)),
        ({"method": "mimo_v2_mtp"}, Mtp(3)),
    ],
    ids=str,
)
def test_a_method_is_found_by_the_names_that_vllm_has_for_it(config: dict[str, Any], asked: object) -> None:
    assert options(**config).speculation == asked
