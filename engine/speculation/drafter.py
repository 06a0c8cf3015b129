"""Drafter: what guesses at tokens to come, and what it is shown of a sequence."""

from __future__ import annotations

from typing import Protocol

import numpy as np
from numpy.typing import NDArray


class Draftable(Protocol):
    """A sequence as drafters see it: `key` names it, and its tokens are the first `num_tokens` of `tokens`.

    The prompt is the first `prompt_len` of them.
    """

    key: int
    tokens: NDArray[np.int32]
    num_tokens: int
    prompt_len: int


class Drafter(Protocol):
    """Guesses how sequences go on."""

    def propose(self, sequence: Draftable) -> list[int]:
        """The likely next tokens of a sequence, of the model's vocabulary; none if it has no idea.

        Called on the engine thread before every step that the sequence decodes in, if guesses may pay.
        """
        ...
