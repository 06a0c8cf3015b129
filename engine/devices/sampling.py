"""Logits to tokens: the numpy reference of the sampler.

The native sampler computes the same thing and must agree bit for bit. So every floating-point operation here is a basic
one of IEEE, in a fixed order: no library exp or log, and no sum whose order numpy chooses.

The order of a row: log-probabilities are taken from the raw logits. Then the tokens that its mask forbids get -inf,
which nothing later can change. Then come repetition, frequency and presence penalties, bias, temperature, min-p, top-k,
top-p, and one draw from what is left. A row with nothing left gets NO_TOKEN. A row with a target draws nothing.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from .batch import SamplingBatch, StepOutput

F32 = NDArray[np.float32]
F64 = NDArray[np.float64]

# Weights are summed in blocks of 16 rows x 16 lanes: each lane downwards, then the lanes, then the blocks in order.
LANES = 16
BLOCK = LANES * LANES

# Top-p adds the weights up as whole multiples of 2^-40: exactly, so in any order.
MASS_UNITS = 2.0**40

NO_TOKEN = -1  # sampled where a row has no finite logit to choose from

# Cephes' expf: 2^n * p(r), r = x - n ln 2 with ln 2 in two parts (https://www.netlib.org/cephes/).
LOG2_E = np.float32(1.44269504088896341)
LN2_HIGH = np.float32(0.693359375)
LN2_LOW = np.float32(-2.12194440e-4)
EXP_COEFFICIENTS = [
    np.float32(c)
    for c in (1.9875691500e-4, 1.3981999507e-3, 8.3334519073e-3, 4.1665795894e-2, 1.6666665459e-1, 5.0000001201e-1)
]
ROUNDER = np.float32(12582912.0)  # 1.5 * 2^23: adding and subtracting it rounds to the nearest integer
EXP_UNDERFLOW = np.float32(-87.0)  # below it the result is 0


def exp_nonpositive(x: F32) -> F32:
    """e^x for x <= 0, elementwise in float32; 0 below -87 and for -inf."""
    clamped = np.maximum(x, EXP_UNDERFLOW)
    n = (clamped * LOG2_E + ROUNDER) - ROUNDER
    r = clamped - n * LN2_HIGH
    r = r - n * LN2_LOW
    p = np.full_like(r, EXP_COEFFICIENTS[0])
    for coefficient in EXP_COEFFICIENTS[1:]:
        p = p * r + coefficient
    p = p * (r * r) + r
    p = p + np.float32(1.0)
    power = ((n.astype(np.int32) + 127) << 23).view(np.float32)
    return np.where(x < EXP_UNDERFLOW, np.float32(0.0), p * power)


def log_positive(x: float) -> float:
    """ln x for a finite x > 0: x = m 2^e with m in [sqrt(1/2), sqrt(2)), ln m = 2 artanh((m - 1) / (m + 1))."""
    mantissa, exponent = np.frexp(np.float64(x))
    if mantissa < 0.70710678118654752:
        mantissa, exponent = mantissa * 2.0, exponent - 1
    s = (mantissa - 1.0) / (mantissa + 1.0)
    square = s * s
    series = np.float64(0.0)
    for k in range(21, 0, -2):
        series = series * square + 1.0 / k
    return float(exponent * 0.69314718055994531 + (2.0 * s) * series)


def philox_uniform(seed: int, position: int) -> float:
    """A uniform number in [0, 1) with 53 random bits, from Philox4x32-10 (https://doi.org/10.1145/2063384.2063405).

    The key is the 64-bit seed, the counter is the position.
    """
    c0, c1, c2, c3 = position & 0xFFFFFFFF, 0, 0, 0
    k0, k1 = seed & 0xFFFFFFFF, seed >> 32
    for _ in range(10):
        p0, p1 = 0xD2511F53 * c0, 0xCD9E8D57 * c2
        c0, c1, c2, c3 = (p1 >> 32) ^ c1 ^ k0, p1 & 0xFFFFFFFF, (p0 >> 32) ^ c3 ^ k1, p0 & 0xFFFFFFFF
        k0, k1 = (k0 + 0x9E3779B9) & 0xFFFFFFFF, (k1 + 0xBB67AE85) & 0xFFFFFFFF
    return float(((c1 << 32 | c0) >> 11) * 2.0**-53)


def _block_sums(weights: F32) -> F64:
    """Running totals over blocks of 256 weights, shape [ceil(V / 256)]; the last one is the total."""
    blocks = -(-weights.size // BLOCK)
    padded = np.zeros(blocks * BLOCK, np.float64)
    padded[: weights.size] = weights
    lanes = np.add.accumulate(padded.reshape(blocks, LANES, LANES), axis=1)[:, -1]
    totals = np.add.accumulate(lanes, axis=1)[:, -1]
    return np.add.accumulate(totals)


def _descending(weights: F32) -> NDArray[np.intp]:
    """Indices by weight, largest first, ties to the lower index."""
    return np.argsort(-weights, kind="stable")


def _forbidden(mask: NDArray[np.uint32], vocab_size: int) -> NDArray[np.bool_]:
    """Which tokens a mask leaves out, shape [V]."""
    little_endian = mask.astype("<u4").view(np.uint8)
    return ~np.unpackbits(little_endian, count=vocab_size, bitorder="little").astype(np.bool_)


def _penalize(
    logits: F32,
    history: NDArray[np.int32],
    prompt_len: int,
    repetition: np.float32,
    frequency: np.float32,
    presence: np.float32,
) -> None:
    seen = np.unique(history)
    values = logits[seen]
    logits[seen] = np.where(values > 0, values / repetition, values * repetition)
    output, counts = np.unique(history[prompt_len:], return_counts=True)
    logits[output] = logits[output] - frequency * counts.astype(np.float32)
    logits[output] = logits[output] - presence


def _keep(weights: F32, min_p: np.float32, top_k: int, top_p: np.float32) -> None:
    """Set to 0 the weights that min-p (https://arxiv.org/abs/2407.01082), top-k and top-p (nucleus) leave out."""
    if min_p > 0:
        weights[weights < min_p] = 0
    if 0 < top_k < weights.size:
        weights[_descending(weights)[top_k:]] = 0
    if top_p < 1:
        order = _descending(weights)
        running = np.add.accumulate(np.rint(weights[order].astype(np.float64) * MASS_UNITS).astype(np.int64))
        enough = np.int64(np.ceil(np.float64(top_p) * np.float64(running[-1])))
        weights[order[int(np.searchsorted(running, enough, side="left")) + 1 :]] = 0


def _draw(weights: F32, uniform: float) -> int:
    """The first index whose running total exceeds `uniform` of the whole."""
    cumulative = _block_sums(weights)
    target = uniform * cumulative[-1]
    last = int(np.searchsorted(cumulative, cumulative[-1], side="left"))
    block = min(int(np.searchsorted(cumulative, target, side="right")), last)
    start = block * BLOCK
    chunk = weights[start : start + BLOCK].astype(np.float64)
    before = cumulative[block - 1] if block else np.float64(0.0)
    running = np.add.accumulate(np.concatenate([[before], chunk]))[1:]
    candidates = np.flatnonzero(chunk)
    beyond = candidates[running[candidates] > target]
    return start + int(beyond[0] if beyond.size else candidates[-1])


def sample(logits: F32, batch: SamplingBatch) -> StepOutput:
    """Pick a token for every row of `logits` [R, vocab]. A row without a finite maximum gets NO_TOKEN."""
    if batch.masks is not None:
        batch.masks.wait()
    output = StepOutput.empty(batch)
    for r in range(logits.shape[0]):
        sample_row(logits[r], batch, r, output)
    return output


def sample_row(raw: F32, batch: SamplingBatch, r: int, output: StepOutput) -> None:
    """Pick the token of row `r` from its logits [vocab], and write to `output` all that the row asks for.

    The caller has waited for the batch's masks.
    """
    output.token_ids[r] = NO_TOKEN
    if not np.isfinite(raw.max()):
        return
    target = -1 if batch.target is None else int(batch.target[r])
    output.token_ids[r] = target if target >= 0 else _pick(raw, batch, r)
    if output.token_ids[r] == NO_TOKEN or batch.num_logprobs[r] < 0:
        return
    assert output.logprobs is not None
    assert output.top_ids is not None
    assert output.top_logprobs is not None
    temperature = np.float32(1.0) if batch.logprob_temperature is None else batch.logprob_temperature[r]
    with np.errstate(over="ignore"):
        weights = exp_nonpositive((raw - raw.max()) / temperature)
    log_total = log_positive(float(_block_sums(weights)[-1]))
    scaled = (raw.astype(np.float64) - np.float64(raw.max())) / np.float64(temperature)
    normalized = (scaled - log_total).astype(np.float32)
    top = _descending(raw)[: batch.num_logprobs[r]]
    output.logprobs[r] = normalized[output.token_ids[r]]
    output.top_ids[r, : top.size] = top
    output.top_logprobs[r, : top.size] = normalized[top]
    if target >= 0:
        assert output.ranks is not None
        output.ranks[r] = 1 + np.count_nonzero(raw > raw[target])


def _pick(raw: F32, batch: SamplingBatch, r: int) -> int:
    row, masks = raw.copy(), batch.masks
    if masks is not None and masks.index[r] >= 0:
        row[_forbidden(masks.bits[masks.index[r]], row.size)] = -np.inf
    history = batch.history_ids[batch.history_start[r] : batch.history_start[r + 1]]
    if history.size:
        _penalize(
            row,
            history,
            int(batch.prompt_len[r]),
            batch.repetition_penalty[r],
            batch.frequency_penalty[r],
            batch.presence_penalty[r],
        )
    bias = slice(batch.bias_start[r], batch.bias_start[r + 1])
    with np.errstate(invalid="ignore"):  # infinities that meet make a NaN, and the row gets no token
        row[batch.bias_ids[bias]] += batch.bias_values[bias]
    best = int(np.argmax(row))
    if not np.isfinite(row[best]):
        return NO_TOKEN
    if batch.temperature[r] == 0:
        return best
    # Divided after the subtraction, so that a tiny temperature leaves 0 for the best and -inf for others.
    with np.errstate(over="ignore"):
        weights = exp_nonpositive((row - row[best]) / batch.temperature[r])
    _keep(weights, batch.min_p[r], int(batch.top_k[r]), batch.top_p[r])
    return _draw(weights, philox_uniform(int(batch.seed[r]), int(batch.position[r])))
