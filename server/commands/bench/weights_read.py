"""The weights that a step reads, by the device's kernels, and how many of a model's experts it chooses."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field

from tidewheel.engine.models.spec import DecoderSpec, ExpertsSpec, mixers, tensor_shapes

EXPERTS_COUNTED = (
    "a token is multiplied only with the experts that it is routed to; the bytes are those of the experts that n "
    "tokens in a step are expected to choose if all are equally likely: E (1 - (1 - k/E)^n) of E experts, k of them "
    "for each token"
)

# By the first part of a weight's name within its layer; of an expert, by the part that follows its number.
_KERNELS = {
    "qkv": "q k v q_gate latent_q latent_q_down latent_q_up latent_kv_down latent_k_up delta_q delta_k delta_v delta_z "
    "delta_b delta_a mamba_z mamba_x mamba_B mamba_C mamba_dt conv_b conv_c conv_x",
    "out": "o latent_v_up latent_o delta_out mamba_out conv_out",
    "convolution": "delta_conv mamba_conv conv_taps",
    "route": "router shared_gate",
    "up": "gate up laurel_down laurel_up per_layer_gate",
    "down": "down per_layer_projection",
}
_KERNEL_OF = {name: kernel for kernel, names in _KERNELS.items() for name in names.split()}
_OUTSIDE = {
    "embed.project_in.weight": "embed",
    "embed.per_layer_projection.weight": "embed",
    "embed.project_out.weight": "head",
    "head.weight": "head",
}
_STREAMS = {"embed": "embed", "final": "head"}  # of matrices that make residual streams and join them
_LOOKED_UP = ("embed.weight", "embed.positions", "embed.per_layer")


@dataclass(slots=True)
class Read:
    """Weights: how many parameters each token is multiplied with, by kernel, and the bytes of them all.

    `other_bytes` are of what no kernel multiplies with: norms and biases.
    """

    parameters: dict[str, int] = field(default_factory=lambda: defaultdict(int))
    num_bytes: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    other_bytes: float = 0.0

    def add(self, kernel: str | None, parameters: int, num_bytes: float) -> None:
        """Count one tensor."""
        if kernel is None:
            self.other_bytes += num_bytes
        else:
            self.parameters[kernel] += parameters
            self.num_bytes[kernel] += num_bytes

    @property
    def all_bytes(self) -> float:
        """The bytes of all of them."""
        return sum(self.num_bytes.values()) + self.other_bytes


class WeightsRead:
    """The weights of a model, divided into those that each step reads, the experts, and the tables it looks up in.

    `always` are read by each step, including the head. `routed` has for `(experts_per_token, num_experts)` all experts
    of the layers with these numbers. `looked_up_bytes` counts the tables from which a step reads single rows.
    """

    def __init__(self, spec: DecoderSpec, tensor_bytes: Mapping[str, float]) -> None:
        """`tensor_bytes` are of each of `tensor_shapes`' weights, as the device keeps it."""
        self.always = Read()
        self.routed: dict[tuple[int, int], Read] = defaultdict(Read)
        self.looked_up_bytes = 0.0
        tied = spec.head.tied
        choices = {f"layers.{i}": _choice(spec, i) for i in range(len(spec.layers))}
        for name, shape in tensor_shapes(spec).items():
            num_bytes = tensor_bytes[name]
            if name in _LOOKED_UP and not (tied and name == "embed.weight"):
                self.looked_up_bytes += num_bytes
                continue
            kernel = "head" if name == "embed.weight" else _kernel_of(name)
            layer, _, rest = name.partition(".experts.")
            choice = choices.get(layer) if rest else None
            read = self.always if choice is None else self.routed[choice]
            read.add(kernel, math.prod(shape), num_bytes)

    def parameters(self, kernel: str) -> float:
        """How many parameters of a kernel one token is multiplied with."""
        routed = sum(read.parameters[kernel] * k / count for (k, count), read in self.routed.items())
        return self.always.parameters[kernel] + routed

    def bytes_of(self, kernel: str, tokens: float) -> float:
        """The bytes that a kernel reads in a step of `tokens` tokens."""
        routed = sum(read.num_bytes[kernel] * expected_part(*choice, tokens) for choice, read in self.routed.items())
        return self.always.num_bytes[kernel] + routed

    def all_bytes(self, tokens: float) -> float:
        """The bytes that a step of `tokens` tokens reads."""
        routed = sum(read.all_bytes * expected_part(*choice, tokens) for choice, read in self.routed.items())
        return self.always.all_bytes + routed

    @property
    def kernels(self) -> list[str]:
        """The kernels that multiply with weights, in the order of a step."""
        reads = [self.always, *self.routed.values()]
        return [k for k in ("embed", *_KERNELS, "head") if any(read.parameters[k] for read in reads)]


def expected_part(experts_per_token: int, num_experts: int, tokens: float) -> float:
    """The part of the experts that at least one of the tokens is expected to choose."""
    return 1.0 - math.pow(1 - experts_per_token / num_experts, tokens)


def _choice(spec: DecoderSpec, layer: int) -> tuple[int, int] | None:
    experts = [mixer for mixer in mixers(spec.layers[layer]) if isinstance(mixer, ExpertsSpec)]
    return (experts[0].experts_per_token, experts[0].num_experts) if experts else None


def _kernel_of(name: str) -> str | None:
    """The kernel that multiplies tokens with a weight; None for norms and biases."""
    if not name.startswith("layers."):
        return _OUTSIDE.get(name) or _STREAMS.get(name.partition(".stream.")[0])
    parts = name.split(".")[2:]
    if parts[-1] != "weight":
        return None
    return _KERNEL_OF.get(parts[-2] if parts[0] in ("alt_up", "experts", "shared") else parts[0])
