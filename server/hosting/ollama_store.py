"""The models in a folder that Ollama itself keeps, such as ~/.ollama/models: manifests name the blobs of each.

The format: https://github.com/ollama/ollama/tree/main/manifest. A manifest lies at HOST/NAMESPACE/MODEL/TAG.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from tidewheel.engine.errors import ModelError
from tidewheel.engine.files.reading import read_file
from tidewheel.engine.files.wording import reason, shown

MANIFESTS = ("manifests-v2", "manifests")
"""The folders of manifests. What the first one has counts, as for Ollama."""
BLOBS = "blobs"

_MAX_BYTES = 1 << 20  # of a manifest, or of parameters
_HOST, _NAMESPACE, _TAG = "registry.ollama.ai", "library", "latest"  # which names leave out
_RUNNERS = ("ollama", "llamacpp")  # of a list's manifests, that are for GGUF files: in Ollama's order
_IMAGE = "application/vnd.ollama.image."
_DIGEST = re.compile(r"sha256[:-]([0-9a-f]{64})", re.IGNORECASE)
_SAMPLING = {
    "temperature": "temperature",
    "top_p": "top_p",
    "top_k": "top_k",
    "min_p": "min_p",
    "repeat_penalty": "repetition_penalty",
}
"""Parameters of a model, and what generation_config.json calls them."""
_NOT_USED = ("system", "messages")


class _Layer(msgspec.Struct):
    digest: str
    media_type: str = msgspec.field(name="mediaType", default="")


class _Manifest(msgspec.Struct):
    layers: list[_Layer] | None = None
    digest: str = ""  # of the manifest itself, where it is not here
    runner: str = ""
    manifests: list[_Manifest] | None = None


class OllamaModel(msgspec.Struct, frozen=True):
    """What a manifest says: the model's GGUF file, and a projector's if it has one.

    `given` are options that it needs, by name, and `unused` what it has that is not used.
    """

    file: Path
    projector: Path | None
    given: Mapping[str, Any]
    unused: Sequence[str]


def is_store(names: Sequence[str]) -> bool:
    """Whether a folder with these names in it is one of Ollama's."""
    return BLOBS in names and any(name in names for name in MANIFESTS)


def named_manifests(root: str, names_in: Callable[[str], Sequence[str]]) -> Iterator[tuple[str, Path]]:
    """The manifests by the names that Ollama shows. `names_in` gives what is in a folder, in order.

    Raises what `names_in` raises.
    """
    found: dict[str, Path] = {}
    for folder in MANIFESTS:
        top = os.path.join(root, folder)
        for host in _folders(top, names_in):
            for namespace in _folders(os.path.join(top, host), names_in):
                for model in _folders(os.path.join(top, host, namespace), names_in):
                    path = os.path.join(top, host, namespace, model)
                    for tag in names_in(path):
                        found.setdefault(_name(host, namespace, model, tag), Path(path, tag))
    yield from found.items()


def read_model(root: str, path: Path) -> OllamaModel:
    """What a manifest in the folder of that `root` names. Raises ModelError."""
    manifest = _manifest(path)
    if manifest.manifests is not None:
        manifest = _for_gguf(root, path, manifest.manifests)
    files: dict[str, list[Path]] = {}
    for layer in manifest.layers or ():
        kind = layer.media_type.partition(";")[0]
        if kind.startswith(_IMAGE):
            files.setdefault(kind.removeprefix(_IMAGE), []).append(_blob(root, layer.digest))
    if "adapter" in files:
        raise ModelError("it has an adapter: serve the model that it is for, with --lora-modules NAME=ADAPTER")
    models, projectors = files.get("model", []), files.get("projector", [])
    if not models:
        raise ModelError("it has no GGUF file: other formats, and models that run elsewhere, are not supported")
    if len(models) > 1 or len(projectors) > 1:
        raise ModelError("it has several GGUF files, which is not supported")
    given: dict[str, Any] = {} if not projectors else {"mmproj": str(projectors[0])}
    if sampling := _sampling(files.get("params", [])):
        given["override_generation_config"] = sampling
    return OllamaModel(models[0], next(iter(projectors), None), given, [kind for kind in _NOT_USED if kind in files])


def _folders(path: str, names_in: Callable[[str], Sequence[str]]) -> list[str]:
    if not os.path.isdir(path):
        return []
    return [name for name in names_in(path) if os.path.isdir(os.path.join(path, name))]


def _name(host: str, namespace: str, model: str, tag: str) -> str:
    parts = [model]
    if (host, namespace) != (_HOST, _NAMESPACE):
        parts = [namespace, model] if host == _HOST else [host, namespace, model]
    return "/".join(parts) + (f":{tag}" if tag != _TAG else "")


def _manifest(path: Path) -> _Manifest:
    try:
        return msgspec.json.decode(read_file(path, _MAX_BYTES), type=_Manifest)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ModelError(f"{path} is no manifest of Ollama: {reason(error)}") from error


def _for_gguf(root: str, path: Path, manifests: Sequence[_Manifest]) -> _Manifest:
    """That of a list which is for GGUF files."""
    for runner in _RUNNERS:
        for manifest in manifests:
            if manifest.runner.lower() == runner:
                return manifest if manifest.layers is not None else _manifest(_blob(root, manifest.digest))
    raise ModelError(f"{path} has no model in GGUF files")


def _blob(root: str, digest: str) -> Path:
    if (found := _DIGEST.fullmatch(digest)) is None:
        raise ModelError(f"its manifest has {shown(digest)} in the place of a digest")
    return Path(root, BLOBS, f"sha256-{found[1].lower()}")


def _sampling(files: Sequence[Path]) -> dict[str, float]:
    values: dict[str, float] = {}
    for path in files:
        try:
            parameters = json.loads(read_file(path, _MAX_BYTES))
        except (ValueError, RecursionError) as error:
            raise ModelError(f"{path}, its parameters, is not valid JSON: {reason(error)}") from error
        if not isinstance(parameters, dict):
            raise ModelError(f"{path}, its parameters, is not a JSON object")
        values |= {_SAMPLING[key]: value for key, value in parameters.items() if key in _SAMPLING}
    return values
