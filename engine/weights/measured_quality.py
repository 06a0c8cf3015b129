"""What formats of weights cost in quality, where it was measured."""

from __future__ import annotations

from collections.abc import Mapping

MEASURED_ON = "SmolLM2-135M-Instruct"

# docs/performance.md says how; load_tests/quality.py measures it. By the name of a mix of GGUF's types, of a
# --quantization or of a checkpoint's method.
_MEAN_KL: Mapping[str, float] = {
    "q8_0": 0.0046,
    "q6_k": 0.0091,
    "q5_k_m": 0.083,
    "q4_k_m": 0.056,
    "q4_0": 0.31,
    "int8": 0.0042,
    "int4": 0.021,
    "int4-fast": 0.3,
}


def mean_divergence(name: str) -> float | None:
    """The mean KL from the model in float32, in nats a token, on MEASURED_ON; None: it was not measured."""
    return _MEAN_KL.get(name.lower())
