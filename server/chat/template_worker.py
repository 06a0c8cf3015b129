"""The process that renders requests' own templates: in turns, it reads a template with variables and writes the text.

Run as `python -I -c COMMAND SOCKET PATH...` by request_templates.py. Its memory and time are limited. It writes no
file, and does not have the server's environment, open files or connections.
"""

from __future__ import annotations

import functools
import os
import pickle
import resource
import signal
import socket
import struct
import sys
import time
from enum import IntEnum
from typing import Any

import jinja2

from tidewheel.engine.machine.memory import address_space_bytes, limit_address_space

from .template_environment import complaint, template_environment

MAX_MEMORY_BYTES = 512 * 2**20
MAX_CPU_S = 2
MAX_TEXT = 16 * 2**20  # characters
_MAX_COMPLAINT = 2000  # characters
_NICE = 10  # about a tenth of a core that the chat model wants, all of one that it does not
# Of a template's memory some may stay with the process; past this it ends, and the next request gets a new one.
_MAX_KEPT_BYTES = 64 * 2**20

REQUEST = struct.Struct("!Q")  # the size of what follows: pickled (source, variables)
REPLY = struct.Struct("!B?I")  # an Outcome, whether the process ends now, the size of the UTF-8 text that follows
READY = b"\n"
COMMAND = "import sys; sys.path[:] = sys.argv[2:]; from tidewheel.server.chat.template_worker import main; main()"


class Outcome(IntEnum):
    """What a reply's text is: a prompt, what is wrong with the template, or with its use on these messages."""

    TEXT = 0
    BAD_TEMPLATE = 1
    FAILED = 2


def main() -> None:
    """Serve on the socket that the command line names, until its other end is closed."""
    connection = socket.socket(fileno=int(sys.argv[1]))
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the server, which ends this process in its time
    _bound_process()
    connection.sendall(READY)
    stream = connection.makefile("rb")
    size_at_start = _size_bytes()
    compiled = functools.lru_cache(maxsize=16)(template_environment().from_string)
    while head := stream.read(REQUEST.size):
        source, variables = pickle.loads(stream.read(*REQUEST.unpack(head)))
        outcome, text = _answer(compiled, source, variables)
        retires = _size_bytes() > size_at_start + _MAX_KEPT_BYTES
        connection.sendall(REPLY.pack(outcome, retires, len(text)) + text)
        if retires:
            return


def _bound_process() -> None:
    os.nice(_NICE)
    limit_address_space(MAX_MEMORY_BYTES)
    for limit in (resource.RLIMIT_CORE, resource.RLIMIT_FSIZE, resource.RLIMIT_NPROC):
        resource.setrlimit(limit, (0, 0))


def _size_bytes() -> int:
    """The memory that this process has taken from the system, which it hardly gives back."""
    if sys.platform == "darwin":
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    else:
        return address_space_bytes()  # on Linux the other peak begins with the parent process's


def _answer(compiled: Any, source: str, variables: dict[str, Any]) -> tuple[Outcome, bytes]:
    # What has been used and what may be; the kernel ends the process when it is more.
    seconds = int(time.process_time()) + 1 + MAX_CPU_S
    resource.setrlimit(resource.RLIMIT_CPU, (seconds, resource.getrlimit(resource.RLIMIT_CPU)[1]))
    try:
        try:
            template = compiled(source)
        except jinja2.TemplateError as error:
            return Outcome.BAD_TEMPLATE, _encoded(f"the chat template does not compile: {error}")
        return _render(template, variables)
    except MemoryError:
        return Outcome.BAD_TEMPLATE, b"rendering it takes more than %d MiB" % (MAX_MEMORY_BYTES >> 20)
    except RecursionError:
        return Outcome.BAD_TEMPLATE, b"it is nested too deeply, or calls itself without end"
    except Exception as error:  # any error of a template is its request's
        return Outcome.FAILED, _encoded(complaint(error))


def _render(template: jinja2.Template, variables: dict[str, Any]) -> tuple[Outcome, bytes]:
    pieces, length = [], 0
    for piece in template.generate(variables):
        length += len(piece)
        if length > MAX_TEXT:
            return Outcome.BAD_TEMPLATE, b"it writes more than %d characters" % MAX_TEXT
        pieces.append(piece)
    return Outcome.TEXT, "".join(pieces).encode()


def _encoded(text: str) -> bytes:
    return text[:_MAX_COMPLAINT].encode(errors="replace")
