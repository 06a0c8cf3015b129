"""The folder's promises: a block comes back as it was or not at all, within the space, and nothing else is touched."""

from __future__ import annotations

import os
import stat
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from tidewheel.engine.cache.tiers.block_file import BadFileError
from tidewheel.engine.cache.tiers.folder import BlockFolder, HeldFolders
from tidewheel.engine.errors import ModelError

MODEL, OTHER = b"m" * 16, b"o" * 16
SIZE = 10_000  # bytes of a block, whose file takes 12 KiB
FILE = 12 << 10
# What may be in the place of a file; a link to itself has no end.
STRANGE: tuple[Callable[[Path], None], ...] = (
    Path.mkdir, os.mkfifo, lambda path: path.symlink_to("/etc/hostname"), lambda path: path.symlink_to(path),
)  # fmt: skip


def digest(number: int) -> bytes:
    return number.to_bytes(16, "little")


def block(number: int) -> NDArray[np.uint8]:
    return np.random.default_rng(number).integers(0, 256, SIZE, dtype=np.uint8)


def opened(path: Path, model: bytes = MODEL, space: int = 1 << 30) -> BlockFolder:
    folder = BlockFolder(str(path), model, space)
    folder.scan()
    return folder


def written(path: Path, *numbers: int, model: bytes = MODEL) -> None:
    folder = opened(path, model)
    for number in numbers:
        folder.write(digest(number), block(number))
    folder.close()


def read(folder: BlockFolder, number: int) -> bool:
    """Whether it is there, and then as it was."""
    data = np.zeros(SIZE, np.uint8)
    found = folder.read(digest(number), data)
    assert not found or (data == block(number)).all()
    return found


def the_file(path: Path, number: int) -> Path:
    (found,) = path.glob(f"*/{digest(number).hex()}.kv")
    return found


def test_blocks_come_back_after_a_restart(tmp_path: Path) -> None:
    written(tmp_path, 1, 2)
    folder = opened(tmp_path)
    assert [folder.has(digest(n)) for n in (1, 2, 3)] == [True, True, False]
    assert [read(folder, n) for n in (1, 2, 3)] == [True, True, False]
    assert (len(folder), folder.num_bytes) == (2, 2 * FILE)


def test_another_model_finds_none_of_them(tmp_path: Path) -> None:
    written(tmp_path, 1)
    folder = opened(tmp_path, OTHER)
    assert not folder.has(digest(1))
    assert not read(folder, 1)
    folder.close()
    assert read(opened(tmp_path), 1)


def cut(path: Path) -> None:
    os.truncate(path, path.stat().st_size - 1)


def lengthen(path: Path) -> None:
    path.write_bytes(path.read_bytes() + b"x")


def empty(path: Path) -> None:
    path.write_bytes(b"")


def flip(offset: int) -> Callable[[Path], None]:
    def flipped(path: Path) -> None:
        content = bytearray(path.read_bytes())
        content[offset] ^= 1
        path.write_bytes(content)

    return flipped


def swap_for_another_block(path: Path) -> None:
    (other,) = path.parent.glob(f"{digest(2).hex()}.kv")
    other.rename(path)


def swap_for_another_model(path: Path) -> None:
    elsewhere = path.parents[1].with_name("elsewhere")
    written(elsewhere, 1, model=OTHER)
    the_file(elsewhere, 1).rename(path)


@pytest.mark.parametrize(
    "damage",
    [cut, lengthen, empty, flip(0), flip(40), flip(58), flip(61), flip(-1), flip(5000), swap_for_another_block,
     swap_for_another_model],
)  # fmt: skip
def test_a_file_that_is_not_that_block_is_refused_and_deleted(tmp_path: Path, damage: Callable[[Path], None]) -> None:
    path = tmp_path / "kv"
    written(path, 1, 2)
    damage(the_file(path, 1))
    folder = opened(path)
    with pytest.raises(BadFileError):
        read(folder, 1)
    assert not folder.has(digest(1))
    assert not list(path.glob(f"*/{digest(1).hex()}.kv"))
    folder.write(digest(1), block(1))
    assert read(folder, 1)


def test_a_file_that_somebody_deleted_is_not_there(tmp_path: Path) -> None:
    written(tmp_path, 1, 2)
    folder = opened(tmp_path)
    the_file(tmp_path, 1).unlink()
    assert [read(folder, n) for n in (1, 2)] == [False, True]
    assert (len(folder), folder.num_bytes) == (1, FILE)


@pytest.mark.parametrize("make", [os.mkfifo, lambda path: path.symlink_to("/dev/zero"), os.mkdir])
def test_what_is_no_file_keeps_nobody_waiting(tmp_path: Path, make: Callable[[Path], None]) -> None:
    written(tmp_path, 1)
    path = the_file(tmp_path, 1)
    path.unlink()
    make(path)
    folder = opened(tmp_path)
    with pytest.raises((BadFileError, OSError)):
        read(folder, 1)


def test_the_least_recently_used_make_room(tmp_path: Path) -> None:
    folder = opened(tmp_path, space=4 * FILE)
    for number in range(4):
        folder.write(digest(number), block(number))
    folder.touch([digest(0), digest(1)])
    folder.write(digest(4), block(4))
    folder.write(digest(5), block(5))
    assert [n for n in range(6) if folder.has(digest(n))] == [0, 1, 4, 5]
    folder.write(digest(6), block(6))  # the end of a sequence goes before its beginning
    assert [n for n in range(7) if folder.has(digest(n))] == [0, 4, 5, 6]
    assert sum(1 for _ in tmp_path.glob("*/*.kv")) == 4
    assert folder.num_bytes == 4 * FILE


