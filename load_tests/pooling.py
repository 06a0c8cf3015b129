"""Compares embedding models from safetensors with the same weights in ONNX Runtime, in turn, with medians.

python load_tests/pooling.py FOLDER-OR-SHAPE
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from tidewheel.engine.encoders.description import describe_encoder
from tidewheel.engine.encoders.native_graph import load_native
from tidewheel.engine.encoders.options import EncoderDType
from tidewheel.engine.encoders.pooling import pool
from tidewheel.engine.encoders.tokenization import EncoderInput

Rows = NDArray[np.float32]

# Random weights of these sizes take as long as trained ones: hidden size, layers, heads, intermediate size.
_SHAPES = {"minilm": (384, 6, 12, 1536), "bge-base": (768, 12, 12, 3072), "bge-large": (1024, 24, 16, 4096)}
_FIRST_WORD = 1000  # of BERT's vocabulary; lower ids are special tokens and letters
_SEED = 5


class Work(NamedTuple):
    """As many texts as that, of that many tokens each."""

    texts: int
    tokens: int

    def inputs(self) -> list[EncoderInput]:
        """Texts of random words."""
        ids = np.random.default_rng(_SEED).integers(_FIRST_WORD, 30000, (self.texts, self.tokens))
        return [EncoderInput(row) for row in ids.tolist()]


_WORKS = (Work(1, 12), Work(1, 128), Work(32, 32), Work(32, 128), Work(8, 512))


def made_model(shape: str, folder: Path) -> Path:
    """A BERT of that shape with random weights."""
    from transformers import BertConfig, BertModel

    hidden, layers, heads, inner = _SHAPES[shape]
    config = BertConfig(
        hidden_size=hidden, num_hidden_layers=layers, num_attention_heads=heads, intermediate_size=inner
    )
    BertModel(config, add_pooling_layer=False).save_pretrained(folder)
    (folder / "sentence_bert_config.json").write_text(json.dumps({"max_seq_length": 512}))
    return folder


def onnx_runtime(folder: Path, graph: Path, threads: int) -> Callable[[Sequence[EncoderInput]], Rows]:
    """The means of the tokens' vectors by ONNX Runtime, with the settings that it has by itself."""
    import onnxruntime
    import torch
    from transformers import AutoModel

    model = AutoModel.from_pretrained(folder, attn_implementation="eager").eval().float()

    class Graph(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = model

        def forward(self, ids: Any, mask: Any) -> Any:
            return self.model(input_ids=ids, attention_mask=mask)[0]

    names = ["input_ids", "attention_mask"]
    axes = {name: {0: "batch", 1: "tokens"} for name in (*names, "last_hidden_state")}
    ones = torch.ones(2, 5, dtype=torch.int64)
    torch.onnx.export(
        Graph().eval(), (ones, ones), str(graph), input_names=names, output_names=["last_hidden_state"],
        dynamic_axes=axes, dynamo=False,
    )  # fmt: skip
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = threads
    session = onnxruntime.InferenceSession(str(graph), options, providers=["CPUExecutionProvider"])

    def run(inputs: Sequence[EncoderInput]) -> Rows:
        ids = np.array([item.token_ids for item in inputs], np.int64)
        (rows,) = session.run(None, {"input_ids": ids, "attention_mask": np.ones_like(ids)})
        means: Rows = rows.mean(1)
        return means

    return run


def native(folder: Path, dtype: EncoderDType, threads: int) -> Callable[[Sequence[EncoderInput]], Rows]:
    """The same by our own kernels."""
    description = describe_encoder(folder)
    assert description.model is not None
    graph = load_native(folder, description.model, 512, (), dtype=dtype, threads=threads)
    return lambda inputs: np.stack([pool(rows, 0, ("mean",)) for rows in graph.run(graph.outputs[0], inputs)])


def seconds(run: Callable[[Sequence[EncoderInput]], Rows], inputs: Sequence[EncoderInput]) -> float:
    """How long one batch takes."""
    start = perf_counter()
    run(inputs)
    return perf_counter() - start


def largest_distance(ours: Rows, theirs: Rows) -> float:
    """The largest cosine distance of two rows."""
    a, b = ours.astype(np.float64), theirs.astype(np.float64)
    return float((1 - (a * b).sum(1) / np.linalg.norm(a, axis=1) / np.linalg.norm(b, axis=1)).max())


def main(arguments: Sequence[str] | None = None) -> None:
    """Print a line for each kind of work and each type."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help=f"a folder with safetensors, or {', '.join(_SHAPES)} with random weights")
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--dtypes", nargs="+", default=["float32", "bfloat16", "int8"])
    parser.add_argument("--rounds", type=int, default=15, help="how often each is measured, in turn")
    options = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory() as made:
        folder = made_model(options.model, Path(made)) if options.model in _SHAPES else Path(options.model)
        theirs = onnx_runtime(folder, Path(made) / "model.onnx", options.threads)
        ours: dict[str, Callable[[Sequence[EncoderInput]], Rows]] = {
            dtype: native(folder, dtype, options.threads) for dtype in options.dtypes
        }
        for work in _WORKS:
            report(work, theirs, ours, options.rounds)


def report(work: Work, theirs: Callable[..., Rows], ours: dict[str, Callable[..., Rows]], rounds: int) -> None:
    """Measure all in turn, after one run of each, and print medians."""
    inputs = work.inputs()
    runs: dict[str, Any] = {"onnxruntime float32": theirs, **ours}
    expected = theirs(inputs)
    distances = {name: largest_distance(run(inputs), expected) for name, run in ours.items()}
    times: dict[str, list[float]] = {name: [] for name in runs}
    for _ in range(rounds):
        for name, run in runs.items():
            times[name].append(seconds(run, inputs))
    base = median(times["onnxruntime float32"])
    for name in runs:
        taken = median(times[name])
        speed = work.texts * work.tokens / taken
        line = f"{work.texts:3} x {work.tokens:3} tokens  {name:20} {1000 * taken:8.2f} ms  {speed:8.0f} tokens/s"
        if name in distances:
            line += f"  {base / taken:5.2f} x  cosine distance {distances[name]:.1e}"
        print(line, flush=True)


if __name__ == "__main__":
    main()
