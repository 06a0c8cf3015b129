"""`--max-log-len` and `--enable-log-outputs`: what requests ask and what is answered, in the log."""

from __future__ import annotations

import logging
from collections.abc import Sequence

from tidewheel.engine.outputs import RequestOutput

logger = logging.getLogger("tidewheel.requests")

Shown = str | Sequence[int]
"""A prompt's text, or its token ids where it has no text of its own."""


class TextLog:
    """Logs prompts cut to `max_len` characters or token ids, and answers too if `logs_answers`.

    Without `max_len`, no prompt is logged, and answers are logged whole; with 0 neither is. Clients choose these texts:
    they are written as Python literals, so that none of their characters ends the line or steers a terminal.
    """

    def __init__(self, max_len: int | None, *, logs_answers: bool = False) -> None:
        self.max_len = max_len
        self.logs_answers = logs_answers and max_len != 0

    def log_prompts(self, answer_id: str, client_id: str, prompts: Sequence[Shown]) -> None:
        """A line for each prompt of a request. `client_id` is its x-request-id."""
        if self.max_len:
            for i, prompt in enumerate(prompts):
                self._log("prompt", answer_id, client_id, i, prompt)

    def log_answers(self, answer_id: str, client_id: str, answers: AnswerTexts) -> None:
        """A line for each choice that has begun."""
        for i, answer in sorted(answers.shown().items()):
            self._log("answer", answer_id, client_id, i, answer)

    def _log(self, what: str, answer_id: str, client_id: str, index: int, shown: Shown) -> None:
        cut = shown[: self.max_len] if isinstance(shown, str) else [*shown[: self.max_len]]
        name = f"{what}_text" if isinstance(cut, str) else f"{what}_token_ids"
        logger.info(
            "%s x-request-id=%s index=%d %s=%r",
            answer_id,
            client_id,
            index,
            name,
            cut,
            extra={"fields": {"id": answer_id, "request_id": client_id, "index": index, name: cut}},
        )


class AnswerTexts:
    """Collects what is answered, each choice up to `max_len` characters; token ids where there is no text."""

    def __init__(self, max_len: int | None, *, has_text: bool) -> None:
        self._max_len = max_len
        self._has_text = has_text
        self._pieces: dict[int, list[str]] = {}
        self._token_ids: dict[int, list[int]] = {}
        self._lengths: dict[int, int] = {}

    def add(self, output: RequestOutput) -> None:
        """Add what one output says."""
        index, length = output.index, self._lengths.get(output.index, 0)
        piece = output.text if self._has_text else output.token_ids
        self._lengths[index] = length + len(piece)
        if self._max_len is not None and length >= self._max_len:
            return
        if self._has_text:
            self._pieces.setdefault(index, []).append(output.text)
        else:
            self._token_ids.setdefault(index, []).extend(output.token_ids)

    def shown(self) -> dict[int, Shown]:
        """By choice, what it has said so far."""
        if self._has_text:
            return {i: "".join(pieces) for i, pieces in self._pieces.items()}
        return {**self._token_ids}
