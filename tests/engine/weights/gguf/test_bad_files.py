"""Files that are cut off or lie: one sentence that names the file, and nothing allocated by a number that is a lie."""

from __future__ import annotations

import struct
import time
import tracemalloc
from pathlib import Path

import pytest
from fuzz import described_gguf
from fuzz.gguf_files import GGUF, read_gguf_model
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tidewheel.engine.errors import ModelError
from tidewheel.engine.weights import open_source
from tidewheel.engine.weights.gguf import source as source_module
from tidewheel.engine.weights.gguf.reader import first_metadata, read_gguf

SEEDS = GGUF["gguf"].seeds
U32, U64 = struct.Struct("<I"), struct.Struct("<Q")


def text(value: str) -> bytes:
    return U64.pack(len(value.encode())) + value.encode()


def key(name: str, kind: int, value: bytes) -> bytes:
    return text(name) + U32.pack(kind) + value


def tensor(name: str, dims: tuple[int, ...], kind: int = 0, offset: int = 0) -> bytes:
    return text(name) + U32.pack(len(dims)) + b"".join(map(U64.pack, dims)) + U32.pack(kind) + U64.pack(offset)


def file(keys: tuple[bytes, ...] = (), tensors: tuple[bytes, ...] = (), data: int = 0, version: int = 3) -> bytes:
    head = b"GGUF" + U32.pack(version) + U64.pack(len(tensors)) + U64.pack(len(keys)) + b"".join(keys + tensors)
    return head + bytes(-len(head) % 32) + bytes(data)


def array(kind: int, count: int, content: bytes = b"") -> bytes:
    return U32.pack(kind) + U64.pack(count) + content


BAD = {
    "empty": (b"", "it does not begin with GGUF"),
    "other": (b"PK\3\4" * 10, "it does not begin with GGUF"),
    "version": (file(version=1), "it has version 1; supported are 2 and 3: convert the original model again"),
    "older": (b"tjgg" + bytes(99), "is in a format that was before GGUF: convert the original model again"),
    "big-endian": (b"GGUF" + struct.pack(">I", 3) + bytes(16), "it is big-endian; .* gguf-convert-endian"),
    "keys": (b"GGUF" + U32.pack(3) + U64.pack(0) + U64.pack(1 << 60), "there are more than 65536 keys, which is more"),
    "tensors": (b"GGUF" + U32.pack(3) + U64.pack(1 << 60) + U64.pack(0), "there are more than 262144 tensors"),
    "few-tensors": (b"GGUF" + U32.pack(3) + U64.pack(1 << 16) + U64.pack(0), "it ends within the list of tensors"),
    "key-length": (file((U64.pack(1 << 50),), data=64), "it says that a key has more than 1.00 KiB"),
    "string-length": (file((key("k", 8, U64.pack(1 << 20)),)), "it ends within key 'k'"),
    "array-length": (file((key("k", 9, array(4, 1 << 20)),)), "it ends within numbers in key 'k'"),
    "strings": (file((key("k", 9, array(8, 1 << 60)),)), "more than 2097152 strings in key 'k', which is"),
    "string-in-array": (file((key("k", 9, array(8, 2, text("a") + U64.pack(99))),), data=4), "it ends within key 'k'"),
    "long-string": (file((key("k", 9, array(8, 2, U64.pack((1 << 64) - 9) + bytes(8))),)), "it ends within key 'k'"),
    "nested": (file((key("k", 9, array(9, 1, array(0, 0))),)), "key 'k' is an array of arrays"),
    "kind": (file((key("k", 13, b""),)), "key 'k' has type 13"),
    "array-kind": (file((key("k", 9, array(99, 1)),)), "key 'k' is an array of type 99"),
    "bool": (file((key("k", 7, b"\2"),)), "key 'k' has a bool that is neither"),
    "utf-8": (file((key("k", 8, U64.pack(1) + b"\xff"),)), "key 'k' is not UTF-8"),
    "twice": (file((key("k", 0, b"\0"),) * 2), "key 'k' occurs twice"),
    "alignment": (file((key("general.alignment", 4, U32.pack(0)),)), "general.alignment must be a power of two, got 0"),
    "dims": (file(tensors=(tensor("t", ()),)), "tensor 't' has 0 dimensions"),
    "many-dims": (file(tensors=(tensor("t", (1,) * 5),)), "tensor 't' has 5 dimensions"),
    "elements": (file(tensors=(tensor("t", (1 << 60, 1 << 60)),)), "tensor 't' has 2.48 elements or more, which is"),
    "no-elements": (file(tensors=(tensor("t", (0,)),)), "tensor 't' has no elements"),
    "past-the-end": (file(tensors=(tensor("t", (8,)),), data=31), "tensor 't' ends 1 byte past its end"),
    "offset": (file(tensors=(tensor("t", (8,), offset=1 << 63),), data=32), "tensor 't' ends 8.00 EiB past its end"),
    "unaligned": (file(tensors=(tensor("t", (4,), offset=16),), data=64), "begins at byte 16, which is not a multiple"),
    "overlap": (file(tensors=(tensor("t", (8,)), tensor("u", (8,))), data=64), "tensors 't' and 'u' overlap"),
    "same-name": (file(tensors=(tensor("t", (8,)),) * 2, data=64), "tensor 't' occurs twice"),
    "blocks": (file(tensors=(tensor("t", (33,), 8),), data=64), "has rows of 33 elements, but Q8_0 has blocks of 32"),
    "known-type": (file(tensors=(tensor("t", (256,), 16),), data=999), "tensor 't' is stored as IQ2_XXS, which"),
    "type": (file(tensors=(tensor("t", (256,), 77),), data=999), "tensor 't' is stored as type 77, which is not"),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD)
