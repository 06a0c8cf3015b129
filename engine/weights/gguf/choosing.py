"""Which GGUF files to take, of a folder or of a repository: `folder:Q4_K_M`, `owner/name:Q4_K_M`.

And which file has the projector that makes a model see: an mmproj file.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Iterable
from pathlib import Path, PurePath, PurePosixPath

from ...errors import ModelError
from ...files.wording import shown

MAGIC = b"GGUF"
"""What a file begins with."""
DEFAULT_QUANTIZATION = "Q4_K_M"
"""The quantization to take if a repository has several and none is named, as in llama.cpp."""

_LABEL = re.compile(
    r"(?:^|[-._/])((?:UD-)?(?:I?Q[1-8](?:_[A-Z0-9]+)*|TQ[12]_0|MXFP4(?:_MOE)?|NVFP4|BF16|F16|F32))(?=$|[-._/])",
    re.IGNORECASE,
)
_SPLIT = re.compile(r"(.*)-(\d{5})-of-(\d{5})")
_MMPROJ = "mmproj"  # in the name of a projector for images
_NOT_MODELS = (_MMPROJ, "imatrix")  # the latter is what quantizers measured
_DRAFTS_ONLY = "mtp-"  # what llama.cpp's converter calls a file with a model's layer for drafts alone
_MAX_LISTED = 30


def is_gguf(path: Path) -> bool:
    """Whether there is a file that begins as GGUF does. Raises OSError if it may not be read."""
    if not path.is_file():
        return False
    with path.open("rb") as file:
        return file.read(len(MAGIC)) == MAGIC


def find_gguf(folder: Path) -> Path | None:
    """The GGUF model in a folder without safetensors: its only file, or the first of its splits.

    None if there is none. Raises ModelError if there are several. Projectors for images and layers for drafts are not
    models.
    """
    if any(folder.glob("*.safetensors")):
        return None
    found = [path for path in sorted(folder.glob("*.gguf")) if not path.name.startswith(_DRAFTS_ONLY)]
    files = [path for path in found if not _is_mmproj(path)]
    models = [path for path in files if (split := _SPLIT.fullmatch(path.stem)) is None or int(split[2]) == 1]
    if len(models) > 1:
        names = ", ".join(path.name for path in models[:10])
        one = next(iter(models_in(path.name for path in files)), models[0].name)
        raise ModelError(f"{folder} has several GGUF models ({names}): name one, as in {folder}:{one}")
    if files and not models:
        raise ModelError(f"{folder} lacks the first file of the model to which {files[0].name} belongs")
    return models[0] if models else None


def choose_gguf_in(folder: Path, wanted: str) -> Path:
    """The GGUF model of that name (see `choose_gguf`) in a folder or in one that lies in it; the first of its splits.

    Raises ModelError with what is there if that is not one model.
    """
    names = [path.relative_to(folder).as_posix() for pattern in ("*", "*/*") for path in folder.glob(pattern)]
    return folder / choose_gguf(str(folder), names, wanted)[0]


def choose_gguf(repository: str, names: Iterable[str], wanted: str | None = None) -> list[str]:
    """The file names of one model, the first part first.

    `names` are the repository's files, and `wanted` a quantization such as Q4_K_M or the name of a `.gguf` file. None
    is the default quantization, or the only one. Raises ModelError with what is there if that is not one model.
    """
    models = _models(names)
    if not models:
        what = f"no GGUF files for :{wanted}" if wanted else "neither safetensors nor GGUF files"
        raise ModelError(f"{repository} has {what}")
    found = [model for model in models if _fits(model, wanted or DEFAULT_QUANTIZATION)]
    if wanted is None and not found:
        found = list(models)
    if not found and wanted is not None:  # Unsloth's dynamic ones, beside which there is seldom a plain one
        found = [model for model in models if _fits(model, f"UD-{wanted}")]
    if len(found) == 1:
        return all_parts(repository, models[found[0]])
    if not found:
        raise ModelError(f"{repository} has no GGUF model {shown(wanted)}; it has {_listed(models)}")
    raise ModelError(
        f"{repository} has several GGUF models ({_listed(found)}): name one, as in {repository}:{_tags(found)[0]}"
    )


def models_in(names: Iterable[str]) -> dict[str, list[str]]:
    """The files of each GGUF model among these names, by what `choose_gguf` takes for it."""
    models = _models(names)
    return dict(zip(_tags(models), models.values(), strict=True))


def choose_mmproj(names: Iterable[str], model: str) -> str | None:
    """The projector for the model, as `names` of files and the model's have folders; None if there is none.

    It lies beside the model, or in a folder around it: the nearest counts. Of several, one that has the model's name
    goes first, then that whose bits are nearest to the model's, in bfloat16 rather than float16.
    """
    folder = PurePosixPath(model).parent
    around = [folder, *folder.parents]
    found = [path for path in map(PurePosixPath, names) if _is_mmproj(path) and path.parent in around]
    own, bits = _own_name(model), _bits(model)

    def rank(path: PurePosixPath) -> tuple[int, bool, int, str]:
        is_named = _is_named_for(_own_name(path.name), own)
        return around.index(path.parent), not is_named, abs(_bits(path.name) - bits), path.name

    return str(min(found, key=rank)) if found else None


def find_mmproj(model: Path) -> Path | None:
    """The projector beside a model's file; in the hub's cache, in the model's repository. None if there is none."""
    snapshot = next((folder for folder in model.parents if folder.parent.name == "snapshots"), model.parent)
    around = [model.parent, *model.parent.parents]
    folders = around[: around.index(snapshot) + 1]
    names = [path.relative_to(snapshot).as_posix() for folder in folders for path in folder.glob("*.*")]
    chosen = choose_mmproj(names, model.relative_to(snapshot).as_posix())
    return None if chosen is None else snapshot / chosen


