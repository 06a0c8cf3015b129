"""A draft model: found, checked against the model that it drafts for, and loaded beside it."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import get_args

from msgspec import Struct

from ..adapters.options import LoraOptions
from ..cancellation import Cancellation
from ..devices.cache_split import GroupBytes
from ..devices.executor import DraftExecutor, Executor
from ..devices.limits import ExecutorLimits, ExecutorOptions
from ..devices.parallel_options import ParallelOptions
from ..errors import DeviceError, ModelError
from ..options import EngineOptions
from ..speculation.draft_model import ModelDrafter
from ..speculation.options import DraftModel, SpeculativeOptions
from ..text.tokenizer import Tokenizer
from ..weights.quantization import Method
from .load_progress import LoadProgress, ReportedWeights
from .opened_model import OpenedModel, open_model

logger = logging.getLogger(__name__)


class OpenedDraft(Struct, frozen=True):
    """A draft model that may draft for the model `target`; its vocabulary and its weights are still to be read.

    `options` are those that it was opened with.
    """

    asked: DraftModel
    options: EngineOptions
    model: OpenedModel
    target: OpenedModel

    def with_own_bytes(self, groups: Sequence[GroupBytes]) -> list[GroupBytes]:
        """The target's cache groups, with what the draft model keeps beside the first of them."""
        first, *others = groups
        return [GroupBytes(first.window, first.bytes_per_token + self.model.kv_bytes_per_token), *others]

    def require_vocabulary(self, tokenizer: Tokenizer, own: Tokenizer) -> None:
        """Raises ModelError unless the draft model's `own` tokens are those of the target's `tokenizer`."""
        if not tokenizer.has_text:
            ours, theirs = self.target.spec.vocab_size, self.model.spec.vocab_size
            if ours != theirs:
                raise ModelError(f"{self._other_tokens}: it has {theirs} of them, and the model has {ours}")
            return
        for token_id in range(max(tokenizer.vocab_size, own.vocab_size)):
            token, other = tokenizer.id_to_token(token_id), own.id_to_token(token_id)
            if token != other:
                raise ModelError(
                    f"{self._other_tokens}: token {token_id} is {_shown(token)} in the model and {_shown(other)} in it"
                )

    @property
    def _other_tokens(self) -> str:
        return (
            f"--speculative-config: the draft model {self.asked.model} has a different vocabulary than the model "
            "that it drafts for, so use one of the same family"
        )

    def executor_options(self, limits: ExecutorLimits, max_model_len: int) -> ExecutorOptions:
        """Its device's options if the target serves contexts of `max_model_len` tokens.

        `limits` are the target's.
        """
        return self.model.executor_options(
            None,
            max_model_len=self._longest(max_model_len),
            max_num_seqs=limits.max_num_seqs,
            max_num_batched_tokens=limits.max_num_batched_tokens,
            num_blocks=limits.num_blocks,
        )

    def load(self, beside: Executor, max_model_len: int, cancellation: Cancellation) -> ModelDrafter:
        """Load its weights, beside the target's executor that serves contexts of `max_model_len` tokens.

        Raises DeviceError, naming what is not supported.
        """
        model, device = self.model, self.model.device
        executor_options = self.executor_options(beside.limits, max_model_len)
        with LoadProgress(self.asked.model, model.weight_bytes) as progress:
            weights = ReportedWeights(model.weights, model.spec, progress)
            executor = device.load_draft(model.spec, weights, executor_options, beside, cancellation)
        return self.drafter(executor, beside.limits, max_model_len)

    def drafter(
        self,
        executor: DraftExecutor,
        limits: ExecutorLimits,
        max_model_len: int,
        clock: Callable[[], float] = time.perf_counter,
    ) -> ModelDrafter:
        """The drafter that uses its loaded `executor`. See `executor_options` and `ModelDrafter`."""
        max_draft_tokens = limits.draft_limit
        num_tokens = self.asked.num_tokens if max_draft_tokens is None else min(self.asked.num_tokens, max_draft_tokens)
        longest = self._longest(max_model_len)
        logger.info(
            "%s (%s, %s) drafts up to %d tokens a step, in contexts of up to %d tokens",
            self.asked.model,
            self.model.spec.family,
            self.model.kept_as,
            num_tokens,
            longest,
        )
        return ModelDrafter(
            executor,
            num_tokens,
            vocab_size=self.target.spec.vocab_size,
            own_vocab_size=self.model.spec.vocab_size,
            max_context=longest,
            clock=clock,
        )

    def _longest(self, max_model_len: int) -> int:
        return min(self.model.spec.max_positions, max_model_len, self.asked.max_context or max_model_len)


def open_draft(options: EngineOptions, asked: DraftModel, target: OpenedModel) -> OpenedDraft:
    """Find a draft model for `target`. Raises ModelError and DeviceError if it cannot draft for it, saying why."""
    device = target.device
    if not device.capabilities.draft_models:
        raise DeviceError(
            f"--speculative-config: the {device.name} device has no draft models; take --device cpu, or "
            '{"method": "ngram"}'
        )
    parallel = next(
        (group for group in options.device_options if isinstance(group, ParallelOptions)), ParallelOptions()
    )
    if asked.tensor_parallel_size not in (1, parallel.tensor_parallel_size):
        raise DeviceError(
            f"--speculative-config: draft_tensor_parallel_size {asked.tensor_parallel_size} must be 1 or that of the "
            f"model, {parallel.tensor_parallel_size}: both compute on the same cores"
        )
    _require_full_attention(target, f"the model {options.model}", "cannot have a draft model", beside_others=True)
    # A checkpoint's own method is found in its files.
    inherited = options.quantization if options.quantization in get_args(Method) else None
    own = replace(
        options,
        model=asked.model,
        revision=asked.revision,
        quantization=asked.quantization or inherited,
        quantization_param_path=None,
        tokenizer=None,
        tokenizer_revision=None,
        hf_overrides=None,
        rope_scaling=None,
        rope_theta=None,
        disable_sliding_window=False,
        device=device.name,
        max_model_len=None,
        lora=LoraOptions(),
        speculative=SpeculativeOptions(),
    )
    model = open_model(own)
    _require_full_attention(model, f"the model {asked.model}", "cannot be a draft model")
    return OpenedDraft(asked, own, model, target)


def _shown(token: str | None) -> str:
    return "none" if token is None else repr(token)


def _require_full_attention(model: OpenedModel, what: str, cannot: str, *, beside_others: bool = False) -> None:
    """Both models keep K and V of the same tokens in the same blocks. The large one may have other layers beside."""
    windows = [shape.window for shape in model.spec.caches()]
    if model.spec.state_bytes and not beside_others:
        why = "it has recurrent layers, and only the large model's state can go back before a rejected draft token"
    elif None not in windows:
        why = "none of its layers sees all tokens"
    elif any(windows) and not beside_others:
        why = "some of its layers see only a window of the tokens"
    else:
        return
    raise ModelError(f"--speculative-config: {what} {cannot}: {why}")