def test_a_lie_is_named(name: str, tmp_path: Path) -> None:
    content, message = BAD[name]
    path = tmp_path / "bad.gguf"
    path.write_bytes(content)
    tracemalloc.start()
    try:
        with pytest.raises(ModelError, match=f"bad.gguf.*{message}"):
            read_gguf(path)
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()


def test_only_the_keys_before_the_tokenizer_are_read(tmp_path: Path) -> None:
    path = tmp_path / "some.gguf"
    for content in (BAD["twice"][0], b"", file((key("k", 99, b""),))):
        path.write_bytes(content)
        with pytest.raises(ModelError, match=r"some\.gguf"):
            first_metadata(path)
    path.write_bytes(file((key("k", 0, b"\1"), key("tokenizer.x", 99, b""), key("l", 0, b"\2"))))
    assert first_metadata(path) == {"k": 1}


def part(number: int, count: int, *tensors: bytes, total: int = 2) -> bytes:
    numbers = {"no": number, "count": count, "tensors.count": total}
    keys = tuple(key(f"split.{name}", 4, U32.pack(value)) for name, value in numbers.items())
    return file(keys, tensors, 64)


@pytest.mark.parametrize(
    ("first", "second", "message"),
    [
        (
            part(0, 3, tensor("t", (8,))),
            b"",
            "m-00001-of-00002.gguf: split.count must be the number of files in a name",
        ),
        (part(1, 2, tensor("t", (8,))), b"", "m-00001-of-00002.gguf is a later part of a model"),
        (part(0, 2, tensor("t", (8,))), b"", "m-00002-of-00002.gguf is not a GGUF file"),
        (part(0, 2, tensor("t", (8,))), part(0, 2), "m-00002-of-00002.gguf says that it is not part 2 of 2"),
        (part(0, 2, tensor("t", (8,))), part(1, 3), "m-00002-of-00002.gguf says that it is not part 2 of 2"),
        (part(0, 2, tensor("t", (8,))), part(1, 2, tensor("t", (8,))), "m-00002-of-00002.gguf has tensor t, which an"),
        (part(0, 2, tensor("t", (8,)), total=9), part(1, 2), "its parts have 1 tensors, but it says that there are 9"),
    ],
    ids=["count", "first", "empty", "number", "count-of-part", "twice", "total"],
)
def test_parts_that_lie_are_named(tmp_path: Path, first: bytes, second: bytes, message: str) -> None:
    for number, content in enumerate((first, second), 1):
        (tmp_path / f"m-0000{number}-of-00002.gguf").write_bytes(content)
    with pytest.raises(ModelError, match=message):
        open_source(str(tmp_path)).config  # noqa: B018


