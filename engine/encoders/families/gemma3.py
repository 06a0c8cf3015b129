"""EmbeddingGemma (https://arxiv.org/abs/2509.20354): Gemma 3, with attention in both directions."""

from __future__ import annotations

from dataclasses import replace

from ...errors import ModelError
from ...models.config import ConfigReader
from ...models.families import gemma3
from ...models.module_tensors import norm_tables
from ...models.spec import AttentionSpec, LayerSpec, TowerSpec, tower_shapes
from ..model import EmbeddingSpec, EncoderModel


def model(architecture: str, config: ConfigReader) -> EncoderModel:
    """Gemma 3 with `use_bidirectional_attention`. Half of a window is before a token, and half of it behind."""
    if not config.flag("use_bidirectional_attention", False):
        raise ModelError(
            "config.json: use_bidirectional_attention is not true, so this is no encoder: serve it as a chat model"
        )
    window = config.optional_integer("sliding_window", 4096)
    own = config.with_fields(
        use_bidirectional_attention=None, sliding_window=None if window is None else window // 2 + 1
    )
    described = gemma3.describe("Gemma3ForCausalLM", own, None)
    spec = described.spec
    norm, hidden = spec.final_norm, spec.hidden_size
    assert norm is not None
    tower = TowerSpec(hidden, tuple(map(_two_way, spec.layers)), tables=norm_tables("final_norm", norm, hidden))
    embedding = EmbeddingSpec(spec.vocab_size, scale=spec.embedding.scale)
    names = {"words": "embed.weight"}
    tensors = {name: described.tensors[names.get(name, name)] for name in (*tower_shapes(tower), *embedding.tables)}
    return EncoderModel(
        tower=tower,
        embedding=embedding,
        tensors={
            name: (ref, replace(ref, name=ref.name.removeprefix(described.base_prefix)))
            for name, ref in tensors.items()
        },
        final_norm=norm,
        max_length=spec.max_positions,
    )


def _two_way(layer: LayerSpec) -> LayerSpec:
    attention, *others = layer
    assert isinstance(attention.mixer, AttentionSpec)
    return replace(attention, mixer=replace(attention.mixer, two_way=True)), *others
