"""How the GGUF files of an architecture differ from the checkpoints that they are made from."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np

from ...models.tensor_ref import TensorRef
from .config import Config, ConfigFields, no_fields, plain_heads, plain_rope
from .experts import expert_reference
from .fields import Fields
from .gemmas import stream_reference
from .names import MODULES, PRE_NORMS, TOP
from .reader import GgufFile

_LAYER = re.compile(
    r"(?:model\.layers|backbone\.layers|transformer\.h|transformer\.blocks|gpt_neox\.layers)\.(\d+)\.(.+)\.(weight|bias)"
)
_LAYER_TENSOR = re.compile(r"(?:model|backbone)\.layers\.(\d+)\.(.+)")
_OURS = re.compile(r"layers\.(\d+)\.(.+)")
_PROJECTIONS = ("q", "k", "v")


def without_experts(fields: Fields) -> bool:
    """Whether a file has none."""
    return not fields.optional_integer("expert_count")


def anyhow(fields: Fields) -> bool:
    """True for every file."""
    return True


def nothing_unused(layer: int, tensor: str, config: Mapping[str, Any]) -> bool:
    """False for every tensor."""
    return False


def no_place(name: str, shapes: Mapping[str, tuple[int, ...]], stored: Collection[str]) -> TensorRef | None:
    """None for every weight."""
    return None


class GgufArchitecture(NamedTuple):
    """How files of one `general.architecture` differ from Hugging Face's checkpoints of `name`.

    `modules` are the names of a layer's modules, in addition to those that most have. `top` has the tensors outside
    layers. `vectors` are tensors of a layer whose whole names differ, not only their modules' names. `own` are tensors
    of a layer by Tidewheel's names: where a file has one of them, it holds the weight as Tidewheel does, with a matrix
    for each head, or all heads one below the other. `places` has the places of weights that files divide differently
    from checkpoints, also by Tidewheel's names.

    `rotated_pairs`: in the rows of q and k, the two of a rotated pair are neighbours. `norms_plus_one`: 1 was added to
    the weights of norms. `layer_norm`: norms are LayerNorms. `qkv_in_rows`: all queries, keys and values follow each
    other, whatever the checkpoint does. `outputs_first`: matrices that the checkpoint holds transposed are not
    transposed here.

    `serves` says whether a file of this architecture is such a model. `heads`, `rope` and `fields` give the fields of
    config.json. Models that are not `attending` do not have heads, rope or MLPs. `unused` says which tensors of a layer
    the model does not need.
    """

    name: str
    modules: Mapping[str, str] = PRE_NORMS
    rotated_pairs: bool = False
    norms_plus_one: bool = False
    layer_norm: bool = False
    qkv_in_rows: bool = False
    outputs_first: bool = False
    fields: ConfigFields = no_fields
    serves: Callable[[Fields], bool] = without_experts
    top: Mapping[str, str] = TOP
    vectors: Mapping[str, str] = {}
    own: Mapping[str, str] = {}
    heads: Callable[[Fields, Config], Config] = plain_heads
    rope: Callable[[GgufFile, Fields, Config], Config] = plain_rope
    unused: Callable[[int, str, Mapping[str, Any]], bool] = nothing_unused
    places: Callable[[str, Mapping[str, tuple[int, ...]], Collection[str]], TensorRef | None] = no_place
    attending: bool = True

    def tensor_name(self, name: str) -> str | None:
        """The name in the file of a tensor of the checkpoint."""
        if (found := _LAYER_TENSOR.fullmatch(name)) and (tensor := self.vectors.get(found[2])):
            return f"blk.{found[1]}.{tensor}"
        if found := _LAYER.fullmatch(name):
            module = self.modules.get(found[2]) or MODULES.get(found[2])
            if module is not None:
                return f"blk.{found[1]}.{module}.{found[3]}"
        return self.top.get(name)

    def reference(
        self, name: str, ref: TensorRef, shapes: Mapping[str, tuple[int, ...]], stored: Collection[str]
    ) -> TensorRef | None:
        """The place in the file of the weight `name` in Tidewheel's words, which `ref` takes from the checkpoint.

        `shapes` has the shapes of all weights, `stored` the names of the file's tensors. None: files do not have it.
        """
        found = expert_reference(name, shapes[name], stored) or stream_reference(name)
        if found := found or self.places(name, shapes, stored):
            return found
        if (layer := _OURS.fullmatch(name)) and (tensor := self.own.get(layer[2])):
            tensor = f"blk.{layer[1]}.{tensor}"
            if tensor in stored:
                return TensorRef(tensor)
        in_file = self.tensor_name(ref.name)
        if in_file is None:
            return None
        ref = replace(ref, name=in_file)
        if self.outputs_first:
            ref = replace(ref, transpose=False)
        return self._in_rows(name, ref, shapes, stored)

    def _in_rows(
        self, name: str, ref: TensorRef, shapes: Mapping[str, tuple[int, ...]], stored: Collection[str]
    ) -> TensorRef:
        """The rows of queries, keys or values in a matrix that has all of them, if the file has such a one."""
        found = _OURS.fullmatch(name)
        module, _, kind = found[2].partition(".") if found else ("", "", "")
        if found is None or module not in _PROJECTIONS:
            return ref
        fused = f"blk.{found[1]}.attn_qkv.{kind}"
        if not self.qkv_in_rows and (ref.name in stored or fused not in stored or ref.name == fused):
            return ref
        before = _PROJECTIONS[: _PROJECTIONS.index(module)]
        start = sum(shapes[f"layers.{found[1]}.{other}.{kind}"][0] for other in before)
        return TensorRef(fused, rows=(start, start + shapes[name][0]))

    def row_order(self, name: str, config: Mapping[str, Any]) -> tuple[int, ...] | None:
        """For a weight by Tidewheel's name whose rows are moved, the row of the file that each of its rows is."""
        found = _OURS.fullmatch(name)
        module = found[2].partition(".")[0] if found else ""
        if not self.rotated_pairs or module not in ("q", "k"):
            return None
        heads = config["num_attention_heads" if module == "q" else "num_key_value_heads"]
        return rotated_rows(heads, heads * config["head_dim"])


def rotated_rows(heads: int, count: int) -> tuple[int, ...]:
    """Of `count` rows of q or k in halves of each head, the row that each is in files where pairs are neighbours."""
    rows = np.arange(count).reshape(heads, -1, 2)
    return tuple(rows.swapaxes(1, 2).reshape(-1).tolist())
