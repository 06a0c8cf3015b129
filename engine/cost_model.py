"""CostModel: how long a step will take, learned from the steps so far."""

from __future__ import annotations

import math
from dataclasses import dataclass

_DECODE_UNITS = (1.0, 16.0, 65536.0)  # one, decodes, attention pairs: scaled to be of like size
_PREFILL_UNITS = (1.0, 128.0, 65536.0, 128.0)  # one, tokens, attention pairs, scored tokens
_DECODE_FORGET = 0.99
_PREFILL_FORGET = 0.95
_RIDGE = 0.05  # evidence, in squared units, that a coefficient needs to leave zero
_OUTLIER_FACTOR = 4.0
_SAMPLE_MS = 10.0  # of decoding: what more of a small model's steps could teach is not worth the time it takes
_TRUSTED_AFTER = 16  # observations
_SWEEPS = 4
_FIRST_CHUNK = 64
_SMALLEST_CHUNK = 16
_MAX_SLOWNESS = 1.5  # so that one stalled step does not take much from the prompts of the next
_STEPS_ALONE = 4.0  # of the longest step, while nobody waits; a longer one would hardly be more efficient
_MIN_PREFILL_SHARE = 1.25  # of a step whose decodes alone take longer than they should


@dataclass(frozen=True, slots=True)
class StepLoad:
    """The work of a step on the device.

    Each draft token counts as a decode. Attention pairs are pairs of a query token and a context token: the context of
    each decode, and the context of each token of a prefill chunk. The logits after `scored_tokens` of the chunks are
    wanted too.
    """

    num_decodes: int = 0
    decode_pairs: int = 0
    prefill_tokens: int = 0
    prefill_pairs: int = 0
    scored_tokens: int = 0

    @property
    def num_tokens(self) -> int:
        """Tokens that the step runs."""
        return self.num_decodes + self.prefill_tokens

    def plus_draft(self, context: int, num_tokens: int) -> StepLoad:
        """The load with `num_tokens` drafted tokens more, of a decode whose context has `context` tokens."""
        pairs = num_tokens * context + num_tokens * (num_tokens + 1) // 2
        return StepLoad(  # `replace` takes several times as long
            self.num_decodes + num_tokens,
            self.decode_pairs + pairs,
            self.prefill_tokens,
            self.prefill_pairs,
            self.scored_tokens,
        )

    def plus_chunk(self, start: int, num_tokens: int, num_scored: int = 0) -> StepLoad:
        """The load with `num_tokens` more tokens of a prompt, from position `start` on; `num_scored` are scored."""
        pairs = num_tokens * start + num_tokens * (num_tokens + 1) // 2
        return StepLoad(
            self.num_decodes,
            self.decode_pairs,
            self.prefill_tokens + num_tokens,
            self.prefill_pairs + pairs,
            self.scored_tokens + num_scored,
        )


