"""A real engine around a device that only recites: each prompt says itself what is to be generated.

The text between the last `SAY(` and the next `)` is the answer, `LOOP(` asks for endless text, and other prompts are
answered with `ok`. Tokens are UTF-8 bytes, besides the special ones.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import re
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tidewheel.engine.core.engine import Engine
from tidewheel.engine.core.request import Request
from tidewheel.engine.core.stream import RequestStream
from tidewheel.engine.devices.batch import StepBatch, StepOutput
from tidewheel.engine.devices.executor import Executor, OnWait
from tidewheel.engine.devices.limits import ExecutorLimits
from tidewheel.engine.text.tokenizer import Tokenizer

BOS, EOS, BROKEN, FATAL = 256, 257, 258, 259
STALL, HANG = -2, -3  # no tokens: a step that takes a second, and one that never ends
VOCAB_SIZE = 260
CLAIMS = "SCRIPTED_CLAIMS"  # this variable has arguments of batches' Claims, in JSON
SECONDS = "SCRIPTED_SECONDS"  # and this one how long the product waits for what, by "module:NAME", in JSON
CHAT_TEMPLATE = (
    "{% for message in messages %}{% if message.role == 'tool' %}[tool {{ message.tool_call_id }}]{% endif %}"
    "<{{ message.role }}>{{ message.content }}"
    "{% for call in message.tool_calls or [] %}[{{ call.function.name }} {{ call.function.arguments | tojson }}]"
    "{% endfor %}{% endfor %}"
    "{% if tools %}{{ tools | tojson }}{% endif %}"
    "{% if messages[0].content == 'refuse' %}{{ raise_exception('no such talk') }}{% endif %}"
    "{% if messages[0].content == 'stumble' %}{{ messages[7].content.nothing }}{% endif %}"
    "{% if shout %}{{ shout | upper }}{% endif %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


def impatient(seconds: float) -> dict[str, str]:
    """The environment of a server whose end waits so long for who does not read, and for a step."""
    names = ("server.http.server:_ERROR_FRAMES_S", "server.http.server:_ABORT_S", "engine.core.engine:_LONGEST_STOP_S")
    return {SECONDS: json.dumps(dict.fromkeys(names, seconds))}


class ByteBackend:
    """Tokens are bytes. A BROKEN token cannot be turned into text, a FATAL one kills the device.

    `specials` are further special tokens, which text is searched for.
    """

    def __init__(self, specials: Sequence[str] = ()) -> None:
        self.vocab_size = VOCAB_SIZE + len(specials)
        self._names = {BOS: "<bos>", EOS: "<eos>", BROKEN: "<broken>", FATAL: "<fatal>"}
        self._ids = {name: VOCAB_SIZE + i for i, name in enumerate(specials)}
        self._names |= {token_id: name for name, token_id in self._ids.items()}

    def encode(self, text: str, add_special_tokens: bool) -> list[int]:
        parts = re.split("(" + "|".join(map(re.escape, self._ids)) + ")", text) if self._ids else [text]
        ids = [i for part in parts for i in ([self._ids[part]] if part in self._ids else part.encode())]
        return [BOS] * add_special_tokens + ids

    def decode(self, ids: Sequence[int], skip_special_tokens: bool) -> str:
        text = b"".join(self.token_bytes(i) for i in ids if i < 256 or not skip_special_tokens)
        return text.decode(errors="replace")

    def token_bytes(self, token_id: int) -> bytes:
        if token_id == BROKEN:
            raise RuntimeError("a token without text")
        return bytes([token_id]) if token_id < 256 else (self.id_to_token(token_id) or "").encode()

    def id_to_token(self, token_id: int) -> str | None:
        return None if token_id == BROKEN else self._names.get(token_id) or chr(token_id)

    def token_to_id(self, token: str) -> int | None:
        return next((token_id for token_id, name in self._names.items() if name == token), None)

    def is_special(self, token_id: int) -> bool:
        return token_id >= 256 and token_id != BROKEN

    def is_byte(self, token_id: int) -> bool:
        return False


def answer_to(prompt: str, encode: Callable[[str], list[int]]) -> list[int] | None:
    """The tokens that a prompt asks for; None for endless ones."""
    if "LOOP(" in prompt:
        return None
    if "BREAK(" in prompt:
        return [ord("o"), BROKEN, EOS]
    if "KILL(" in prompt:
        return [FATAL]
    if "STALL(" in prompt or "HANG(" in prompt:
        return [STALL if "STALL(" in prompt else HANG, EOS]
    said = prompt.rpartition("SAY(")[2].partition(")YAS")[0] if "SAY(" in prompt else "ok"
    return [*encode(said), EOS]


class RecitingExecutor(Executor):
    """Keeps the tokens of each slot, as a device keeps their K and V, and so knows how far each answer has come."""

    def __init__(self, step_s: float, num_blocks: int, *, is_led: bool = False) -> None:
        """If it `is_led`, it writes the one token that a mask leaves. Otherwise it ignores masks."""
        self.is_led = is_led
        self.limits = ExecutorLimits(16, num_blocks, max_num_seqs=64, max_num_batched_tokens=4096)
        self.step_s = step_s
        self.prompts: dict[bytes, tuple[int, list[int] | None]] = {}
        self._slots = np.zeros((num_blocks + 1, 16), np.int32)

    def learn(self, prompt: Sequence[int], answer: list[int] | None) -> None:
        key = np.asarray(prompt, np.int32).tobytes()
        # The newest last, even if it was known: it may begin like one that has come since. The oldest are answered.
        known = {other: said for other, said in list(self.prompts.items())[-1000:] if other != key}
        self.prompts = {**known, key: (len(prompt), answer)}

    def step(self, batch: StepBatch) -> StepOutput:
        time.sleep(self.step_s)
        sequence_of = np.repeat(np.arange(len(batch.context_len)), np.diff(batch.query_start))
        blocks = batch.block_tables[sequence_of, batch.positions // 16]
        self._slots[blocks, batch.positions % 16] = batch.token_ids
        targets = batch.sampling.target if batch.sampling.target is not None else np.full(len(batch.logits_rows), -1)
        tokens = [
            int(target) if target >= 0 else self._next_token(batch, sequence_of[row], int(batch.positions[row]) + 1)
            for row, target in zip(batch.logits_rows, targets, strict=True)
        ]
        if self.is_led and (masks := batch.sampling.masks) is not None:
            masks.wait()
            left = [np.flatnonzero(np.unpackbits(bits.view(np.uint8), bitorder="little")) for bits in masks.bits]
            tokens = [
                int(left[mask][0]) if mask >= 0 and len(left[mask]) == 1 else token
                for token, mask in zip(tokens, masks.index, strict=True)
            ]
        if FATAL in tokens:
            raise RuntimeError("the device is gone")
        if HANG in tokens:
            threading.Event().wait()
        if STALL in tokens:
            time.sleep(1)
            tokens = [EOS if token == STALL else token for token in tokens]
        return self._output(batch, tokens)

    def _next_token(self, batch: StepBatch, sequence: int, length: int) -> int:
        context = self._slots[batch.block_tables[sequence]].ravel()[:length]
        for key, (prompt_len, answer) in reversed(self.prompts.items()):
            if length >= prompt_len and context[:prompt_len].tobytes() == key:
                return ord("x") if answer is None else answer[min(length - prompt_len, len(answer) - 1)]
        raise AssertionError("a prompt that was never submitted")

    def _output(self, batch: StepBatch, tokens: list[int]) -> StepOutput:
        output = StepOutput.empty(batch.sampling)
        output.token_ids[:] = tokens
        if output.ranks is not None:
            output.ranks[:] = 1
        if output.logprobs is not None and output.top_ids is not None and output.top_logprobs is not None:
            ranks = np.arange(output.top_ids.shape[1])
            output.top_ids[:] = (output.token_ids[:, None] + ranks) % 128
            output.logprobs[:], output.top_logprobs[:] = -0.25, -0.25 - ranks
        return output

    def copy_blocks(self, pairs: NDArray[np.int32], group: int = 0) -> None:
        self._slots[pairs[:, 1]] = self._slots[pairs[:, 0]]

    def warm_up(self, progress: Callable[[int, int], None]) -> None:
        pass

    def start(self, batch: StepBatch) -> OnWait:
        return OnWait(partial(self.step, batch))

    def close(self) -> None:
        pass


class ScriptedEngine(Engine):
    """The engine, with its device told beforehand what each prompt asks for."""

    def __init__(
        self,
        *,
        step_s: float = 0.0,
        max_model_len: int = 8192,
        num_blocks: int = 2048,
        template: str | None = None,
        step_timeout_s: float | None = None,
        specials: Sequence[str] = (),
        ends: Sequence[str] = (),
        is_led: bool = False,
        media: Any = None,
    ) -> None:
        """`ends` are the `specials` that end an answer, as <eos> does. `media` reads images, which nobody looks at."""
        self.executor = RecitingExecutor(step_s, num_blocks, is_led=is_led)
        special = {"bos_token": "<bos>", "eos_token": "<eos>"}
        super().__init__(
            self.executor,
            Tokenizer(ByteBackend(specials), special, CHAT_TEMPLATE if template is None else template or None),
            model_name="scripted",
            max_model_len=max_model_len,
            vocab_size=VOCAB_SIZE + len(specials),
            eos_token_ids=frozenset({EOS, *(VOCAB_SIZE + list(specials).index(name) for name in ends)}),
            generation_defaults={"temperature": 0.5},
            max_step_ms=75.0,
            enable_prefix_caching=True,
            step_timeout_s=step_timeout_s,
            info={"device": "scripted", "kv_cache_dtype": "int32"},
        )
        self.media = media
        self.requests: list[Request] = []

    def submit(self, request: Request) -> RequestStream:
        self.requests.append(request)
        prompt = list(request.prompt_token_ids)
        if all(0 <= token < self.tokenizer.vocab_size for token in prompt):
            text = self.tokenizer.decode(prompt, skip_special_tokens=False)
            self.executor.learn(prompt, answer_to(text, lambda said: self.tokenizer.encode(said, False)))
        return super().submit(replace(request, media=()))


class ScriptedLoad(contextlib.nullcontext):
    """In place of an EngineLoad, made with its options."""

    def __enter__(self) -> ScriptedLoad:
        self._engine = ScriptedEngine(step_s=0.01, step_timeout_s=self.enter_result.step_timeout)
        self.tokenizer = self._engine.tokenizer
        return self

    def engine(self) -> ScriptedEngine:
        return self._engine


def serve(arguments: list[str]) -> int:
    """`tidewheel serve` around a ScriptedEngine, for tests that need a process."""
    from tidewheel.server.batches import runner
    from tidewheel.server.commands import serve as start
    from tidewheel.server.commands.cli import main

    start.EngineLoad = ScriptedLoad
    runner.Claims = partial(runner.Claims, **json.loads(os.environ.get(CLAIMS, "{}")))
    for name, seconds in json.loads(os.environ.get(SECONDS, "{}")).items():
        module, _, constant = name.partition(":")
        setattr(importlib.import_module(f"tidewheel.{module}"), constant, seconds)
    return main(["serve", "--model", str(Path(__file__).parent), *arguments])


if __name__ == "__main__":
    import sys

    sys.exit(serve(sys.argv[1:]))
