"""From a model's name to a folder or a GGUF file: local ones as they are, hub ids by huggingface_hub's cache."""

from __future__ import annotations

import glob
import json
import logging
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from ..errors import ModelError
from ..files.reading import is_there
from ..files.wording import one_line, shown
from .gguf.choosing import choose_gguf, choose_gguf_in, choose_mmproj, is_gguf
from .hub_client import longest_wait_s, prepare_client, read_beginning
from .pickles import PYTORCH_FILES, PYTORCH_INDEX, may_be_plain, pickles_in, refused_repository

if TYPE_CHECKING:
    from huggingface_hub.hf_api import ModelInfo

    from .gguf.reader import Metadata

logger = logging.getLogger(__name__)

# What serving needs. Pickles only where nothing else has the weights; not the copies in other formats that many
# repositories have in subfolders, nor the unsharded duplicate that some keep beside the shards.
_PIECES = ["tokenizer.model", "tokenizer.model.v*", "spiece.model", "sentencepiece.bpe.model", "spm.model"]
_WANTED = ["*.json", "*.jinja", "*.txt", *_PIECES, "tiktoken.model"]
_WEIGHTS = ["*.safetensors"]
_INDEX = "model.safetensors.index.json"
_UNWANTED = ["*/*", "consolidated*.safetensors"]
# An encoder in ONNX has its modules in subfolders; large ones keep their weights beside the graph.
_ENCODER_WANTED = ["*.json", "onnx/model.onnx*", "model.onnx*"]
_ENCODER_UNWANTED = ["openvino/*"]
_MODULES = "modules.json"
_BEGINNING_BYTES = 2**18  # of a GGUF file: its own keys lie before those of the tokenizer, and take a few thousand
OF_BGE_M3 = ["sparse_linear.pt", "colbert_linear.pt"]  # its other weights are PyTorch's files too
_NATIVE_ENCODER_WANTED = ["*.json", "*.jinja", "*.safetensors", "artifact.metadata", *OF_BGE_M3]
_NATIVE_ENCODER_UNWANTED = [*_ENCODER_UNWANTED, "onnx/*", "consolidated*.safetensors"]


def resolve(
    model: str,
    revision: str | None = None,
    download_dir: str | Path | None = None,
    with_weights: bool = True,
    load_format: str = "auto",
    *,
    with_mmproj: bool = False,
) -> Path:
    """The folder of a model, downloaded if need be, with progress bars on stderr; or a `.gguf` file, if it is one.

    `model` is such a file, a folder or a hub id: "owner/name". "owner/name:Q4_K_M" is one of a repository's GGUF
    models, and "folder:Q4_K_M" one of a folder's (see `choose_gguf`). A repository that has no safetensors is looked
    through for GGUF. `download_dir` is the cache's folder in place of huggingface_hub's own. Without `with_weights`
    only the small files are downloaded, for dummy weights. The load formats `safetensors` and `pt` are for that kind
    of weights alone. `with_mmproj`: with a GGUF model comes the file that makes it see, if the repository has one (see
    `choose_mmproj`). The hub's variables are honoured: HF_ENDPOINT, HF_HUB_OFFLINE, HF_HOME, HF_TOKEN and the rest.

    Raises ModelError if the model is not there or cannot be had.
    """
    if (local := local_model(model, ".gguf")) is not None:
        return local
    repository, wanted = split_name(model)
    if wanted is not None:
        return _gguf(repository, revision, download_dir, wanted, with_mmproj=with_mmproj)
    if load_format == "pt":
        return download(model, revision, download_dir, _WANTED + PYTORCH_FILES, _UNWANTED)
    folder = download(model, revision, download_dir, _WANTED + _WEIGHTS if with_weights else _WANTED, _UNWANTED)
    if any(folder.glob("*.safetensors")) or (not with_weights and is_there(folder / "config.json")):
        return folder
    if load_format == "safetensors":
        raise ModelError(f"{model} has no safetensors, but --load-format is safetensors: leave that option out")
    names = repository_files(model, revision, download_dir)
    refuse_pickles(model, revision, names)
    if not any(name.lower().endswith(".gguf") for name in names):
        if with_weights and may_be_plain(names):
            return download(model, revision, download_dir, _WANTED + PYTORCH_FILES, _UNWANTED)
        return folder
    return _gguf(model, revision, download_dir, None, names, with_mmproj=with_mmproj)


