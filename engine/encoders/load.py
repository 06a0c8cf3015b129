"""Loading of encoder models by their names."""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import chain, repeat
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..declaring.option import OptionError
from ..devices.cpu.device import CpuDevice, default_threads
from ..errors import ModelError
from ..machine.priority import lower_thread_priority
from ..model_names import short_name
from ..options import EngineOptions
from ..start_log import start_logger
from ..weights.hub import local_model, resolve_encoder
from ..weights.hub_room import Download, check_room, not_cached
from .as_asked import as_asked
from .classifier import Classifier
from .description import EncoderDescription, describe_encoder, is_native
from .embedder import Embedder
from .encoder import Encoder, padding_id
from .engine import EncoderEngine
from .graph import EncoderGraph
from .onnx_graph import OnnxGraph, import_onnxruntime
from .options import Convert, EncoderDType, EncoderOptions
from .settings import EncoderSettings, settings_of, without_effect
from .sharing import shared_device
from .tokenization import EncoderTokenizer

if TYPE_CHECKING:
    from ..hosting.cores import SharedCores
    from ..hosting.units import Needs

logger = logging.getLogger(__name__)


def load_encoders(
    models: Sequence[str],
    names: Sequence[str] = (),
    *,
    threads: int | None = 1,
    dtype: EncoderDType = EncoderOptions.dtype,
    download_dir: str | Path | None = None,
    beside: Sequence[Download] = (),
    first: EncoderSettings | None = None,
    device: CpuDevice | None = None,
    cores: SharedCores | None = None,
) -> EncoderEngine:
    """Load encoders, each from a folder, a GGUF file or a hub id, under `names` or their own. The engine is not started
    yet.

    `dtype` is that of checkpoints; an ONNX graph has its own. What will be downloaded afterwards, `beside` them, must
    fit on the disk, too. With settings of the `first`, it is the model that a command is for, and there is no chat
    model: the encoders' threads, for which None means all cores, have no lower priority. With a `device` (see
    `shared_device`) those that can use the chat model's threads later get as many. Raises DeviceError if a model needs
    onnxruntime and it is not there, and ModelError, which says what to change, if a model cannot be served.

    With `cores`, which other models have as well, they are loaded in the background, and those that can compute on the
    `device`'s cores in turns with the other models.
    """
    if not models:
        return EncoderEngine()
    others = EncoderSettings(dtype=dtype)
    encoders = [Download(model, is_encoder=True) for model in models if local_model(model, ".gguf") is None]
    if missing := not_cached(encoders, download_dir):
        check_room([*missing, *not_cached(beside, download_dir)], download_dir)
    num_threads = threads or (1 if first is None else default_threads())
    lowered = lower_thread_priority if first is None or cores is not None else None
    threads_in_turns = None if cores is None or device is None else cores.threads_of(device)
    # The threads that a graph computes with are started here and inherit this one's priority.
    with ThreadPoolExecutor(1, initializer=lowered) as loader:
        engine = EncoderEngine(
            [
                loader.submit(_load, model, name, num_threads, settings, download_dir, device, cores).result()
                for model, name, settings in zip(
                    models, names or map(short_name, models), chain([first or others], repeat(others)), strict=False
                )
            ],
            has_priority=lowered is None,
        )
    if cores is not None and threads_in_turns is not None:
        engine.run_in_turns(threads_in_turns, cores.turns.join())
    return engine


def load_encoders_beside(
    engine: EngineOptions, encoders: EncoderOptions, downloads: Sequence[Download]
) -> EncoderEngine:
    """Load the encoders beside the MODEL of these options, which is loaded afterwards and needs `downloads`.

    Those that will run between its steps are loaded so that they can. That they have no other threads is logged. Raises
    as `load_encoders`.
    """
    device = shared_device(engine)
    if encoders.threads is not None and device is not None:
        logger.info(
            "--embedding-threads is for ONNX graphs alone: others run between the chat model's steps, on its threads"
        )
    return load_encoders(
        encoders.models,
        encoders.names,
        threads=encoders.threads,
        dtype=encoders.dtype,
        download_dir=engine.download_dir,
        beside=downloads,
        device=device,
    )


def load_model_alone(
    engine: EngineOptions, encoders: EncoderOptions, names: Sequence[str] = (), *, cores: SharedCores | None = None
) -> EncoderEngine:
    """Load the MODEL of a command as an encoder, and the other encoders. `names` are those of MODEL, the first first.
    Other models that are served by this process have the same `cores`.

    Raises as `load_encoders`, and OptionError for options that an encoder cannot have, or if two have the same name.
    """
    settings = settings_of(engine, encoders)
    own, others = names or [short_name(engine.model)], encoders.names or [*map(short_name, encoders.models)]
    if (clash := next((name for name in others if name in own), None)) is not None:
        raise OptionError(
            f"MODEL and one of --embedding-model are both named {clash}: give them other names with "
            "--served-embedding-model-name"
        )
    for note in without_effect(engine):
        logger.info("%s", note)
    return load_encoders(
        (engine.model, *encoders.models),
        (own[0], *others),
        threads=encoders.threads,
        dtype=encoders.dtype,
        download_dir=engine.download_dir,
        first=settings,
        device=None if cores is None else shared_device(engine) or CpuDevice(),
        cores=cores,
    )