def test_what_was_used_last_survives_a_smaller_space(tmp_path: Path) -> None:
    written(tmp_path, 1, 2, model=OTHER)
    folder = opened(tmp_path)
    for number in (3, 4, 5):
        folder.write(digest(number), block(number))
    folder.touch([digest(3), digest(4)])
    folder.close()
    folder = opened(tmp_path, space=2 * FILE)
    assert [n for n in range(6) if folder.has(digest(n))] == [3, 4]
    assert [path.name for path in sorted(tmp_path.glob("*/*.kv"))] == [f"{digest(n).hex()}.kv" for n in (3, 4)]
    assert not list(tmp_path.glob(f"*{OTHER.hex()}")), "a folder that is empty is not kept"


def test_only_its_own_files_are_touched(tmp_path: Path) -> None:
    written(tmp_path, 1)
    own = the_file(tmp_path, 1).parent
    others = [tmp_path / "notes.txt", tmp_path / "a.kv", own / "notes.txt", tmp_path / "photos" / ("0" * 32 + ".kv")]
    others[3].parent.mkdir()
    for other in others:
        other.write_bytes(b"x" * (1 << 20))
    (own / "partial.tmp").write_bytes(b"half a block")
    folder = opened(tmp_path, space=FILE)
    folder.write(digest(2), block(2))
    folder.clear()
    assert all(other.exists() for other in others)
    assert {path.name for path in own.iterdir()} == {"notes.txt"}
    assert (len(folder), folder.num_bytes) == (0, 0)


def test_others_cannot_read_it(tmp_path: Path) -> None:
    path = tmp_path / "new" / "kv"
    before = os.umask(0)
    try:
        written(path, 1)
    finally:
        os.umask(before)
    modes = {entry: stat.S_IMODE(entry.stat().st_mode) for entry in (path, *path.rglob("*"))}
    assert {entry: mode for entry, mode in modes.items() if mode & 0o077} == {}


def test_one_process_has_the_folder(tmp_path: Path) -> None:
    folder = opened(tmp_path)
    with pytest.raises(ModelError, match="in use by another server: give each server a folder of its own"):
        opened(tmp_path, OTHER)
    folder.close()
    opened(tmp_path, OTHER).close()


def test_a_folder_that_cannot_be_made_is_an_error_that_says_so(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ModelError, match=r"--kv-offload .*file/kv cannot be used: Not a directory"):
        opened(tmp_path / "file" / "kv")


@pytest.mark.parametrize("make", STRANGE, ids=range(4))
def test_what_has_the_name_of_half_a_block_keeps_none_from_being_written(
    tmp_path: Path, make: Callable[[Path], None]
) -> None:
    written(tmp_path, 1)
    partial = the_file(tmp_path, 1).with_name("partial.tmp")
    make(partial)
    folder = opened(tmp_path)
    if not partial.is_dir():
        make(partial)
    folder.write(digest(2), block(2))
    assert read(folder, 2)
    folder.close()


@pytest.mark.parametrize("make", STRANGE, ids=range(4))
@pytest.mark.parametrize("later", [False, True])
def test_a_strange_entry_spoils_no_other(tmp_path: Path, make: Callable[[Path], None], later: bool) -> None:
    written(tmp_path, 1, 2, 3)
    path = the_file(tmp_path, 2)
    folder = opened(tmp_path) if later else None
    path.unlink()
    make(path)
    folder = folder or opened(tmp_path, space=3 * FILE)  # it is not counted
    assert [folder.has(digest(n)) for n in (1, 3)] == [True, True]
    folder.touch([digest(n) for n in (3, 2, 1)])
    if later:
        with pytest.raises(BadFileError):
            read(folder, 2)
    folder.write(digest(2), block(2))
    folder.write(digest(4), block(4))
    assert read(folder, 4)
    assert read(folder, 3)
    folder.clear()
    assert not [entry for entry in path.parent.iterdir() if entry.is_file()]
    folder.close()


def test_nothing_is_written_through_a_link(tmp_path: Path) -> None:
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (tmp_path / "kv").mkdir()
    (tmp_path / "kv" / f"tidewheel-kv-{MODEL.hex()}").symlink_to(elsewhere)
    with pytest.raises(ModelError, match=r"--kv-offload .* in it is a link"):
        BlockFolder(str(tmp_path / "kv"), MODEL, 1 << 30)


def test_models_of_one_process_have_a_folder_and_its_space_together(tmp_path: Path) -> None:
    """The last of them leaves it to others, and blocks of one make room for those of another."""
    path, held = tmp_path / "kv", HeldFolders()
    written(path, 1)
    one, other = (BlockFolder(str(path), model, 3 * FILE, held) for model in (MODEL, OTHER))
    for folder in (one, other):
        folder.scan()
    assert read(one, 1)
    assert not read(other, 1)
    other.write(digest(1), block(1))
    one.write(digest(2), block(2))
    assert one.num_bytes == other.num_bytes == 3 * FILE
    other.write(digest(3), block(3))
    assert not read(one, 1)
    assert all(read(folder, number) for folder, number in ((one, 2), (other, 1), (other, 3)))
    one.close()
    one.close()
    with pytest.raises(ModelError, match="in use by another server"):
        BlockFolder(str(path), MODEL, 1 << 30)
    again = BlockFolder(str(path), MODEL, 3 * FILE, held)
    again.scan()
    assert read(again, 2)
    again.close()
    other.close()
    last = BlockFolder(str(path), MODEL, 3 * FILE, held)
    last.scan()
    assert len(last) == 3
    last.close()
