"""LookaheadCosts: the limits on what it takes to follow draft tokens with a grammar.

Whether draft tokens are followed changes no token. So where it takes long, it pauses, and the grammar costs what it
costs without draft tokens.
"""

from __future__ import annotations

_MASK_S = 0.0005  # of processor time a mask; what takes more is added up
_MAX_BEHIND_S = 0.02
_FIRST_PAUSE = 256  # drafts


class LookaheadCosts:
    """The costs of one grammar, for all its sequences together. Each pause is twice as long as the last one."""

    def __init__(self) -> None:
        self._behind_s = 0.0
        self._pause = _FIRST_PAUSE
        self._left = 0

    def may_begin(self) -> bool:
        """Whether the draft tokens of a draft may be followed; if not, that was one draft of the pause."""
        if not self._left:
            return True
        self._left -= 1
        return False

    def charge(self, seconds: float, num_masks: int) -> None:
        """Add the processor time of following draft tokens, which may have made up to `num_masks` masks."""
        self._behind_s = max(self._behind_s + seconds - num_masks * _MASK_S, 0.0)
        if self._behind_s > _MAX_BEHIND_S:
            self.pause()

    def pause(self) -> None:
        """Follow no draft tokens for a while."""
        self._behind_s = 0.0
        self._left, self._pause = self._pause, 2 * self._pause