def needs_of_model(engine: EngineOptions, encoders: EncoderOptions) -> Needs:
    """About the memory that `load_model_alone` will take, before any weights are read. Raises as that does."""
    from ..hosting.units import Needs
    from .native_graph import planned_weights

    first, others = settings_of(engine, encoders), EncoderSettings(dtype=encoders.dtype)
    num_bytes = 0
    for model, settings in zip((engine.model, *encoders.models), chain([first], repeat(others)), strict=False):
        described = _described(model, settings, engine.download_dir)
        if described.model is not None:
            of_model = described.folder, described.model, described.max_length, settings.dtype
            num_bytes += planned_weights(*of_model)[1]
        elif described.graph is not None:  # weights may lie in files beside it
            graph = described.graph
            num_bytes += sum(file.stat().st_size for file in graph.parent.glob(f"{graph.name}*") if file.is_file())
    return Needs(num_bytes)


def _load(
    model: str,
    name: str,
    threads: int,
    settings: EncoderSettings,
    download_dir: str | Path | None,
    device: CpuDevice | None,
    cores: SharedCores | None,
) -> Encoder:
    started = time.perf_counter()
    description = _described(model, settings, download_dir)
    tokenizer = _tokenizer(description, cores)
    graph, runs_in = _graph(description, padding_id(description, tokenizer), threads, settings.dtype, device)
    encoder = _kind(description)(name, model, description, tokenizer, graph)
    start_logger.info(
        "Loaded %s (%s, up to %d tokens, %s) in %.2f s",
        model,
        _what(encoder),
        encoder.max_length,
        runs_in,
        time.perf_counter() - started,
    )
    return encoder


def _tokenizer(description: EncoderDescription, cores: SharedCores | None) -> EncoderTokenizer:
    path, lower_case, pairs = description.tokenizer_folder, description.lower_case, bool(description.labels)
    if cores is None:
        return EncoderTokenizer.load(path, lower_case=lower_case, pairs=pairs)
    from ..hosting.kept_tokenizers import LARGE_VOCABULARY, files_version

    def make() -> EncoderTokenizer:
        is_large = description.vocab_size is None or description.vocab_size >= LARGE_VOCABULARY
        if is_large and cores.turns.is_taken:  # by streams of other models, which would stand still
            from .lent_tokenization import LentEncoderTokenizer

            try:
                return LentEncoderTokenizer(path, lower_case=lower_case, pairs=pairs)
            except ModelError as error:  # if the files are broken, to make it here says how
                logger.info("The tokenizer in %s is made in this process: %s", path, error)
        return EncoderTokenizer.load(path, lower_case=lower_case, pairs=pairs)

    return cores.tokenizers.get(path, files_version(path), f"encoder {lower_case} {pairs}", make)


def _described(model: str, settings: EncoderSettings, download_dir: str | Path | None) -> EncoderDescription:
    overrides, convert = settings.hf_overrides, settings.convert
    folder = resolve_encoder(
        model, download_dir, revision=settings.revision, is_native=lambda path: _is_native(path, overrides, convert)
    )
    return as_asked(describe_encoder(folder, overrides, convert), settings)


def _kind(description: EncoderDescription) -> type[Encoder]:
    if description.labels:
        return Classifier
    if description.static_queries is not None:
        from .static_queries import StaticQueryEncoder

        return StaticQueryEncoder
    if description.task == "sparse":
        from .sparse_encoder import SparseEncoder

        return SparseEncoder
    if description.late_interaction is not None:
        from .multi_vector import MultiVectorEncoder

        return MultiVectorEncoder
    return Embedder


def _what(encoder: Encoder) -> str:
    if encoder.is_cross_encoder:
        return "cross-encoder"
    if encoder.labels:
        return f"{len(encoder.labels)} labels"
    return "sparse vectors" if encoder.task == "sparse" else f"embeddings of {encoder.info['width']} numbers"


def _is_native(folder: Path, overrides: Mapping[str, Any] | None, convert: Convert) -> bool:
    native = is_native(folder, overrides, convert)
    if not native:
        import_onnxruntime()  # before a graph is downloaded
    return native


def _graph(
    description: EncoderDescription,
    pad_token_id: int,
    threads: int,
    dtype: EncoderDType,
    device: CpuDevice | None,
) -> tuple[EncoderGraph, str]:
    """What computes the model, and in what, for the log."""
    if description.model is not None:
        from .native_graph import load_native

        graph = load_native(
            description.folder,
            description.model,
            description.max_length,
            description.dense_folders,
            device or CpuDevice(),
            token_layers=description.token_layers,
            dtype=dtype,
            threads=None if device is not None else threads,
        )
        return graph, f"in {graph.info['weights']}"
    assert description.graph is not None
    return OnnxGraph(description.graph, threads, pad_token_id), "in ONNX Runtime"
