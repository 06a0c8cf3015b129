"""Attention to latents: keys and values of all heads come out of one small vector a token, and only that is cached."""

from __future__ import annotations

from typing import ClassVar

from ...declaring.record import record
from .attention import KvShape, RopeSpec
from .norm import NormSpec
from .shapes import Shapes, linear, under


@record(frozen=True, slots=True)
class LatentAttentionSpec:
    """Causal multi-head latent attention, MLA (https://arxiv.org/abs/2405.04434).

    `kv_down(x)` is a latent of `kv_rank` numbers, which `norm` normalizes, and a key of `rope_dim` numbers, which rope
    rotates; both are for all heads. A head's key is `k_up^T latent` (`nope_dim` numbers) and the rotated key, its value
    `v_up latent` (`value_dim` numbers). Queries have as many numbers as keys, the last `rope_dim` of them rotated; they
    are `q(x)`, or with a `q_rank` `q_up(norm(q_down(x)))`. A score is `q.k * scale`. With a `bias`, the matrices that
    make latents and the last one have one. Raises ValueError for numbers that make no attention.
    """

    kind: ClassVar[str] = "latent_attention"

    num_heads: int
    nope_dim: int
    rope_dim: int
    value_dim: int
    kv_rank: int
    scale: float
    rope: RopeSpec
    norm: NormSpec
    q_rank: int | None = None
    bias: bool = False

    def __post_init__(self) -> None:
        if self.scale <= 0 or 2 * len(self.rope.inv_freq) != self.rope_dim:
            raise ValueError("the scores' scale must be above 0, and rope must rotate all of the part that is for it")

    @property
    def q_size(self) -> int:
        """The width of all query heads."""
        return self.num_heads * (self.nope_dim + self.rope_dim)

    @property
    def cached(self) -> KvShape:
        """A token's entry in the cache: the rotated key and the latent, which together are K. V is the latent."""
        return KvShape(None, 1, self.rope_dim + self.kv_rank, self.kv_rank, values_in_keys=True)

    @property
    def activations(self) -> int:
        """How many values a token takes: queries, before and behind `k_up`, twice, and what all of them are made of."""
        wide = (self.num_heads + 1) * (self.rope_dim + self.kv_rank)
        return self.q_size + 2 * wide + (self.q_rank or self.q_size) + self.kv_rank

    def shapes(self, hidden_size: int) -> Shapes:
        """The weights. `k_up` is `[num_heads * kv_rank, nope_dim]`: it takes a query to where latents are."""
        heads, kv_rank = self.num_heads, self.kv_rank
        if self.q_rank is None:
            shapes = under("latent_q", linear(self.q_size, hidden_size, bias=False))
        else:
            shapes = under("latent_q_down", linear(self.q_rank, hidden_size, self.bias))
            shapes |= under("latent_q_norm", self.norm.shapes(self.q_rank))
            shapes |= under("latent_q_up", linear(self.q_size, self.q_rank, bias=False))
        shapes |= under("latent_kv_down", linear(kv_rank + self.rope_dim, hidden_size, self.bias))
        shapes |= under("latent_kv_norm", self.norm.shapes(kv_rank))
        shapes |= under("latent_k_up", linear(heads * kv_rank, self.nope_dim, bias=False))
        shapes |= under("latent_v_up", linear(heads * self.value_dim, kv_rank, bias=False))
        return shapes | under("latent_o", linear(hidden_size, heads * self.value_dim, self.bias))
