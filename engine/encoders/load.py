"""Loading of encoder models by their names."""

from __future__ import annotations

import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from ..files.reading import MAX_TOKENIZER_BYTES, is_there, require_file
from ..model_names import short_name
from ..start_log import start_logger
from ..weights.hub import local_model, resolve_encoder
from ..weights.hub_room import Download, check_room, not_cached
from .description import describe_encoder
from .encoder import CrossEncoder, Embedder, Encoder
from .engine import EncoderEngine
from .graph import OnnxGraph, import_onnxruntime
from .loop import lower_thread_priority
from .options import EncoderOptions
from .tokenization import EncoderTokenizer


def load_encoders(
    models: Sequence[str],
    names: Sequence[str] = (),
    *,
    threads: int = EncoderOptions.threads,
    download_dir: str | Path | None = None,
    beside: Sequence[Download] = (),
) -> EncoderEngine:
    """Load encoders, each from a folder or a hub id, under `names` or their own. The engine is not started yet.

    What will be downloaded afterwards, `beside` them, must fit on the disk, too. Raises DeviceError without
    onnxruntime, and ModelError, which says what to change, if a model cannot be served.
    """
    if not models:
        return EncoderEngine()
    import_onnxruntime()  # before anything is downloaded
    encoders = [Download(model, is_encoder=True) for model in models if local_model(model) is None]
    if missing := not_cached(encoders, download_dir):
        check_room([*missing, *not_cached(beside, download_dir)], download_dir)
    # The threads that a graph computes with are started here and inherit this one's priority.
    with ThreadPoolExecutor(1, initializer=lower_thread_priority) as loader:
        return EncoderEngine(
            [
                loader.submit(_load, model, name, threads, download_dir).result()
                for model, name in zip(models, names or map(short_name, models), strict=True)
            ]
        )


def _load(model: str, name: str, threads: int, download_dir: str | Path | None) -> Encoder:
    started = time.perf_counter()
    description = describe_encoder(resolve_encoder(model, download_dir))
    if is_there(path := description.tokenizer_folder / "tokenizer.json"):
        require_file(path, MAX_TOKENIZER_BYTES)
    tokenizer = EncoderTokenizer.load(
        description.tokenizer_folder, lower_case=description.lower_case, pairs=description.is_cross_encoder
    )
    kind = CrossEncoder if description.is_cross_encoder else Embedder
    encoder = kind(name, model, description, tokenizer, OnnxGraph(description.graph, threads))
    start_logger.info(
        "Loaded %s (%s, up to %d tokens) in %.2f s",
        model,
        "cross-encoder" if description.is_cross_encoder else f"embeddings of {encoder.width} numbers",
        encoder.max_length,
        time.perf_counter() - started,
    )
    return encoder
