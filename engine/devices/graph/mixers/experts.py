"""Experts, in products of fixed shapes.

Each token is computed by k of E experts: these are P pairs. The pairs of an expert fill blocks of rows, the last one
partly. There are as many blocks as any choice of experts may need, and a batched product computes each block with the
matrices of its expert. Nothing is sorted: not every device can.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from ....models.spec import ExpertsSpec, RouterSpec
from ..grouped import Grouped
from ..kernels.finding import kernels_of
from .mixer import Parts, Tokens
from .mlp import ACTIVATIONS, Mlp

_SWIGLU_ALPHA = 1.702
_FEWEST_ROWS = 16  # of a block, where experts have several: what matrix units take at least
_PIECE_BYTES = 1 << 26  # of matrices that are copied together


class Blocks(NamedTuple):
    """Where P pairs of a token and an expert are computed: in row `rows [P]` of all rows of blocks.

    `tokens [blocks * size]` are the tokens in these rows, and `experts [blocks]` the experts of blocks. The first
    `used [1]` blocks have any.
    """

    rows: Tensor
    tokens: Tensor
    experts: Tensor
    used: Tensor


class Experts:
    """Routed experts, and a shared one. They remember nothing."""

    def __init__(self, spec: ExpertsSpec, layer: str, parts: Parts) -> None:
        weights = parts.weights
        self._spec = spec
        self._router = parts.product(f"{layer}.router")
        self._router_norm = weights.norm(f"{layer}.router_norm", spec.router.norm)
        self._input_norm = weights.norm(f"{layer}.experts_input_norm", spec.input_norm)
        self._correction = weights[f"{layer}.router.correction_bias"] if spec.router.correction_bias else None
        self._scales = weights[f"{layer}.router.expert_scales"] if spec.router.expert_scales else None
        self._shared = Mlp(spec.shared, f"{layer}.shared", parts) if spec.shared else None
        self._shared_gate = parts.product(f"{layer}.shared_gate") if spec.shared_gate else None

        def of_all(name: str, kind: str) -> list[str]:
            return [f"{layer}.experts.{i}.{name}.{kind}" for i in range(spec.num_experts)]

        names = ("gate", "up", "down") if spec.gated else ("up", "down")
        self._updates = {name: parts.expert_updates(layer, name, spec.num_experts) for name in names}
        self._matrices = {name: weights.take_stack(of_all(name, "weight")) for name in names}
        biases = names if spec.bias else ()
        self._biases = {name: torch.stack([weights.take(one) for one in of_all(name, "bias")]) for name in biases}
        self._kernels = kernels_of("experts", parts.device)

    def __call__(self, x: Tensor, tokens: Tokens) -> Tensor:
        """The chosen experts' outputs for `x [S, Q, hidden]`, weighted and summed."""
        spec, hidden = self._spec, x.shape[-1]
        read = self._router_norm(x) * spec.router.input_scale
        chosen, weights = route(spec, self._router(read, tokens).flatten(0, 1), self._correction, self._scales)
        x = self._input_norm(x)
        rows = x.reshape(-1, hidden)
        size, count = block_sizes(chosen.numel(), spec.num_experts)
        blocks = arrange(chosen, spec.num_experts, size, count)
        if spec.weighs_input:
            weight = torch.zeros(count * size, device=x.device).index_put((blocks.rows,), weights.flatten())
            inputs = rows[blocks.tokens] * weight[:, None]
        else:
            inputs = rows[blocks.tokens]
        adapters = None
        if tokens.adapters is not None:
            of_tokens = tokens.adapters.expand(*x.shape[:2], -1).flatten(0, 1)
            adapters = of_tokens[blocks.tokens].view(count, size, -1)
        outputs = self._computed(inputs.view(count, size, hidden), blocks, adapters).flatten(0, 1)
        each = outputs[blocks.rows].float().view(*chosen.shape, hidden)
        total = (each if spec.weighs_input else each * weights[..., None]).sum(1).view(x.shape)
        if self._shared is None:
            return total
        shared = self._shared(x, tokens).float()
        if self._shared_gate is not None:
            shared = self._shared_gate(x, tokens).float().sigmoid() * shared
        return total + shared

    def _computed(self, x: Tensor, blocks: Blocks, adapters: Tensor | None) -> Tensor:
        """What the experts of blocks give for `x [blocks, size, hidden]`, in the same shape.

        `adapters [blocks, size, adapters]` are the rows', as in Tokens.
        """
        spec = self._spec
        up = self._product("up", x, blocks, adapters).float()
        if not spec.gated:
            return self._product("down", ACTIVATIONS[spec.activation](up), blocks, adapters)
        gate = self._product("gate", x, blocks, adapters).float()
        if spec.swiglu_limit is None:
            return self._product("down", ACTIVATIONS[spec.activation](gate) * up, blocks, adapters)
        limit = spec.swiglu_limit
        gate = gate.clamp(max=limit)
        inner = (up.clamp(-limit, limit) + 1) * gate * torch.sigmoid(_SWIGLU_ALPHA * gate)
        return self._product("down", inner, blocks, adapters)

    def _product(self, name: str, x: Tensor, blocks: Blocks, adapters: Tensor | None) -> Tensor:
        """The blocks' products with a matrix of their experts, and what adapters add to them."""
        matrices, update = self._matrices[name], self._updates[name]
        if isinstance(matrices, Grouped):
            own = x.to(matrices.dtype)
            product = matrices.multiply_blocks(own, blocks.experts, blocks.used, self._spec.num_experts)
        else:
            product = self._with_stack(matrices, x, blocks)
        if update is not None and adapters is not None:
            between = update.own(self._with_stack(update.a, x, blocks), adapters)
            product = product + self._with_stack(update.b, between, blocks)
        return product + self._biases[name][blocks.experts][:, None] if self._biases else product

    def _with_stack(self, matrices: Tensor, x: Tensor, blocks: Blocks) -> Tensor:
        """The products with a stack `[experts, N, K]`. Torch's own operations copy a few of its matrices at once."""
        x = x.to(matrices.dtype)
        if self._kernels is not None:
            product: Tensor = self._kernels.multiply_experts(x.contiguous(), matrices, blocks.experts, blocks.used)
            return product
        most = max(_PIECE_BYTES // (matrices[0].numel() * matrices.element_size()), 1)
        pieces = zip(torch.split(x, most), torch.split(blocks.experts, most), strict=True)
        return torch.cat([torch.bmm(some, matrices[of].mT) for some, of in pieces])


def block_sizes(num_pairs: int, num_experts: int) -> tuple[int, int]:
    """How many rows a block has, and how many blocks hold that many pairs whatever their experts are."""
    if num_pairs <= num_experts:
        return 1, num_pairs
    size = max(1 << (-(-num_pairs // num_experts) - 1).bit_length(), _FEWEST_ROWS)
    return size, num_pairs // size + num_experts


def arrange(chosen: Tensor, num_experts: int, size: int, count: int) -> Blocks:
    """Share out the pairs of `chosen [T, k]` experts among `count` blocks of `size` rows."""
    pairs, device = chosen.flatten(), chosen.device
    numbers = torch.arange(num_experts, device=device)
    one_hot = (pairs[:, None] == numbers).long()
    earlier = one_hot.cumsum(0)
    place = earlier.gather(1, pairs[:, None])[:, 0] - 1  # among the pairs of the same expert
    ends = ((earlier[-1] + size - 1) // size).cumsum(0)  # of each expert's blocks
    first = functional.pad(ends, (1, 0))[pairs]
    rows = first * size + place
    tokens = torch.arange(len(pairs), device=device) // chosen.shape[1]
    # Rows that are not filled compute the first token, for nobody.
    of_rows = torch.zeros(count * size, dtype=torch.long, device=device).index_put((rows,), tokens)
    experts = (torch.arange(count, device=device)[:, None] >= ends).sum(1).clamp(max=num_experts - 1)
    return Blocks(rows, of_rows, experts, ends[-1:])


def route(
    spec: ExpertsSpec, logits: Tensor, correction_bias: Tensor | None, expert_scales: Tensor | None
) -> tuple[Tensor, Tensor]:
    """The chosen experts and what they count, both `[T, k]`. `logits [T, experts]` are float32."""
    router, count = spec.router, spec.experts_per_token
    if router.scores == "sparse_mixer":
        chosen, weights = _mixed(count, router.jitter, logits)
    else:
        scores = logits.softmax(-1) if router.scores == "softmax" else logits.sigmoid()
        choice = scores if correction_bias is None else scores + correction_bias
        if router.num_groups > 1:
            choice = choice.masked_fill(~_kept(router, choice), -torch.inf)
        chosen = _best(choice, count)
        weights = scores.gather(1, chosen)
        if router.normalize:
            weights = weights / weights.sum(-1, keepdim=True).clamp(min=torch.finfo(torch.float32).tiny)
    weights = weights * router.scale
    return chosen, weights if expert_scales is None else weights * expert_scales[chosen]


def _best(scores: Tensor, count: int) -> Tensor:
    """Where the `count` highest of `scores [T, N]` are, of equal ones the first. torch.topk does not say which."""
    found = []
    for _ in range(count):
        found.append(scores.argmax(-1, keepdim=True))
        scores = scores.scatter(1, found[-1], -torch.inf)
    return torch.cat(found, 1)


def _mixed(count: int, jitter: float, logits: Tensor) -> tuple[Tensor, Tensor]:
    """The choice of a sparse mixer, which chooses one expert after the other, and the weights."""
    left, chosen, weights = logits, [], []
    for _ in range(count):
        chosen.append(left.argmax(-1, keepdim=True))
        best = left.gather(1, chosen[-1])
        far = (best - logits) / logits.abs().maximum(best) > 2 * jitter
        weights.append(left.masked_fill(far, -torch.inf).softmax(-1).gather(1, chosen[-1]))
        left = left.scatter(1, chosen[-1], -torch.inf)
    return torch.cat(chosen, 1), torch.cat(weights, 1)


def _kept(router: RouterSpec, choice: Tensor) -> Tensor:
    """Which experts are in the best groups."""
    groups = torch.unflatten(choice, -1, (router.num_groups, -1))
    best = groups.amax(-1)
    if router.group_score == "best_two":
        first = groups.argmax(-1, keepdim=True)
        best = best + groups.scatter(-1, first, -torch.inf).amax(-1)
    kept = _best(best, router.kept_groups)
    numbers = torch.arange(router.num_groups, device=choice.device)
    return (kept[:, :, None] == numbers).any(1)[..., None].expand_as(groups).flatten(1)