def test_the_parts_of_a_model_have_so_many_tensors_together(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(source_module, "MAX_TENSORS", 1)
    for number, name in enumerate("tu"):
        (tmp_path / f"m-0000{number + 1}-of-00002.gguf").write_bytes(part(number, 2, tensor(name, (8,))))
    with pytest.raises(ModelError, match=r"m-00002-of-00002.gguf: the parts .* up to here have more than 1 tensors"):
        open_source(str(tmp_path)).config  # noqa: B018


@pytest.mark.parametrize("architecture", ["llama", "gemma3n", "gemma4", "lfm2", "mamba2"])
def test_so_many_layers_are_refused_before_there_is_anything_of_each(architecture: str, tmp_path: Path) -> None:
    numbers = {"embedding_length": 8, "block_count": (1 << 31) - 1, "context_length": 64, "attention.head_count": 1}
    keys = [key(f"{architecture}.{name}", 4, U32.pack(value)) for name, value in numbers.items()]
    keys += [key(f"{architecture}.attention.layer_norm_rms_epsilon", 6, struct.pack("<f", 1e-5))]
    path = tmp_path / "m.gguf"
    path.write_bytes(
        file((key("general.architecture", 8, text(architecture)), *keys), (tensor("token_embd.weight", (8, 4)),), 128)
    )
    source = open_source(str(path))
    tracemalloc.start()
    try:
        with pytest.raises(ModelError, match=rf"{architecture}.block_count must be at most 10000, got 2147483647"):
            source.config  # noqa: B018
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize(
    ("count", "first", "said"),
    [
        ((1 << 18) + 1, "", r"262145 tokens with \d+ characters are found in texts before all others .*262144"),
        (2, "x" * (1 << 22), "2 tokens with 4194305 characters"),
    ],
)
def test_tokens_that_cost_the_library_much_are_bounded(tmp_path: Path, count: int, first: str, said: str) -> None:
    tokens = [first, *map(str, range(1, count))]
    keys = (
        key("tokenizer.ggml.model", 8, text("gpt2")),
        key("tokenizer.ggml.tokens", 9, array(8, count, b"".join(map(text, tokens)))),
        key("tokenizer.ggml.token_type", 9, array(5, count, U32.pack(3) * count)),
    )
    (tmp_path / "m.gguf").write_bytes(file(keys))
    with pytest.raises(ModelError, match=said):
        open_source(str(tmp_path)).tokenizer()


def test_a_file_of_nothing_has_nothing_wrong(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    path.write_bytes(file((key("k", 9, array(4, 2, U32.pack(1) + U32.pack(2))),), (tensor("t", (8, 1)),), 32))
    read = read_gguf(path)
    assert read.metadata["k"].tolist() == [1, 2]
    assert read.tensors["t"].shape == (1, 8)


# Strings that look like others with the length before them.
TEXTS = st.lists(
    st.sampled_from(
        ["", "a", "ab", "é", "\0", text("a").decode(), text("").decode(), text(text("a").decode()).decode()]
    )
)


@settings(max_examples=30, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(TEXTS, TEXTS)
def test_strings_are_what_was_written(tmp_path: Path, texts: list[str], others: list[str]) -> None:
    path = tmp_path / "m.gguf"
    path.write_bytes(file((key("k", 9, array(8, len(texts), b"".join(map(text, texts)))),)))
    strings = read_gguf(path).metadata["k"]
    assert strings.to_list() == texts
    assert len(strings) == len(texts)
    for one in (*texts, *others):
        assert strings.find(one) == (texts.index(one) if one in texts else None)


def test_a_file_that_is_read_again_has_the_same_strings_and_another_one_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = time.time_ns
    monkeypatch.setattr(time, "time_ns", lambda: now() + 10**10)  # files were written long ago
    path, before = tmp_path / "m.gguf", ["ab", "", "c", "ab"]

    def write(texts: list[str]) -> None:
        keys = (key("k", 9, array(8, len(texts), b"".join(map(text, texts)))), key("l", 9, array(8, 1, text("last"))))
        (tmp_path / "new").write_bytes(file(keys))
        (tmp_path / "new").replace(path)

    def read() -> tuple[list[str], list[str], list[int | None]]:
        strings, last = (read_gguf(path).metadata[name] for name in ("k", "l"))
        found = [strings.find(one) for one in ("c", "ab", "last")]
        assert len(strings) == len(strings.to_list())
        return strings.to_list(), last.to_list(), found

    write(before)
    assert read() == read() == (before, ["last"], [2, 0, None])
    write(["abc", "", "", "ab"])
    assert read() == read() == (["abc", "", "", "ab"], ["last"], [None, 3, None])


def test_a_string_that_is_no_text_is_named_when_it_is_read(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    path.write_bytes(file((key("k", 9, array(8, 2, text("a") + U64.pack(1) + b"\xff")),)))
    with pytest.raises(ModelError, match=r"m\.gguf.*string 1 in key 'k' is not UTF-8"):
        read_gguf(path).metadata["k"].to_list()


def test_described_files_are_models_until_they_are_changed(tmp_path: Path) -> None:
    for number, seed in enumerate(GGUF["gguf-described"].seeds):
        folder = tmp_path / str(number)
        folder.mkdir()
        for name, content in described_gguf.files(seed).items():
            (folder / name).write_bytes(content)
        read_gguf_model(folder)


@pytest.mark.parametrize("seed", range(len(SEEDS)))
def test_every_truncation_is_a_model_error(seed: int, tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    padding = 31  # after the last tensor; it may be missing
    for length in range(0, len(SEEDS[seed]) - padding, 31):
        path.write_bytes(SEEDS[seed][:length])
        with pytest.raises(ModelError, match=r"m\.gguf"):
            read_gguf(path)


@settings(max_examples=100, deadline=None, suppress_health_check=list(HealthCheck))
@given(st.data())
def test_flipped_bits_are_a_model_error_or_harmless(data: st.DataObject) -> None:
    content = bytearray(data.draw(st.sampled_from(SEEDS)))
    for _ in range(data.draw(st.integers(1, 3))):
        content[data.draw(st.integers(0, len(content) - 1))] ^= 1 << data.draw(st.integers(0, 7))
    GGUF["gguf"].run(bytes(content))
