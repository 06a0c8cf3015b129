"""The mixers of padded launches: one file a kind, and one line here."""

from ....models.spec import AttentionSpec, MlpSpec, ParallelSpec
from .attention import Attention
from .mixer import Parts, Tokens
from .mlp import Mlp
from .parallel import Parallel
from .residual_block import ResidualBlock

__all__ = ["KINDS", "Parts", "ResidualBlock", "Tokens"]

KINDS = {
    AttentionSpec.kind: Attention,
    MlpSpec.kind: Mlp,
    ParallelSpec.kind: Parallel,
}
