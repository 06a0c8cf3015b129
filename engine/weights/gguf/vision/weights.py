"""The tensors of a tower in a GGUF file under Tidewheel's names.

Names of files: https://github.com/ggml-org/llama.cpp/blob/master/gguf-py/gguf/constants.py.
"""

from __future__ import annotations

import json
import math
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from ....errors import ModelError
from ....models.spec import AttentionSpec, TowerSpec, tower_shapes
from ....models.tensor_ref import TensorRef
from ...dtypes import DType
from ...quantization import TensorFormat, stored_as_blocks
from ...taking import join, scaled
from ...tensor import DenseTensor, WeightTensor, to_float32
from ..architecture import rotated_rows
from ..reader import GgufTensor
from ..weights import FLOATS, blocks_of, floats_of, require_scales, without_one
from .clip_file import PATCHES, SECOND_FRAME, ClipFile
from .projectors import Projector

_LAYER = re.compile(r"layers\.(\d+)\.(.+)\.(weight|bias|bounds)")
_IN_LAYER = {
    "q": "attn_q",
    "k": "attn_k",
    "v": "attn_v",
    "q_norm": "attn_q_norm",
    "k_norm": "attn_k_norm",
    "o": "attn_out",
    "attention_norm": "ln1",
    "attention_post_norm": "attn_post_norm",
    "up": "ffn_up",
    "gate": "ffn_gate",
    "down": "ffn_down",
    "mlp_norm": "ln2",
    "mlp_post_norm": "ffn_post_norm",
}
_FUSED = ("q", "k", "v")  # which may lie in one matrix
_SWAPPED = {"up": "ffn_down", "down": "ffn_up"}
_FACTORS = {"o": "ls1", "down": "ls2"}  # what these give is multiplied by, in some towers
_OUTSIDE = {
    "patches.bias": "v.patch_embd.bias",
    "positions": "v.position_embd.weight",
    "class": "v.class_embd",
    "pre_norm": "v.pre_ln",
    "post_norm": "v.post_ln",
}
# Of a file's tensors, those that no tower here needs: layers behind the last whose features are taken and their norm,
# what marks the end of a row, which the language model has as a token, sines that are computed, and parts for sound.
_UNUSED = re.compile(r"v\.post_ln\.(weight|bias)|v\.token_embd\.img_break|resampler\.pos_embed(_k)?|(a|mm\.a)\..*")
_STORED_LAYER = re.compile(r"v\.blk\.(\d{1,6})\..+")


class _Place(NamedTuple):
    stored: GgufTensor
    ref: TensorRef
    factors: GgufTensor | None = None  # one for each row
    others: tuple[GgufTensor, ...] = ()  # whose elements follow

    @property
    def tensors(self) -> list[GgufTensor]:
        return [tensor for tensor in (self.stored, self.factors, *self.others) if tensor is not None]


