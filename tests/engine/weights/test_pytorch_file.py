"""PyTorch's files of tensors: read as torch reads them, without torch and without running anything."""

from __future__ import annotations

import collections
import io
import struct
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.numpy import save_file

from tidewheel.engine.errors import ModelError
from tidewheel.engine.models import describe
from tidewheel.engine.weights import open_source, open_weights, read_config
from tidewheel.engine.weights.checkpoint import open_checkpoint
from tidewheel.engine.weights.pytorch_file import NotPlainTensorsError, open_pytorch_file
from tidewheel.engine.weights.tensor import to_float32

torch = pytest.importorskip("torch")

DTYPES = ("float64", "float32", "float16", "bfloat16", "int64", "int32", "int16", "int8", "uint8", "bool")
WORDS = ("F64", "F32", "F16", "BF16", "I64", "I32", "I16", "I8", "U8", "BOOL")


def archive(program: bytes, **others: bytes) -> bytes:
    """A file as torch.save lays it out, with this pickle."""
    raw = io.BytesIO()
    with zipfile.ZipFile(raw, "w", zipfile.ZIP_STORED) as file:
        for name, content in {"data.pkl": program, "byteorder": b"little", **others}.items():
            file.writestr(f"archive/{name}", content)
    return raw.getvalue()


def saved(value: object, **options: Any) -> bytes:
    raw = io.BytesIO()
    torch.save(value, raw, **options)
    return raw.getvalue()


def refusal(path: Path, content: bytes) -> str:
    path.write_bytes(content)
    with pytest.raises(NotPlainTensorsError) as error:
        open_pytorch_file(path)
    return str(error.value)


@pytest.mark.parametrize(("dtype", "word"), [*zip(DTYPES, WORDS, strict=True)])
def test_tensors_are_what_torch_reads(tmp_path: Path, dtype: str, word: str) -> None:
    path = tmp_path / "pytorch_model.bin"
    whole = (torch.arange(24) % 3).to(getattr(torch, dtype)).reshape(4, 6)
    given = {"whole": whole, "rows": whole[1:3], "same": whole, "scalar": whole[2, 3], "none": whole[:0]}
    torch.save(collections.OrderedDict(given), path)
    expected = torch.load(path, weights_only=True)
    read = open_pytorch_file(path)
    assert read.keys() == expected.keys()
    for name, tensor in expected.items():
        stored = read[name]
        assert (stored.dtype, stored.shape) == (word, tuple(tensor.shape))
        assert stored.data.tobytes() == bytes(tensor.contiguous().reshape(-1).view(torch.uint8).numpy())
    assert read["same"].place == read["whole"].place  # storages are shared, and mapped
    assert not read["whole"].data.flags.owndata


def test_a_modules_state_and_its_parameters(tmp_path: Path) -> None:
    module = torch.nn.Sequential(torch.nn.Linear(3, 2), torch.nn.LayerNorm(2))
    for value in (module.state_dict(), dict(module.named_parameters())):
        torch.save(value, tmp_path / "pytorch_model.bin")
        read = open_checkpoint(tmp_path)
        assert read.keys() == {"0.weight", "0.bias", "1.weight", "1.bias"}
        assert read["0.weight"].data.tobytes() == module[0].weight.detach().numpy().tobytes()


