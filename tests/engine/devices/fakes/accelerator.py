"""A software model of an accelerator under torch, as strict as the vendors' documentation.

Its tensors hold ordinary CPU tensors inside. They say that they are meta tensors, whatever the device is called:
a torch that has no accelerator initializes no other device. All their operations pass through `Accelerator.run`. It
checks that all operands lie on the device, charges scripted memory, and counts what would be compiled. While a graph is
captured, operations that graphs cannot hold are refused, and nothing is computed.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_map_only, tree_unflatten

if TYPE_CHECKING:
    from engine.devices.fakes.recording import Recording

aten = torch.ops.aten
_COPIES = {aten.copy_.default, aten._to_copy.default}
_STAND_IN = torch.device("meta")
_BOOLEAN = {torch.bool, torch.uint8}
GIB = 2**30


class FakeDeviceError(RuntimeError):
    """What the device would refuse."""


class Allocation:
    """Memory of the device. It is given back when no tensor has it any more."""

    def __init__(self, accelerator: Accelerator, inner: Tensor) -> None:
        self._accelerator = accelerator
        self.num_bytes = inner.untyped_storage().nbytes()
        self.geometry = _geometry(inner)
        self.recording = accelerator.recording
        self._taken = False
        accelerator.take(self.num_bytes)
        self._taken = True

    def __del__(self) -> None:
        if self._taken:
            self._accelerator.take(-self.num_bytes)


class DeviceTensor(Tensor):
    """A tensor of the device, around the CPU tensor that has its values."""

    inner: Tensor
    allocation: Allocation
    accelerator: Accelerator

    __torch_function__ = torch._C._disabled_torch_function_impl

    @staticmethod
    def __new__(cls, inner: Tensor, allocation: Allocation, accelerator: Accelerator) -> DeviceTensor:
        tensor: DeviceTensor = torch.Tensor._make_wrapper_subclass(
            cls,
            inner.size(),
            strides=inner.stride(),
            storage_offset=inner.storage_offset(),
            dtype=inner.dtype,
            device=_STAND_IN,
        )
        tensor.inner, tensor.allocation, tensor.accelerator = inner, allocation, accelerator
        return tensor

    @property
    def is_part(self) -> bool:
        """Whether this is a view of a tensor with another shape."""
        return _geometry(self.inner) != self.allocation.geometry

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        composed = func.decompose(*args, **(kwargs or {}))
        if composed is not NotImplemented:
            return composed
        operand = next(leaf for leaf in tree_flatten((args, kwargs))[0] if isinstance(leaf, DeviceTensor))
        return operand.accelerator.run(func, args, kwargs or {})

    def __repr__(self, **_: Any) -> str:
        return f"DeviceTensor({list(self.shape)}, {self.dtype}, {self.accelerator.device})"


class Accelerator:
    """A device and its runtime. `compiled` are the things that were compiled or captured, in order.

    `compiles_operations`: operations outside of compiled functions are compiled one by one, when their shapes are new.
    `capture_refuses_parts`: a graph may not write to a view of a tensor. `pins_memory`: the host may have memory that
    the device copies from and to by itself. `refuses` says why an operation is not possible, if it is not; it is told
    the operands, and whether they are within a compiled function. Memory is in bytes.
    """

    def __init__(
        self,
        kind: str,
        total_bytes: int = GIB,
        *,
        compiles_operations: bool = False,
        capture_refuses_parts: bool = False,
        pins_memory: bool = True,
        refuses: Callable[[Any, Sequence[Tensor], bool], str | None] = lambda func, operands, compiled: None,
    ) -> None:
        self.device = torch.device(kind, 0)
        self.total_bytes = total_bytes
        self.capture_refuses_parts = capture_refuses_parts
        self.pins_memory = pins_memory
        self._refuses = refuses
        self.taken_bytes = self.peak_bytes = 0
        self.compiled: list[object] = []
        self.compiles_operations = compiles_operations
        self.recording: Recording | None = None
        self.synchronized = 0
        self._known: set[object] = set()
        self._ran: set[object] = set()
        self._lazy: list[object] | None = None
        self._tracing = False
        self._modes = threading.local()
        self._capturing_thread = 0

    # Memory.

    def take(self, num_bytes: int) -> None:
        """Take memory, or give back what is below 0. Raises OutOfMemoryError."""
        if self.taken_bytes + num_bytes > self.total_bytes:
            raise torch.OutOfMemoryError(f"{self.device} has {self.total_bytes - self.taken_bytes} bytes left")
        self.taken_bytes += num_bytes
        self.peak_bytes = max(self.peak_bytes, self.taken_bytes)

    @property
    def memory(self) -> tuple[int, int]:
        """Free and total."""
        return self.total_bytes - self.taken_bytes, self.total_bytes

    # Threads.

    def enter(self) -> None:
        """Make the calling thread one that may put tensors on the device."""
        if not hasattr(self._modes, "stack"):
            self._modes.stack = [_Operations(self), _Names(self)]
            for mode in self._modes.stack:
                mode.__enter__()

    def leave(self) -> None:
        """The other way round."""
        for mode in reversed(self._modes.__dict__.pop("stack", [])):
            mode.__exit__(None, None, None)

    # Compilation.

    def compile(self, key: object) -> bool:
        """Note that something is compiled, unless it has been. Returns whether it is new."""
        new = key not in self._known
        if new:
            self._known.add(key)
            self.compiled.append(key)
        return new

    def be_lazy(self) -> None:
        """From now on operations accumulate until `flush`, and are compiled together."""
        self._lazy = []

    def flush(self) -> None:
        """Compile what has accumulated, if the same has not been before."""
        if self._lazy:
            self.compile(tuple(self._lazy))
            self._lazy = []

    def compiled_function(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """As torch.compile with fullgraph and static shapes: compiled once for each set of shapes."""

        def run(*args: Any) -> Any:
            if self._tracing:
                return function(*args)
            if self._in_capture():
                if (function, _signature(args)) not in self._known:
                    raise FakeDeviceError(f"{function} would be compiled while a graph is captured")
                return function(*args)
            self.flush()
            self.compile((function, _signature(args)))
            self._tracing = True
            try:
                return function(*args)
            finally:
                self._tracing = False

        return run

    # Operations.

    def run(self, func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        """Run an operation of torch on tensors of the device, or refuse it."""
        leaves, _ = tree_flatten((args, kwargs))
        operands = [leaf for leaf in leaves if isinstance(leaf, DeviceTensor)]
        hosts = [leaf for leaf in leaves if isinstance(leaf, Tensor) and not isinstance(leaf, DeviceTensor)]
        if any(host.device == _STAND_IN for host in hosts):
            raise FakeDeviceError(f"a tensor was made on {self.device} in a thread that has not set the device")
        target = self._target(func, leaves, args)
        crossing = func in _COPIES and (bool(hosts) or target == "cpu")
        recording = self.recording if self._in_capture() else None
        if reason := self._refuses(func, operands, self._tracing):
            raise FakeDeviceError(f"{func}: {reason}")
        if recording or self._tracing:
            self._refuse_in_graph(func, args, kwargs, hosts, crossing)
        if not crossing and kwargs.get("device") is None and any(host.dim() > 0 for host in hosts):
            raise FakeDeviceError(f"{func} has operands on {self.device} and on the CPU")
        if func in (aten._local_scalar_dense.default, aten.equal.default) or (crossing and target == "cpu"):
            self.flush()
        inner = _Unwrapped(operands)
        plain_args, plain_kwargs = inner(args), inner(kwargs)
        if "device" in plain_kwargs:
            plain_kwargs = {**plain_kwargs, "device": "cpu", "pin_memory": False}
            plain_kwargs = {k: v for k, v in plain_kwargs.items() if k != "pin_memory" or "pin_memory" in kwargs}
        if not crossing:
            self._count(func, operands)
        if recording:
            written = [target for target in _written(func, args, kwargs) if isinstance(target, DeviceTensor)]
            result = recording.record(func, plain_args, plain_kwargs, operands, written)
            return self.wrap(result, inner, operands)
        self._ran.add((func, _signature((args, kwargs))))
        result = func(*plain_args, **plain_kwargs)
        return result if target == "cpu" else self.wrap(result, inner, operands)

    def wrap(self, result: Any, inner: _Unwrapped, operands: Sequence[DeviceTensor]) -> Any:
        """The result of an operation on inner tensors, as tensors of the device."""
        by_storage = {o.inner.untyped_storage()._cdata: o.allocation for o in operands}

        def one(tensor: Tensor) -> Tensor:
            if id(tensor) in inner.of:
                return inner.of[id(tensor)]
            allocation = by_storage.get(tensor.untyped_storage()._cdata) or Allocation(self, tensor)
            return DeviceTensor(tensor, allocation, self)

        return tree_map_only(Tensor, one, result)

    def _target(self, func: Any, leaves: Sequence[Any], args: Sequence[Any]) -> str:
        """Where the result lies: "cpu" for what leaves the device."""
        if func is aten.copy_.default:
            return "device" if isinstance(args[0], DeviceTensor) else "cpu"
        devices = [leaf for leaf in leaves if isinstance(leaf, torch.device)]
        return "cpu" if devices and devices[0].type == "cpu" else "device"

    def _in_capture(self) -> bool:
        return self.recording is not None and threading.get_ident() == self._capturing_thread

    def _refuse_in_graph(
        self, func: Any, args: Sequence[Any], kwargs: dict[str, Any], hosts: Sequence[Tensor], crossing: bool
    ) -> None:
        where = "while a graph is captured" if self.recording else "in a compiled function"
        if crossing:
            raise FakeDeviceError(f"{func} copies between the host and {self.device} {where}")
        if hosts:
            raise FakeDeviceError(f"{func} has an operand on the CPU {where}")
        masks = func in (aten.index.Tensor, aten.index_put_.default, aten.index_put.default) and any(
            index is not None and index.dtype in _BOOLEAN for index in args[1]
        )
        dynamic = torch.Tag.dynamic_output_shape in func.tags and func is not aten.index.Tensor
        if masks or dynamic or torch.Tag.data_dependent_output in func.tags:
            raise FakeDeviceError(f"{func} depends on data {where}")
        if self.recording and self.capture_refuses_parts:
            for target in _written(func, args, {}):
                if isinstance(target, DeviceTensor) and target.is_part:
                    raise FakeDeviceError(f"{func} writes to a view of a tensor {where}")
        key = (func, _signature((args, kwargs)))
        if self.recording and key not in self._ran:
            raise FakeDeviceError(f"{func} was not run on {key[1]} before a graph of it is captured")

    def _count(self, func: Any, operands: Sequence[Tensor]) -> None:
        if torch.Tag.inplace_view in func.tags or is_view(func) or not operands or self._in_capture():
            return
        key = (func, _signature(operands))
        if self._lazy is not None:
            self._lazy.append(key)
        elif self.compiles_operations and not self._tracing:
            self.compile(key)

    # Graphs.

    def begin_capture(self, recording: Recording) -> None:
        """Record what this thread asks of the device. One graph at a time."""
        if self.recording is not None:
            raise FakeDeviceError("another graph is being captured")
        self.flush()
        self.peak_bytes = self.taken_bytes
        self.recording, self._capturing_thread = recording, threading.get_ident()

    def end_capture(self) -> int:
        """No more is recorded. Returns the bytes that the graph took at most for itself."""
        self.recording = None
        return self.peak_bytes - self.taken_bytes


class _Unwrapped:
    """Arguments with inner tensors instead of the device's; `of` leads back from inner tensors, by identity."""

    def __init__(self, operands: Sequence[DeviceTensor]) -> None:
        self.of = {id(operand.inner): operand for operand in operands}

    def __call__(self, tree: Any) -> Any:
        return tree_map_only(DeviceTensor, lambda tensor: tensor.inner, tree)


