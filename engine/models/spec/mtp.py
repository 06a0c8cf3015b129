"""A layer behind the model's own that predicts the token after the next one: multi-token prediction (MTP)."""

from __future__ import annotations

from ...declaring.record import record
from .norm import NormSpec
from .residual_block import LayerSpec
from .shapes import Shapes, linear, under


@record(frozen=True, slots=True)
class MtpSpec:
    """Drafts the token at position p + 1 from the token at p and from what the model left at p - 1.

    Its row is `layer(project [embedding_norm(embed(token p)), hidden_norm(h)])`, where h is the model's hidden row of
    position p - 1 behind the model's final norm (https://arxiv.org/abs/2412.19437, 2.2). The model's head makes logits
    of `final_norm(row)`. To draft another token, it is run again with the draft token, and with the row as h:
    behind `final_norm` if it `feeds_normed`. The embedding and the head are the model's.

    `layer` begins with attention, which sees all tokens; its other residual blocks keep nothing of a token. Raises
    ValueError for one that does not.
    """

    embedding_norm: NormSpec
    hidden_norm: NormSpec
    layer: LayerSpec
    final_norm: NormSpec
    feeds_normed: bool = True

    def __post_init__(self) -> None:
        kinds = [residual.mixer.kind for residual in self.layer]
        if not kinds or kinds[0] not in ("attention", "latent_attention") or {*kinds[1:]} - {"mlp", "experts"}:
            raise ValueError(f"a layer that predicts tokens is attention, then MLPs or experts, not {kinds}")

    def shapes(self, hidden_size: int) -> Shapes:
        """The weights, by their names below `mtp`."""
        shapes = under("embedding_norm", self.embedding_norm.shapes(hidden_size))
        shapes |= under("hidden_norm", self.hidden_norm.shapes(hidden_size))
        shapes |= under("project", linear(hidden_size, 2 * hidden_size, bias=False))
        for residual in self.layer:
            shapes |= under("layer", residual.shapes(hidden_size))
        return shapes | under("final_norm", self.final_norm.shapes(hidden_size))
