"""The mixers that torch computes: one file a kind, and one line here."""

from ....models.spec import AttentionSpec, ExpertsSpec, MlpSpec, ParallelSpec
from .attention import Attention
from .branch import Branch
from .experts import Experts
from .mixer import Parts, Tokens
from .mlp import Mlp
from .parallel import Parallel

__all__ = ["KINDS", "Branch", "Parts", "Tokens"]

KINDS = {
    AttentionSpec.kind: Attention,
    ExpertsSpec.kind: Experts,
    MlpSpec.kind: Mlp,
    ParallelSpec.kind: Parallel,
}
