"""The functions that a step runs on the device: compiled once for each size, and replayed where there are graphs."""

from __future__ import annotations

import logging
import sys
from collections import Counter
from collections.abc import Callable, Hashable, Iterator, Sequence
from functools import partial
from types import FunctionType
from typing import Any, Literal, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ...errors import DeviceError
from ...files.wording import one_line
from ..bucket_stats import BucketStats, BucketUse
from ..bucketing import Bucket
from .adapter import Adapter, operations_of
from .decoder import GraphDecoder
from .sampler import greedy, sample
from .staging import Padding, Staging, num_inputs, pack_padding
from .warm_up import Phase

logger = logging.getLogger(__name__)

Head = Literal["greedy", "sampled", "logits"]
_Function = tuple[Any, ...]  # the function, and its inputs

NUM_PARAMETERS = 5  # of a row that is sampled on the device, see `sample`
_FEWEST_ROWS = 8
_MAX_ROWS = 256
_MAX_LOGITS_ROWS = 64  # to keep or to sort: takes up to 8 bytes x vocabulary x rows several times
_COPIES = (1, 8, 64)  # blocks, or slots of state, that are copied together


class Launches:
    """The launches of a loaded decoder. They are padded: bodies to buckets, the others to powers of two.

    They write to the KV cache, to recurrent state, to `decoder.hidden`, to `decoder.tokens` or to `logits [rows,
    vocab]`, which all stay where they are, as do their inputs. A `padding.state` of 0 says that there is no state.
    """

    def __init__(
        self,
        adapter: Adapter,
        decoder: GraphDecoder,
        buckets: Sequence[Bucket],
        padding: Padding,
        block_size: int,
    ) -> None:
        device = adapter.device
        self.tokens, self.max_tokens = decoder.tokens, len(decoder.tokens) - 1  # the last is for padding
        most = min(_padded_rows(self.max_tokens), _MAX_ROWS)
        few = min(most, _MAX_LOGITS_ROWS)
        self.max_rows: dict[Head, int] = {"greedy": most, "sampled": few, "logits": few}
        self.logits = torch.zeros((few + 1, decoder.vocab_size), device=device)
        sizes = [num_inputs(bucket, len(padding.blocks)) for bucket in buckets]
        self._inputs = Staging(torch.int32, device, max([*sizes, 2 * most, 2 * _COPIES[-1]]))
        wide = torch.float64 if adapter.has_float64 else torch.float32
        self._parameters = Staging(wide, device, NUM_PARAMETERS * few)
        self._adapter, self._decoder = adapter, decoder
        self._padding, self._block_size = padding, block_size
        self._compiled: dict[Hashable, _Launch] = {}
        self._num_after_warm_up: int | None = None
        self._num_outside = 0
        self._num_launches: Counter[tuple[Phase, Bucket]] = Counter()
        self._num_tokens: Counter[tuple[Phase, Bucket]] = Counter()

    def stats(self) -> BucketStats:
        """What was run since `finish_warm_up`. Any thread may ask."""
        launches = sorted(self._num_launches.items())  # copied at once: steps go on meanwhile
        uses = (BucketUse(*key, count, self._num_tokens[key]) for key, count in launches)
        return BucketStats(tuple(uses), self._num_outside, self._num_after_warm_up or 0)

    def begin_step(self) -> None:
        """Begin a step. The device has done all that the step before the last one asked it for."""
        self._inputs.begin_step()
        self._parameters.begin_step()

    def free_memory(self) -> int:
        """Free bytes of the device's memory."""
        self._adapter.synchronize()
        return self._adapter.memory().free

    def run(self, phase: Phase, bucket: Bucket) -> None:
        """Compile a bucket's launch, and run it on padding."""
        self._write_padding(bucket, self._body(phase, bucket).inputs[0])
        self._body(phase, bucket).run()

    def capture(self, phase: Phase, bucket: Bucket) -> None:
        """Keep the graph of a bucket's launch."""
        self._write_padding(bucket, self._body(phase, bucket).inputs[0])
        self._body(phase, bucket).capture()

    def run_largest(self, buckets: Sequence[Bucket]) -> None:
        """Run the launches that take the most memory on padding, without compiling them."""
        attending = max(buckets, key=lambda bucket: bucket.num_tokens * bucket.width)
        for bucket in {max(buckets, key=lambda bucket: bucket.num_tokens), attending}:
            staged = self._inputs.inputs(num_inputs(bucket, len(self._padding.blocks)))
            self._write_padding(bucket, staged)
            self._adapter.run(partial(self._decoder.forward, staged, *bucket))
        for head, rows in self.max_rows.items():
            function, *inputs = self._head_function(head, rows)
            self._write_apart(np.zeros(2 * rows, np.int32), inputs[0])
            self._adapter.run(partial(function, *inputs))

    def warm_up_small(self, captures: bool) -> None:
        """Compile and run all launches but the bodies, and capture them if the device does."""
        for head, most in self.max_rows.items():
            for rows in _sizes_up_to(most):
                self._warm_up(self._head(head, rows), captures)
        groups = [*range(len(self._padding.blocks)), *([None] if self._padding.state else [])]
        for group in groups:
            for count in _COPIES:
                padding = np.full(2 * count, self._padding_of(group), np.int32)
                self._write_apart(padding, self._copies(group, count).inputs[0])
                self._warm_up(self._copies(group, count), captures)

    def finish_warm_up(self) -> None:
        """From now on, what is compiled keeps people waiting: count it."""
        self._adapter.synchronize()
        self._num_after_warm_up = 0

    def body(self, phase: Phase, bucket: Bucket, packed: NDArray[np.int32], num_tokens: int) -> None:
        """Run the layers on packed inputs of a bucket. `num_tokens` of its tokens are not padding."""
        self._num_launches[phase, bucket] += 1
        self._num_tokens[phase, bucket] += num_tokens
        launch = self._body(phase, bucket)
        self._inputs.write(packed, launch.inputs[0])
        launch.run()

    def body_outside(self, bucket: Bucket, packed: NDArray[np.int32]) -> None:
        """Run the layers on a size that no bucket has, as operations one by one."""
        self._num_outside += 1
        inputs = self._inputs.inputs(len(packed))
        self._inputs.write(packed, inputs)
        self._adapter.run(lambda: self._decoder.forward(inputs, *bucket))

    def head(
        self,
        head: Head,
        rows: NDArray[np.int32],
        first: int,
        parameters: NDArray[np.float64] | None = None,
    ) -> None:
        """Write the tokens or the logits that follow the hidden states in `rows [R]`, at most `max_rows[head]`.

        They are written from place `first` on. A sampled row has a column of `parameters [5, R]`, see `sample`.
        """
        count = _padded_rows(len(rows))
        launch = self._head(head, count)
        padded = np.zeros((2, count), np.int32)
        padded[1] = (self.logits if head == "logits" else self._decoder.tokens).shape[0] - 1
        padded[:, : len(rows)] = rows, np.arange(first, first + len(rows))
        self._inputs.write(padded.ravel(), launch.inputs[0])
        if parameters is not None:
            values = np.zeros((NUM_PARAMETERS, count))
            values[:, : len(rows)] = parameters
            self._parameters.write(values.ravel(), launch.inputs[1])
        launch.run()

    def copy(self, pairs: NDArray[np.int32], group: int | None) -> None:
        """Copy KV blocks of a cache group, or for None slots of recurrent state, `pairs [N, 2]`, at once.

        None is copied both from and to.
        """
        for start in range(0, len(pairs), _COPIES[-1]):
            some = pairs[start : start + _COPIES[-1]]
            count = min(size for size in _COPIES if size >= len(some))
            padded = np.full((count, 2), self._padding_of(group), np.int32)
            padded[: len(some)] = some
            launch = self._copies(group, count)
            self._inputs.write(padded.ravel(), launch.inputs[0])
            launch.run()

    def _padding_of(self, group: int | None) -> int:
        return self._padding.state if group is None else self._padding.blocks[group]

    def _write_padding(self, bucket: Bucket, inputs: Tensor) -> None:
        self._write_apart(pack_padding(bucket, self._padding, self._block_size), inputs)

    def _write_apart(self, values: NDArray[np.int32], inputs: Tensor) -> None:
        """Write inputs outside of a step."""
        self._adapter.synchronize()
        self._inputs.begin_step()
        self._inputs.write(values, inputs)

    def _body(self, phase: Phase, bucket: Bucket) -> _Launch:
        is_whole = not self._adapter.compiles_only_layers
        return self._launch((phase, bucket), lambda: self._body_function(bucket), compiles=is_whole)

    def _body_function(self, bucket: Bucket) -> _Function:
        def body(staged: Tensor) -> None:
            decoder.forward(staged, num_sequences, query_len, width, layers)

        decoder, (num_sequences, query_len, width) = self._decoder, bucket
        layers = decoder.compiled_layers(self._compile) if self._adapter.compiles_only_layers else None
        return body, self._inputs.inputs(num_inputs(bucket, len(self._padding.blocks)))

    def _head(self, head: Head, rows: int) -> _Launch:
        return self._launch((head, rows), lambda: self._head_function(head, rows))

    def _head_function(self, head: Head, rows: int) -> _Function:
        def greedy_head(staged: Tensor) -> None:
            source, target = staged.view(2, -1).unbind()
            tokens.index_put_((target.long(),), greedy(decoder.logits(source)).int())

        def sampled_head(staged: Tensor, parameters: Tensor) -> None:
            source, target = staged.view(2, -1).unbind()
            drawn = sample(decoder.logits(source), parameters.view(NUM_PARAMETERS, -1), keep)
            tokens.index_put_((target.long(),), drawn.int())

        def logits_head(staged: Tensor) -> None:
            source, target = staged.view(2, -1).unbind()
            logits.index_put_((target.long(),), decoder.logits(source))

        decoder, tokens, logits = self._decoder, self._decoder.tokens, self.logits
        keep = operations_of(self._adapter).keep
        staged = self._inputs.inputs(2 * rows)
        if head == "greedy":
            return greedy_head, staged
        if head == "logits":
            return logits_head, staged
        return sampled_head, staged, self._parameters.inputs(NUM_PARAMETERS * rows)

    def _copies(self, group: int | None, count: int) -> _Launch:
        def copy_blocks(staged: Tensor) -> None:
            blocks = staged.long().view(-1, 2, 1)
            slots = blocks * block_size + torch.arange(block_size, device=staged.device)
            source, target = slots.unbind(1)
            decoder.copy_slots(source.flatten(), target.flatten(), 0 if group is None else group)

        def copy_states(staged: Tensor) -> None:
            source, target = staged.long().view(-1, 2).unbind(1)
            decoder.copy_states(source, target)

        decoder, block_size = self._decoder, self._block_size
        function = copy_states if group is None else copy_blocks
        return self._launch(("copies", group, count), lambda: (function, self._inputs.inputs(2 * count)))

    def _launch(self, key: Hashable, function: Callable[[], _Function], *, compiles: bool | None = None) -> _Launch:
        if (launch := self._compiled.get(key)) is None:
            if self._num_after_warm_up is not None:
                self._num_after_warm_up += 1
            call, *inputs = function()
            if compiles is None:  # graphs make the calls of a launch cheap that is not compiled as one function
                compiles = not (self._adapter.compiles_only_layers and self._adapter.captures)
            call = self._compile(call) if compiles else call
            launch = self._compiled[key] = _Launch(self._adapter, call, *inputs)
        return launch

    def _compile(self, function: Callable[..., Any]) -> Callable[..., Any]:
        return self._adapter.compile(_with_own_code(function))

    def _warm_up(self, launch: _Launch, captures: bool) -> None:
        launch.run()
        if captures:
            launch.capture()


