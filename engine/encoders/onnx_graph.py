"""OnnxGraph: an encoder's graph in onnxruntime, which is imported only here."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from ..errors import DeviceError, ModelError
from ..files.wording import one_line
from ..install_hint import install_command
from .graph import LOGITS, POOLED_OUTPUT, EncoderGraph
from .pooling import Floats
from .tokenization import EncoderInput

_INPUTS = ("input_ids", "attention_mask", "token_type_ids")
_INPUT_TYPES: dict[str, type[np.signedinteger[Any]]] = {"tensor(int64)": np.int64, "tensor(int32)": np.int32}
_FATAL_ONLY = 4  # other errors are raised


class OnnxGraph(EncoderGraph):
    """A graph that takes token ids and, if it asks for them, a mask and type ids, each [batch, tokens]."""

    pads = True

    def __init__(self, path: Path, threads: int, pad_token_id: int) -> None:
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
        weights = [path, *path.parent.glob(f"{path.name}?data")]
        self.info = {"format": "onnx", "device": "cpu", "weight_bytes": str(sum(p.stat().st_size for p in weights))}
        self._pad_token_id = pad_token_id
        self._types = {name: self._input_type(name, kind, shape) for name, kind, shape in inputs}
        if "input_ids" not in self._types:
            raise ModelError(f"{path} has no input input_ids; it has {', '.join(self._types)}")

    def run(
        self, output: str, inputs: Sequence[EncoderInput], read: Sequence[Sequence[int]] | None = None
    ) -> Sequence[Floats]:
        """See EncoderGraph. The graph takes those of the three arrays that it has, and computes all rows."""
        lengths = np.array([len(item) for item in inputs])
        ids = np.full((len(inputs), lengths.max()), self._pad_token_id, np.int64)
        types = np.zeros_like(ids)
        for row, item in enumerate(inputs):
            ids[row, : len(item)] = item.token_ids
            if item.type_ids is not None:
                types[row, : len(item)] = item.type_ids
        mask = (np.arange(ids.shape[1]) < lengths[:, None]).astype(np.int64)
        arrays = {"input_ids": ids, "attention_mask": mask, "token_type_ids": types}
        feeds = {name: arrays[name].astype(kind, copy=False) for name, kind in self._types.items()}
        (values,) = self._session.run([output], feeds, self._run_options)
        floats: Floats = np.asarray(values, dtype=np.float32)
        if output in (LOGITS, POOLED_OUTPUT):
            return list(floats)
        return [row[:length] for row, length in zip(floats, lengths, strict=True)]

    def interrupt(self) -> None:
        """See EncoderGraph."""
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
