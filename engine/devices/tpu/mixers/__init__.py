"""The mixers in JAX: one file a kind, and one line here."""

from ....models.spec import AttentionSpec, MlpSpec, ParallelSpec
from .attention import Attention
from .mixer import Params, Parts, Pass
from .mlp import Mlp
from .parallel import Parallel
from .residual_block import ResidualBlock

__all__ = ["KINDS", "Params", "Parts", "Pass", "ResidualBlock"]

KINDS = {
    AttentionSpec.kind: Attention,
    MlpSpec.kind: Mlp,
    ParallelSpec.kind: Parallel,
}
