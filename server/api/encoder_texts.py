"""EncoderTexts: from the texts of a request to what an encoder makes of them, and to a response."""

from __future__ import annotations

import base64
from collections.abc import Callable, Sequence
from typing import Any

import msgspec
import numpy as np
import orjson
from starlette.requests import Request
from starlette.responses import Response

from tidewheel.engine.encoders.encoder import Encoder
from tidewheel.engine.encoders.pooling import Floats
from tidewheel.engine.encoders.tasks import Task
from tidewheel.engine.encoders.tokenization import EncoderInput

from ..encoders import EncoderAnswer, check_input, truncation
from ..protocol.embeddings import TextsRequest
from .encoder_state import EncoderState


class EncoderTexts:
    """Long texts are encoded, and long answers written, in the prompt encoder's threads."""

    def __init__(self, state: EncoderState) -> None:
        self.encoders = state.encoders
        self._worker = state.encoder

    async def run(
        self,
        request: Request,
        kind: str,
        model: Encoder,
        task: Task,
        body: TextsRequest,
        raw_size: int,
        *,
        cut_by: str = "truncate_prompt_tokens: -1",
    ) -> EncoderAnswer:
        """A task's results of a body's inputs. `kind` begins the answer's id. Raises ApiError or InvalidRequestError.

        `raw_size` is the body's in bytes, and `cut_by` what it says to have long texts cut.
        """
        given = body.inputs()
        # Multiplied by their number, because short texts cost time too.
        inputs = await self._worker.run(raw_size * len(given), lambda: _inputs(model, body, given, cut_by))
        return await self.encoders.run(request, kind, model, task, inputs, given)

    async def response(self, answer: EncoderAnswer, write: Callable[[], Response]) -> Response:
        """The response that `write` makes of an answer."""
        return await self._worker.run(answer.nbytes, write)


def _inputs(model: Encoder, body: TextsRequest, given: Sequence[str | list[int]], cut_by: str) -> list[EncoderInput]:
    truncate_to = truncation(model, body.truncate_prompt_tokens)
    inputs: list[EncoderInput] = []
    for i, item in enumerate(given):
        if isinstance(item, str):
            encoded = model.encode(
                item,
                prompt_name=body.prompt_name,
                add_special_tokens=body.add_special_tokens is not False,
                truncate_to=truncate_to,
            )
        else:
            encoded = model.tokens(item[:truncate_to], prompt_name=body.prompt_name)
        check_input(model, encoded, "input" if len(given) == 1 else f"input[{i}]", cut_by)
        inputs.append(encoded)
    return inputs


def numbers(values: Floats) -> Any:
    """An array as JSON, to be a part of an answer."""
    # orjson writes the shortest digits that give the same float32, in a fraction of the time that a list would take.
    return msgspec.Raw(orjson.dumps(np.ascontiguousarray(values), option=orjson.OPT_SERIALIZE_NUMPY))


def in_base64(values: Floats) -> str:
    """An array's little-endian float32 in base64."""
    return base64.b64encode(values.astype("<f4").tobytes()).decode("ascii")
