"""One choice on its way from the model's text to pieces: content, reasoning, tool calls, and why it ended."""

from __future__ import annotations

from tidewheel.engine.request import FinishReason, RequestOutput
from tidewheel.server.chat.pieces import CallArguments, CallStart, Piece
from tidewheel.server.chat.tools.parser import ToolCallParser


class Answer:
    """Splits the outputs of one choice. Without `tool_parser` all text is content.

    With `one_call`, calls after the first are dropped.
    """

    def __init__(self, tool_parser: ToolCallParser | None, *, one_call: bool) -> None:
        self._tool_parser = tool_parser
        self._one_call = one_call
        self._has_calls = False
        self.finish_reason: str | None = None

    def push(self, output: RequestOutput) -> list[Piece]:
        """What became certain with `output`; sets `finish_reason` with the last one."""
        pieces = self._pieces(output)
        if output.finish_reason is not None:
            stopped_to_call = self._has_calls and output.finish_reason is FinishReason.STOP
            self.finish_reason = "tool_calls" if stopped_to_call else output.finish_reason.value
        return pieces

    def _pieces(self, output: RequestOutput) -> list[Piece]:
        if self._tool_parser is None:
            return [output.text] if output.text else []
        pieces = self._tool_parser.feed(output.text)
        if output.finish_reason is not None:
            pieces += self._tool_parser.finish()
        if any(isinstance(piece, CallStart) for piece in pieces):
            self._has_calls = True
        if self._one_call:
            pieces = [p for p in pieces if not (isinstance(p, CallStart | CallArguments) and p.index > 0)]
        return pieces