class CostModel:
    """The time of a step is the time of its decodes, `a + b x decodes + c x pairs`, plus that of its prefill,
    `d + e x tokens + f x pairs + g x scored tokens`.

    The two parts are learned separately, decodes from the steps that do nothing else. So a long time without prompts
    does not wear out what is known about prompts. Because a fit extrapolates badly, prefill beside decodes starts small
    and at most doubles from what has been seen to fit. Shared machines become slower for a few steps, which no fit
    learns in time. So after a step that took longer than expected, the next ones get less to do at once.

    `spent_ms` of the next step's time are gone before it begins: something else has computed. While `num_others` models
    wait for the same cores, a step of each together may take as long as one. Then steps without decodes are limited
    as well, and still when others may come, by several times as much. None: nobody else has these cores.
    """

    def __init__(self, max_step_ms: float) -> None:
        self.max_step_ms = max_step_ms
        self.last_ms = 0.0
        self.spent_ms = 0.0
        self.num_others: int | None = None
        self._decode = Fit(len(_DECODE_UNITS), _DECODE_FORGET)
        self._prefill = Fit(len(_PREFILL_UNITS), _PREFILL_FORGET)
        self._proven_chunk = _FIRST_CHUNK
        self._since_sample_ms = 0.0
        self._slowness = 1.0  # how many times as long as expected the last steps beside prompts took

    @property
    def knows_decodes(self) -> bool:
        """Whether a step of decodes alone has run. Before, a row more seems to cost nothing."""
        return self._decode.has_begun

    def predict_ms(self, load: StepLoad) -> float:
        """The expected duration of a step."""
        decode_ms = self._decode_ms(load)
        return decode_ms + self._prefill.predict(_prefill_features(load)) if load.prefill_tokens else decode_ms

    def draft_ms(self, context: int, num_tokens: int) -> float:
        """How much longer a step takes with a draft of `num_tokens` behind a context of `context` tokens."""
        _, per_decode, per_pair = self._decode.coefficients
        pairs = num_tokens * context + num_tokens * (num_tokens + 1) // 2
        return per_decode * num_tokens / _DECODE_UNITS[1] + per_pair * pairs / _DECODE_UNITS[2]

    def prefill_ms(self, start: int, num_tokens: int) -> float | None:
        """How long it takes to compute tokens of a prompt from position `start` on; None as long as little is known."""
        if not self._prefill.is_trusted:
            return None
        return self._prefill.predict(_prefill_features(StepLoad().plus_chunk(start, num_tokens)))

    def prompts_ms(self, load: StepLoad) -> float | None:
        """How long all prompts of a load take, in chunks like those so far; None as long as little is known."""
        if not self._prefill.is_trusted:
            return None
        _, *features = _prefill_features(load)
        return self._prefill.predict((max(features[0] / self._prefill.mean(1), 1.0), *features))

    def observe(self, load: StepLoad, elapsed_ms: float) -> None:
        """Learn from a step that has run. `last_ms` is the duration of the last one."""
        self.last_ms = elapsed_ms
        if load.prefill_tokens == 0:
            # Checked before this step's time is added: else a step that stalled would always be chosen.
            if self._since_sample_ms >= _SAMPLE_MS or not self._decode.is_trusted:
                self._since_sample_ms = 0.0
                self._decode.observe(_decode_features(load), elapsed_ms)
            self._since_sample_ms += elapsed_ms
            return
        if load.num_decodes and self._prefill.is_trusted:
            ratio = elapsed_ms / max(self.predict_ms(load), 1e-3)
            self._slowness = min(max(ratio, (self._slowness + ratio) / 2, 1.0), _MAX_SLOWNESS)
        self._prove(load, elapsed_ms)
        self._prefill.observe(_prefill_features(load), max(elapsed_ms - self._decode_ms(load), 0.0))

    def limit_ms(self, decodes: StepLoad) -> float:
        """How long a step with these decodes may take when prompts want to join it.

        Prefill gets the time that decodes leave, and at least a quarter of theirs, so that prompts advance however
        many sequences decode.
        """
        num_waiting = (self.num_others or 0) + (1 if decodes.num_decodes else 0)  # models whose streams may wait
        longest_ms = self.max_step_ms / num_waiting if num_waiting else _STEPS_ALONE * self.max_step_ms
        left_ms = max(longest_ms - self.spent_ms, 0.0)
        return max(left_ms / self._slowness, _MIN_PREFILL_SHARE * self._decode_ms(decodes))

    def chunk_tokens(self, load: StepLoad, context: int, limit_ms: float, *, scored: bool = False) -> int:
        """How many tokens of a prompt with `context` computed ones fit beside `load` in `limit_ms`.

        Never less than one small chunk for the first prompt of a step.
        """
        once, per_token, per_pair, per_scored = (
            w / unit for w, unit in zip(self._prefill.coefficients, _PREFILL_UNITS, strict=True)
        )
        per_token += per_scored if scored else 0.0
        spare_ms = limit_ms - self.predict_ms(load) - (0.0 if load.prefill_tokens else once)
        fitting = _positive_root(per_pair / 2, per_token + per_pair * context, spare_ms)
        smallest = 0 if load.prefill_tokens else _SMALLEST_CHUNK
        return max(int(min(fitting, self._proven_chunk - load.prefill_tokens)), smallest)

    def _decode_ms(self, load: StepLoad) -> float:
        return self._decode.predict(_decode_features(load)) if load.num_decodes else 0.0

    def _prove(self, load: StepLoad, elapsed_ms: float) -> None:
        fits = int(load.prefill_tokens * min(2.0, self.max_step_ms / max(elapsed_ms, 1e-3)))
        if load.num_decodes and elapsed_ms > 2 * self.max_step_ms:
            self._proven_chunk = max(fits, _SMALLEST_CHUNK)
        else:
            self._proven_chunk = max(self._proven_chunk, fits)


class Fit:
    """Exponentially weighted least squares with coefficients that are never negative.

    A few sweeps of coordinate descent an observation, from the last solution on. One slow step (a noisy neighbour) is
    clipped, and a feature that hardly varied above zero is left out rather than blamed for the neighbour's drift.
    """

    def __init__(self, size: int, forget: float) -> None:
        self.coefficients = [0.0] * size
        self._forget = forget
        self._gram = [[0.0] * size for _ in range(size)]
        self._moment = [0.0] * size
        self._observations = 0

    @property
    def has_begun(self) -> bool:
        """Whether it has seen anything."""
        return self._observations > 0

    @property
    def is_trusted(self) -> bool:
        """Whether it has seen enough to tell an outlier."""
        return self._observations >= _TRUSTED_AFTER

    def predict(self, x: tuple[float, ...]) -> float:
        """The value that is expected with these features."""
        return sum([w * xi for w, xi in zip(self.coefficients, x, strict=True)])

    def mean(self, index: int) -> float:
        """The mean of a feature in what it has learned from; the first feature must be always one."""
        return self._gram[0][index] / self._gram[0][0]

    def observe(self, x: tuple[float, ...], y: float) -> None:
        """Learn from a value."""
        if self.is_trusted:
            y = min(y, _OUTLIER_FACTOR * self.predict(x) + 1.0)
        self._observations += 1
        gram, moment, w, forget = self._gram, self._moment, self.coefficients, self._forget
        for i, xi in enumerate(x):
            moment[i] = forget * moment[i] + xi * y
            gram[i] = [forget * g + xi * xj for g, xj in zip(gram[i], x, strict=True)]
        for _ in range(_SWEEPS):
            for i, row in enumerate(gram):
                rest = sum([g * v for g, v in zip(row, w, strict=True)]) - row[i] * w[i]
                w[i] = max((moment[i] - rest) / (row[i] + _RIDGE), 0.0)


def _decode_features(load: StepLoad) -> tuple[float, ...]:
    _, decodes, pairs = _DECODE_UNITS
    return 1.0, load.num_decodes / decodes, load.decode_pairs / pairs


def _prefill_features(load: StepLoad) -> tuple[float, ...]:
    _, tokens, pairs, scored = _PREFILL_UNITS
    return 1.0, load.prefill_tokens / tokens, load.prefill_pairs / pairs, load.scored_tokens / scored


def _positive_root(quadratic: float, linear: float, value: float) -> float:
    """The x at which `quadratic * x^2 + linear * x` reaches `value`; infinity if it never does."""
    if value <= 0.0:
        return 0.0
    denominator = linear + math.sqrt(linear * linear + 4 * quadratic * value)
    return 2 * value / denominator if denominator > 0.0 else math.inf
