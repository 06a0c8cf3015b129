"""Loading of encoder models by their names."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from ..files.reading import MAX_TOKENIZER_BYTES, is_there, require_file
from ..model_names import short_name
from ..start_log import start_logger
from ..weights.hub import local_model, resolve_encoder
from ..weights.hub_room import Download, check_room, not_cached
from .description import EncoderDescription, describe_encoder, is_native
from .encoder import Classifier, Embedder, Encoder, padding_id
from .engine import EncoderEngine
from .graph import EncoderGraph
from .loop import lower_thread_priority
from .onnx_graph import OnnxGraph, import_onnxruntime
from .options import Convert, EncoderDType, EncoderOptions
from .tokenization import EncoderTokenizer


def load_encoders(
    models: Sequence[str],
    names: Sequence[str] = (),
    *,
    threads: int = EncoderOptions.threads,
    dtype: EncoderDType = EncoderOptions.dtype,
    download_dir: str | Path | None = None,
    beside: Sequence[Download] = (),
    overrides: Mapping[str, Any] | None = None,
    convert: Convert = "auto",
) -> EncoderEngine:
    """Load encoders, each from a folder or a hub id, under `names` or their own. The engine is not started yet.

    `dtype` is for safetensors; an ONNX graph has its own. What will be downloaded afterwards, `beside` them, must fit
    on the disk, too. Each config has `overrides` in place of its own fields, and `convert` says what decoders are
    served as. Raises DeviceError if a model needs onnxruntime and it is not there, and ModelError, which says
    what to change, if a model cannot be served.
    """
    if not models:
        return EncoderEngine()
    encoders = [Download(model, is_encoder=True) for model in models if local_model(model) is None]
    if missing := not_cached(encoders, download_dir):
        check_room([*missing, *not_cached(beside, download_dir)], download_dir)
    # The threads that a graph computes with are started here and inherit this one's priority.
    with ThreadPoolExecutor(1, initializer=lower_thread_priority) as loader:
        return EncoderEngine(
            [
                loader.submit(_load, model, name, threads, dtype, download_dir, overrides, convert).result()
                for model, name in zip(models, names or map(short_name, models), strict=True)
            ]
        )


def _load(
    model: str,
    name: str,
    threads: int,
    dtype: EncoderDType,
    download_dir: str | Path | None,
    overrides: Mapping[str, Any] | None,
    convert: Convert,
) -> Encoder:
    started = time.perf_counter()
    folder = resolve_encoder(model, download_dir, is_native=lambda path: _is_native(path, overrides, convert))
    description = describe_encoder(folder, overrides, convert)
    if is_there(path := description.tokenizer_folder / "tokenizer.json"):
        require_file(path, MAX_TOKENIZER_BYTES)
    tokenizer = EncoderTokenizer.load(
        description.tokenizer_folder, lower_case=description.lower_case, pairs=bool(description.labels)
    )
    kind = Classifier if description.task == "classify" else Embedder
    graph, runs_in = _graph(description, padding_id(description, tokenizer), threads, dtype)
    encoder = kind(name, model, description, tokenizer, graph)
    start_logger.info(
        "Loaded %s (%s, up to %d tokens, %s) in %.2f s",
        model,
        _what(encoder),
        encoder.max_length,
        runs_in,
        time.perf_counter() - started,
    )
    return encoder


def _what(encoder: Encoder) -> str:
    if encoder.is_cross_encoder:
        return "cross-encoder"
    return f"{len(encoder.labels)} labels" if encoder.labels else f"embeddings of {encoder.width} numbers"


def _is_native(folder: Path, overrides: Mapping[str, Any] | None, convert: Convert) -> bool:
    native = is_native(folder, overrides, convert)
    if not native:
        import_onnxruntime()  # before a graph is downloaded
    return native


def _graph(
    description: EncoderDescription, pad_token_id: int, threads: int, dtype: EncoderDType
) -> tuple[EncoderGraph, str]:
    """What computes the model, and in what, for the log."""
    if description.model is not None:
        from .native_graph import load_native

        graph = load_native(
            description.folder,
            description.model,
            description.max_length,
            description.dense_folders,
            dtype=dtype,
            threads=threads,
        )
        return graph, f"in {graph.dtype}"
    assert description.graph is not None
    return OnnxGraph(description.graph, threads, pad_token_id), "in ONNX Runtime"
