"""The causal depthwise convolution that recurrent mixers begin with."""

from __future__ import annotations

from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

from ..cache import StateShape
from ..heads import chips_sharing
from .mixer import Parts, Pass


class Convolution:
    """A convolution over the last `taps` tokens, with the inputs that each slot's sequence had.

    Chips share the channels out. So those of each of the `sizes`, which layers split the results into, are divided: an
    array has `[.., chips, channels of a chip]`.
    """

    def __init__(self, name: str, sizes: Sequence[int], taps: int, parts: Parts, *, bias: bool) -> None:
        self._name, self._sizes, self._taps, self._bias = name, sizes, taps, bias
        self._chips = chips_sharing(parts.mesh.size, *sizes)
        shape = taps - 1, self._chips, sum(sizes) // self._chips
        self._index = parts.keep(StateShape(shape, 1 if self._chips > 1 else None))

    def __call__(self, inputs: Sequence[jax.Array], step: Pass) -> list[jax.Array]:
        """The results for arrays `[T, size]`, in the same shapes. What lies before a sequence's first token is zero."""
        x = self._by_chip(inputs)
        y = self._convolved(x, step)
        ends = np.cumsum(self._sizes)[:-1] // self._chips
        return [part.reshape(len(x), -1) for part in jnp.split(y, ends, axis=-1)]

    def _convolved(self, x: jax.Array, step: Pass) -> jax.Array:
        tokens, past = step.tokens, step.cache[self._index]
        T, earlier = len(x), self._taps - 1
        starts, counts = jnp.asarray(tokens.query_start[:-1]), jnp.diff(tokens.query_start)
        goes_on = jnp.asarray(tokens.positions)[jnp.minimum(starts, T - 1)] > 0
        before = jnp.where(_over(goes_on, past), past[tokens.state_slots], 0.0)  # [S, taps - 1, chips, channels]
        weight = self._by_chip(self._of_channels(step.params[f"{self._name}.weight"].reshape(self._taps, -1)))

        place = jnp.arange(T) - starts[tokens.sequence]  # of a token among those of its sequence
        y = x * weight[-1]
        for lag in range(1, self._taps):
            y += jnp.where(_over(place >= lag, x), jnp.roll(x, lag, axis=0), 0.0) * weight[earlier - lag]
        for token in range(earlier):  # the first ones of each sequence also see what came before the step
            lags = range(token + 1, self._taps)
            seen = sum(before[:, earlier - lag + token] * weight[earlier - lag] for lag in lags)
            y = y.at[jnp.where(token < counts, starts + token, T)].add(seen, mode="drop")

        # Of those before the step and in it, the last ones.
        places = jnp.arange(earlier) + counts[:, None]
        kept = jnp.take_along_axis(before, jnp.minimum(places, earlier - 1)[:, :, None, None], axis=1)
        new = x[jnp.clip(starts[:, None] + places - earlier, 0, T - 1)]
        kept = jnp.where(_over(places < earlier, kept), kept, new)
        step.cache[self._index] = past.at[tokens.state_slots].set(kept)
        if not self._bias:
            return y
        return y + self._by_chip(self._of_channels(step.params[f"{self._name}.bias"][None]))

    def _of_channels(self, rows: jax.Array) -> list[jax.Array]:
        """Weights `[.., all channels]` of each of the sizes."""
        return jnp.split(rows, np.cumsum(self._sizes)[:-1], axis=-1)

    def _by_chip(self, arrays: Sequence[jax.Array]) -> jax.Array:
        """The channels `[.., size]` of all sizes, `[.., chips, channels of a chip]`."""
        return jnp.concatenate([array.reshape(len(array), self._chips, -1) for array in arrays], axis=-1)


def _over(condition: jax.Array, array: jax.Array) -> jax.Array:
    """A condition on the first dimensions of an array."""
    return condition.reshape(*condition.shape, *[1] * (array.ndim - condition.ndim))
