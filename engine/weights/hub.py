"""From a model's name to a folder or a GGUF file: local ones as they are, hub ids by huggingface_hub's cache."""

from __future__ import annotations

from pathlib import Path

from ..errors import ModelError
from ..files.wording import shown

# What serving needs. Never pickle; not the copies in other formats that many repositories have in subfolders, nor the
# unsharded duplicate that some keep beside the shards.
_WANTED = ["*.json", "*.jinja", "*.txt", "tokenizer.model"]
_WEIGHTS = ["*.safetensors"]
_UNWANTED = ["*/*", "consolidated*.safetensors"]
# An encoder in ONNX has its modules in subfolders; large ones keep their weights beside the graph.
_ENCODER_WANTED = ["*.json", "onnx/model.onnx*", "model.onnx*"]
_ENCODER_UNWANTED = ["openvino/*"]


def resolve(
    model: str, revision: str | None = None, download_dir: str | Path | None = None, with_weights: bool = True
) -> Path:
    """The folder of a model, downloaded if need be, with progress bars on stderr; or a `.gguf` file, if it is one.

    `model` is such a file, a folder or a hub id ("owner/name"). `download_dir` is the cache's folder in place of
    huggingface_hub's own. Without `with_weights` only the small files are downloaded, for dummy weights. The hub's
    variables are honoured: HF_ENDPOINT, HF_HUB_OFFLINE, HF_HOME, HF_TOKEN and the rest.

    Raises ModelError if the model is not there or cannot be had.
    """
    wanted = _WANTED + _WEIGHTS if with_weights else _WANTED
    return _local(model, ".gguf") or _download(model, revision, download_dir, wanted, _UNWANTED)


def resolve_encoder(model: str, download_dir: str | Path | None = None) -> Path:
    """As `resolve`, for an encoder in ONNX."""
    return _local(model) or _download(model, None, download_dir, _ENCODER_WANTED, _ENCODER_UNWANTED)


def _local(model: str, suffix: str | None = None) -> Path | None:
    """A folder, or a file with that suffix. None for what may be a hub id."""
    try:
        path = Path(model).expanduser()
        if path.is_dir() or (path.suffix == suffix and path.exists()):
            return path
        if path.exists():
            raise ModelError(
                f"{model} is a file; give a .gguf file, the folder that holds the model, or a hub id such as owner/name"
            )
    except (OSError, ValueError, RuntimeError) as error:  # a name too long, a folder nobody may look into, no such home
        reason = getattr(error, "strerror", None) or error
        raise ModelError(f"{shown(model)} cannot be looked for: {reason}") from error
    if model.startswith(("/", "./", "../", "~")):
        raise ModelError(f"{model} does not exist")
    return None


def _download(
    model: str, revision: str | None, download_dir: str | Path | None, wanted: list[str], unwanted: list[str]
) -> Path:
    # Importing the hub's client takes a good part of a second, which a local folder need not pay.
    from huggingface_hub import constants, errors, snapshot_download

    at = f"{model} (revision {revision})" if revision else model
    endpoint = constants.ENDPOINT
    try:
        path = snapshot_download(
            model, revision=revision, cache_dir=download_dir, allow_patterns=wanted, ignore_patterns=unwanted
        )
    except errors.HFValidationError as error:
        raise ModelError(f"{model} is neither a folder nor a hub id such as owner/name") from error
    except errors.GatedRepoError as error:
        raise ModelError(
            f"{at} is gated: accept its terms at {endpoint}/{model}, then set HF_TOKEN to a token of that account"
        ) from error
    except errors.RepositoryNotFoundError as error:
        raise ModelError(
            f"{model} is neither a folder here nor a model at {endpoint}; if it is private, set HF_TOKEN"
        ) from error
    except errors.RevisionNotFoundError as error:
        raise ModelError(f"{model} has no revision {revision} at {endpoint}") from error
    except errors.LocalEntryNotFoundError as error:
        if constants.HF_HUB_OFFLINE:
            raise ModelError(f"{at} is not in the cache, and HF_HUB_OFFLINE forbids downloading it") from error
        raise ModelError(f"{at} is not in the cache, and {endpoint} cannot be reached") from error
    except (errors.HfHubHTTPError, OSError) as error:
        raise ModelError(f"{at} could not be downloaded from {endpoint}: {error}") from error
    return Path(path)