def cached_model(model: str, revision: str | None = None, download_dir: str | Path | None = None) -> Path:
    """As `resolve` for a hub id, but only from the cache: the hub is not asked. Raises ModelError."""
    repository, wanted = split_name(model)
    folder = cached_folder(repository, revision, download_dir)
    names = files_in(folder)
    if wanted is None and (any(folder.glob("*.safetensors")) or not any(n.lower().endswith(".gguf") for n in names)):
        return folder
    return folder / choose_gguf(repository, names, wanted)[0]


def resolve_encoder(
    model: str,
    download_dir: str | Path | None = None,
    *,
    revision: str | None = None,
    is_native: Callable[[Path], bool] | None = None,
) -> Path:
    """As `resolve`, for an encoder: its ONNX graph, or its safetensors, if it has any and `is_native` says of the
    folder of its small files that these can be computed with; or its GGUF file, if one is named or it has no other.
    """
    if (local := local_model(model, ".gguf")) is not None:
        return local
    repository, wanted = split_name(model)
    names = None if wanted else repository_files(repository, revision, download_dir)
    if names is None or _is_gguf_alone(names):
        return _gguf(repository, revision, download_dir, wanted, names, with_mmproj=False)
    if is_native is not None and is_native(download(model, revision, download_dir, ["*.json"], _ENCODER_UNWANTED)):
        folder = download(model, revision, download_dir, _NATIVE_ENCODER_WANTED, _NATIVE_ENCODER_UNWANTED)
        if any(folder.rglob("*.safetensors")):
            return folder
        if any(is_there(folder / name) for name in OF_BGE_M3):
            files = [*_NATIVE_ENCODER_WANTED, *PYTORCH_FILES]
            return download(model, revision, download_dir, files, _NATIVE_ENCODER_UNWANTED)
    return download(model, revision, download_dir, _ENCODER_WANTED, _ENCODER_UNWANTED)


def download_model(
    model: str,
    revision: str | None = None,
    download_dir: str | Path | None = None,
    *,
    is_native: Callable[[Path], bool] | None = None,
) -> Path:
    """As `resolve` for a hub id; encoders are downloaded as `resolve_encoder` does it, without a graph in any case.

    Raises ModelError for a repository of neither, before anything of it is downloaded.
    """
    repository, _ = split_name(model)
    names = repository_files(repository, revision, download_dir)
    if not _is_encoder(model, revision, names):
        return resolve(model, revision, download_dir, with_mmproj=True)
    has_graph = any(name.endswith(".onnx") for name in names)
    return resolve_encoder(model, download_dir, revision=revision, is_native=is_native if has_graph else lambda _: True)


def wanted_files(
    model: str,
    revision: str | None,
    names: Sequence[str],
    *,
    is_encoder: bool | None = False,
    with_mmproj: bool = False,
) -> list[str]:
    """The files of a repository that `resolve` or `resolve_encoder` downloads; None: that `download_model` downloads.

    Raises ModelError if no model is among them.
    """
    from huggingface_hub.utils import filter_repo_objects  # type: ignore[attr-defined]  # documented, but not listed

    repository, wanted = split_name(model)
    if is_encoder and (wanted is not None or _is_gguf_alone(names)):
        return _gguf_files(repository, names, wanted, with_mmproj=False)
    if _is_encoder(model, revision, names) if is_encoder is None else is_encoder:
        wanted_here, unwanted = _ENCODER_WANTED, _ENCODER_UNWANTED
        if any(name.endswith(".safetensors") and "/" not in name for name in names):  # as large as a graph, in any case
            wanted_here, unwanted = _NATIVE_ENCODER_WANTED, _NATIVE_ENCODER_UNWANTED
        elif any(name in names for name in OF_BGE_M3):
            wanted_here, unwanted = _NATIVE_ENCODER_WANTED + PYTORCH_FILES, _NATIVE_ENCODER_UNWANTED
        return list(filter_repo_objects(names, allow_patterns=wanted_here, ignore_patterns=unwanted))
    if wanted is not None:
        return _gguf_files(repository, names, wanted, with_mmproj=with_mmproj or is_encoder is None)
    found = list(filter_repo_objects(names, allow_patterns=_WANTED + _WEIGHTS, ignore_patterns=_UNWANTED))
    if any(name.endswith(".safetensors") for name in found):
        return found
    refuse_pickles(model, revision, names)
    if may_be_plain(names):
        return list(filter_repo_objects(names, allow_patterns=_WANTED + PYTORCH_FILES, ignore_patterns=_UNWANTED))
    return [*found, *_gguf_files(repository, names, None, with_mmproj=with_mmproj or is_encoder is None)]


