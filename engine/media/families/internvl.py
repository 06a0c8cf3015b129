"""InternVL 2.5 and 3 (https://arxiv.org/abs/2504.10479) as in transformers: tiles of the nearest aspect ratio."""

from __future__ import annotations

from collections.abc import Generator, Hashable, Mapping
from typing import Any

from ...devices.tower import Rows, TowerExecutor
from ...models.config import ConfigReader
from ...models.spec import AttentionSpec, MlpSpec, NormSpec, ProjectionSpec, ResidualBlockSpec, TowerSpec
from ...models.tensor_ref import TensorRef
from ..media import Media
from ..picture import Picture
from ..processing import Patches, arrangements, cut, joined_blocks, nearest_arrangement, resize
from ..vision import Expansion, Vision
from .llava_parts import PROJECTOR, tensors_of
from .settings import (
    BICUBIC,
    CLIP_MEAN,
    CLIP_STD,
    ProcessorSettings,
    decoder_size,
    head_dim_of,
    part_of,
    require_patches,
    require_size,
    square,
)
from .towers import conv, embedded_behind_class, even_segments, without_class

MAX_TILES = 256


def vision(architecture: str, config: Mapping[str, Any], processor: Mapping[str, Any]) -> InternVision:
    """The vision of InternVL."""
    return InternVision(architecture, config, processor)


