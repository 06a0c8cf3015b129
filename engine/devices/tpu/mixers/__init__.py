"""The mixers in JAX: one file a kind, and one line here."""

from ....models.spec import AttentionSpec, MlpSpec, ParallelSpec
from .attention import Attention
from .branch import Branch
from .mixer import Params, Parts, Pass
from .mlp import Mlp
from .parallel import Parallel

__all__ = ["KINDS", "Branch", "Params", "Parts", "Pass"]

KINDS = {
    AttentionSpec.kind: Attention,
    MlpSpec.kind: Mlp,
    ParallelSpec.kind: Parallel,
}