class _Operations(TorchDispatchMode):
    """Leads operations that make tensors on the device to it."""

    def __init__(self, accelerator: Accelerator) -> None:
        super().__init__()
        self._accelerator = accelerator

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if not any(
            isinstance(leaf, DeviceTensor) or (isinstance(leaf, torch.device) and leaf.type == _STAND_IN.type)
            for leaf in tree_flatten((args, kwargs))[0]
        ):
            return func(*args, **kwargs)
        with self:
            composed = func.decompose(*args, **kwargs)
        return self._accelerator.run(func, args, kwargs) if composed is NotImplemented else composed


class _Names(TorchFunctionMode):
    """Has torch take the device's name for the stand-in's. The host's memory counts as pinned if it can be."""

    def __init__(self, accelerator: Accelerator) -> None:
        super().__init__()
        self._own, self._pins_memory = accelerator.device.type, accelerator.pins_memory

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if (func is Tensor.pin_memory or (kwargs or {}).get("pin_memory")) and not self._pins_memory:
            raise FakeDeviceError(f"{self._own} has no pinned memory")
        if func is Tensor.pin_memory:
            return args[0]
        if func is torch.device:
            return func(*args, **(kwargs or {}))
        leaves, structure = tree_flatten((args, kwargs or {}))
        meant = [self._meant(leaf) for leaf in leaves]
        args, kwargs = tree_unflatten(meant, structure)
        if func in (torch.tensor, torch.as_tensor) and kwargs.get("device") == _STAND_IN:
            return func(*args, **{**kwargs, "device": "cpu"}).to(_STAND_IN)
        if _STAND_IN not in meant:
            kwargs.pop("pin_memory", None)
        return func(*args, **kwargs)

    def _meant(self, leaf: Any) -> Any:
        if isinstance(leaf, torch.device):
            return _STAND_IN if leaf.type == self._own else leaf
        return _STAND_IN if isinstance(leaf, str) and leaf.partition(":")[0] == self._own else leaf


def _geometry(tensor: Tensor) -> tuple[object, ...]:
    return tuple(tensor.shape), tensor.stride(), tensor.storage_offset(), tensor.dtype


def _signature(tree: Any) -> object:
    """Shapes, types and scalars: what decides which program runs."""
    leaves, _ = tree_flatten(tree)
    return tuple((tuple(leaf.shape), leaf.dtype) if isinstance(leaf, Tensor) else str(leaf) for leaf in leaves)


def _written(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Iterator[Any]:
    """The arguments that an operation writes to."""
    for index, argument in enumerate(func._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            yield args[index] if index < len(args) else kwargs.get(argument.name)


def is_view(func: Any) -> bool:
    """Whether an operation only looks at its operand in another way."""
    return any(result.alias_info is not None and not result.alias_info.is_write for result in func._schema.returns)
