"""The `tidewheel` command. Each subcommand is imported only when it is the one asked for, to start fast."""

from __future__ import annotations

import contextlib
import difflib
import errno
import os
import select
import sys
from collections.abc import Callable, Iterator, Sequence

from tidewheel import __version__
from tidewheel.engine.errors import TidewheelError

_USAGE = """\
usage: tidewheel COMMAND [ARGUMENTS]

commands:
  serve [MODEL]   serve a model over an OpenAI-compatible API
  chat [MODEL]    talk to a model; starts a server if none runs
  complete [MODEL]
                  let a model continue a text, in the same way
  run-batch -i IN -o OUT [MODEL]
                  answer a file of requests in OpenAI's batch format
  bench [MODEL]   measure speed and memory
  eval [MODEL]    measure quality: perplexity, and the divergence from a reference
  quantize MODEL OUT
                  write a model in fewer bits
  inspect MODEL   show what a model is, whether it is supported, and the memory it needs
  pull ID         download a model from the Hugging Face Hub
  list            list the downloaded models
  rm ID           delete a downloaded model
  run NAME        talk to a model of a running server, which may download it first
  ps              show the loaded models of a running server
  stop NAME       unload a model of a running server
  devices         show what was detected: device, ISA levels, cores, memory; or a Ray cluster's nodes

options:
  -h, --help      show this, or a command's own help
  -v, --version   show the version
"""


def _serve(arguments: list[str]) -> int:
    from ..garbage import without_collections

    with _without_blas_threads(), without_collections():
        from .serve import run

    return run(arguments)


@contextlib.contextmanager
def _without_blas_threads() -> Iterator[None]:
    # numpy's BLAS starts a thread for each core when it is imported, and they spin for a while. It is not used here,
    # and the cores have something better to do. Other libraries that read the variable later find it as it was.
    name = "OPENBLAS_NUM_THREADS"
    if name in os.environ:
        yield
        return
    os.environ[name] = "1"
    try:
        yield
    finally:
        del os.environ[name]


def _chat(arguments: list[str]) -> int:
    from .chat import chat

    return chat(arguments)


def _complete(arguments: list[str]) -> int:
    from .chat import complete

    return complete(arguments)


def _run_batch(arguments: list[str]) -> int:
    with _without_blas_threads():
        from .run_batch import run

    return run(arguments)


def _bench(arguments: list[str]) -> int:
    from .bench import run

    return run(arguments)


def _eval(arguments: list[str]) -> int:
    with _without_blas_threads():
        from .eval import run

    return run(arguments)


def _quantize(arguments: list[str]) -> int:
    from .quantize import run

    return run(arguments)


def _run_model(arguments: list[str]) -> int:
    from .chat import run

    return run(arguments)


def _ps(arguments: list[str]) -> int:
    from .server_models import ps

    return ps(arguments)


def _stop(arguments: list[str]) -> int:
    from .server_models import stop

    return stop(arguments)


def _devices(arguments: list[str]) -> int:
    from .devices import run

    return run(arguments)


def _inspect(arguments: list[str]) -> int:
    with _without_blas_threads():
        from .inspect import run

    return run(arguments)


def _pull(arguments: list[str]) -> int:
    from .downloads import pull

    return pull(arguments)


def _list(arguments: list[str]) -> int:
    from .downloads import list_models

    return list_models(arguments)


def _rm(arguments: list[str]) -> int:
    from .downloads import remove

    return remove(arguments)


_COMMANDS: dict[str, Callable[[list[str]], int]] = {
    "serve": _serve,
    "chat": _chat,
    "complete": _complete,
    "run-batch": _run_batch,
    "bench": _bench,
    "eval": _eval,
    "quantize": _quantize,
    "inspect": _inspect,
    "pull": _pull,
    "list": _list,
    "rm": _rm,
    "run": _run_model,
    "ps": _ps,
    "stop": _stop,
    "devices": _devices,
}


_PIPE_BROKE = 128 + 13  # what a shell says of a program that SIGPIPE has ended
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)

_ELSEWHERE = {
    "collect-env": "devices",
    "launch": "serve",
    "ls": "list",
    "server": "serve",
    "show": "inspect",
    "start": "serve",
}
"""The commands' names in vLLM, Ollama and others."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs a command line and returns its exit code: 0, 1 for a failure, 2 for a wrong command line, 141 if its output
    is not read to the end.
    """
    try:
        try:
            return _run(list(sys.argv[1:] if arguments is None else arguments))
        finally:
            if sys.stdout is not None:
                sys.stdout.flush()
    except BrokenPipeError:
        if not _reader_is_gone():
            raise
        _drop_output()
        return _PIPE_BROKE
    except OSError as error:
        if error.errno not in _FULL:
            raise
        _drop_output()
        said = f"{error.strerror} where the output is written: make room, or write elsewhere"
        print(f"tidewheel: {said}", file=sys.stderr)
        return 1


def _drop_output() -> None:
    """Python writes what is left when it ends, and would complain."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _reader_is_gone() -> bool:
    """Whether it is standard output that broke: `tidewheel inspect MODEL | head -1`."""
    poll = select.poll()
    poll.register(sys.stdout, 0)
    return any(event & select.POLLERR for _, event in poll.poll(0))


def _run(given: list[str]) -> int:
    if not given or given[0] in ("-h", "--help", "help"):
        print(_USAGE, end="")
        return 0 if given else 2
    if given[0] in ("-v", "--version"):
        print(f"tidewheel {__version__}")
        return 0
    command = _COMMANDS.get(given[0])
    if command is None:
        close = difflib.get_close_matches(given[0], _COMMANDS, 1)
        meant = _ELSEWHERE.get(given[0]) or (close[0] if close else None)
        hint = f"; did you mean {meant}?" if meant else f"; there are {', '.join(_COMMANDS)}"
        print(f"tidewheel: unknown command {given[0]}{hint}", file=sys.stderr)
        return 2
    try:
        return command(given[1:])
    except TidewheelError as error:
        print(f"tidewheel {given[0]}: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
