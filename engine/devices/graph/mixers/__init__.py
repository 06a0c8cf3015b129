"""The mixers of padded launches: one file a kind, and one line here."""

from ....models.spec import (
    AltUpSpec,
    AttentionSpec,
    DeltaNetSpec,
    ExpertsSpec,
    LatentAttentionSpec,
    LaurelSpec,
    Mamba2Spec,
    MlpSpec,
    ParallelSpec,
    PerLayerSpec,
    ShortConvSpec,
)
from .alt_up import AltUp, Streams
from .attention import Attention
from .delta_net import DeltaNet
from .experts import Experts
from .latent_attention import LatentAttention
from .laurel import Laurel
from .mamba2 import Mamba2
from .mixer import Parts, Tokens
from .mlp import Mlp
from .parallel import Parallel
from .per_layer import PerLayer
from .residual_block import ResidualBlock
from .short_conv import ShortConv

__all__ = ["KINDS", "Parts", "ResidualBlock", "Streams", "Tokens"]

KINDS = {
    AltUpSpec.kind: AltUp,
    AttentionSpec.kind: Attention,
    DeltaNetSpec.kind: DeltaNet,
    ExpertsSpec.kind: Experts,
    LatentAttentionSpec.kind: LatentAttention,
    LaurelSpec.kind: Laurel,
    Mamba2Spec.kind: Mamba2,
    MlpSpec.kind: Mlp,
    ParallelSpec.kind: Parallel,
    PerLayerSpec.kind: PerLayer,
    ShortConvSpec.kind: ShortConv,
}
