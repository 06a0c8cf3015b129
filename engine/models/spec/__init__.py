"""DecoderSpec: a decoder-only model as plain data.

A model family turns a Hugging Face config into a `DecoderSpec`; a device lowers the spec its own way. There are no
tensors here. A layer is a tuple of residual blocks, each around a mixer; a kind of mixer is one file here.
`tensor_shapes` is the one list of the weights that a spec needs, under Tidewheel's own names.
"""

from .alt_up import AltUpSpec, StreamsSpec
from .attention import AttentionSpec, DisentangledSpec, KvShape, RopeSpec, TemperatureSpec
from .decoder import DecoderSpec, EmbeddingSpec, HeadSpec, tensor_shapes
from .delta_net import DeltaNetSpec
from .eagle3 import Eagle3Spec
from .experts import ExpertsSpec, RouterSpec
from .latent_attention import LatentAttentionSpec
from .laurel import LaurelSpec
from .layers import mixers
from .mamba2 import Mamba2Spec
from .mlp import Activation, MlpSpec
from .mtp import MtpSpec
from .norm import NormSpec
from .per_layer import PerLayerEmbeddingSpec, PerLayerSpec
from .residual_block import LayerSpec, MixerSpec, ParallelSpec, ResidualBlockSpec
from .short_conv import ShortConvSpec
from .stages import (
    StageSpec,
    held_bytes_of,
    layer_bytes_of,
    stage_cuts,
    stage_has,
    stage_row_floats,
    stage_tensors,
)
from .tower import CrossAttentionSpec, ProjectionSpec, TowerSpec, tower_shapes

__all__ = [
    "Activation",
    "AltUpSpec",
    "AttentionSpec",
    "CrossAttentionSpec",
    "DecoderSpec",
    "DeltaNetSpec",
    "DisentangledSpec",
    "Eagle3Spec",
    "EmbeddingSpec",
    "ExpertsSpec",
    "HeadSpec",
    "KvShape",
    "LatentAttentionSpec",
    "LaurelSpec",
    "LayerSpec",
    "Mamba2Spec",
    "MixerSpec",
    "MlpSpec",
    "MtpSpec",
    "NormSpec",
    "ParallelSpec",
    "PerLayerEmbeddingSpec",
    "PerLayerSpec",
    "ProjectionSpec",
    "ResidualBlockSpec",
    "RopeSpec",
    "RouterSpec",
    "ShortConvSpec",
    "StageSpec",
    "StreamsSpec",
    "TemperatureSpec",
    "TowerSpec",
    "held_bytes_of",
    "layer_bytes_of",
    "mixers",
    "stage_cuts",
    "stage_has",
    "stage_row_floats",
    "stage_tensors",
    "tensor_shapes",
    "tower_shapes",
]