class _Launch:
    """A function with its inputs, tensors that stay where they are."""

    def __init__(self, adapter: Adapter, function: Callable[..., None], *inputs: Tensor) -> None:
        self.inputs = inputs
        self._adapter = adapter
        self._call: Callable[[], None] = partial(function, *inputs)
        self._replay: Callable[[], None] | None = None

    def run(self) -> None:
        """Replay the graph if there is one. Raises DeviceError if torch.compile fails."""
        if self._replay is not None:
            self._replay()
            return
        try:
            self._adapter.run(self._call)
        except Exception as error:
            if _is_of_compiling(error):
                raise _compile_error(self._adapter.name, error) from error
            raise

    def capture(self) -> None:
        """Keep the graph."""
        self._replay = self._adapter.capture(self._call)


def _is_of_compiling(error: Exception) -> bool:
    errors = sys.modules.get("torch._dynamo.exc")  # which torch.compile imports
    return errors is not None and isinstance(error, errors.TorchDynamoException)


def _compile_error(device: str, error: Exception) -> DeviceError:
    logger.debug("torch.compile has failed", exc_info=error)
    cause = getattr(error, "inner_exception", error)
    said = one_line(str(cause).strip().partition("\n\n")[0])  # torch's own advice is behind it
    return DeviceError(
        f"torch.compile cannot make code for the {device} device: {type(cause).__name__}: {said}. Fix that "
        "(--log-level debug shows more), or use --enforce-eager, which does not need it"
    )


def _with_own_code(function: Callable[..., Any]) -> Callable[..., Any]:
    """The same function. torch.compile keeps what it makes by code object, and gives up after a few shapes of one."""
    plain = cast(FunctionType, function)
    return FunctionType(plain.__code__.replace(), plain.__globals__, plain.__name__, closure=plain.__closure__)


def _padded_rows(count: int) -> int:
    return max(_FEWEST_ROWS, 1 << (count - 1).bit_length())


def _sizes_up_to(most: int) -> Iterator[int]:
    size = _FEWEST_ROWS
    while size <= most:
        yield size
        size *= 2
