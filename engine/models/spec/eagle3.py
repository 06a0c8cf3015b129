"""A layer beside a model that predicts the next token from what three of the model's layers were given: EAGLE3."""

from __future__ import annotations

from dataclasses import field

from ...declaring.record import record
from .attention import AttentionSpec
from .norm import NormSpec
from .residual_block import LayerSpec, ResidualBlockSpec
from .shapes import Shapes, linear, under


@record(frozen=True, slots=True)
class Eagle3Spec:
    """Drafts the token at position p + 1 from the token at p and from what the model had at p - 1.

    Let g be the sum of `fuse[i] x_i`, where x_i is the row that number `layers[i]` of the model's layers was given at
    position p - 1 (where there are no more layers, what the last one gave). The layer's row at p is `y = h +
    attention([embedding_norm(embed(token p)), hidden_norm(g)])`, then `y + mlp(y)`. Here h is g, or `hidden_norm(g)` if
    it `adds_normed`. Position 0 has no row, and nothing attends to it. The head, over `vocab_size` tokens, makes logits
    of `final_norm(row)`. To draft another token, the layer is run again with the draft token, and with the row as
    g (https://arxiv.org/abs/2503.01840).

    Its tokens are `token_ids` of the model's; None: the same. The embedding is the model's unless it has its `own`.
    Raises ValueError for attention with a window.
    """

    hidden_size: int
    vocab_size: int
    layers: tuple[int, ...]
    embedding_norm: NormSpec
    hidden_norm: NormSpec
    attention: AttentionSpec
    mlp: ResidualBlockSpec
    final_norm: NormSpec
    adds_normed: bool = False
    own_embedding: bool = False
    token_ids: tuple[int, ...] | None = field(default=None, repr=False)

    def __post_init__(self) -> None:
        if self.attention.sliding_window is not None or self.attention.kv_layer is not None:
            raise ValueError("a layer that predicts tokens attends to all tokens, in a cache of its own")
        if self.token_ids is not None and len(self.token_ids) != self.vocab_size:
            raise ValueError("each token of a layer that predicts is one of the model's")

    @property
    def layer(self) -> LayerSpec:
        """Its parts, in the form of any layer."""
        return (ResidualBlockSpec(self.attention), self.mlp)

    def shapes(self, model_size: int, model_vocab: int) -> Shapes:
        """The weights, by their names below `eagle3`, for a model with that hidden size and size of vocabulary."""
        size = self.hidden_size
        shapes: Shapes = {"embed.weight": (model_vocab, size)} if self.own_embedding else {}
        for index in range(len(self.layers)):
            shapes |= under(f"fuse.{index}", linear(size, model_size, bias=False))
        shapes |= under("embedding_norm", self.embedding_norm.shapes(size))
        shapes |= under("hidden_norm", self.hidden_norm.shapes(size))
        of_both = self.attention.shapes(2 * size)
        shapes |= under("layer", {name: shape for name, shape in of_both.items() if not name.startswith("o.")})
        of_one = self.attention.shapes(size)
        shapes |= under("layer", {name: shape for name, shape in of_one.items() if name.startswith("o.")})
        shapes |= under("layer", self.mlp.shapes(size))
        shapes |= under("final_norm", self.final_norm.shapes(size))
        return shapes | under("head", linear(self.vocab_size, size, bias=False))
