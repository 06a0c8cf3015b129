"""EngineTime: how long the engine itself takes in a step, beside the device and the drafter."""

from __future__ import annotations

from collections.abc import Callable

_WEIGHT = 0.1  # how much a step changes what is known


class EngineTime:
    """Learns it from steps without prompts: with drafts, without drafts, and for each draft.

    All times are in milliseconds. `drafting_ms` is what drafting took in this step.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        """`clock` gives seconds."""
        self._clock = clock
        self._started: float | None = None  # when the engine's part of this step began, if it is to be learned
        self._num_drafts = 0
        self._known_ms: dict[bool, float] = {}  # by whether there were drafts
        self.drafting_ms = 0.0
        self.draft_ms = 0.0  # of each draft

    @property
    def plain_ms(self) -> float:
        """The time of a step without drafts; 0 as long as that is not known."""
        return self._known_ms.get(False, 0.0)

    @property
    def drafted_ms(self) -> float:
        """The time of a step with drafts, which is never less than that of one without."""
        return max(self._known_ms.get(True, 0.0), self.plain_ms)

    def skip(self) -> None:
        """Learn nothing from this step."""
        self._started = None

    def begin(self) -> None:
        """Begin drafting."""
        self._started, self.drafting_ms, self._num_drafts = self._clock(), 0.0, 0

    def drafted(self, num_drafts: int, drafting_ms: float | None = None) -> None:
        """Note `num_drafts` drafts, made in `drafting_ms` or else since `begin`. 0: as if drafting had not begun."""
        assert self._started is not None
        now = self._clock()
        self.drafting_ms = (now - self._started) * 1e3 if drafting_ms is None else drafting_ms
        self._num_drafts = num_drafts
        if not num_drafts:
            self._started = now

    def end(self, device_ms: float, *, drafted: bool) -> None:
        """Note that a step has ended. The device took `device_ms` of it."""
        if self._started is None:
            return
        elapsed_ms, self._started = (self._clock() - self._started) * 1e3, None
        own_ms = max(elapsed_ms - (self.drafting_ms if drafted else 0.0) - device_ms, 0.0)
        if drafted:
            per_draft_ms = max(own_ms - self._known_ms.get(False, own_ms), 0.0) / max(self._num_drafts, 1)
            self.draft_ms += _WEIGHT * (per_draft_ms - self.draft_ms)
        known = self._known_ms.get(drafted, own_ms)
        self._known_ms[drafted] = known + _WEIGHT * (min(own_ms, 2 * known) - known)
