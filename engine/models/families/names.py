"""The names of weights in checkpoints."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType

from ..description import ModelDescription
from ..spec import DecoderSpec, tensor_shapes
from ..tensor_ref import TensorRef

_EXPERT = re.compile(r"experts\.(\d+)\.")
_NONE: Mapping[str, TensorRef] = MappingProxyType({})


@dataclass(frozen=True, slots=True)
class CheckpointNames:
    """The names in a family's checkpoints. All but the head's begin with `base`.

    `top`: what belongs to no layer, from Tidewheel's name to the one below `base`. `modules`: what belongs to a layer,
    from Tidewheel's module to the one below `base` + `layers` + its number; a module's weight and bias are called that.
    A tensor that is called otherwise is there with its whole name, `router.correction_bias`. `*` stands for the number
    of an expert, `experts.*.gate`.
    """

    base: str
    top: Mapping[str, str]
    layers: str
    modules: Mapping[str, str]
    head: str = "lm_head.weight"

    def describe(self, spec: DecoderSpec, fused: Mapping[str, TensorRef] = _NONE) -> ModelDescription:
        """The description of `spec`. `fused` are references for modules that are transposed, or a part of a matrix.

        References for experts may have an index: the expert's number is put there.
        """
        tensors = {name: self._reference(name, fused) for name in tensor_shapes(spec)}
        return ModelDescription(spec, tensors, self.base, self.head)

    def _reference(self, name: str, fused: Mapping[str, TensorRef]) -> TensorRef:
        if name in ("head.weight", "head.bias"):
            return TensorRef(self.head.replace("weight", name.split(".")[1]))
        if name in self.top:
            return TensorRef(self.base + self.top[name])
        _, layer, rest = name.split(".", 2)
        return self.of_layer(int(layer), rest, fused)

    def of_layer(self, layer: int, rest: str, fused: Mapping[str, TensorRef] = _NONE) -> TensorRef:
        """Where the weight that is called `rest` within a layer is of layer number `layer`."""
        expert = _EXPERT.match(rest)
        rest = _EXPERT.sub("experts.*.", rest)
        module, _, kind = rest.rpartition(".")
        ref, suffix = fused.get(rest), ""
        if ref is None and rest in self.modules:
            ref = TensorRef(self.modules[rest])
        if ref is None:
            ref, suffix = fused.get(module) or TensorRef(self.modules[module]), f".{kind}"
        if expert:
            stacked = ref.index is not None
            ref = replace(ref, name=ref.name.replace("*", expert[1]), index=int(expert[1]) if stacked else None)
        return _placed(ref, f"{self.base}{self.layers}.{layer}.", suffix)


def _placed(ref: TensorRef, before: str, after: str) -> TensorRef:
    """The reference and its stack with whole names."""
    stack = tuple(_placed(other, before, after) for other in ref.stack)
    return replace(ref, name=f"{before}{ref.name}{after}", stack=stack)


def llama_names(norms: Mapping[str, str], base: str = "model.") -> CheckpointNames:
    """Llama's names, which most families use. `norms` are a family's own names for the norms of a layer."""
    return CheckpointNames(
        base=base,
        top={
            "embed.weight": "embed_tokens.weight",
            "final_norm.weight": "norm.weight",
            "final_norm.bias": "norm.bias",
        },
        layers="layers",
        modules={
            "q": "self_attn.q_proj",
            "k": "self_attn.k_proj",
            "v": "self_attn.v_proj",
            "o": "self_attn.o_proj",
            "q_norm": "self_attn.q_norm",
            "k_norm": "self_attn.k_norm",
            "gate": "mlp.gate_proj",
            "up": "mlp.up_proj",
            "down": "mlp.down_proj",
            **norms,
        },
    )


PRE_NORMS = {"attention_norm": "input_layernorm", "mlp_norm": "post_attention_layernorm"}


def fused_heads(name: str, queries: int, head_dim: int) -> dict[str, TensorRef]:
    """q, k and v out of one matrix that holds, for each KV head, its `queries` query heads, its key, its value."""
    starts = (0, queries * head_dim, (queries + 1) * head_dim, (queries + 2) * head_dim)
    return {
        module: TensorRef(name, each=(starts[-1], starts[i], starts[i + 1])) for i, module in enumerate(("q", "k", "v"))
    }


def fused_rows(name: str, **sizes: int) -> dict[str, TensorRef]:
    """Modules out of one matrix that holds them one after the other, from each one's name to its rows."""
    refs, start = {}, 0
    for module, size in sizes.items():
        refs[module] = TensorRef(name, rows=(start, start + size))
        start += size
    return refs
