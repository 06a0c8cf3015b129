"""Asks accelerators for their memory and model, and chooses one for `--device auto`.

A vendor's package is asked in its own process, with a time limit. Importing it takes seconds and much memory, may fail
in many ways, and occupies some devices as long as the process lives.
"""

from __future__ import annotations

import json
import logging
import subprocess
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryFile
from typing import IO

from ..errors import DeviceError
from .finding import find

logger = logging.getLogger(__name__)

_GIB = 2**30
_TIMEOUT_S = 60.0  # the first import after a start of the machine reads gigabytes

# Each gives the number of devices, the first one's model, and its free and its whole memory in bytes.
_TORCH = """
import torch
if not torch.{device}.is_available():
    raise SystemExit("torch.{device}.is_available() is false")
model = getattr(torch.{device}, "get_device_name", lambda: "{model}")()
answer(torch.{device}.device_count(), model, *torch.{device}.{memory}())
"""
_QUESTIONS: Mapping[str, str] = {
    "cuda": _TORCH.format(device="cuda", model="GPU", memory="mem_get_info"),
    "rocm": _TORCH.format(device="cuda", model="GPU", memory="mem_get_info"),
    "xpu": """
import torch
if not torch.xpu.is_available():
    raise SystemExit("torch.xpu.is_available() is false")
try:
    memory = torch.xpu.mem_get_info()
except RuntimeError:  # integrated GPUs do not tell
    memory = None, None
answer(torch.xpu.device_count(), torch.xpu.get_device_name(), *memory)
""",
    "hpu": "import habana_frameworks.torch" + _TORCH.format(device="hpu", model="Gaudi", memory="mem_get_info"),
    "neuron": "import torch_neuronx"
    + _TORCH.format(device="accelerator", model="NeuronCore", memory="get_memory_info"),
    "tpu": """
import jax
devices = jax.local_devices(backend="tpu")
memory = devices[0].memory_stats() or {}
total = memory.get("bytes_limit")
free = None if total is None else total - memory.get("bytes_in_use", 0)
answer(len(devices), devices[0].device_kind, free, total)
""",
}
_MARK = "tidewheel:"  # packages print to both streams, as they like
_PREFIX = f"""
import json, sys
sys.path[:] = [folder for folder in sys.path if folder]  # the current folder may hold a file of any name
def answer(*values):
    print("{_MARK}" + json.dumps(values))
"""


@dataclass(frozen=True, slots=True)
class Answer:
    """`count` devices of one `model`. Memory is the first device's, in bytes; None if the package does not tell."""

    count: int
    model: str
    free: int | None
    total: int | None

    def __str__(self) -> str:
        devices = self.model if self.count == 1 else f"{self.count} x {self.model}"
        if self.free is None or self.total is None:
            return f"{devices}, memory not reported"
        each = "" if self.count == 1 else " in the first"
        return f"{devices}, {self.free / _GIB:.2f} GiB of {self.total / _GIB:.2f} GiB free{each}"


def ask(name: str, timeout_s: float = _TIMEOUT_S) -> Answer:
    """Ask the package of an accelerator that lacks nothing (see `find`). Raises DeviceError if it cannot be used."""
    command = [sys.executable, "-c", _PREFIX + _QUESTIONS[name]]
    # Files and not pipes: those would be waited for until all processes that the package has started are gone.
    with TemporaryFile() as out, TemporaryFile() as err:
        try:
            done = subprocess.run(command, stdin=subprocess.DEVNULL, stdout=out, stderr=err, timeout=timeout_s)
        except subprocess.TimeoutExpired as error:
            raise DeviceError(f"it did not answer within {timeout_s:g} s") from error
        answers = [line.removeprefix(_MARK) for line in _lines(out) if line.startswith(_MARK)]
        if done.returncode != 0 or not answers:
            last = next(reversed(_lines(err)), f"the process that asked it ended with {done.returncode}")
            raise DeviceError(last)
    count, model, free, total = json.loads(answers[0])
    return Answer(count, model, free, total)


def _lines(file: IO[bytes]) -> list[str]:
    file.seek(0)
    return file.read().decode(errors="replace").strip().splitlines()


def choose(names: Iterable[str], weight_bytes: int, root: Path = Path("/")) -> str | None:
    """The first of these accelerators that can be used and has `weight_bytes` of free memory; None: there is none.

    The log says what is chosen, and why the others before it are not. `root` is where `find` looks.
    """
    for name in names:
        finding = find(name, root)
        try:
            if finding.missing:
                raise DeviceError("; ".join(finding.missing))
            answer = ask(name)
            if answer.free is not None and answer.free < weight_bytes:
                raise DeviceError(f"{answer}, and the weights take {weight_bytes / _GIB:.2f} GiB")
        except DeviceError as error:
            logger.warning("--device auto does not choose %s (%s): %s", name, finding.found, error)
        else:
            logger.info("--device auto chooses %s: %s (%s)", name, answer, finding.found)
            return name
    return None
