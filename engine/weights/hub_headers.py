"""A model of the hub without its weights: the config, and files of the right size that have nothing but the headers.

What reads a checkpoint's headers works on them as on the whole checkpoint, and says the same of it. The files are
sparse: they take no room for what they lack.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..errors import ModelError
from ..files.folder import read_json_if_there
from ..files.reading import MAX_JSON_BYTES, MAX_TOKENIZER_BYTES
from .gguf.choosing import choose_gguf, choose_mmproj
from .gguf.config import CONFIG_TENSORS
from .gguf.reader import GgufFile, read_gguf
from .hub import OF_BGE_M3, hub_errors, refuse_pickles, repository_info, split_name
from .hub_client import longest_wait_s
from .pickles import may_be_plain
from .quantized import SETTINGS_FILES

_CONFIGS = ("config.json", "model.safetensors.index.json", *SETTINGS_FILES)
_GRAPHS = ("onnx/model.onnx", "model.onnx")
_WORDS_OF_ENCODERS = (
    "config.json", "modules.json", "config_sentence_transformers.json", "tokenizer_config.json",
    "special_tokens_map.json", "chat_template.jinja", "artifact.metadata",
)  # fmt: skip
_REQUESTS_AT_A_TIME = 8
_FIRST_BYTES = 100_000  # nearly all headers of safetensors files are shorter
_MAX_HEADER_BYTES = 100_000_000  # the safetensors library takes no longer one
_GGUF_BYTES = [2 << 20, 16 << 20, 64 << 20, 256 << 20]  # tried one after the other: the vocabulary takes most
# Readers of quantized layers look at some numbers before they load: shapes of packed matrices, orders of inputs, zero
# points, and settings that are stored as bytes.
_NUMBERS = ("weight_shape", "g_idx", "weight_g_idx", "qzeros", "weight_zero_point")
# Scales that are all 0 are refused, so each tensor of floats begins with a 1 here. Nothing else looks at floats.
_ONE = {"F32": b"\0\0\x80\x3f", "F16": b"\0\x3c", "BF16": b"\x80\x3f", "F8_E4M3": b"\x38"}
_MAX_SETTINGS_BYTES = 1024
_MAX_NUMBERS_BYTES = 64 << 20  # of a file
_MAX_CONFIG_BYTES = 1 << 20  # of a tensor that belongs to the config


class NoHeadersError(ModelError):
    """The weights are in files without a header that could be fetched."""


@contextmanager
def hub_headers(model: str, revision: str | None = None, *, with_mmproj: bool = False) -> Iterator[Path]:
    """A folder, or a GGUF file, that lasts as long as the context, for the model of a hub id (see `hub.resolve`).

    `with_mmproj`: beside a GGUF model lies what makes it see, if the repository has that. A few MB at most are fetched
    for each file. Raises ModelError if the hub has no such model, NoHeadersError if only all of it would do;
    UnreachableError if the hub cannot be asked.
    """
    repository, wanted = split_name(model)
    with tempfile.TemporaryDirectory(prefix="tidewheel-") as folder:
        with hub_errors(repository, revision):
            path = _fetch(_Repository(repository, revision), wanted, Path(folder), with_mmproj=with_mmproj)
        yield path


class _Repository:
    """A repository at one commit."""

    def __init__(self, name: str, revision: str | None) -> None:
        info = repository_info(name, revision)
        self.name, self.revision, self._commit = name, revision, info.sha
        self.files = [file.rfilename for file in info.siblings or []]

    def read(self, file: str, start: int, count: int) -> tuple[bytes, int]:
        """At most `count` bytes of a file from `start` on, and the size of the file."""
        from huggingface_hub import hf_hub_url
        from huggingface_hub.utils import (  # type: ignore[attr-defined]  # documented, but not listed
            build_hf_headers,
            get_session,
            hf_raise_for_status,
        )

        url = hf_hub_url(self.name, file, revision=self._commit)
        headers = {**build_hf_headers(), "Range": f"bytes={start}-{start + count - 1}"}
        response = get_session().get(url, headers=headers, timeout=longest_wait_s())
        hf_raise_for_status(response)
        content, size = response.content, response.headers.get("Content-Range", "").rpartition("/")[2]
        if response.status_code != 206 or not size.isdecimal() or len(content) > count:
            raise ModelError(
                f"{self.name}: the hub does not send parts of {file}; download it with tidewheel pull {self.name}"
            )
        return content, int(size)


def _fetch(repository: _Repository, wanted: str | None, folder: Path, *, with_mmproj: bool) -> Path:
    weights = [name for name in repository.files if _is_checkpoint(name)]
    graphs = [n for n in repository.files if n.startswith(_GRAPHS) and "/" not in n.removeprefix("onnx/")]
    if wanted is not None or not (weights or graphs):
        if wanted is None:
            refuse_pickles(repository.name, repository.revision, repository.files)
            if may_be_plain(repository.files):
                raise _no_headers(repository)
        parts = choose_gguf(repository.name, repository.files, wanted)
        for part in parts:
            _gguf(repository, part, folder / Path(part).name)
        if with_mmproj and (mmproj := choose_mmproj(repository.files, parts[0])) is not None:
            with suppress(ModelError):  # what reads it says what is wrong
                _gguf(repository, mmproj, folder / Path(mmproj).name)
        return folder / Path(parts[0]).name
    layers = [name for name in OF_BGE_M3 if name in repository.files]
    if layers and not weights:
        raise _no_headers(repository)
    may_be_encoder = bool(graphs) or "modules.json" in repository.files
    for name in repository.files:
        if name in (*_CONFIGS, *_WORDS_OF_ENCODERS) or (may_be_encoder and _is_of_an_encoder(name)):
            _whole(repository, name, folder, MAX_JSON_BYTES)
    for config in [*folder.rglob("config.json")]:
        tokenizer = (config.parent / "tokenizer.json").relative_to(folder).as_posix()
        if tokenizer in repository.files and read_json_if_there(config).get("classifier_from_token"):
            _whole(repository, tokenizer, folder, MAX_TOKENIZER_BYTES)  # the tokens have their ids there
    for name in (*graphs, *layers):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        _Sparse(repository, name, folder / name).begin(1)
    with ThreadPoolExecutor(_REQUESTS_AT_A_TIME) as pool:
        for made in [pool.submit(_safetensors, repository, name, folder / name) for name in weights]:
            made.result()
    return folder


def _no_headers(repository: _Repository) -> NoHeadersError:
    return NoHeadersError(
        f"{repository.name} has its weights in PyTorch's files, which can only be inspected after the download: "
        f"tidewheel pull {repository.name}"
    )


def _whole(repository: _Repository, name: str, folder: Path, most_bytes: int) -> None:
    content, size = repository.read(name, 0, most_bytes)
    if size > len(content):
        raise ModelError(f"{repository.name}: {name} has {size} bytes, more than a file of its kind may have")
    (folder / name).parent.mkdir(parents=True, exist_ok=True)
    (folder / name).write_bytes(content)


def _is_checkpoint(name: str) -> bool:
    return name.endswith(".safetensors") and "/" not in name and not name.startswith(("consolidated", "adapter_"))


def _is_of_an_encoder(name: str) -> bool:
    """Whether a file is one that `encoders.description` reads."""
    place, _, file = name.rpartition("/")
    is_settings = file.startswith("sentence_") and file.endswith("_config.json")
    near = "/" not in place and not place.startswith((".", "openvino"))
    return near and (file in _WORDS_OF_ENCODERS or is_settings)


@dataclass
class _Sparse:
    """A file here that has the size of one on the hub, and of its content what was fetched."""

    repository: _Repository
    name: str
    path: Path

    def begin(self, count: int) -> tuple[bytes, int]:
        """Fetches the first `count` bytes."""
        content, size = self.repository.read(self.name, 0, count)
        with self.path.open("wb") as file:
            file.write(content)
            file.truncate(size)
        return content, size

    def fill(self, start: int, count: int) -> None:
        """Fetches other bytes."""
        self.write({start: self.repository.read(self.name, start, count)[0]})

    def write(self, pieces: Mapping[int, bytes]) -> None:
        """Writes bytes where they begin; none behind the end."""
        size = self.path.stat().st_size
        with self.path.open("r+b") as file:
            for start, content in pieces.items():
                file.seek(start)
                file.write(content[: max(size - start, 0)])


def _safetensors(repository: _Repository, name: str, path: Path) -> None:
    file = _Sparse(repository, name, path)
    content, _ = file.begin(_FIRST_BYTES)
    header_bytes = int.from_bytes(content[:8], "little")
    if 8 + header_bytes > len(content):
        if header_bytes > _MAX_HEADER_BYTES:
            return  # what reads it says what is wrong
        content, _ = file.begin(8 + header_bytes)
    try:
        header = json.loads(content[8 : 8 + header_bytes])
        numbers, ones = sorted(_numbers(header)), list(_ones(header))
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
        return
    num_bytes = sum(end - start for start, end in numbers)
    if num_bytes > _MAX_NUMBERS_BYTES:
        raise ModelError(
            f"{repository.name}: {name} has {num_bytes >> 20} MiB of zero points and orders of inputs, which are too "
            "many to inspect remotely: download it first with tidewheel pull"
        )
    file.write({8 + header_bytes + start: one for start, one in ones})
    for start, end in _joined(numbers):
        file.fill(8 + header_bytes + start, end - start)


def _numbers(header: Mapping[str, Any]) -> Iterator[tuple[int, int]]:
    """Where the numbers that readers look at begin and end."""
    for name, entry in header.items():
        if name == "__metadata__" or entry["dtype"] not in ("I64", "I32", "I8", "U8"):
            continue
        start, end = entry["data_offsets"]
        if 0 <= start < end and (name.rpartition(".")[2] in _NUMBERS or end - start <= _MAX_SETTINGS_BYTES):
            yield start, end


def _ones(header: Mapping[str, Any]) -> Iterator[tuple[int, bytes]]:
    """Where tensors of floats begin, and what is written there."""
    for name, entry in header.items():
        if name != "__metadata__" and entry["dtype"] in _ONE:
            start, end = entry["data_offsets"]
            if 0 <= start < end < 1 << 48:
                yield start, _ONE[entry["dtype"]]


def _joined(ranges: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
    """Ranges with little between them as one."""
    joined: list[tuple[int, int]] = []
    for start, end in ranges:
        if joined and start - joined[-1][1] <= 1 << 16:
            joined[-1] = (joined[-1][0], max(end, joined[-1][1]))
        else:
            joined.append((start, end))
    return joined


def _gguf(repository: _Repository, name: str, path: Path) -> None:
    file = _Sparse(repository, name, path)
    for count in _GGUF_BYTES:
        content, size = file.begin(count)
        found = _read_headers(path, len(content), size)
        if found is not None:
            for tensor in CONFIG_TENSORS & found.tensors.keys():
                stored = found.tensors[tensor]
                file.fill(stored.start, min(stored.data.nbytes, _MAX_CONFIG_BYTES))
            return


def _read_headers(path: Path, fetched: int, size: int) -> GgufFile | None:
    """The file; None if there is more of its metadata to fetch."""
    try:
        file = read_gguf(path)
    except ModelError:
        if fetched < size:
            return None
        raise
    data = min((tensor.start for tensor in file.tensors.values()), default=0)
    return file if data <= fetched or fetched >= size else None
