"""Granite 4 Vision (https://huggingface.co/ibm-granite): features of several layers, for as many of the decoder.

Each set of features has a window QFormer: learned queries see each other, and then the features of their window.
"""

from __future__ import annotations

from collections.abc import Generator, Mapping
from typing import Any, NamedTuple

import numpy as np

from ...devices.tower import Rows, TowerExecutor
from ...errors import ModelError
from ...models.config import ConfigReader
from ...models.module_tensors import in_places, module_tensors, norm_tables
from ...models.spec import (
    AttentionSpec,
    CrossAttentionSpec,
    NormSpec,
    ProjectionSpec,
    ResidualBlockSpec,
    TowerSpec,
    tower_shapes,
)
from ...models.tensor_ref import TensorRef
from ..media import Media
from ..processing import Floats, block_places
from .any_resolution import AnyResolutionVision
from .llava_parts import feature_layers
from .settings import CLIP_MEAN, CLIP_STD, ProcessorSettings, decoder_size, head_dim_of, part_of
from .tile_tower import TileTower
from .towers import even_segments, in_pieces, table_normalized

_NORM = NormSpec("layer", 1e-6, bias=True)  # of features, before they are cut into windows
_HEAD_DIM = 64  # about, of the QFormers
_CORNERS = 4  # of each block of 2 x 2 features, which have a projector each
_MAX_PROJECTORS = 64
_MAX_DEPTH = 16  # layers of a QFormer
_WINDOW = "window"  # the attention of queries to what is in their window


class _Projector(NamedTuple):
    """What makes features of a tower's layer to what is added before layer `target` of the decoder.

    `taken` is the number of these features among all that the tower gives. Queries begin with the mean of each block of
    2 x 2, or with one `corner` of it.
    """

    module: str
    target: int
    taken: int
    corner: int | None


def vision(architecture: str, config: Mapping[str, Any], processor: Mapping[str, Any]) -> Granite4Vision:
    """The vision of Granite 4 Vision."""
    return Granite4Vision(architecture, config, processor)


