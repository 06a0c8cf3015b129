"""Checkpoints that are pickles: refused, with the one command that makes safetensors of them."""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Sequence

from ..errors import ModelError

_SUFFIXES = (".bin", ".pt", ".pth", ".ckpt")
_OF_TRAINING = ("training_args", "optimizer", "scheduler", "rng_state")  # may lie beside weights
_CONVERTED = "model.safetensors"
# From pickles, the arguments after the first, to safetensors, the first, where tensors cannot share memory.
_CONVERT = (
    "python3 -c 'import sys, torch; from safetensors.torch import save_file; "
    "save_file({k: v.clone().contiguous() for f in sys.argv[2:] "
    'for k, v in torch.load(f, map_location="cpu", weights_only=True).items()}, sys.argv[1])\''
)


def pickles_in(names: Iterable[str]) -> list[str]:
    """Those of the files that are pickles, without what training leaves."""
    files = ((name, name.rpartition("/")[2]) for name in names)
    return sorted(name for name, file in files if file.endswith(_SUFFIXES) and not file.startswith(_OF_TRAINING))


def refused_folder(folder: str, pickles: Sequence[str]) -> ModelError:
    """The error for a folder that has these pickles."""
    return ModelError(
        f"{_never_loaded(folder, pickles)}. Where torch is installed, this makes safetensors of it and runs no code: "
        f"{_conversion(folder, pickles)}"
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
        f"{refused}. Or, where torch is installed, this fetches it, makes safetensors of it, runs no code of it, and "
        f"serves it: {shlex.join(download)} && {_conversion(folder, beside)} && "
        f"tidewheel serve {shlex.quote(f'./{folder}')}"
    )


def _never_loaded(owner: str, pickles: Sequence[str]) -> str:
    shown = ", ".join(pickles[:3])
    return f"{owner} has its weights as pickle ({shown}), which can run code when it is read and is never loaded"


def _conversion(folder: str, pickles: Sequence[str]) -> str:
    return f"{_CONVERT} {shlex.join(f'{folder}/{name}' for name in (_CONVERTED, *pickles))}"
