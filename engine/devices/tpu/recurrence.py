"""Linear recurrences over the tokens of sequences: gated delta nets and state space layers.

A head's state S `[K, V]` becomes `decay * S + k u^T` with each token, and the token's output is `S^T q`. Of a delta net
u is `beta * (v - decay * S^T k)`, otherwise it is v. Dimensions: T tokens, S sequences, C tokens of a chunk, H heads.
"""

from __future__ import annotations

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import Mesh, PartitionSpec

from .inputs import StepInputs
from .mesh import AXIS

CHUNK = 64  # tokens of a sequence that are computed together
_SIDE_BY_SIDE = 8  # sequences with one token, whose states are copied

_einsum = partial(jnp.einsum, precision=lax.Precision.HIGHEST)


class Inputs(NamedTuple):
    """What tokens bring: arrays that begin with their number. Only delta nets have a `beta`."""

    q: jax.Array  # [T, H, K]
    k: jax.Array  # [T, H, K]
    v: jax.Array  # [T, H, V]
    log_decay: jax.Array  # [T, H]; at most 0
    beta: jax.Array | None = None  # [T, H]


def recur(states: jax.Array, inputs: Inputs, tokens: StepInputs, chunk: int = CHUNK) -> tuple[jax.Array, jax.Array]:
    """The `states [slots, H, K, V]` after a step's tokens, and the outputs of these, `[T, H, V]`.

    Sequences with one token are computed some side by side, which is what decoding needs. The tokens of the others are
    computed `chunk` by `chunk`, one sequence after the other, with products of matrices.
    """
    T, S = len(inputs.q), len(tokens.state_slots)
    C, G = min(chunk, T), min(_SIDE_BY_SIDE, S)
    starts, counts = jnp.asarray(tokens.query_start[:-1]), jnp.diff(tokens.query_start)
    slots, positions = jnp.asarray(tokens.state_slots), jnp.asarray(tokens.positions)

    first = jnp.minimum(starts, T - 1)
    single = counts == 1
    # Of other sequences, the state of padding, which is the last one, and no token.
    own = jnp.pad(jnp.where(single, slots, len(states) - 1), (0, -S % G), constant_values=len(states) - 1)
    target = jnp.pad(jnp.where(single, first, T + C), (0, -S % G), constant_values=T + C)
    first = jnp.pad(first, (0, -S % G))

    def compute_singles(index: jax.Array, carry: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        states, result = carry
        group = (lax.dynamic_slice_in_dim(array, index * G, G) for array in (own, first, target))
        own_states, read, written = group
        # One after the other: to gather rows of more than 2 MiB together, XLA copies all states.
        before = lax.map(lambda slot: lax.dynamic_index_in_dim(states, slot, keepdims=False), own_states)
        before = jnp.where((positions[read] > 0)[:, None, None, None], before, 0.0)
        after, outputs = jax.vmap(advance)(before, jax.tree.map(lambda array: array[read][:, None], inputs))
        return states.at[own_states].set(after), result.at[written].set(outputs[:, 0], mode="drop")

    groups = -(-jnp.asarray(tokens.num_seqs)[0] // G)
    result = jnp.zeros((T + C, *inputs.v.shape[1:]))
    states, result = lax.fori_loop(0, groups, compute_singles, (states, result))

    padded = jax.tree.map(lambda array: jnp.pad(array, [(0, C), *[(0, 0)] * (array.ndim - 1)]), inputs)
    chunks = jnp.where(counts > 1, -(-counts // C), 0)
    ends = jnp.cumsum(chunks)

    def compute(index: jax.Array, carry: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        states, result = carry
        sequence = jnp.searchsorted(ends, index, side="right")
        done = (index - ends[sequence] + chunks[sequence]) * C
        start, slot = starts[sequence] + done, slots[sequence]
        real = jnp.arange(C) < counts[sequence] - done
        mine = jax.tree.map(lambda array: lax.dynamic_slice_in_dim(array, start, C), padded)
        # Tokens without a key and without decay leave the state as it is.
        mine = mine._replace(
            k=jnp.where(real[:, None, None], mine.k, 0.0), log_decay=jnp.where(real[:, None], mine.log_decay, 0.0)
        )
        state, outputs = advance(jnp.where(positions[start] > 0, states[slot], 0.0), mine)
        others = lax.dynamic_slice_in_dim(result, start, C)
        outputs = jnp.where(real[:, None, None], outputs, others)
        return states.at[slot].set(state), lax.dynamic_update_slice_in_dim(result, outputs, start, 0)

    states, result = lax.fori_loop(0, ends[-1], compute, (states, result))
    return states, result[:T]


def recur_on_chips(mesh: Mesh, states: jax.Array, inputs: Inputs, tokens: StepInputs) -> tuple[jax.Array, jax.Array]:
    """The same on the chips of a mesh, of which each has some of the heads, or all where they cannot be divided."""
    by_head = PartitionSpec(None, AXIS) if states.shape[1] % mesh.size == 0 else PartitionSpec()
    on_chip = jax.shard_map(
        recur,
        mesh=mesh,
        in_specs=(by_head, by_head, PartitionSpec()),
        out_specs=(by_head, by_head),
        check_vma=False,
    )
    after, outputs = on_chip(states, inputs, tokens)
    return after, outputs


def advance(state: jax.Array, inputs: Inputs) -> tuple[jax.Array, jax.Array]:
    """The `state [H, K, V]` after C tokens of one sequence, and their outputs `[C, H, V]`.

    With `total[t]` as the product of the decays up to token t, the state after it is
    `total[t] S + sum over i <= t of total[t] / total[i] k[i] u[i]^T`. The u of a delta net are the solution of a
    triangular system (https://arxiv.org/abs/2412.06464).
    """
    q, k, u, log_decay, beta = inputs
    total = jnp.cumsum(log_decay, axis=0)  # [C, H]
    by_head = total.T
    C = len(q)
    seen = jnp.tril(jnp.ones((C, C), bool))
    # What is left at token t of what token i brought, [H, C, C].
    left = jnp.exp(jnp.where(seen, by_head[:, :, None] - by_head[:, None, :], -jnp.inf))
    since = jnp.exp(total)[:, :, None]
    if beta is not None:
        u = beta[:, :, None] * (u - since * _einsum("thk,hkv->thv", k, state))
        if C > 1:
            links = beta.T[:, :, None] * left * _einsum("thk,ihk->hti", k, k)
            solved = lax.linalg.triangular_solve(
                links, u.transpose(1, 0, 2), left_side=True, lower=True, unit_diagonal=True
            )
            u = solved.transpose(1, 0, 2)
    outputs = since * _einsum("thk,hkv->thv", q, state)
    outputs += _einsum("hti,ihv->thv", left * _einsum("thk,ihk->hti", q, k), u)
    to_end = jnp.exp(total[-1] - total)[:, :, None]
    state = since[-1][:, :, None] * state + _einsum("ihk,ihv->hkv", to_end * k, u)
    return state, outputs
