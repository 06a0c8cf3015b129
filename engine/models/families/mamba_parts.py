"""Shared by families with Mamba2 layers: the fields of their configs, and the names of the weights."""

from __future__ import annotations

import math
from collections.abc import Sequence

from ...errors import ModelError
from ..config import ConfigReader
from ..spec import Mamba2Spec, NormSpec
from ..tensor_ref import TensorRef
from .hybrids import conv_taps
from .names import fused_rows

_INFINITY = {"__float__": "Infinity"}
_LAYER_TYPES = {"mamba": "mamba", "linear_attention": "mamba", "attention": "attention", "full_attention": "attention"}


def bamba_mixer(config: ConfigReader, norm: NormSpec | None, size: int | None = None) -> Mamba2Spec:
    """The Mamba2 layer of a config in Bamba's words. Raises ModelError for sizes that do not fit together.

    `size` is the width of all heads, by default `mamba_expand * hidden_size`.
    """
    config.refuse("hidden_act", "silu", "swish")
    heads, groups = config.integer("mamba_n_heads", 128), config.integer("mamba_n_groups", 1)
    size = size or config.integer("mamba_expand", 2) * config.integer("hidden_size")
    head_dim = size // heads if config.raw("mamba_d_head") in (None, "auto") else config.integer("mamba_d_head")
    if heads * head_dim != size:
        raise ModelError(
            f"config.json: mamba_n_heads {heads} of mamba_d_head {head_dim} are not the width of a layer, {size}"
        )
    return mamba_mixer(
        config,
        heads,
        head_dim,
        groups,
        config.integer("mamba_d_state", 256),
        config.integer("mamba_d_conv", 4),
        norm,
        conv_bias=config.flag("mamba_conv_bias", True),
        bias=config.flag("mamba_proj_bias", False),
    )


def plain_mixer(config: ConfigReader, heads: int, head_dim: int, state_dim: int, norm: NormSpec) -> Mamba2Spec:
    """A Mamba2 layer of a config in the words that Mamba2's and Nemotron-H's have in common."""
    return mamba_mixer(
        config,
        heads,
        head_dim,
        config.integer("n_groups", 8),
        state_dim,
        config.integer("conv_kernel", 4),
        norm,
        conv_bias=config.flag("use_conv_bias", True),
        bias=config.flag("use_bias", False),
    )


def mamba_mixer(
    config: ConfigReader,
    heads: int,
    head_dim: int,
    groups: int,
    state_dim: int,
    conv_kernel: int,
    norm: NormSpec | None,
    *,
    conv_bias: bool,
    bias: bool,
) -> Mamba2Spec:
    """A Mamba2 layer with the config's limits of time steps. Raises ModelError for groups that do not divide heads."""
    if heads % groups:
        raise ModelError(f"config.json: {groups} groups of a Mamba2 layer must divide its {heads} heads")
    return Mamba2Spec(
        heads,
        head_dim,
        groups,
        state_dim,
        conv_kernel,
        norm,
        norm_groups=groups,
        dt_limits=_time_steps(config),
        conv_bias=conv_bias,
        bias=bias,
    )


def mamba_layers(config: ConfigReader, name: str, default: Sequence[str]) -> list[str]:
    """Mamba or attention for each layer, by the field `name` or else `default`. Raises ModelError."""
    types = config.raw(name)
    if types is None:
        return list(default)
    if not isinstance(types, list) or any(not isinstance(t, str) or t not in _LAYER_TYPES for t in types):
        raise config.error(name, f"a list of {', '.join(_LAYER_TYPES)}")
    if len(types) != len(default):
        raise config.error(name, f"a list of {len(default)} entries")
    return [_LAYER_TYPES[t] for t in types]


def mamba_refs(mamba: Mamba2Spec, module: str) -> dict[str, TensorRef]:
    """Where the weights of a Mamba2 layer are, which its family calls `module`."""
    return {
        **fused_rows(
            f"{module}.in_proj",
            mamba_z=mamba.size,
            mamba_x=mamba.size,
            mamba_B=mamba.group_size,
            mamba_C=mamba.group_size,
            mamba_dt=mamba.num_heads,
        ),
        "mamba_conv": conv_taps(f"{module}.conv1d"),
        "mamba": TensorRef(module),
        "mamba_gated_norm": TensorRef(f"{module}.norm"),
        "mamba_out": TensorRef(f"{module}.out_proj"),
    }


def _time_steps(config: ConfigReader) -> tuple[float, float]:
    limits = config.raw("time_step_limit")
    if limits is None:
        return 0.0, math.inf
    # JSON has no infinity: transformers has an object for it.
    found = [math.inf if limit in (_INFINITY, "inf") else limit for limit in limits] if isinstance(limits, list) else []
    if (
        len(found) != 2
        or any(isinstance(limit, bool) or not isinstance(limit, (int, float)) for limit in found)
        or not 0 <= found[0] <= found[1]
        or found[0] == math.inf
    ):
        raise config.error("time_step_limit", "a list of two ascending numbers of at least 0")
    return float(found[0]), float(found[1])
