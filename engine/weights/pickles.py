"""Checkpoints that are pickles. Pickles of plain tensors are read without running them. Others are refused, with the
one command that makes safetensors of them.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterable, Sequence

from ..errors import ModelError

_SUFFIXES = (".bin", ".pt", ".pth", ".ckpt")
_OF_TRAINING = ("training_args", "optimizer", "scheduler", "rng_state")  # may lie beside weights
PYTORCH, PYTORCH_INDEX = "pytorch_model.bin", "pytorch_model.bin.index.json"
PYTORCH_FILES = [PYTORCH, "pytorch_model-*-of-*.bin"]
PYTORCH_GLOB = "pytorch_model*.bin"
_PYTORCH_FILE = re.compile(r"pytorch_model(-[0-9]+-of-[0-9]+)?\.bin")
_CONVERTED = "model.safetensors"
# From pickles, the arguments after the first, to safetensors, the first, where tensors cannot share memory.
_CONVERT = (
    "python3 -c 'import sys, torch; from safetensors.torch import save_file; "
    "save_file({k: v.clone().contiguous() for f in sys.argv[2:] "
    'for k, v in torch.load(f, map_location="cpu", weights_only=True).items()}, sys.argv[1])\''
)


def pickles_in(names: Iterable[str]) -> list[str]:
    """The files that are pickles, without those that training leaves."""
    files = ((name, name.rpartition("/")[2]) for name in names)
    return sorted(name for name, file in files if file.endswith(_SUFFIXES) and not file.startswith(_OF_TRAINING))


def may_be_plain(names: Iterable[str]) -> bool:
    """Whether a model without safetensors and GGUF has the files that in most cases hold tensors and nothing else."""
    there = list(names)
    return any(map(_PYTORCH_FILE.fullmatch, there)) and not any(name.lower().endswith(".gguf") for name in there)


def refused_folder(folder: str, pickles: Sequence[str], reason: str = "") -> ModelError:
    """The error for a folder that has these pickles; `reason` says what is in one of them besides tensors."""
    because = f" ({reason})" if reason else ""
    return ModelError(
        f"{_never_loaded(folder, pickles)}{because}. Where torch is installed, this command converts it to "
        f"safetensors without running its code: {_conversion(folder, pickles)}"
    )


def refused_repository(
    repository: str, revision: str | None, pickles: Sequence[str], others: Sequence[str]
) -> ModelError:
    """The error for a repository that has these pickles. The command also fetches its `others`, and serves the model.

    Only weights beside the config are converted: in subfolders they have other names than a family knows.
    """
    refused = f"{_never_loaded(repository, pickles)}: name a repository or a --revision with safetensors or GGUF"
    beside = [name for name in pickles if "/" not in name]
    if not beside:
        return ModelError(refused)
    folder = repository.rpartition("/")[2]
    download = ["hf", "download", repository, *others, *beside, "--local-dir", folder]
    if revision is not None:
        download += ["--revision", revision]
    return ModelError(
        f"{refused}. Or, where torch is installed, this command downloads it, converts it to safetensors without "
        f"running its code, and serves it: {shlex.join(download)} && {_conversion(folder, beside)} && tidewheel "
        f"serve {shlex.quote(f'./{folder}')}"
    )


def _never_loaded(owner: str, pickles: Sequence[str]) -> str:
    shown = ", ".join(pickles[:3])
    return f"{owner} has its weights as pickle ({shown}), which can run code when it is read and is never loaded"


def _conversion(folder: str, pickles: Sequence[str]) -> str:
    return f"{_CONVERT} {shlex.join(f'{folder}/{name}' for name in (_CONVERTED, *pickles))}"
