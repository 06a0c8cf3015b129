"""Parts of towers that several families share: their layers, the places of their weights, and how patches enter."""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from ...devices.tower import Rows, TowerExecutor
from ...models.config import ConfigReader
from ...models.spec import AttentionSpec, LayerSpec, MlpSpec, NormSpec, ResidualBlockSpec, RopeSpec
from ...models.tensor_ref import TensorRef
from ..processing import Image, Patches, normalized
from .settings import head_dim_of

_PIECE = 256  # rows at a time, of work that takes a millisecond or two
# Where a tower of transformers has the weights of its layers, as CLIP and SigLIP name them.
MODULES = {
    "q": "self_attn.q_proj",
    "k": "self_attn.k_proj",
    "v": "self_attn.v_proj",
    "o": "self_attn.out_proj",
    "up": "mlp.fc1",
    "down": "mlp.fc2",
    "attention_norm": "layer_norm1",
    "mlp_norm": "layer_norm2",
}


def plain_layer(config: ConfigReader, act: str, eps: float) -> LayerSpec:
    """A layer of CLIP or SigLIP, by the names that configs have for its sizes."""
    hidden, heads = config.integer("hidden_size", 768), config.integer("num_attention_heads", 12)
    size = head_dim_of(config, hidden, heads)
    attention = AttentionSpec(heads, heads, size, size**-0.5, qkv_bias=True, out_bias=True, two_way=True)
    mlp = MlpSpec(
        config.integer("intermediate_size", 3072), config.activation("hidden_act", act), gated=False, bias=True
    )
    norm = NormSpec("layer", config.number("layer_norm_eps", eps), bias=True)
    return ResidualBlockSpec(attention, norm), ResidualBlockSpec(mlp, norm)


def axial_rope(config: ConfigReader, head_dim: int, *, alternating: bool = False) -> RopeSpec:
    """Rope by row and column: half of the pairs for each, with the same frequencies or, `alternating`, each second."""
    parameters = config.raw("rope_parameters")
    if not isinstance(parameters, Mapping | None):
        raise config.error("rope_parameters", "an object")
    rope = ConfigReader(parameters or {}, "config.json: vision_config: rope_parameters")
    rope.refuse("rope_type", "axial", "default")
    theta = rope.number("rope_theta", config.number("rope_theta", 1e4))
    pairs = head_dim // 2
    if head_dim % 4:
        raise config.error("num_heads", "such that a head's width is a multiple of 4")
    if alternating:
        table = theta ** -(np.arange(0, head_dim, 2, dtype=np.float64) / head_dim)
        table = np.concatenate([table[0::2], table[1::2]])
    else:
        table = np.tile(theta ** -(np.arange(0, pairs, 2, dtype=np.float64) / pairs), 2)
    axes = (0,) * (pairs // 2) + (1,) * (pairs // 2)
    return RopeSpec(tuple(table.astype(np.float32).tolist()), axes=axes)


def conv(name: str) -> dict[str, TensorRef | str]:
    """A convolution over patches, as the projection `patches`."""
    return {
        "patches.weight": TensorRef(f"{name}.weight", matrix=True),
        "patches.bias": f"{name}.bias",
    }


def embedded(
    tower: TowerExecutor,
    patches: Patches,
    images: Sequence[Image],
    add: Callable[[int, int], Rows] | None = None,
    together: int = 1,
) -> Generator[None, None, Rows]:
    """The patches of the images as rows of the tower, some at a time. `add` gives what is added to rows of a range.

    `together` is as in Patches.
    """
    pieces, start = [], 0
    for piece in patches.pieces(images, together):
        rows = yield from tower.project("patches", piece)
        if add is not None:
            rows = rows + add(start, start + len(rows))
        pieces.append(rows)
        start += len(rows)
    return np.concatenate(pieces)


def embedded_behind_class(
    tower: TowerExecutor, patches: Patches, images: Sequence[Image], *, last: bool = False
) -> Generator[None, None, Rows]:
    """The same, of images with as many patches each, with the table `class` before those of each image, or as `last`.

    The table `positions` has an entry for it and each patch, in this order.
    """
    positions = tower.table("positions")
    count = len(positions) - 1
    own, first = (count, 0) if last else (0, 1)
    of_class = positions[own : own + 1] + tower.table("class").reshape(1, -1)
    rows = yield from embedded(
        tower, patches, images, lambda start, stop: positions[first + np.arange(start, stop) % count]
    )
    parts = [np.broadcast_to(of_class, (len(images), *of_class.shape)), rows.reshape(len(images), count, -1)]
    return np.concatenate(parts[::-1] if last else parts, axis=1).reshape(-1, rows.shape[1])


def without_class(rows: Rows, images: int, *, last: bool = False) -> Rows:
    """The rows of the patches of as many images."""
    by_image = rows.reshape(images, -1, rows.shape[1])
    return (by_image[:, :-1] if last else by_image[:, 1:]).reshape(-1, rows.shape[1])


def even_segments(count: int, size: int) -> NDArray[np.int32]:
    """The bounds of `count` segments of `size` rows."""
    return np.arange(count + 1, dtype=np.int32) * np.int32(size)


def in_pieces(rows: Rows, compute: Callable[[int, Rows], Rows]) -> Generator[None, None, Rows]:
    """What `compute` makes of each few rows, given the first one's number: as many rows, of the same width."""
    result = np.empty_like(rows)
    for start in range(0, len(rows), _PIECE):
        result[start : start + _PIECE] = compute(start, rows[start : start + _PIECE])
        yield
    return result


def table_normalized(tower: TowerExecutor, name: str, rows: Rows, norm: NormSpec) -> Generator[None, None, Rows]:
    """Rows normalized with the tables `name`.weight and, if it has one, `name`.bias."""
    weight, bias = tower.table(f"{name}.weight"), tower.table(f"{name}.bias") if norm.bias else None
    return (yield from in_pieces(rows, lambda _, piece: normalized(piece, norm.eps, weight, bias)))