class Granite4Vision(AnyResolutionVision):
    """Tiles as LLaVA-NeXT has them. Each window of their features becomes a quarter as many rows."""

    def __init__(self, architecture: str, config: Mapping[str, Any], processor: Mapping[str, Any]) -> None:
        settings, whole = ProcessorSettings(processor), ConfigReader(config)
        part, pixels = part_of(config, "vision_config"), settings.pixels(CLIP_MEAN, CLIP_STD)
        depth = part.with_defaults(num_hidden_layers=12).num_layers("num_hidden_layers")
        self._projectors, taken = _projectors(whole, depth)
        tower = TileTower(part, whole.with_fields(vision_feature_layer=taken), pixels, -2, "default")
        self._queries, self._window = _rate(whole)
        if tower.grid % self._window:
            raise whole.error("downsample_rate", f"windows whose side divides {tower.grid} patches")
        super().__init__(settings, whole, pixels, tower, cells=tower.grid // 2)
        qformer = part_of(config, "qformer_config")
        qformer.refuse("cross_attention_frequency", 1)
        qformer.refuse("use_qformer_text_input", False)
        self._depth = qformer.integer("num_hidden_layers", 1)
        if self._depth > _MAX_DEPTH:
            raise qformer.error("num_hidden_layers", f"at most {_MAX_DEPTH}")
        # Its own sizes are those of the tower, whatever it says.
        hidden, inner = tower.hidden, qformer.integer("intermediate_size", 3072)
        heads = max(hidden // _HEAD_DIM, 1)
        size = head_dim_of(part, hidden, heads)
        self._norm = NormSpec("layer", qformer.number("layer_norm_eps", 1e-12), bias=True)
        attention = AttentionSpec(heads, heads, size, size**-0.5, qkv_bias=True, out_bias=True, two_way=True)
        layer = (ResidualBlockSpec(attention, sum_norm=self._norm),)
        outputs = decoder_size(architecture, config)
        same = ProjectionSpec(hidden, hidden, bias=True)
        activation = qformer.activation("hidden_act", "gelu")
        projections, tables, layers = [tower.patch_projection], [*tower.tables, ("newline", (outputs,))], tower.layers
        modules = {"newline": "image_newline"}
        for number, projector in enumerate(self._projectors):
            before, first = f"projectors.{number}", len(layers)
            layers += (layer,) * self._depth
            projections.append((f"{before}.out", ProjectionSpec(hidden, outputs, bias=True)))
            tables += [(f"{before}.query", (self._queries**2, hidden)), (f"{before}.places", (self._window**2, hidden))]
            tables += norm_tables(f"{before}.norm", _NORM, hidden)
            tables += norm_tables(f"{before}.query_norm", self._norm, hidden)
            for index in range(self._depth):
                name = f"{before}.{index}"
                projections += [(f"{name}.{kind}", same) for kind in ("q", "k", "v", "o")]
                projections.append((f"{name}.up", ProjectionSpec(hidden, inner, bias=True, activation=activation)))
                projections.append((f"{name}.down", ProjectionSpec(inner, hidden, bias=True)))
                tables += norm_tables(f"{name}.window_norm", self._norm, hidden)
                tables += norm_tables(f"{name}.mlp_norm", self._norm, hidden)
            modules |= _modules(before, projector.module, first, self._depth)
        attentions = ((_WINDOW, CrossAttentionSpec(heads, size, size**-0.5)),)
        self.spec = TowerSpec(hidden, layers, tuple(projections), tuple(tables), attentions)
        self.added_after = tuple(projector.target - 1 for projector in self._projectors if projector.target)
        self.tensors = _tensors(self.spec, tower, modules)

    def encode(self, media: Media, tower: TowerExecutor) -> Generator[None, None, Rows]:
        features = yield from self._tower.features(tower, media.tiles)
        newline, width = tower.table("newline"), self._tower.hidden
        parts: list[Rows] = []
        for number, projector in enumerate(self._projectors):
            taken = features[:, projector.taken * width : (projector.taken + 1) * width]
            rows = yield from self._projected(tower, number, np.ascontiguousarray(taken))
            parts.append(self._packed(media, rows, newline))
            yield
        if self._projectors[0].target:  # nothing is there before the first layer
            parts.insert(0, np.zeros_like(parts[0]))
        return np.concatenate(parts, axis=1)

    def _projected(self, tower: TowerExecutor, number: int, rows: Rows) -> Generator[None, None, Rows]:
        """What a projector makes of features `[tiles * grid * grid, hidden]`: a quarter as many rows, tile by tile."""
        name, corner = f"projectors.{number}", self._projectors[number].corner
        grid, queries, hidden = self._tower.grid, self._queries, rows.shape[1]
        rows = yield from table_normalized(tower, f"{name}.norm", rows, _NORM)
        down, across = block_places(len(rows) // grid, grid, self._window)
        rows = rows[down * grid + across]  # window by window
        yield
        blocks = rows.reshape(-1, queries, 2, queries, 2, hidden)
        corners = [blocks[:, :, i, :, j].reshape(-1, hidden) for i in range(2) for j in range(2)]
        x = _mean(corners) if corner is None else corners[corner]
        yield
        x = yield from _with_places(x, tower.table(f"{name}.query"))
        x = yield from table_normalized(tower, f"{name}.query_norm", x, self._norm)
        rows = yield from _with_places(rows, tower.table(f"{name}.places"))
        windows, first = len(x) // queries**2, len(self._tower.layers) + number * self._depth
        segments, seen = even_segments(windows, queries**2), even_segments(windows, self._window**2)
        for index in range(self._depth):
            of = f"{name}.{index}"
            x = yield from tower.layer(first + index, x, segments)
            q = yield from tower.project(f"{of}.q", x)
            k = yield from tower.project(f"{of}.k", rows)
            v = yield from tower.project(f"{of}.v", rows)
            found = np.empty_like(q)
            for window in range(windows):
                own, theirs = slice(*segments[window : window + 2]), slice(*seen[window : window + 2])
                found[own] = yield from tower.attend(_WINDOW, q[own], k[theirs], v[theirs])
            found = yield from tower.project(f"{of}.o", found)
            x = yield from table_normalized(tower, f"{of}.window_norm", x + found, self._norm)
            inner = yield from tower.project(f"{of}.up", x)
            inner = yield from tower.project(f"{of}.down", inner)
            x = yield from table_normalized(tower, f"{of}.mlp_norm", x + inner, self._norm)
        x = yield from tower.project(f"{name}.out", x)
        down, across = block_places(len(x) // self._cells, self._cells, queries)
        result = np.empty_like(x)
        result[down * self._cells + across] = x
        return result


def _projectors(config: ConfigReader, depth: int) -> tuple[tuple[_Projector, ...], list[int]]:
    """All projectors, by the layers of the decoder that they are for, and the layers of the tower that they take."""
    pairs, layer = config.raw("deepstack_layer_map"), config.raw("spatial_vision_layer")
    targets = config.raw("spatial_target_layers")
    targets = [12, 15, 18, 21] if targets is None else targets
    layer = -1 if layer is None else layer
    if (
        not isinstance(pairs, list | tuple)
        or not 0 < len(pairs) <= _MAX_PROJECTORS
        or not all(isinstance(pair, list | tuple) and [*map(type, pair)] == [int, int] for pair in pairs)
    ):
        raise config.error("deepstack_layer_map", "a list of pairs of a layer of the tower and one of the decoder")
    if not isinstance(targets, list | tuple) or [*map(type, targets)] != [int] * _CORNERS:
        raise config.error("spatial_target_layers", f"{_CORNERS} numbers of layers of the decoder")
    numbers = [pair[0] for pair in pairs] + [layer]
    try:
        named = feature_layers(config.with_fields(vision_feature_layer=numbers), depth, -1)
    except ModelError:
        raise config.error("deepstack_layer_map", f"layers of a tower that has {depth}") from None
    taken = sorted({*named})
    found = [
        _Projector(f"layerwise_projectors.{i}", target, taken.index(named[i]), None)
        for i, (_, target) in enumerate(pairs)
    ]
    found += [
        _Projector(f"spatial_projectors.{corner}", target, taken.index(named[-1]), corner)
        for corner, target in enumerate(targets)
    ]
    all_targets = {projector.target for projector in found}
    if len(all_targets) < len(found) or min(all_targets) < 0:
        raise config.error("deepstack_layer_map", "and spatial_target_layers different layers of the decoder")
    return tuple(sorted(found, key=lambda projector: projector.target)), taken


def _rate(config: ConfigReader) -> tuple[int, int]:
    """Along a side of a window: how many queries it has, and twice as many features."""
    rate = config.raw("downsample_rate")
    parts = rate.split("/") if isinstance(rate, str) and len(rate) < 10 else ()
    if len(parts) == 2 and all(part.isdecimal() and part.isascii() for part in parts):
        queries, window = map(int, parts)
        if queries and window == 2 * queries:
            return queries, window
    raise config.error("downsample_rate", 'a half, such as "4/8"')


def _modules(before: str, module: str, first: int, depth: int) -> dict[str, str]:
    """Where a projector's modules lie, whose QFormer's layers begin with the tower's layer `first`."""
    found = {
        f"{before}.query": f"{module}.query",
        f"{before}.places": f"{module}.image_positions",
        f"{before}.norm": f"{module}.norm",
        f"{before}.query_norm": f"{module}.qformer.layernorm",
        f"{before}.out": f"{module}.out_linear",
    }
    for index in range(depth):
        name, layer, theirs = f"{before}.{index}", f"layers.{first + index}", f"{module}.qformer.encoder.layer.{index}"
        for kind, called in (("q", "query"), ("k", "key"), ("v", "value")):
            found[f"{layer}.{kind}"] = f"{theirs}.attention.attention.{called}"
            found[f"{name}.{kind}"] = f"{theirs}.crossattention.attention.{called}"
        found |= {
            f"{layer}.o": f"{theirs}.attention.output.dense",
            f"{layer}.attention_sum_norm": f"{theirs}.attention.output.LayerNorm",
            f"{name}.o": f"{theirs}.crossattention.output.dense",
            f"{name}.window_norm": f"{theirs}.crossattention.output.LayerNorm",
            f"{name}.up": f"{theirs}.intermediate_query.dense",
            f"{name}.down": f"{theirs}.output_query.dense",
            f"{name}.mlp_norm": f"{theirs}.output_query.LayerNorm",
        }
    return found


def _tensors(spec: TowerSpec, tower: TileTower, modules: Mapping[str, str]) -> dict[str, tuple[TensorRef, ...]]:
    """Where all weights lie: those of these modules, and those of the tower."""
    own: dict[str, TensorRef] = {}
    of_tower = []
    for name in tower_shapes(spec):
        module, _, kind = name.rpartition(".")
        if name in modules:
            own[name] = TensorRef(modules[name], index=None if name == "newline" else 0)
        elif module in modules:
            own[name] = TensorRef(f"{modules[module]}.{kind}")
        else:
            of_tower.append(name)
    inner = module_tensors(of_tower, tower.names, "encoder.layers.")
    return {
        **in_places(own, ("model.", "")),
        **in_places(inner, ("model.", ""), ("vision_tower.",), ("vision_model.", "")),
    }


def _with_places(rows: Rows, places: Floats) -> Generator[None, None, Rows]:
    """Rows with the table of a window's places added to those of each window."""
    return (
        yield from in_pieces(
            rows, lambda start, piece: piece + places[np.arange(start, start + len(piece)) % len(places)]
        )
    )


def _mean(parts: list[Rows]) -> Rows:
    """Summed one after the other."""
    total = parts[0]
    for part in parts[1:]:
        total = total + part
    result: Rows = total / np.float32(len(parts))
    return result
