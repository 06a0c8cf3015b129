"""Keys of vLLM's speculative config that have no effect here, because no value of them changes the answers."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

_KERNELS = "the best kernels of this processor are chosen at the start"
_COMPARED = "draft tokens are compared with the tokens that are sampled, and change none"
_WITHOUT_EFFECT = {
    "enforce_eager": "no graphs are captured for drafting",
    "code_revision": "no code that comes with a model is ever run",
    "moe_backend": _KERNELS,
    "attention_backend": _KERNELS,
    "disable_mqa_scorer": _KERNELS,
    "disable_padded_drafter_batch": "draft tokens are never padded",
    "disable_eagle_block_drop": "no block of the prefix cache is dropped for draft tokens",
    "use_local_argmax_reduction": "draft tokens are sampled where their logits are",
    "disable_logprobs": "draft tokens change no log-probability",
    "disable_log_stats": "/metrics counts accepted and rejected draft tokens",
    "draft_sample_method": "draft tokens are sampled with the parameters of their request",
    "rejection_sample_method": _COMPARED,
    "acceptance_method": _COMPARED,
}
_VALUES = {  # of keys that have no effect with these values alone
    "rejection_sample_method": ("standard", "block"),
    "acceptance_method": ("rejection_sampler",),
}


def without_effect(config: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Each key that has none with the value it has, and why."""
    for key, why in _WITHOUT_EFFECT.items():
        if key in config and config[key] in _VALUES.get(key, (config[key],)):
            yield key, why