def _is_gguf_alone(names: Sequence[str]) -> bool:
    """Whether a repository has weights as GGUF, and neither as safetensors nor in ONNX."""
    kinds = {name.lower().rpartition(".")[2] for name in names}
    return "gguf" in kinds and not kinds & {"onnx", "safetensors"}


def _is_encoder(model: str, revision: str | None, names: Sequence[str]) -> bool:
    """Whether a repository has an encoder in ONNX and no other model, or the modules of one, which lie in subfolders.

    Raises ModelError if it has no model at all.
    """
    _, wanted = split_name(model)
    if wanted is None and _MODULES in names and any(name.endswith((".safetensors", ".onnx")) for name in names):
        return True
    if wanted is not None or any(name.lower().endswith((".safetensors", ".gguf")) for name in names):
        return False
    if not any(name.endswith(".onnx") for name in names):
        refuse_pickles(model, revision, names)
        if may_be_plain(names):
            return False
        raise ModelError(f"{model} has no safetensors, GGUF or ONNX files: name another repository of the model")
    return True


def refuse_pickles(model: str, revision: str | None, names: Sequence[str]) -> None:
    """Raises ModelError for a repository without safetensors that has pickles and no GGUF files, unless they may be
    plain tensors, which are read.
    """
    from huggingface_hub.utils import filter_repo_objects  # type: ignore[attr-defined]  # documented, but not listed

    pickles = pickles_in(names)
    if pickles and not may_be_plain(names) and not any(name.lower().endswith(".gguf") for name in names):
        others = list(filter_repo_objects(names, allow_patterns=_WANTED, ignore_patterns=_UNWANTED))
        raise refused_repository(model, revision, pickles, others)


def split_name(model: str) -> tuple[str, str | None]:
    """A hub id and the GGUF model that is named behind it, if one is."""
    repository, colon, wanted = model.partition(":")
    if colon and not wanted:
        _no_quantization(model, repository)
    return repository, wanted or None


def _no_quantization(model: str, owner: str) -> NoReturn:
    raise ModelError(f"{model} names no quantization after the colon; name one, as in {owner}:Q4_K_M")


def local_model(model: str, suffix: str | None = None) -> Path | None:
    """A folder, or a file with that suffix. None for what may be a hub id.

    With the suffix .gguf also a GGUF file of another name, as Ollama keeps them, and the file that is named behind a
    folder. Raises ModelError if the folder lacks it.
    """
    if "://" in model:
        own_hub = re.fullmatch(r"(?:hf://|https?://huggingface\.co/)([\w.-]+/[\w.-]+)/?", model)
        meant = f"say {own_hub[1]}" if own_hub else "download it, and serve the folder"
        raise ModelError(
            f"{model} is an address, and a model is a folder, a GGUF file or an id of the Hugging Face Hub such as "
            f"owner/name: {meant}"
        )
    try:
        path = Path(model).expanduser()
        if path.is_dir() or (path.suffix == suffix and path.exists()) or (suffix == ".gguf" and is_gguf(path)):
            return path
        folder, _, wanted = model.rpartition(":")
        if suffix == ".gguf" and folder and Path(folder).expanduser().is_dir():
            return choose_gguf_in(Path(folder).expanduser(), wanted or _no_quantization(model, folder))
        if path.exists():
            raise ModelError(
                f"{model} is a file; give a .gguf file, the folder that holds the model, or a hub id such as owner/name"
            )
    except (OSError, ValueError, RuntimeError) as error:  # a name too long, a folder without permission, no such home
        reason = getattr(error, "strerror", None) or error
        raise ModelError(f"{shown(model)} cannot be looked for: {reason}") from error
    is_no_id = path.suffix == suffix and ":" not in model and model.count("/") != 1
    if is_no_id or model.startswith(("/", "./", "../", "~")):
        raise ModelError(f"{model} does not exist")
    return None


