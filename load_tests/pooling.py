"""Compares embedding models with the same weights in ONNX Runtime and llama.cpp, in turn, with medians.

python load_tests/pooling.py FOLDER-OR-SHAPE
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import shutil
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from statistics import median, quantiles
from time import perf_counter, process_time, sleep
from typing import Any, NamedTuple

import httpx
import numpy as np
from numpy.typing import NDArray
from process_tree import memory_mib

from tidewheel.engine.devices.cpu.device import CpuDevice
from tidewheel.engine.encoders.batching import MAX_BATCH_TOKENS
from tidewheel.engine.encoders.description import describe_encoder
from tidewheel.engine.encoders.native_graph import load_native
from tidewheel.engine.encoders.options import EncoderDType
from tidewheel.engine.encoders.pooling import looks_at_ends, places_read, pool
from tidewheel.engine.encoders.tokenization import EncoderInput

Rows = NDArray[np.float32]
Texts = Sequence[Sequence[int]]

_RUNNERS = Path(__file__).parent / "peer_runners"
# Random weights of these sizes take as long as trained ones: hidden size, layers, heads, intermediate size.
_BERTS = {"minilm": (384, 6, 12, 1536), "bge-base": (768, 12, 12, 3072), "bge-large": (1024, 24, 16, 4096)}
_QWEN3 = "qwen3-embedding-0.6b"
_SHAPES = (*_BERTS, _QWEN3)
_POOLING = {"bge-base": "cls", "bge-large": "cls", _QWEN3: "lasttoken"}  # the others take the mean
_FIRST_WORD = 1000  # of BERT's vocabulary; lower ids are special tokens and letters
_MAX_TOKENS = 512
_SEED = 5
_PADDED_TEXTS = 32  # in a batch of ONNX Runtime; as sentence-transformers has it
_CLIENTS = 64
_LOOK_S = 0.02  # in which idle threads compute nothing
_START_S = 120
_REST_S = 2  # until a server without requests has given memory back
_REQUEST_S = 120
_GGUF_TYPES: dict[str, str] = {"float32": "F32", "bfloat16": "BF16", "int8": "Q8_0"}
_DTYPES = (*_GGUF_TYPES, "int8-channel")  # llama.cpp has nothing like the last one


class Run(NamedTuple):
    """What embeds texts: their vectors, and how many seconds that took."""

    name: str
    embed: Callable[[Texts], tuple[Rows, float]]


def works(most_texts: int) -> Iterator[tuple[str, Texts]]:
    """What is measured, with at most as many texts: names, and texts of random words as token ids."""
    for texts, tokens in ((1, 12), (1, 128)):
        yield f"{texts} x {tokens}", _texts([tokens] * texts)
    for texts in (count for count in (32, 256) if count <= most_texts):
        lengths = np.random.default_rng(_SEED).integers(32, _MAX_TOKENS + 1, texts)
        yield f"{texts} x 32-{_MAX_TOKENS}", _texts(lengths.tolist())


def _texts(lengths: Sequence[int]) -> Texts:
    words = np.random.default_rng(_SEED)
    return [words.integers(_FIRST_WORD, 30000, length).tolist() for length in lengths]


@contextmanager
def _whole(path: Path) -> Iterator[Path]:
    """Another path to write to, which takes this one's name once all is written: no half of a file is found later."""
    unfinished = path.with_name(f"unfinished-{path.name}")
    yield unfinished
    unfinished.rename(path)


def made_model(shape: str, folder: Path) -> Path:
    """A model of that shape with random weights, made unless it is there."""
    if (folder / "model.safetensors").exists():
        return folder
    if shape == _QWEN3:
        from transformers import Qwen3Config, Qwen3Model

        Qwen3Model(
            Qwen3Config(
                vocab_size=151_669, hidden_size=1024, num_hidden_layers=28, num_attention_heads=16,
                num_key_value_heads=8, head_dim=128, intermediate_size=3072, dtype="float32",
            )
        ).save_pretrained(folder)  # fmt: skip
    else:
        from transformers import BertConfig, BertModel

        hidden, layers, heads, inner = _BERTS[shape]
        config = BertConfig(
            hidden_size=hidden, num_hidden_layers=layers, num_attention_heads=heads, intermediate_size=inner
        )
        BertModel(config, add_pooling_layer=False).save_pretrained(folder)
    (folder / "sentence_bert_config.json").write_text(json.dumps({"max_seq_length": _MAX_TOKENS}))
    kinds = {"": "Transformer", "1_Pooling": "Pooling"}
    modules = [{"path": path, "type": f"sentence_transformers.models.{kind}"} for path, kind in kinds.items()]
    (folder / "modules.json").write_text(json.dumps(modules))
    (folder / "1_Pooling").mkdir()
    (folder / "1_Pooling" / "config.json").write_text(json.dumps({"pooling_mode": _POOLING.get(shape, "mean")}))
    return folder


