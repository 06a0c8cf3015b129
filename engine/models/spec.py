"""DecoderSpec: a decoder-only transformer as plain data.

A model family turns a Hugging Face config into a `DecoderSpec`; a device lowers the spec its own way. There are no
tensors here. `tensor_shapes` is the one list of the weights a spec needs, under Tidewheel's own names.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Activation = Literal["silu", "gelu", "gelu_tanh", "relu"]


@dataclass(frozen=True, slots=True)
class NormSpec:
    """RMSNorm (https://arxiv.org/abs/1910.07467) or LayerNorm (https://arxiv.org/abs/1607.06450)."""

    kind: Literal["rms", "layer"]
    eps: float
    bias: bool = False


@dataclass(frozen=True, slots=True)
class RopeSpec:
    """Rotary position embedding (https://arxiv.org/abs/2104.09864), halves paired: dimension i with i + len(inv_freq).

    The first `2 * len(inv_freq)` dimensions of a head are rotated; the angle of pair i at position p is
    `p * inv_freq[i]`, and cosine and sine are multiplied by `attention_factor` (YaRN, LongRoPE). Every scaling
    scheme arrives as this table.
    """

    inv_freq: tuple[float, ...]
    attention_factor: float = 1.0


@dataclass(frozen=True, slots=True)
class AttentionSpec:
    """Causal attention. `num_kv_heads` divides `num_heads`; each KV head serves that many query heads in order.

    `sliding_window`: a token attends to itself and the `sliding_window - 1` tokens before it; None is no limit.
    `qk_norm` normalizes every query and key head over `head_dim`, before rope. A score is `q.k * scale`, then
    `softcap * tanh(score / softcap)` if there is a cap (https://arxiv.org/abs/2408.00118), then
    `score + alibi_slopes[head] * (key position - query position)` if there are slopes, one a query head
    (https://arxiv.org/abs/2108.12409). Raises ValueError for numbers that make no attention.
    """

    num_heads: int
    num_kv_heads: int
    head_dim: int
    scale: float
    qkv_bias: bool = False
    out_bias: bool = False
    qk_norm: NormSpec | None = None
    rope: RopeSpec | None = None
    sliding_window: int | None = None
    softcap: float | None = None
    alibi_slopes: tuple[float, ...] | None = None

    def __post_init__(self) -> None:
        if self.scale <= 0 or (self.softcap is not None and self.softcap <= 0):
            raise ValueError("the scores' scale and softcap must be above 0")
        if self.alibi_slopes is not None and len(self.alibi_slopes) != self.num_heads:
            raise ValueError(f"{self.num_heads} query heads need as many ALiBi slopes, not {len(self.alibi_slopes)}")
        if self.alibi_slopes is not None and self.rope is not None:
            raise ValueError("positions are given by rope or by ALiBi, not by both")


@dataclass(frozen=True, slots=True)
class MlpSpec:
    """Gated: `down(act(gate(x)) * up(x))`. Plain: `down(act(up(x)))`."""

    intermediate_size: int
    activation: Activation
    gated: bool
    bias: bool = False


@dataclass(frozen=True, slots=True)
class LayerSpec:
    """Pre: `x += attention(norm(x)); x += mlp(norm(x))`. Post: `x = norm(x + attention(x)); x = norm(x + mlp(x))`."""

    attention: AttentionSpec
    mlp: MlpSpec
    norm: NormSpec
    norm_placement: Literal["pre", "post"] = "pre"


@dataclass(frozen=True, slots=True)
class EmbeddingSpec:
    """Token embedding `[vocab, size]`, plus learned positions if `num_positions` is not 0.

    Row `position + position_offset` of the `[num_positions + position_offset, hidden]` table is added. When `size`
    is not the hidden size, a projection without bias follows the token embedding (before positions are added), and
    another precedes the head.
    """

    size: int
    num_positions: int = 0
    position_offset: int = 0


@dataclass(frozen=True, slots=True)
class DecoderSpec:
    """A whole decoder. `max_positions` is the longest context, in tokens, that the weights and tables allow."""

    family: str
    vocab_size: int
    hidden_size: int
    max_positions: int
    embedding: EmbeddingSpec
    layers: tuple[LayerSpec, ...]
    final_norm: NormSpec | None
    tied_head: bool


@dataclass(frozen=True, slots=True)
class TensorRef:
    """Where a weight lies in the checkpoint: `name`, transposed first if so said, then rows `[start, stop)` of it."""

    name: str
    transpose: bool = False
    rows: tuple[int, int] | None = None


def _norm(prefix: str, norm: NormSpec, size: int) -> dict[str, tuple[int, ...]]:
    shapes: dict[str, tuple[int, ...]] = {f"{prefix}.weight": (size,)}
    if norm.bias:
        shapes[f"{prefix}.bias"] = (size,)
    return shapes


def _linear(prefix: str, out_features: int, in_features: int, bias: bool) -> dict[str, tuple[int, ...]]:
    shapes: dict[str, tuple[int, ...]] = {f"{prefix}.weight": (out_features, in_features)}
    if bias:
        shapes[f"{prefix}.bias"] = (out_features,)
    return shapes


def tensor_shapes(spec: DecoderSpec) -> dict[str, tuple[int, ...]]:
    """The weights that `spec` needs: Tidewheel's name to shape, linear weights as `(out_features, in_features)`."""
    hidden, embedding = spec.hidden_size, spec.embedding
    shapes: dict[str, tuple[int, ...]] = {"embed.weight": (spec.vocab_size, embedding.size)}
    if embedding.num_positions:
        shapes["embed.positions"] = (embedding.num_positions + embedding.position_offset, hidden)
    if embedding.size != hidden:
        shapes["embed.project_in.weight"] = (hidden, embedding.size)
        shapes["embed.project_out.weight"] = (embedding.size, hidden)
    for i, layer in enumerate(spec.layers):
        attention, mlp, prefix = layer.attention, layer.mlp, f"layers.{i}"
        q_size, kv_size = attention.num_heads * attention.head_dim, attention.num_kv_heads * attention.head_dim
        shapes |= _norm(f"{prefix}.attention_norm", layer.norm, hidden)
        shapes |= _linear(f"{prefix}.q", q_size, hidden, attention.qkv_bias)
        shapes |= _linear(f"{prefix}.k", kv_size, hidden, attention.qkv_bias)
        shapes |= _linear(f"{prefix}.v", kv_size, hidden, attention.qkv_bias)
        shapes |= _linear(f"{prefix}.o", hidden, q_size, attention.out_bias)
        if attention.qk_norm:
            shapes |= _norm(f"{prefix}.q_norm", attention.qk_norm, attention.head_dim)
            shapes |= _norm(f"{prefix}.k_norm", attention.qk_norm, attention.head_dim)
        shapes |= _norm(f"{prefix}.mlp_norm", layer.norm, hidden)
        if mlp.gated:
            shapes |= _linear(f"{prefix}.gate", mlp.intermediate_size, hidden, mlp.bias)
        shapes |= _linear(f"{prefix}.up", mlp.intermediate_size, hidden, mlp.bias)
        shapes |= _linear(f"{prefix}.down", hidden, mlp.intermediate_size, mlp.bias)
    if spec.final_norm:
        shapes |= _norm("final_norm", spec.final_norm, hidden)
    if not spec.tied_head:
        shapes["head.weight"] = (spec.vocab_size, embedding.size)
    return shapes