class GgufTowerWeights:
    """A WeightSource. Matrices of layers stay in blocks where they are in blocks; all else is in floats.

    All names and shapes are checked on construction. Raises ModelError, naming the file and the tensor.
    """

    def __init__(
        self, clip: ClipFile, projector: Projector, spec: TowerSpec, tensors: Mapping[str, Sequence[TensorRef]]
    ) -> None:
        self._clip, self._projector, self._spec, self._in_checkpoint = clip, projector, spec, tensors
        self._shapes = tower_shapes(spec)
        self._places: dict[str, _Place] = {}
        count: Counter[DType] = Counter()
        used: set[str] = set()
        for name, shape in self._shapes.items():
            if name == "patches.weight":
                place = self._patches(shape)
            else:
                place = self._bounds(name) if name.endswith(".bounds") else self._place(name, shape)
            self._places[name] = place
            used |= {tensor.name for tensor in place.tensors}
            count[FLOATS.get(place.stored.kind.name, "bfloat16")] += math.prod(shape)
        if len(self._kernels()) > 1:
            used.add(SECOND_FRAME)
        if unknown := sorted(name for name in clip.tensors.keys() - used if self._is_needed(name)):
            raise ModelError(
                f"{clip.tensors[unknown[0]].origin} does not belong to a projector of type {clip.projector_type}: the "
                "file contains an unsupported variant"
            )
        self.dtype: DType = count.most_common(1)[0][0]
        places = [
            (name, repr(place.ref), [tensor.place for tensor in place.tensors]) for name, place in self._places.items()
        ]
        kernels = [stored.place for stored in self._kernels()]
        self.identity: str | None = json.dumps(["gguf tower", projector.colours_last, kernels, places])

    def stored_format(self, name: str) -> TensorFormat | None:
        """The type of a layer's matrix in blocks; None for floats, and for what becomes floats."""
        place = self._places[name]
        return stored_as_blocks(place.stored.kind) if self._stays_in_blocks(name) else None

    def __getitem__(self, name: str) -> WeightTensor:
        if name == "patches.weight":
            return self._convolution()
        stored, ref, factors, others = self._places[name]
        if others:
            return join([floats_of(one, TensorRef(one.name, flat=True)) for one in (stored, *others)])
        if stored.kind.parts is not None:
            require_scales(stored)
        if self._stays_in_blocks(name):
            return blocks_of(stored, ref)
        tensor = floats_of(stored, ref)
        if factors is not None:
            return scaled(tensor, floats_of(factors, TensorRef(factors.name)))
        module = name.removesuffix(".norm.weight")
        norm = projection.norm if (projection := dict(self._spec.projections).get(module)) else None
        return without_one(tensor, stored) if module != name and norm is not None and norm.unit_offset else tensor

    def __iter__(self) -> Iterator[str]:
        return iter(self._places)

    def _stays_in_blocks(self, name: str) -> bool:
        stored, _, factors, _ = self._places[name]
        is_matrix = len(self._shapes[name]) == 2 and _LAYER.fullmatch(name) is not None
        return stored.kind.parts is not None and is_matrix and factors is None

    def _place(self, name: str, shape: tuple[int, ...]) -> _Place:
        """Where a weight lies. Raises ModelError if it is not there, or does not have the shape."""
        ref = self._ref(name, shape)
        factors: GgufTensor | None = None
        if found := _LAYER.fullmatch(name):
            if found[2] in _FACTORS:
                factors = self._clip.tensors.get(f"v.blk.{found[1]}.{_FACTORS[found[2]]}.weight")
            if self._projector.rotated_pairs and found[2] in ("q", "k"):
                ref = replace(ref, permute=rotated_rows(self._num_heads(), shape[0]))
        stored = self._clip.tensor(ref.name)
        if ref.index is not None and len(stored.shape) > 1 and ref.index < stored.shape[0]:
            stored, ref = stored.at(ref.index), replace(ref, index=None)
        if ref.flat and math.prod(stored.shape) == math.prod(shape):
            stored, ref = replace(stored, shape=shape), replace(ref, flat=False)
        if not (ref.matrix or ref.rows) and _without_ones(stored.shape) == _without_ones(shape):
            stored = replace(stored, shape=shape)
        if ref.shape(stored.shape) != shape:
            raise ModelError(f"{stored.origin} has shape {stored.shape}, but images need {ref.needed(shape)}")
        if factors is not None and math.prod(factors.shape) != shape[0]:
            raise ModelError(f"{factors.origin} has shape {factors.shape}, but images need {shape[0]} elements")
        return _Place(stored, ref, factors)

    def _ref(self, name: str, shape: tuple[int, ...]) -> TensorRef:
        found = _LAYER.fullmatch(name)
        if found is None:
            names = {**_OUTSIDE, **self._projector.names}
            module, _, kind = name.rpartition(".")
            place = names.get(name) or f"{names[module]}.{kind}"
            own = self._in_checkpoint[name][0]
            if isinstance(place, TensorRef):
                return place
            # Several tables lie in one tensor as in checkpoints.
            return TensorRef(place) if own.index is None else TensorRef(place, index=own.index, rows=own.rows)
        layer, module, kind = found.groups()
        stored, fused = f"{self._module(layer, module)}.{kind}", f"v.blk.{layer}.attn_qkv.{kind}"
        order = self._in_checkpoint[name][0].permute  # rows are in the order that checkpoints have
        if module in _FUSED and stored not in self._clip.tensors and fused in self._clip.tensors:
            start = _FUSED.index(module) * shape[0]
            return TensorRef(fused, rows=(start, start + shape[0]), permute=order)
        return TensorRef(stored, permute=order)

    def _module(self, layer: str, module: str) -> str:
        swapped = _SWAPPED if self._clip.is_mlp_swapped else {}
        return f"v.blk.{layer}.{({**_IN_LAYER, **swapped, **self._projector.in_layers})[module]}"

    def _bounds(self, name: str) -> _Place:
        """Where the numbers lie that the inputs and outputs of a matrix are kept between."""
        found = _LAYER.fullmatch(name)
        assert found is not None
        module, parts = self._module(found[1], found[2]), self._in_checkpoint[name][0].parts()
        first, *others = (self._clip.tensor(f"{module}.{part.name.rpartition('.')[2]}") for part in parts)
        for stored in (first, *others):
            if math.prod(stored.shape) != 1:
                raise ModelError(f"{stored.origin} has shape {stored.shape}, but images need one number")
        return _Place(first, TensorRef(first.name, flat=True), others=tuple(others))

    def _num_heads(self) -> int:
        attention = self._spec.layers[0][0].mixer
        assert isinstance(attention, AttentionSpec)
        return attention.num_heads

    def _kernels(self) -> list[GgufTensor]:
        """The convolution over patches: of each frame, `[hidden, 3, patch, patch]`."""
        return [self._clip.tensors[name] for name in (PATCHES, SECOND_FRAME) if name in self._clip.tensors]

    def _patches(self, shape: tuple[int, ...]) -> _Place:
        kernels, size = self._kernels(), self._clip.patch
        for stored in kernels:
            needed = (shape[0], 3, size, size)
            if stored.shape not in (needed, (shape[0], 3 * size**2)) or len(kernels) * 3 * size**2 != shape[1]:
                raise ModelError(f"{stored.origin} has shape {stored.shape}, but images need {needed}")
        return _Place(kernels[0], TensorRef(PATCHES))

    def _convolution(self) -> DenseTensor:
        """Its rows as the family's pixels lie: colour, frame, row and column, or the colour last."""
        size = self._clip.patch
        frames = [
            to_float32(floats_of(stored, TensorRef(stored.name))).reshape(-1, 3, size, size)
            for stored in self._kernels()
        ]
        rows = np.stack(frames, axis=2)
        if self._projector.colours_last:
            rows = rows.transpose(0, 2, 3, 4, 1)
        return DenseTensor(rows.reshape(len(rows), -1), "float32", origin=self._places["patches.weight"].stored.origin)

    def _is_needed(self, name: str) -> bool:
        """Whether a tensor belongs to what computes images."""
        layer = _STORED_LAYER.fullmatch(name)
        if layer is not None and int(layer[1]) >= len(self._spec.layers):
            return False
        return name.startswith(("v.", "mm.", "resampler.")) and _UNUSED.fullmatch(name) is None


def _without_ones(shape: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(size for size in shape if size != 1)