class TiledVision(Vision):
    """An image is stretched to tiles, row by row, whose arrangement is nearest to its aspect ratio.

    If they are several, the whole image follows as one more. The layout is the number of tiles. Blocks of `merge` x
    `merge` patches of a tile become one embedding.
    """

    request_fields = frozenset({"min_patches", "max_patches"})

    def __init__(
        self, settings: ProcessorSettings, side: int, patch: int, merge: int, *, default_side: int = 384
    ) -> None:
        require_size(settings, side, default_side)
        self._side, self._grid, self._merge = side, side // patch, merge
        self._least, self._most = settings.integer("min_patches", 1), settings.integer("max_patches", 12)
        if not self._least <= self._most <= MAX_TILES:
            raise settings.error("max_patches", f"from min_patches to {MAX_TILES}")
        require_patches((self._most + 1) * self._grid**2, "an image of max_patches tiles")
        self.max_rows = self._grid**2 + 1
        self._arrangements = arrangements(self._least, self._most)
        self._resample = settings.resample(BICUBIC)
        self._patches = Patches(settings.pixels(CLIP_MEAN, CLIP_STD), patch)
        self.settings = ("internvl", side, self._least, self._most, self._resample, self._patches.pixels)

    def process(self, picture: Picture) -> tuple[tuple[Picture, ...], Hashable]:
        whole = (resize(picture, self._side, self._side, self._resample),)
        if self._most == 1:
            return whole, 1
        height, width = picture.shape[:2]
        columns, rows = self._columns_and_rows(height, width)
        if rows == columns == 1:
            return whole, 1
        tiles = cut(resize(picture, rows * self._side, columns * self._side, self._resample), rows, columns)
        return tiles + whole, len(tiles) + 1

    def _columns_and_rows(self, height: int, width: int) -> tuple[int, int]:
        """Of the tiles of an image."""
        return nearest_arrangement(self._arrangements, height, width, self._side)

    def num_tokens(self, layout: Hashable) -> int:
        assert isinstance(layout, int)
        return layout * (self._grid // self._merge) ** 2

    def _joined(self, rows: Rows, tiles: int) -> Rows:
        # Tiles lie below each other, so their blocks are those of one tall image.
        return joined_blocks(rows, (tiles * self._grid, self._grid), self._merge)


class InternVision(TiledVision):
    """Vision of InternVL's own, with a class embedding that is left out."""

    placeholder = "<IMG_CONTEXT>"
    slot = "<IMG_CONTEXT>"

    def __init__(self, architecture: str, config: Mapping[str, Any], processor: Mapping[str, Any]) -> None:
        tower, settings, whole = part_of(config, "vision_config"), ProcessorSettings(processor), ConfigReader(config)
        hidden, heads = tower.integer("hidden_size", 1024), tower.integer("num_attention_heads", 16)
        patch, side = square(tower, "patch_size", 14), square(tower, "image_size", 448)
        grid, merge = side // patch, int(1 / whole.number("downsample_ratio", 0.5))
        if not merge or not grid or grid % merge:
            raise whole.error("downsample_ratio", f"1 / n, with a number n that divides {grid} patches")
        super().__init__(settings, side, patch, merge)
        for name, only in (("vision_feature_layer", -1), ("vision_feature_select_strategy", "default")):
            whole.refuse(name, only)
        tower.refuse("use_mean_pooling", True)
        tower.refuse("use_absolute_position_embeddings", True)
        layer = self._layer(tower, head_dim_of(tower, hidden, heads), heads)
        joined, outputs = hidden * self._merge**2, decoder_size(architecture, config)
        act = whole.activation("projector_hidden_act", "gelu")
        norm = NormSpec("layer", 1e-5, bias=True)
        self.spec = TowerSpec(
            hidden,
            (layer,) * tower.with_defaults(num_hidden_layers=24).num_layers("num_hidden_layers"),
            projections=(
                ("patches", ProjectionSpec(self._patches.inputs, hidden, bias=True)),
                ("merge", ProjectionSpec(joined, outputs, bias=True, norm=norm, activation=act)),
                ("connector", ProjectionSpec(outputs, outputs, bias=True)),
            ),
            tables=(("class", (1, hidden)), ("positions", (self._grid**2 + 1, hidden))),
        )
        names: dict[str, str | TensorRef] = {
            **conv("embeddings.patch_embeddings.projection"),
            **{part: f"attention.{part}_proj" for part in "qkv"},
            "q_norm": "attention.q_norm",
            "k_norm": "attention.k_norm",
            "up": "mlp.fc1",
            "attention_norm": "layernorm_before",
            "mlp_norm": "layernorm_after",
            "class": TensorRef("embeddings.cls_token", index=0),
            "positions": TensorRef("embeddings.position_embeddings", index=0),
        }
        # What attention and MLP give is multiplied by learned factors, and so are the matrices that give it.
        for kind in ("weight", "bias"):
            names[f"o.{kind}"] = TensorRef(f"attention.projection_layer.{kind}", scaled_by="lambda_1")
            names[f"down.{kind}"] = TensorRef(f"mlp.fc2.{kind}", scaled_by="lambda_2")
        of_projector = {**PROJECTOR, "merge.norm": "layer_norm"}
        self.tensors = tensors_of(self.spec, names, "encoder.layer.", ("",), of_projector)

    def _layer(self, tower: ConfigReader, head_dim: int, heads: int) -> tuple[ResidualBlockSpec, ResidualBlockSpec]:
        kind = tower.raw("norm_type") or "layer_norm"
        if kind not in ("layer_norm", "rms_norm"):
            raise tower.error("norm_type", "layer_norm or rms_norm")
        eps = tower.number("layer_norm_eps", 1e-6)
        norm = NormSpec("rms", eps) if kind == "rms_norm" else NormSpec("layer", eps, bias=True)
        attention = AttentionSpec(
            heads,
            heads,
            head_dim,
            head_dim**-0.5,
            qkv_bias=tower.flag("attention_bias", False),
            out_bias=True,
            qk_norm=NormSpec("rms", 1e-6) if tower.flag("use_qk_norm", False) else None,
            qk_norm_over="whole",
            two_way=True,
        )
        mlp = MlpSpec(
            tower.integer("intermediate_size", 4096), tower.activation("hidden_act", "gelu"), gated=False, bias=True
        )
        return ResidualBlockSpec(attention, norm), ResidualBlockSpec(mlp, norm)

    def expansion(self, layout: Hashable) -> Expansion:
        return Expansion(f"<img>{self.slot}</img>", (self.num_tokens(layout),))

    def encode(self, media: Media, tower: TowerExecutor) -> Generator[None, None, Rows]:
        tiles = len(media.tiles)
        rows = yield from embedded_behind_class(tower, self._patches, media.tiles)
        rows = yield from tower.layers(rows, even_segments(tiles, self._grid**2 + 1))
        rows = yield from tower.project("merge", self._joined(without_class(rows, tiles), tiles))
        return (yield from tower.project("connector", rows))