def repository_files(repository: str, revision: str | None, download_dir: str | Path | None) -> list[str]:
    """The names of a repository's files; where the hub cannot be asked, those in the cache. Raises ModelError."""
    from huggingface_hub import constants

    if not constants.HF_HUB_OFFLINE:
        try:
            return [file.rfilename for file in repository_info(repository, revision).siblings or []]
        except UnreachableError:
            logger.info("%s cannot be reached: looking in the cache", constants.ENDPOINT)
    return files_in(cached_folder(repository, revision, download_dir))


def repository_info(repository: str, revision: str | None, *, with_sizes: bool = False) -> ModelInfo:
    """The hub's information on a repository. Raises ModelError, and UnreachableError if the hub cannot be asked."""
    from huggingface_hub import HfApi

    with hub_errors(repository, revision):
        return HfApi().model_info(repository, revision=revision, files_metadata=with_sizes, timeout=longest_wait_s())


def cached_folder(repository: str, revision: str | None, download_dir: str | Path | None) -> Path:
    """The cache's folder of a repository, however much of it is there. Raises ModelError if there is nothing."""
    from huggingface_hub import snapshot_download

    with hub_errors(repository, revision):
        folder = snapshot_download(
            repository, revision=revision, cache_dir=download_dir, local_files_only=True, allow_patterns=[]
        )
    return Path(folder)


def files_in(folder: Path) -> list[str]:
    """The names of the files in a folder of the cache, as the repository has them."""
    return [path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()]


def gguf_metadata(model: str, revision: str | None = None, download_dir: str | Path | None = None) -> Metadata | None:
    """What the metadata of the GGUF file of a hub id begins with: see `first_metadata`. None: it has other files.

    Of a file that is not in the cache, only the beginning is read. Raises ModelError.
    """
    from huggingface_hub import hf_hub_url

    from .gguf.reader import first_metadata, first_metadata_in

    repository, wanted = split_name(model)
    with suppress(ModelError):
        folder = cached_folder(repository, revision, download_dir)
        names = files_in(folder)
        if wanted is not None or _is_gguf_alone(names):
            return first_metadata(folder / choose_gguf(repository, names, wanted)[0])
    names = repository_files(repository, revision, download_dir)
    if wanted is None and not _is_gguf_alone(names):
        return None
    name = choose_gguf(repository, names, wanted)[0]
    with hub_errors(repository, revision):
        content = read_beginning(hf_hub_url(repository, name, revision=revision), _BEGINNING_BYTES)
    return first_metadata_in(content, Path(name))


def _gguf(
    repository: str,
    revision: str | None,
    download_dir: str | Path | None,
    wanted: str | None,
    names: list[str] | None = None,
    *,
    with_mmproj: bool,
) -> Path:
    """The first file of one of a repository's GGUF models, downloaded with its other parts."""
    if names is None:
        names = repository_files(repository, revision, download_dir)
    chosen = _gguf_files(repository, names, wanted, with_mmproj=with_mmproj)
    if wanted is None:
        logger.info("%s has GGUF files only: taking %s; %s:NAME chooses another", repository, chosen[0], repository)
    folder = download(repository, revision, download_dir, [glob.escape(name) for name in chosen], [])
    for name in chosen:
        if not is_there(folder / name):
            raise ModelError(f"{repository}: {name} is not in the cache, and cannot be downloaded now")
    return folder / chosen[0]


def _gguf_files(repository: str, names: Sequence[str], wanted: str | None, *, with_mmproj: bool) -> list[str]:
    """The files of a GGUF model, its first part first, and the one that makes it see last."""
    chosen = choose_gguf(repository, names, wanted)
    mmproj = choose_mmproj(names, chosen[0]) if with_mmproj else None
    return chosen if mmproj is None else [*chosen, mmproj]


