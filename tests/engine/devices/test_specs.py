"""Specs that few families use: all devices compute what the torch reference computes."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import fields, is_dataclass, replace

import jax_processors
import numpy as np
import pytest
from engine.devices.made_models import MLP, NORM, PLAIN, ROPE, SLOPES, decoder, decoder_of, reference, run
from harness import over_devices
from samples import sample, swept

from tidewheel.engine.models.spec import (
    DecoderSpec,
    DeltaNetSpec,
    EmbeddingSpec,
    HeadSpec,
    LaurelSpec,
    LayerSpec,
    Mamba2Spec,
    MixerSpec,
    MlpSpec,
    NormSpec,
    ParallelSpec,
    ResidualBlockSpec,
    ShortConvSpec,
    TemperatureSpec,
)

torch = pytest.importorskip("torch")

TURNED = replace(PLAIN, rope=ROPE)
LAYER_NORM = NormSpec("layer", 1e-5, bias=True)
NO_WEIGHT = NormSpec("rms", 1e-5, weight=False)
UNIT_OFFSET = NormSpec("rms", 1e-5, unit_offset=True)
DELTA_NET = DeltaNetSpec(2, 4, 24, 48, 4, NORM)
MAMBA = Mamba2Spec(4, 24, 2, 40, 4, NORM, norm_groups=2)
USUAL = (ResidualBlockSpec(TURNED, NORM), ResidualBlockSpec(MLP, NORM))


def twice(layer: LayerSpec) -> DecoderSpec:
    return decoder_of(layer, layer)


def residuals(**fields: object) -> DecoderSpec:
    return twice(tuple(replace(residual, **fields) for residual in USUAL))  # type: ignore[arg-type]


def beside(norm: NormSpec | None, attention_norm: NormSpec | None, mlp_norm: NormSpec | None) -> DecoderSpec:
    return twice(
        (
            ResidualBlockSpec(
                ParallelSpec((ResidualBlockSpec(TURNED, attention_norm), ResidualBlockSpec(MLP, mlp_norm))), norm
            ),
        )
    )


def with_mlp(mlp: MlpSpec) -> DecoderSpec:
    return twice((USUAL[0], ResidualBlockSpec(mlp, NORM)))


def attention(**fields: object) -> DecoderSpec:
    changed = replace(TURNED, **fields)  # type: ignore[arg-type]
    return decoder(changed, changed)


def beside_attention(mixer: MixerSpec) -> DecoderSpec:
    """In a layer of its own, and in one side by side with attention."""
    both = ParallelSpec((ResidualBlockSpec(TURNED, None), ResidualBlockSpec(mixer, None)))
    return decoder_of(
        (ResidualBlockSpec(mixer, NORM), ResidualBlockSpec(MLP, NORM)), (ResidualBlockSpec(both, NORM), USUAL[1])
    )


SPECS = {
    "sinks": attention(sinks=True),
    "sinks in a window": attention(sinks=True, sliding_window=7),
    "interleaved rope": attention(rope=replace(ROPE, interleaved=True)),
    "interleaved rope of a part": attention(rope=replace(ROPE, inv_freq=ROPE.inv_freq[:7], interleaved=True)),
    "rope in some layers": decoder(TURNED, PLAIN, TURNED),
    "q/k norm of a head": attention(qk_norm=NORM),
    "q/k norm of the whole": attention(qk_norm=NORM, qk_norm_over="whole"),
    "q/k layer norm of a head": attention(qk_norm=LAYER_NORM),
    "q/k layer norm of the whole": attention(qk_norm=LAYER_NORM, qk_norm_over="whole"),
    "q/k norm above 1": attention(qk_norm=UNIT_OFFSET),
    "q/k norm of each head": attention(qk_norm=NORM, qk_norm_over="each"),
    "q/k norm after rope": attention(qk_norm=NORM, qk_norm_after_rope=True),
    "temperature by position": attention(query_temperature=TemperatureSpec(0.6, 8)),
    "norms without weight": residuals(norm=NO_WEIGHT),
    "layer norms without bias": residuals(norm=NormSpec("layer", 1e-5)),
    "norms above 1": residuals(norm=UNIT_OFFSET),
    "post-norms": residuals(post_norm=NORM),
    "post-norms alone": residuals(norm=None, post_norm=LAYER_NORM),
    "norms of the sum": residuals(norm=None, sum_norm=LAYER_NORM),
    "scales": residuals(scale=0.22),
    "scales of post-norms": residuals(post_norm=UNIT_OFFSET, scale=0.5),
    "side by side, one norm": beside(LAYER_NORM, None, None),
    "side by side, two norms": beside(None, NORM, LAYER_NORM),
    "side by side, three norms": beside(NORM, NORM, LAYER_NORM),
    "quick gelu": with_mlp(MlpSpec(96, "gelu_quick", gated=False, bias=True)),
    "squared relu": with_mlp(MlpSpec(96, "relu2", gated=False, bias=True)),
    "squared relu with a gate": with_mlp(replace(MLP, activation="relu2")),
    "scaled embedding": replace(twice(USUAL), embedding=EmbeddingSpec(64, scale=8.0)),
    "normalized embedding": replace(twice(USUAL), embedding=EmbeddingSpec(40, 2048, norm=LAYER_NORM)),
    "biased logits": replace(twice(USUAL), head=HeadSpec(tied=False, divisor=2.0, bias=True)),
    "biased logits of a tied head": replace(twice(USUAL), head=HeadSpec(tied=True, bias=True)),
    "scaled, projected embedding": replace(twice(USUAL), embedding=EmbeddingSpec(40, 2048, 2, scale=0.5)),
    "divided logits": replace(twice(USUAL), head=HeadSpec(tied=False, divisor=13.0)),
    "capped logits": replace(twice(USUAL), head=HeadSpec(tied=True, softcap=3.0)),
    "divided and capped logits": replace(twice(USUAL), head=HeadSpec(tied=False, divisor=0.5, softcap=5.0)),
}
# What test_attention.py has for CPUs.
SCORES = {
    "softcap": attention(softcap=5.0),
    "ALiBi": attention(rope=None, alibi_slopes=SLOPES),
    "ALiBi with sinks in a window": attention(rope=None, alibi_slopes=SLOPES, sinks=True, sliding_window=7),
    "softcap with sinks": attention(softcap=5.0, sinks=True),
}
# What few families need.
CPU_SPECS = {
    **SPECS,
    "a gate that is cut off": twice(
        (USUAL[0], ResidualBlockSpec(replace(MLP, activation="gelu_tanh", cutoff=0.5), NORM))
    ),
    "a gate that is cut off below its mean": twice((USUAL[0], ResidualBlockSpec(replace(MLP, cutoff=-1.0), NORM))),
    "factors of sums": residuals(sum_factor=0.7),
    "LAuReL": beside_attention(LaurelSpec(20, NORM)),
    "output gate": attention(output_gate=True),
    "scaled gate of an MLP": with_mlp(replace(MLP, gate_scale=0.4, bias=True)),
    "output gate with biases": attention(output_gate=True, qkv_bias=True),
    "delta net": beside_attention(DELTA_NET),
    "delta net with tiled heads": beside_attention(replace(DELTA_NET, tiled=True)),
    "delta net of tails": beside_attention(DeltaNetSpec(1, 3, 9, 37, 2, NORM)),
    "mamba": beside_attention(MAMBA),
    "mamba of tails": beside_attention(
        replace(MAMBA, head_dim=19, state_dim=9, num_groups=1, gate="last", norm_groups=1, conv_bias=False)
    ),
    "mamba with scales": beside_attention(replace(MAMBA, input_scales=(0.7, 1.4, 0.6, 1.2, 0.9), bias=True)),
    "mamba without norm": beside_attention(replace(MAMBA, norm=None, bias=True, dt_limits=(0.1, 0.7))),
    "short convolution": beside_attention(ShortConvSpec(64, 3)),
    "short convolution of tails": beside_attention(ShortConvSpec(131, 5, bias=True)),
}


# Those that have kernels of their own.
OF_LEVELS = {
    "sinks in a window",
    "interleaved rope of a part",
    "q/k layer norm of the whole",
    "norms of the sum",
    "squared relu with a gate",
    "normalized embedding",
    "divided and capped logits",
    "a gate that is cut off",
    "LAuReL",
    "output gate with biases",
    "delta net",
    "delta net of tails",
    "mamba",
    "mamba of tails",
    "short convolution of tails",
}


# Those that graph devices compute in no way that others do not have, too.
LIKE_OTHERS = {
    "a gate that is cut off below its mean",
    "output gate",
    "delta net",
    "mamba",
    "mamba without norm",
    "short convolution",
}
OF_ALL_DEVICES = {**SPECS, **SCORES}
OF_TPUS = {**CPU_SPECS, **SCORES}
BRANCHES = dict.fromkeys(residual for spec in OF_TPUS.values() for layer in spec.layers for residual in layer)


def said(of: object, at: str = "") -> set[tuple[str, object]]:
    """The fields of a residual block and of its parts, with their values, wherever in it the parts are."""
    if isinstance(of, tuple) and any(map(is_dataclass, of)):
        return {pair for part in of for pair in said(part, at)}
    if not is_dataclass(of):
        return {(at, of)}
    name = type(of).__name__
    return {(at, name)}.union(*(said(getattr(of, field.name), f"{name}.{field.name}") for field in fields(of)))


def fewest_with_every_value(residuals: Collection[ResidualBlockSpec]) -> list[ResidualBlockSpec]:
    """A few of the residual blocks that together have each value of each field."""
    missing, found = set().union(*map(said, residuals)), list[ResidualBlockSpec]()
    while missing:
        found.append(max(residuals, key=lambda residual: len(said(residual) & missing)))
        missing -= said(found[-1])
    return found


# Residual blocks that have all that those specs say, which TPUs compile as two models.
LAYERS = [(residual,) for residual in fewest_with_every_value(BRANCHES)]
TOGETHER = {
    "one half": replace(
        decoder_of(*LAYERS[::2]),
        embedding=EmbeddingSpec(40, 2048, norm=LAYER_NORM),
        head=HeadSpec(tied=False, divisor=2.0, bias=True),
    ),
    "the other half": replace(
        decoder_of(*LAYERS[1::2]), embedding=EmbeddingSpec(64, scale=8.0), head=HeadSpec(tied=True, softcap=3.0)
    ),
}


@pytest.fixture(scope="module", autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


@pytest.mark.parametrize(("device_id", "name"), over_devices(CPU_SPECS, levels=OF_LEVELS))
def test_every_level_computes_what_the_reference_computes(device_id: str, name: str) -> None:
    expected, ours = reference(CPU_SPECS[name]), run(device_id, CPU_SPECS[name])
    np.testing.assert_allclose(ours, expected, atol=1e-4 * np.abs(expected).max())
    np.testing.assert_array_equal(run(device_id, CPU_SPECS[name], chunk=7), ours)


@pytest.mark.parametrize("name", sample({**CPU_SPECS, **SCORES}, lambda name: name not in LIKE_OTHERS))
def test_graphs_compute_what_the_reference_computes(name: str) -> None:
    spec = {**CPU_SPECS, **SCORES}[name]
    expected = reference(spec)
    for chunk in (7, 2048):
        logits = run("graph", spec, chunk)
        np.testing.assert_allclose(logits, expected, atol=1e-4 * np.abs(expected).max())


# A program of many kinds of layers is compiled.
@pytest.mark.parametrize("name", [*TOGETHER, *map(swept, OF_TPUS)])
def test_tpus_compute_what_the_reference_computes(name: str) -> None:
    spec = {**TOGETHER, **OF_TPUS}[name]
    expected = reference(spec)
    with jax_processors.asked_for():
        logits = run("tpu", spec, chunk=16)
    np.testing.assert_allclose(logits, expected, atol=1e-3 * np.abs(expected).max())


@pytest.mark.parametrize("name", CPU_SPECS)
def test_all_of_this_matters(name: str) -> None:
    changed = reference(CPU_SPECS[name])
    assert np.abs(changed - reference(twice(USUAL))).max() > 1e-2 * np.abs(changed).max()