def exported(folder: Path, graph: Path) -> Path:
    """The weights as an ONNX graph, by torch, unless it is there."""
    if graph.exists():
        return graph
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
    with _whole(graph) as file:
        torch.onnx.export(
            Graph().eval(), (ones, ones), str(file), input_names=names, output_names=["last_hidden_state"],
            dynamic_axes=axes, dynamo=False,
        )  # fmt: skip
    return graph


def in_int8(graph: Path) -> Path:
    """The graph with matrices in int8, whose inputs are rounded as they come, by ONNX Runtime's own tool."""
    made = graph.with_name("int8.onnx")
    if made.exists():
        return made
    from onnxruntime.quantization import QuantType, quantize_dynamic

    with _whole(made) as file:
        quantize_dynamic(graph, file, weight_type=QuantType.QInt8)
    return made


def onnx_runtime(name: str, graph: Path, pooling: Sequence[str], threads: int) -> Run:
    """The pooled vectors of the tokens by ONNX Runtime, with the settings that it has by itself."""
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = threads
    session = onnxruntime.InferenceSession(str(graph), options, providers=["CPUExecutionProvider"])

    def embed(texts: Texts) -> tuple[Rows, float]:
        vectors, started = [np.empty(0, np.float32)] * len(texts), perf_counter()
        order = sorted(range(len(texts)), key=lambda i: -len(texts[i]))
        for start in range(0, len(order), _PADDED_TEXTS):
            batch = order[start : start + _PADDED_TEXTS]
            ids = np.zeros((len(batch), len(texts[batch[0]])), np.int64)
            mask = np.zeros_like(ids)
            for row, index in enumerate(batch):
                ids[row, : len(texts[index])], mask[row, : len(texts[index])] = texts[index], 1
            (rows,) = session.run(None, {"input_ids": ids, "attention_mask": mask})
            for row, index in enumerate(batch):
                vectors[index] = pool(rows[row, : len(texts[index])], 0, pooling)
        return np.stack(vectors), perf_counter() - started

    return Run(name, embed)