def download(
    model: str, revision: str | None, download_dir: str | Path | None, wanted: list[str], unwanted: list[str]
) -> Path:
    """A repository's folder in the cache, with the files that fit `wanted` and not `unwanted`. Raises ModelError."""
    # Importing the hub's client takes a good part of a second, which a local folder need not pay.
    from huggingface_hub import snapshot_download

    from ..progress import DownloadProgress
    from .hub_progress import bars_are_wanted, bars_that_report

    bar = bars_are_wanted()
    prepare_client()
    with hub_errors(model, revision), _nothing_may_match(), DownloadProgress(model, bar=bar) as progress:
        path = snapshot_download(
            model,
            revision=revision,
            cache_dir=download_dir,
            allow_patterns=wanted,
            ignore_patterns=unwanted,
            tqdm_class=bars_that_report(progress.report),
        )
    return Path(path)


@contextmanager
def _nothing_may_match() -> Iterator[None]:
    """Without the client's warning if no file is wanted, which is so of a repository that has GGUF files alone."""
    client = logging.getLogger("huggingface_hub._snapshot_download")

    def is_news(record: logging.LogRecord) -> bool:
        return not record.getMessage().startswith("No files matched")

    client.addFilter(is_news)
    try:
        yield
    finally:
        client.removeFilter(is_news)


def is_cached(
    model: str, revision: str | None, download_dir: str | Path | None, *, is_encoder: bool | None = False
) -> bool:
    """Whether the weights of a hub id are in the cache, with all shards that its index names."""
    repository, wanted = split_name(model)
    try:
        folder = cached_folder(repository, revision, download_dir)
        names = files_in(folder)
        if is_encoder and wanted is None and not _is_gguf_alone(names):
            return any(name.endswith((".onnx", ".safetensors")) for name in names)
        if wanted is not None or any(name.lower().endswith(".gguf") for name in names):
            return all((folder / name).exists() for name in choose_gguf(repository, names, wanted))
        has_safetensors = any(name.endswith(".safetensors") and "/" not in name for name in names)
        index = folder / (PYTORCH_INDEX if may_be_plain(names) and not has_safetensors else _INDEX)
        if index.exists():
            return all((folder / str(name)).exists() for name in json.loads(index.read_bytes())["weight_map"].values())
    except (ModelError, ValueError, KeyError, AttributeError, OSError):
        return False
    return has_safetensors or may_be_plain(names)


class UnreachableError(ModelError):
    """The hub cannot be reached, or must not be asked, and the cache does not have what is needed."""


@contextmanager
def hub_errors(model: str, revision: str | None = None) -> Iterator[None]:
    """Raises ModelError in place of what the hub's client raises."""
    from huggingface_hub import constants, errors

    at = f"{model} (revision {revision})" if revision else model
    endpoint = constants.ENDPOINT
    try:
        yield
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
    except (errors.LocalEntryNotFoundError, errors.OfflineModeIsEnabled) as error:
        if constants.HF_HUB_OFFLINE:
            raise UnreachableError(f"{at} is not in the cache, and HF_HUB_OFFLINE forbids downloading it") from error
        raise UnreachableError(f"{at} is not in the cache, and {endpoint} cannot be reached") from error
    except errors.HfHubHTTPError as error:
        raise ModelError(f"{at} could not be downloaded from {endpoint}: {one_line(error)}") from error
    except _transport_errors() as error:
        raise UnreachableError(f"{endpoint} cannot be reached for {at}: {one_line(error)}") from error
    except OSError as error:
        raise ModelError(f"{at} could not be downloaded from {endpoint}: {error}") from error


def _transport_errors() -> tuple[type[Exception], ...]:
    """What the HTTP library under the hub's client raises; which one it is depends on the client's version."""
    bases = {"httpx2": "TransportError", "httpx": "TransportError", "requests": "RequestException"}
    return tuple(getattr(sys.modules[module], base) for module, base in bases.items() if module in sys.modules)
