"""The causal depthwise convolution that recurrent mixers begin with."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from ..cache import StateShape
from .mixer import Parts, Pass


class Convolution:
    """A convolution over the last `taps` tokens of `size` channels, with the inputs that each slot's sequence had."""

    def __init__(self, name: str, size: int, taps: int, parts: Parts, *, bias: bool) -> None:
        self._name, self._size, self._taps, self._bias = name, size, taps, bias
        self._index = parts.keep(StateShape((taps - 1, size)))

    def __call__(self, x: jax.Array, step: Pass) -> jax.Array:
        """The results for `x [T, size]`, in the same shape. What lies before a sequence's first token is zero."""
        tokens, past = step.tokens, step.cache[self._index]
        T, earlier = len(x), self._taps - 1
        starts, counts = jnp.asarray(tokens.query_start[:-1]), jnp.diff(tokens.query_start)
        goes_on = jnp.asarray(tokens.positions)[jnp.minimum(starts, T - 1)] > 0
        before = jnp.where(goes_on[:, None, None], past[tokens.state_slots], 0.0)  # [S, taps - 1, size]
        weight = step.params[f"{self._name}.weight"].reshape(self._taps, self._size)

        place = jnp.arange(T) - starts[tokens.sequence]  # of a token among those of its sequence
        y = x * weight[-1]
        for lag in range(1, self._taps):
            y += jnp.where(place[:, None] >= lag, jnp.roll(x, lag, axis=0), 0.0) * weight[earlier - lag]
        for token in range(earlier):  # the first ones of each sequence also see what came before the step
            lags = range(token + 1, self._taps)
            seen = sum(before[:, earlier - lag + token] * weight[earlier - lag] for lag in lags)
            y = y.at[jnp.where(token < counts, starts + token, T)].add(seen, mode="drop")

        # Of those before the step and in it, the last ones.
        places = jnp.arange(earlier) + counts[:, None]
        kept = jnp.take_along_axis(before, jnp.minimum(places, earlier - 1)[:, :, None], axis=1)
        new = x[jnp.clip(starts[:, None] + places - earlier, 0, T - 1)]
        kept = jnp.where((places < earlier)[:, :, None], kept, new)
        step.cache[self._index] = past.at[tokens.state_slots].set(kept)
        return y + step.params[f"{self._name}.bias"] if self._bias else y
