"""The model to evaluate, and its reference: found, checked against each other, and loaded beside each other."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

from tidewheel.engine.adapters.options import LoraOptions
from tidewheel.engine.devices.cache_split import max_states
from tidewheel.engine.devices.executor import Executor
from tidewheel.engine.encoders.detection import is_encoder
from tidewheel.engine.errors import DeviceError, ModelError, TidewheelError
from tidewheel.engine.files.wording import in_bytes, shown
from tidewheel.engine.loading.load_progress import WarmUpProgress
from tidewheel.engine.loading.opened_model import OpenedModel, open_model
from tidewheel.engine.machine.memory import available_memory_bytes
from tidewheel.engine.options import EngineOptions
from tidewheel.engine.speculation.options import SpeculativeOptions
from tidewheel.engine.text.tokenizer import Tokenizer

from ..bench.model import tensor_bytes
from .distributions import ROWS

FLOAT32 = "float32"
_FEW_ROWS = 4
_ROUND_TOKENS = 128  # a sequence's last block is rarely full, whatever the device's block size


@dataclass(frozen=True)
class Subject:
    """A model that was found, and the options that it is loaded with."""

    name: str
    opened: OpenedModel
    options: EngineOptions

    @property
    def weight_bytes(self) -> int:
        """What all weights take as the device keeps them."""
        return sum(tensor_bytes(self.opened).values())

    @property
    def max_context(self) -> int:
        """The longest window, in tokens."""
        return self.options.max_model_len or self.opened.spec.max_positions

    @property
    def max_num_seqs(self) -> int:
        """As many rows go through the model's head at a time.

        Where sequences have states, each more takes memory, and other devices than the CPU warm up sizes for each.
        """
        return ROWS if self.opened.device.name == "cpu" and not self.opened.slot_bytes else _FEW_ROWS

    def kv_cache_bytes(self, context: int) -> int:
        """What the cache takes for one window, recurrent state included."""
        tokens = -(-context // _ROUND_TOKENS) * _ROUND_TOKENS + _ROUND_TOKENS
        # Twice the states, because they get at most half of the cache.
        return tokens * self.opened.kv_bytes_per_token + 2 * self.opened.slot_bytes * max_states(self.max_num_seqs)

    def load(self, context: int) -> Executor:
        """Load it, for one window at a time. Raises DeviceError."""
        executor = self.opened.load(
            self.options,
            kv_cache_bytes=self.kv_cache_bytes(context),
            max_model_len=context,
            max_num_seqs=self.max_num_seqs,
            max_num_batched_tokens=max(context, ROWS),
        )
        try:
            with WarmUpProgress() as progress:
                executor.warm_up(progress.report)
        except BaseException:
            executor.close()
            raise
        return executor


def find(options: EngineOptions, name: str) -> Subject:
    """Find the model. Raises TidewheelError for what is not evaluated, and what `open_model` raises."""
    if options.pipeline.stages > 1:
        raise DeviceError("tidewheel eval runs one process: leave --pipeline-parallel-size out")
    if options.lora != LoraOptions():
        raise TidewheelError("tidewheel eval measures a model without adapters: leave --enable-lora and --lora-* out")
    if options.speculative != SpeculativeOptions():
        raise TidewheelError("draft tokens change no probability: leave --speculative-config out")
    if is_encoder(Path(options.model)):
        raise ModelError(
            f"{options.model} is an encoder, which computes vectors or scores and predicts no next token: name a "
            "model that generates text"
        )
    return Subject(name, open_model(options), options)


def find_reference(reference: str, of: Subject) -> Subject:
    """The reference: the model itself, or another one, in float32. Raises ModelError if it has other tokens."""
    options = replace(
        of.options,
        dtype="float32",
        quantization=None,
        quantization_group_size=None,
        quantization_zero_points=False,
        kv_cache_dtype="float32",
        quantization_param_path=None,
    )
    if reference == FLOAT32:
        found = find(options, FLOAT32)
    else:
        own = replace(
            options,
            model=reference,
            revision=None,
            tokenizer=None,
            tokenizer_revision=None,
            hf_overrides=None,
            rope_scaling=None,
            rope_theta=None,
        )
        found = find(own, reference)
        _require_same_tokens(found, of)
    return replace(found, opened=found.opened.dequantized())


def require_memory(subjects: list[Subject], context: int) -> None:
    """Raises ModelError if this machine's memory cannot hold all of them together."""
    own = [subject for subject in subjects if not subject.opened.device.capabilities.own_memory]
    needed = sum(subject.weight_bytes + subject.kv_cache_bytes(context) for subject in own)
    available = available_memory_bytes()
    if available is not None and needed > available:
        both = " and its reference together" if len(own) > 1 else ""
        raise ModelError(
            f"the model{both} take{'s' * (not both)} {in_bytes(needed)}, and {in_bytes(available)} of memory is "
            f"available: {'take a smaller reference, or leave --reference out' if both else 'take a smaller model'}"
        )


def _require_same_tokens(reference: Subject, of: Subject) -> None:
    ours, theirs = of.opened.spec.vocab_size, reference.opened.spec.vocab_size
    refused = (
        f"--reference {reference.name} has another vocabulary than {of.name}, so their predictions cannot be compared"
    )
    if ours != theirs:
        raise ModelError(f"{refused}: {theirs} tokens, and the model has {ours}; take a model of the same family")
    tokenizer, other = of.opened.tokenizer(), reference.opened.tokenizer()
    for token_id in range(ours):
        mine, its = tokenizer.id_to_token(token_id), other.id_to_token(token_id)
        if mine != its:
            raise ModelError(
                f"{refused}: token {token_id} is {shown(its)} in it and {shown(mine)} in the model; take a model of "
                "the same family"
            )


def tokenizer_of(subject: Subject) -> Tokenizer:
    """The model's tokenizer. Raises ModelError if it has none, or it has no text."""
    tokenizer = subject.opened.tokenizer()
    if not tokenizer.has_text:
        raise ModelError("a text is measured in tokens: leave --skip-tokenizer-init out")
    return tokenizer