@contextmanager
def llama_cpp(python: Path, file: Path, pooling: Sequence[str], threads: int) -> Iterator[Run]:
    """The same by llama.cpp, in an interpreter of its own."""
    command = [str(python), str(_RUNNERS / "embed_llama_cpp_python.py"), str(file), *pooling, str(threads)]
    with subprocess.Popen(command, text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdin is not None
        assert process.stdout is not None

        def embed(texts: Texts) -> tuple[Rows, float]:
            assert process.stdin is not None
            assert process.stdout is not None
            print(json.dumps(texts), file=process.stdin, flush=True)
            seconds, vectors = json.loads(process.stdout.readline())
            return np.array(vectors, np.float32), seconds

        yield Run(f"llama.cpp {file.stem}", embed)
        process.stdin.close()


def gguf_file(folder: Path, sources: Path, kind: str, made: Path) -> Path:
    """The weights as GGUF, by the converter of llama.cpp's sources, unless they are there."""
    file = made / f"{kind}.gguf"
    if file.exists():
        return file
    script = _RUNNERS / "make_vision_gguf.py"
    subprocess.run([sys.executable, str(script), str(sources), str(folder), str(file)], check=True, capture_output=True)
    return file


def native(folder: Path, dtype: EncoderDType, threads: int) -> Run:
    """The same by our own kernels."""
    description = describe_encoder(folder, convert="embed")
    assert description.model is not None
    pooling = description.pooling
    graph = load_native(folder, description.model, _MAX_TOKENS, (), CpuDevice(), dtype=dtype, threads=threads)

    def embed(texts: Texts) -> tuple[Rows, float]:
        vectors, started = [np.empty(0, np.float32)] * len(texts), perf_counter()
        for batch in _batches(texts):
            read = [places_read(len(texts[index]), 0, pooling) for index in batch] if looks_at_ends(pooling) else None
            found = graph.run(graph.outputs[0], [EncoderInput(texts[index]) for index in batch], read)
            for index, rows in zip(batch, found, strict=True):
                vectors[index] = pool(rows, 0, pooling)
        return np.stack(vectors), perf_counter() - started

    return Run(f"tidewheel {dtype}", embed)


def _batches(texts: Texts) -> Iterator[list[int]]:
    batch: list[int] = []
    for index in sorted(range(len(texts)), key=lambda i: len(texts[i])):
        if batch and sum(len(texts[i]) for i in (*batch, index)) > MAX_BATCH_TOKENS:
            yield batch
            batch = []
        batch.append(index)
    yield batch


def distances_of(ours: Rows, theirs: Rows) -> NDArray[np.float64]:
    """The cosine distance of each row and its fellow."""
    a, b = ours.astype(np.float64), theirs.astype(np.float64)
    distances: NDArray[np.float64] = 1 - (a * b).sum(1) / np.linalg.norm(a, axis=1) / np.linalg.norm(b, axis=1)
    return distances


def _wait_for_cores() -> None:
    """Until idle threads have stopped looking for work, as ONNX Runtime's do for up to a second."""
    used_s = _LOOK_S
    while used_s > _LOOK_S / 10:
        before = process_time()
        sleep(_LOOK_S)
        used_s = process_time() - before


def compare(
    runs: Sequence[Run], rounds: int, most_texts: int, only: Sequence[str] | None = None
) -> dict[str, dict[str, float]]:
    """Measure all in turn, after one run of each, and print medians as multiples of the first one's speed.

    Returns the median seconds by what was embedded, then by the run's name.
    """
    medians: dict[str, dict[str, float]] = {}
    for name, texts in works(most_texts):
        if only is not None and name not in only:
            continue
        expected, _ = runs[0].embed(texts)
        distances = [distances_of(run.embed(texts)[0], expected) for run in runs]
        times: list[list[float]] = [[] for _ in runs]
        for _ in range(rounds):
            for run, taken in zip(runs, times, strict=True):
                _wait_for_cores()
                run.embed(texts[:1])  # wakes its threads
                taken.append(run.embed(texts)[1])
        tokens = sum(map(len, texts))
        for run, taken, own in zip(runs, times, distances, strict=True):
            middle = medians.setdefault(name, {})[run.name] = median(taken)
            print(
                f"{name:12} {run.name:20} {1000 * middle:9.2f} ms ({1000 * min(taken):.2f} to {1000 * max(taken):.2f}) "
                f"{tokens / middle:9.0f} tokens/s {median(times[0]) / middle:6.2f} x  "
                f"cosine distance {own.mean():.1e}, at most {own.max():.1e}",
                flush=True,
            )
    return medians


@contextmanager
def serving(folder: Path, dtype: str, threads: int) -> Iterator[tuple[str, int]]:
    """A server with the model alone: its address, and its process. If it does not start, this program ends."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    command = [
        str(Path(sys.executable).with_name("tidewheel")), "serve", str(folder), "--runner", "pooling",
        "--embedding-dtype", dtype, "--embedding-threads", str(threads), "--port", port, "--disable-log-requests",
        "--log-level", "error",
    ]  # fmt: skip
    with subprocess.Popen(command) as process:
        try:
            _await_health(f"http://127.0.0.1:{port}", process)
            yield f"http://127.0.0.1:{port}", process.pid
        finally:
            process.terminate()


def _await_health(address: str, process: subprocess.Popen[bytes]) -> None:
    deadline = perf_counter() + _START_S
    while True:
        try:
            httpx.get(f"{address}/health").raise_for_status()
            return
        except httpx.HTTPError as error:
            if process.poll() is not None or perf_counter() > deadline:
                raise SystemExit(f"the server does not start: {error}") from error  # it has said why
            sleep(0.05)


async def closed_loop(address: str, clients: int, texts: Texts) -> tuple[list[float], float]:
    """How long each text took, one a request, and how long all of them, with as many clients at a time."""
    waiting = list(reversed(texts))
    taken: list[float] = []
    limits = httpx.Limits(max_connections=clients)
    async with httpx.AsyncClient(base_url=address, timeout=_REQUEST_S, limits=limits) as client:

        async def ask() -> None:
            while waiting:
                body = {"input": waiting.pop(), "encoding_format": "base64"}
                started = perf_counter()
                (await client.post("/v1/embeddings", json=body)).raise_for_status()
                taken.append(perf_counter() - started)

        started = perf_counter()
        await asyncio.gather(*(ask() for _ in range(clients)))
        return taken, perf_counter() - started


def over_http(folder: Path, dtype: str, threads: int) -> dict[str, float]:
    """Print what a server takes for short texts one by one, and for many clients. Returns some of these figures."""
    weights = sum(file.stat().st_size for file in folder.glob("*.safetensors")) / 2**20
    with serving(folder, dtype, threads) as (address, process):
        short = _texts([12] * 200)
        asyncio.run(closed_loop(address, 1, short))
        alone, _ = asyncio.run(closed_loop(address, 1, short))
        most = min(_MAX_TOKENS, describe_encoder(folder).max_length)
        lengths = np.random.default_rng(_SEED).integers(32, most + 1, 1024).tolist()
        taken, seconds = asyncio.run(closed_loop(address, _CLIENTS, _texts(lengths)))
        at_work = memory_mib(process)
        sleep(_REST_S)
        at_rest = memory_mib(process)
    print(
        f"HTTP, {dtype}: a text of 12 tokens in {1000 * median(alone):.2f} ms; {_CLIENTS} clients: "
        f"{sum(lengths) / seconds:.0f} tokens/s, p50 {1000 * median(taken):.0f} ms, "
        f"p99 {1000 * quantiles(taken, n=100)[-1]:.0f} ms; {at_work:.0f} MiB, at rest {at_rest:.0f}, the file has "
        f"{weights:.0f}"
    )
    return {"short_text_s": median(alone), "at_work_mib": at_work, "at_rest_mib": at_rest, "file_mib": weights}


def main(arguments: Sequence[str] | None = None) -> None:
    """Print a line for each kind of work and each engine."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help=f"a folder with safetensors, or {', '.join(_SHAPES)} with random weights")
    parser.add_argument("--tokenizer", type=Path, help="a folder with BERT's tokenizer, for shapes with random weights")
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--dtypes", nargs="+", default=list(_GGUF_TYPES), choices=_DTYPES)
    parser.add_argument("--most-texts", type=int, default=256, help="32: leave out 256 texts, which take long")
    parser.add_argument("--rounds", type=int, default=7, help="how often each is measured, in turn")
    parser.add_argument("--llama-cpp-python", type=Path, metavar="VENV", help="environment that has llama-cpp-python")
    parser.add_argument("--llama-cpp-sources", type=Path, metavar="FOLDER", help="whose converter writes GGUF files")
    parser.add_argument("--only", nargs="+", metavar="WORK", help="what to measure, such as '1 x 128'; default: all")
    parser.add_argument("--made", type=Path, metavar="FOLDER", help="keeps what is made for this model, for other runs")
    parser.add_argument("--http", action="store_true", help="measure a server, too")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write medians, in seconds, and memory to FILE")
    options = parser.parse_args(arguments)
    if options.llama_cpp_python is not None and options.llama_cpp_sources is None:
        parser.error("--llama-cpp-python needs --llama-cpp-sources, whose converter writes its files")
    with ExitStack() as stack:
        made = options.made or Path(stack.enter_context(tempfile.TemporaryDirectory()))
        made.mkdir(parents=True, exist_ok=True)
        folder = Path(options.model)
        if options.model in _SHAPES:
            folder = made_model(options.model, made / options.model)
            for file in options.tokenizer.glob("*token*.json") if options.tokenizer else ():
                shutil.copy(file, folder)
        graph = exported(folder, made / "model.onnx")
        pooling = describe_encoder(folder, convert="embed").pooling
        runs = [onnx_runtime("onnxruntime float32", graph, pooling, options.threads)]
        if {"int8", "int8-channel"} & {*options.dtypes}:
            runs.append(onnx_runtime("onnxruntime int8", in_int8(graph), pooling, options.threads))
        for dtype in options.dtypes:
            if options.llama_cpp_python is not None and dtype in _GGUF_TYPES:
                file = gguf_file(folder, options.llama_cpp_sources, _GGUF_TYPES[dtype], made)
                python = options.llama_cpp_python / "bin/python"
                runs.append(stack.enter_context(llama_cpp(python, file, pooling, options.threads)))
            runs.append(native(folder, dtype, options.threads))
        medians = compare(runs, options.rounds, options.most_texts, options.only)
        dtypes = options.dtypes if options.http else ()
        served = {dtype: over_http(folder, dtype, options.threads) for dtype in dtypes}
        if options.json is not None:
            options.json.write_text(json.dumps({"median_s": medians, "http": served}, indent=2) + "\n")


if __name__ == "__main__":
    main()
