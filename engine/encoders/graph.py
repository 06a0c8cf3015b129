"""OnnxGraph: an encoder's graph in onnxruntime, which is imported only here."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..errors import DeviceError, ModelError
from ..files.wording import one_line
from ..install_hint import install_command

_INPUTS = ("input_ids", "attention_mask", "token_type_ids")
_INPUT_TYPES: dict[str, type[np.signedinteger[Any]]] = {"tensor(int64)": np.int64, "tensor(int32)": np.int32}
_FATAL_ONLY = 4  # other errors are raised


class OnnxGraph:
    """A graph that takes token ids and, if it asks for them, a mask and type ids, each [batch, tokens]."""

    def __init__(self, path: Path, threads: int) -> None:
        """Raises DeviceError without onnxruntime, and ModelError if the graph is broken or has unknown inputs."""
        onnxruntime = import_onnxruntime()
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = threads
        options.inter_op_num_threads = 1
        # Waiting threads must sleep. Spinning would take cores from the chat model.
        options.add_session_config_entry("session.intra_op.allow_spinning", "0")
        options.enable_mem_pattern = False  # it plans memory for shapes that repeat, and these rarely do
        options.log_severity_level = _FATAL_ONLY
        try:
            self._session = onnxruntime.InferenceSession(
                str(path), options, providers=["CPUExecutionProvider"], enable_fallback=0
            )
            inputs = [(node.name, node.type, node.shape) for node in self._session.get_inputs()]
            self.outputs: tuple[str, ...] = tuple(node.name for node in self._session.get_outputs())
        except Exception as error:  # onnxruntime's exceptions have no common base class
            raise ModelError(f"{path} cannot be loaded: {one_line(error)}") from error
        self._run_options = onnxruntime.RunOptions()
        self._run_options.log_severity_level = _FATAL_ONLY
        self.path = path
        self._types = {name: self._input_type(name, kind, shape) for name, kind, shape in inputs}
        if "input_ids" not in self._types:
            raise ModelError(f"{path} has no input input_ids; it has {', '.join(self._types)}")

    def run(self, output: str, inputs: Mapping[str, NDArray[np.int64]]) -> NDArray[np.float32]:
        """One of the outputs. `inputs` has all three inputs by name, and the graph takes those that it has."""
        feeds = {name: inputs[name].astype(kind, copy=False) for name, kind in self._types.items()}
        (values,) = self._session.run([output], feeds, self._run_options)
        floats: NDArray[np.float32] = np.asarray(values, dtype=np.float32)
        return floats

    def interrupt(self) -> None:
        """Make a run in another thread fail, and all later runs."""
        self._run_options.terminate = True

    def _input_type(self, name: str, kind: str, shape: Sequence[int | str | None]) -> type[np.signedinteger[Any]]:
        if name not in _INPUTS:
            raise ModelError(f"{self.path} wants the input {name}; known are {', '.join(_INPUTS)}")
        if kind not in _INPUT_TYPES:
            raise ModelError(f"{self.path} wants {name} as {kind}; known are {', '.join(_INPUT_TYPES)}")
        if len(shape) != 2 or any(isinstance(size, int) for size in shape):
            raise ModelError(
                f"{self.path} takes {name} of shape {shape} only: export it with dynamic axes for batch and sequence"
            )
        return _INPUT_TYPES[kind]


def import_onnxruntime() -> Any:
    """onnxruntime. Raises DeviceError, which says how to install it."""
    os.environ.setdefault("ORT_DISABLE_TELEMETRY", "1")  # otherwise it sends telemetry from its import on
    try:
        import onnxruntime
    except ImportError as error:
        raise DeviceError(f"embedding models need onnxruntime: {install_command('onnx')}") from error
    return onnxruntime