def test_a_model_is_the_same_from_both_kinds_of_files(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    import models_zoo

    folder = models_zoo.folder("opt")
    (tmp_path / "config.json").write_bytes((folder / "config.json").read_bytes())
    torch.save(models_zoo.model("opt").state_dict(), tmp_path / "pytorch_model.bin")
    models = [describe(read_config(path)) for path in (folder, tmp_path)]
    ours, theirs = (open_weights(path, model) for path, model in zip((tmp_path, folder), models, strict=True))
    for name in theirs:
        assert np.array_equal(to_float32(ours[name]), to_float32(theirs[name])), name


def test_a_load_format_reads_its_kind_of_files_alone(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    torch.save({"a": torch.ones(2)}, tmp_path / "pytorch_model.bin")
    assert open_source(str(tmp_path)).contents().kind == "pytorch"
    with pytest.raises(ModelError, match="has no safetensors, but --load-format is safetensors: leave that option out"):
        open_source(str(tmp_path), load_format="safetensors").contents()
    save_file({"b": np.ones(2, np.float32)}, tmp_path / "model.safetensors")
    (tmp_path / "model.gguf").touch()  # which is left alone
    for name, kind in {"auto": "safetensors", "safetensors": "safetensors", "pt": "pytorch"}.items():
        assert open_source(str(tmp_path), load_format=name).contents().kind == kind
    (tmp_path / "pytorch_model.bin").unlink()
    with pytest.raises(ModelError, match=r"has no pytorch_model.bin and no .*, but --load-format is pt: leave it out"):
        open_source(str(tmp_path), load_format="pt").contents()


def test_shards_are_joined_by_their_index(tmp_path: Path) -> None:
    names = {"a": "pytorch_model-00001-of-00002.bin", "b": "pytorch_model-00002-of-00002.bin"}
    for name, file in names.items():
        torch.save({name: torch.ones(2)}, tmp_path / file)
    (tmp_path / "pytorch_model.bin.index.json").write_text(str({"weight_map": names}).replace("'", '"'))
    assert open_checkpoint(tmp_path).keys() == {"a", "b"}
    (tmp_path / names["b"]).unlink()
    with pytest.raises(ModelError, match=r"pytorch_model-00002-of-00002.bin, a shard that .* names, does not exist"):
        open_checkpoint(tmp_path)


class Runs:
    """A pickle of it calls a function when it is read."""

    def __init__(self, function: Any, *arguments: object) -> None:
        self._call = function, arguments

    def __reduce__(self) -> Any:
        return self._call


@pytest.mark.parametrize(
    ("value", "why"),
    [
        (lambda: {"a": Runs(open, "/tmp/made", "w")}, "io.open"),
        (lambda: {"a": Runs(eval, "1")}, "eval"),
        (lambda: {"a": torch.nn.Linear(1, 1)}, "torch.nn.modules.linear.Linear"),
        (lambda: {"a": torch.device("cpu")}, "torch.device"),
        (lambda: {"a": torch.ones(2, 3).T}, "not stored row by row"),
        (lambda: {"a": torch.ones(1).expand(3)}, "not stored row by row"),
        (lambda: {"a": 1.5}, "'a' is a float, not a tensor"),
        (lambda: {"model": {"a": torch.ones(1)}}, "'model' is a dict, not a tensor"),
        (lambda: {1: torch.ones(1)}, "a name is a int"),
        (lambda: [torch.ones(1)], "a list in place of named tensors"),
        (lambda: {"a": torch.ones(1, dtype=torch.complex64)}, "torch.ComplexFloatStorage"),
        (lambda: {"a": torch.ones(2).to_sparse()}, "_rebuild_sparse_tensor"),
    ],
)
def test_everything_but_tensors_is_refused(tmp_path: Path, value: Any, why: str) -> None:
    assert why in refusal(tmp_path / "pytorch_model.bin", saved(value()))
    with pytest.raises(ModelError, match=r"can run code when it is read and is never loaded \(.*python3 -c"):
        open_checkpoint(tmp_path)
    assert not Path("/tmp/made").exists()


TENSOR = b"ctorch._utils\n_rebuild_tensor_v2\n"
STORAGE = b"(X\x07\0\0\0storagectorch\nFloatStorage\nX\x01\0\0\x000X\x03\0\0\0cpuK%ctQ"


def tensor(offset: int = 0, shape: bytes = b"K\x02\x85", strides: bytes = b"K\x01\x85", count: int = 2) -> bytes:
    """A dictionary with one tensor."""
    storage = STORAGE % bytes([count])
    return b"\x80\x02}X\x01\0\0\0a" + TENSOR + b"(" + storage + b"K%c" % offset + shape + strides + b"\x89}tRs."


@pytest.mark.parametrize(
    ("program", "why"),
    [
        (tensor(offset=1), "does not fit in its storage of 2"),
        (tensor(shape=b"K\x03\x85"), "does not fit"),
        (tensor(shape=b"J\xff\xff\xff\xff\x85"), "an impossible shape"),
        (tensor(strides=b"K\x02\x85"), "not stored row by row"),
        (tensor(strides=b")"), "an impossible shape"),
        (tensor(count=3), "too few for 3 numbers"),
        (b"\x80\x02" + b"(" * 10 + b".", "broken"),
        (b"\x80\x02}.}", ""),
        (b"\x80\x02}}.", "leaves values behind"),
        (b"\x80\x02}r\xff\xff\xff\x7f0.", "instruction POP"),
        (b"\x80\x02j\xff\xff\xff\x7f.", "broken"),
        (b"\x80\x04}.", "protocol 4"),
        (b"\x80\x02}X\xff\xff\xff\x7fa", "broken"),
        (b"\x80\x02ccollections\nOrderedDict\n)R}X\x01\0\0\0ad}sb.", "instruction DICT"),
        (b"\x80\x02ccollections\nOrderedDict\n)R}X\x09\0\0\0__class__Nsb.", "sets members of an object"),
        (b"\x80\x02ctorch._utils\n_rebuild_tensor_v2\n)R.", "makes a tensor in an unknown way"),
        (b"\x80\x02ccollections\nOrderedDict\n(K\x01tR.", "calls OrderedDict in an unknown way"),
        (b"\x80\x02cos\nsystem\n.", "'os.system'"),
        (b"\x80\x02}" + b"\x85" * 100_000 + b"NNs.", "something that is not a dictionary"),
        (b"\x80\x02}" + b")" + b"\x85" * 100_000 + b"K\x01s.", "a name is a tuple"),
    ],
)
def test_broken_programs_are_refused(tmp_path: Path, program: bytes, why: str) -> None:
    if not why:
        (tmp_path / "f").write_bytes(archive(program))
        assert open_pytorch_file(tmp_path / "f") == {}
        return
    assert why in refusal(tmp_path / "f", archive(program, **{"data/0": b"\0" * 8}))


def test_the_programs_of_these_tests_are_torchs(tmp_path: Path) -> None:
    (tmp_path / "f").write_bytes(archive(tensor(), **{"data/0": struct.pack("<2f", 1, 2), "version": b"3\n"}))
    read = open_pytorch_file(tmp_path / "f")["a"]
    assert read.array(np.dtype("<f4"))[0].tolist() == [1.0, 2.0]


@pytest.mark.parametrize(
    ("content", "why"),
    [
        (b"", None),
        (b"\x80\x02}.", "not a zip archive"),
        (saved({}, _use_new_zipfile_serialization=False), "not a zip archive, as torch.save writes it since 1.6"),
        (archive(b"\x80\x02}.", byteorder=b"big"), "big-endian"),
        (archive(b"\x80\x02}.").replace(b"data.pkl", b"date.pkl"), "no data.pkl"),
        (archive(b"\x80\x02}.")[:-30], "not a zip archive"),
        (b"PK\x05\x06" + b"\xff" * 18, "bytes, more than"),
    ],
)
def test_broken_archives_are_refused(tmp_path: Path, content: bytes, why: str | None) -> None:
    if why is None:
        (tmp_path / "f").write_bytes(content)
        with pytest.raises(ModelError, match="cannot be read"):
            open_pytorch_file(tmp_path / "f")
    else:
        assert why in refusal(tmp_path / "f", content)


def test_a_compressed_file_is_refused(tmp_path: Path) -> None:
    raw = io.BytesIO()
    with zipfile.ZipFile(raw, "w", zipfile.ZIP_DEFLATED) as file:
        file.writestr("archive/data.pkl", b"\0" * 1_000_000)
    assert "compressed" in refusal(tmp_path / "f", raw.getvalue())


@given(st.data())
@settings(max_examples=60)
def test_changed_files_are_read_or_refused(tmp_path_factory: pytest.TempPathFactory, data: st.DataObject) -> None:
    raw = bytearray(archive(tensor(), **{"data/0": b"\0" * 8}))
    for at in data.draw(st.lists(st.integers(0, len(raw) - 1), max_size=4)):
        raw[at] = data.draw(st.integers(0, 255))
    path = tmp_path_factory.mktemp("changed") / "f"
    path.write_bytes(raw[: data.draw(st.integers(1, len(raw)))])
    try:
        for stored in open_pytorch_file(path).values():
            assert stored.data.nbytes <= 8
    except NotPlainTensorsError:
        pass
