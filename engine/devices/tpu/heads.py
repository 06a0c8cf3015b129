"""What layers need to be shared by chips, and attention to be computed by the kernel for TPUs. No JAX here."""

from __future__ import annotations

from dataclasses import dataclass, replace

from ...errors import DeviceError
from ...models.spec import (
    AltUpSpec,
    AttentionSpec,
    DecoderSpec,
    DeltaNetSpec,
    LatentAttentionSpec,
    Mamba2Spec,
    ParallelSpec,
    ResidualBlockSpec,
    ShortConvSpec,
)
from ...models.spec.decoder import Recurrence

_LANES = 128
_SUBLANES = 8
_WORD_BYTES = 4
_STATE_BYTES = 4  # of a number


def with_heads_for(spec: DecoderSpec, num_devices: int) -> DecoderSpec:
    """The same model with each KV head as often as it takes for every chip to have one.

    Raises DeviceError with the numbers of chips that can share its heads evenly, if these cannot.
    """

    def residual(old: ResidualBlockSpec) -> ResidualBlockSpec:
        mixer = old.mixer
        if isinstance(mixer, AttentionSpec):
            return replace(old, mixer=_repeated(mixer, num_devices))
        if isinstance(mixer, ParallelSpec):
            return replace(old, mixer=ParallelSpec(tuple(map(residual, mixer.residuals))))
        if isinstance(mixer, AltUpSpec):
            residuals = tuple(map(residual, mixer.residuals))
            return replace(old, mixer=replace(mixer, residuals=residuals, passive=residual(mixer.passive)))
        if isinstance(mixer, LatentAttentionSpec) and mixer.num_heads % num_devices:
            fitting = [str(n) for n in range(1, mixer.num_heads + 1) if mixer.num_heads % n == 0]
            raise DeviceError(
                f"{mixer.num_heads} heads cannot be shared by {num_devices} chips: choose --tensor-parallel-size "
                f"{' or '.join(fitting)}"
            )
        return old

    return replace(spec, layers=tuple(tuple(map(residual, layer)) for layer in spec.layers))


def _repeated(attention: AttentionSpec, num_devices: int) -> AttentionSpec:
    if not _fits(attention, num_devices):
        fitting = [str(n) for n in range(1, attention.num_heads + 1) if _fits(attention, n)]
        raise DeviceError(
            f"{attention.num_heads} query heads with {attention.num_kv_heads} KV heads cannot be shared by "
            f"{num_devices} chips: choose --tensor-parallel-size {' or '.join(fitting)}"
        )
    return replace(attention, num_kv_heads=max(attention.num_kv_heads, num_devices))


def _fits(attention: AttentionSpec, num_devices: int) -> bool:
    heads = attention.num_kv_heads
    if heads % num_devices == 0:
        return True
    return num_devices % heads == 0 and attention.num_heads % num_devices == 0


def chips_sharing(num_devices: int, *sizes: int) -> int:
    """How many chips share something of these sizes out: all, or each has the whole where one cannot be divided."""
    return 1 if any(size % num_devices for size in sizes) else num_devices


def convolved_sizes(mixer: Recurrence) -> tuple[int, ...]:
    """The widths of what passes a recurrent mixer's convolution."""
    if isinstance(mixer, DeltaNetSpec):
        return mixer.key_size, mixer.key_size, mixer.value_size
    return (mixer.size, mixer.group_size, mixer.group_size) if isinstance(mixer, Mamba2Spec) else (mixer.size,)


def state_bytes(spec: DecoderSpec, num_devices: int) -> int:
    """The size of all recurrent mixers' state of one sequence, over all chips."""
    count = 0
    for mixer in spec.recurrences():
        widths = convolved_sizes(mixer)
        inputs = (mixer.conv_kernel - 1) * sum(widths)
        count += inputs * num_devices // chips_sharing(num_devices, *widths)
        if not isinstance(mixer, ShortConvSpec):
            heads = mixer.num_value_heads if isinstance(mixer, DeltaNetSpec) else mixer.num_heads
            count += (mixer.state_size - inputs) * num_devices // chips_sharing(num_devices, heads)
    return _STATE_BYTES * count


@dataclass(frozen=True, slots=True)
class Kernel:
    """Which layers the kernel computes, on chips that each have a part of the KV heads, and in which pages.

    `itemsize` is the size of a cached number of K or V, in bytes. Not `available`: it computes no layer.
    """

    available: bool
    num_devices: int
    itemsize: int

    def computes(self, attention: AttentionSpec) -> bool:
        """Whether it computes that layer."""
        return self.available and self.refusal(attention) is None

    def refusal(self, attention: AttentionSpec) -> str | None:
        """What of a layer the kernel cannot compute; None if it can."""
        if attention.alibi_slopes is not None:
            return "ALiBi"
        if attention.sinks:
            return "attention sinks"
        if self.itemsize == _WORD_BYTES and attention.head_dim > _LANES:
            return f"heads of more than {_LANES} values in float32"
        return None

    def page_shape(self, attention: AttentionSpec, page_size: int) -> tuple[int, ...]:
        """The shape of a page of `page_size` tokens, over all chips: `[size, 2 * KV heads, D]`.

        It is `[KV heads, size, 2, D]` where the kernel has to compute one KV head after the other.
        """
        heads, dim = attention.num_kv_heads, self.cached_head_dim(attention)
        if self.computes(attention) and self.separation(attention):
            return heads, page_size, 2, dim
        return page_size, 2 * heads, dim

    def cached_head_dim(self, attention: AttentionSpec) -> int:
        """The width of a head in the cache: what the kernel reads is padded with zeros to whole vectors."""
        if not self.computes(attention):
            return attention.head_dim
        return -(-attention.head_dim // _LANES) * _LANES

    def separation(self, attention: AttentionSpec) -> str | None:
        """Why it computes a chip's KV heads one after the other; None if all at once.

        What it computes at all, it compiles for one head.
        """
        heads = attention.num_kv_heads // self.num_devices
        if heads == 1:
            return None
        if self.cached_head_dim(attention) > _LANES:
            # It takes every n-th row of a page, which Mosaic can only do with rows of one vector.
            return f"heads of more than {_LANES} values"
        words, rest = divmod(2 * heads * self.itemsize, _WORD_BYTES)
        if rest or (words not in (1, 2, 4) and words % _SUBLANES):
            return f"{heads} KV heads on a chip, which fill no tiles"
        # Of more than 4 KV heads in float32 it takes 4 at a time. Without others in their groups, as many query heads
        # are less than the 8 rows of a tile.
        if self.itemsize == _WORD_BYTES and heads > 4 and attention.num_heads == attention.num_kv_heads:
            return "full attention in float32"
        return None