def without_own_mmproj(names: Iterable[str], models: Iterable[str]) -> set[str]:
    """Those of the models for which none of the projectors among these names of files is named; none without any."""
    projectors = [_own_name(name) for name in names if _is_mmproj(PurePosixPath(name))]
    if not projectors:
        return set()
    own = {model: _own_name(model) for model in models}
    return {model for model, name in own.items() if not any(_is_named_for(one, name) for one in projectors)}


def _is_named_for(projector: str, model: str) -> bool:
    """By the names in their files."""
    return bool(projector) and (projector in model or model in projector)


def _is_mmproj(path: PurePath) -> bool:
    return path.suffix.lower() == ".gguf" and _MMPROJ in path.name.lower()


def _own_name(file: str) -> str:
    """The model's name in a file's, in small letters."""
    stem = PurePosixPath(file).name[: -len(".gguf")]
    split = _SPLIT.fullmatch(stem)
    name = _LABEL.sub("", split[1] if split else stem).lower().replace(_MMPROJ, "")
    return name.strip("-._")


def _bits(file: str) -> int:
    """How many bits a file's name says that most weights have; 16 if it does not."""
    label = _label(file[: -len(".gguf")]) or ""
    found = re.search(r"\d+", label)
    return int(found[0]) if found else 16


def _models(names: Iterable[str]) -> dict[str, list[str]]:
    """The files of each model, in order, by their common name without `.gguf`."""
    models: dict[str, list[str]] = defaultdict(list)
    for name in sorted(names):
        path = PurePosixPath(name)
        is_model = not (any(word in path.name.lower() for word in _NOT_MODELS) or path.name.startswith(_DRAFTS_ONLY))
        if path.suffix.lower() == ".gguf" and is_model:
            stem = name[: -len(".gguf")]
            split = _SPLIT.fullmatch(stem)
            models[split[1] if split else stem].append(name)
    return dict(models)


def _label(model: str) -> str | None:
    """The quantization that a model's name says."""
    labels = _LABEL.findall(model)
    return labels[-1].upper() if labels else None


def _fits(model: str, wanted: str) -> bool:
    if wanted.lower().endswith(".gguf"):
        stem = wanted[: -len(".gguf")]
        split = _SPLIT.fullmatch(stem)
        return model == (split[1] if split else stem)
    return _label(model) == wanted.upper()


def all_parts(repository: str, names: list[str]) -> list[str]:
    """The files of one model, the first part first. Raises ModelError if one is missing."""
    split = _SPLIT.fullmatch(names[0][: -len(".gguf")])
    if split is not None and len(names) != int(split[3]):
        raise ModelError(f"{repository} has {len(names)} of the {int(split[3])} parts of {names[0]}")
    return names


def _tags(models: Iterable[str]) -> list[str]:
    """A name for each of these models: its quantization, or its file if that is unknown or not unique."""
    labels = {model: _label(model) for model in models}
    count = Counter(labels.values())
    return [label if label and count[label] == 1 else f"{model}.gguf" for model, label in labels.items()]


def _listed(models: Iterable[str]) -> str:
    tags = sorted(_tags(models))
    more = f" and {len(tags) - _MAX_LISTED} more" if len(tags) > _MAX_LISTED else ""
    return ", ".join(tags[:_MAX_LISTED]) + more
