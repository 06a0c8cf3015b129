"""Other things in a file's place, and how large a file may be."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable
from pathlib import Path

import pytest

from tidewheel.engine.errors import ModelError
from tidewheel.engine.files.folder import read_json
from tidewheel.engine.files.reading import is_there, read_file, require_file, require_no_special_files
from tidewheel.engine.files.wording import one_line, shown


def make_socket(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(path))


KINDS: dict[str, tuple[Callable[[Path], object], str]] = {
    "pipe": (os.mkfifo, "is a named pipe"),
    "folder": (Path.mkdir, "is a folder"),
    "socket": (make_socket, "is a socket"),
    "device": (lambda path: path.symlink_to("/dev/zero"), "is a device"),
    "loop": (lambda path: path.symlink_to(path), "cannot be read: Too many levels of symbolic links"),
    "dangling": (lambda path: path.symlink_to("nowhere"), "is a link to a file that does not exist"),
    "missing": (lambda path: None, "does not exist"),
    "inside a file": (lambda path: path.parent.rmdir() or path.parent.touch(), "cannot be read: Not a directory"),
}


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_no_regular_file_is_refused_unread(kind: str, tmp_path: Path) -> None:
    make, said = KINDS[kind]
    path = tmp_path / "in" / "x.json"
    path.parent.mkdir()
    make(path)
    for read in (read_json, require_file, lambda path: read_file(path, 10)):
        with pytest.raises(ModelError, match=said):
            read(path)
    assert is_there(path) == (kind not in ("missing", "inside a file"))


def test_a_link_to_a_file_is_that_file(tmp_path: Path) -> None:
    (tmp_path / "blob").write_bytes(b"{}")
    (tmp_path / "x.json").symlink_to("blob")
    assert read_json(tmp_path / "x.json") == {}


def test_a_file_is_as_large_as_it_may_be_and_no_larger(tmp_path: Path) -> None:
    path = tmp_path / "x"
    path.write_bytes(b"12345")
    assert read_file(path, 5) == b"12345"
    with pytest.raises(ModelError, match=r"x has 5 bytes; a file of its kind may have at most 4 bytes"):
        read_file(path, 4)
    os.truncate(path, 10 << 30)  # which takes no room on the disk
    with pytest.raises(ModelError, match=r"x has 10737418240 bytes; .* at most 64 MiB"):
        read_json(path)


def test_a_file_that_this_user_may_not_read_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "x").touch(mode=0)
    monkeypatch.setattr(os, "access", lambda path, mode: False)  # also where the tests run as root
    with pytest.raises(ModelError, match="x cannot be read: Permission denied"):
        require_file(tmp_path / "x")


def test_a_pointer_of_git_lfs_is_refused_and_longer_files_are_not(tmp_path: Path) -> None:
    path, begins = tmp_path / "x.json", b"version https://git-lfs.github.com/spec/v1"
    path.write_bytes(begins + b"\n" + b"x" * 980)
    for read in (read_json, require_file):
        with pytest.raises(ModelError, match=r"x\.json is a pointer of Git LFS"):
            read(path)
    require_no_special_files(tmp_path)  # it may not be needed
    path.write_bytes(begins + b"\n" + b"x" * 981)  # longer than a pointer may be
    require_file(path)


def test_a_folder_whose_files_a_library_opens_may_have_subfolders_and_links_that_lead_nowhere(tmp_path: Path) -> None:
    (tmp_path / "sub").mkdir()
    (tmp_path / "file").touch()
    (tmp_path / "dangling").symlink_to("nowhere")
    require_no_special_files(tmp_path)
    os.mkfifo(tmp_path / "weights.data")
    with pytest.raises(ModelError, match=r"weights\.data is a named pipe"):
        require_no_special_files(tmp_path)


def test_a_folder_that_nobody_may_look_into_is_said(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="cannot be read: File name too long"):
        is_there(tmp_path / ("x" * 5000))


def test_what_a_file_holds_is_shown_short_and_in_one_line() -> None:
    assert shown("a\nb\x1b[31m") == "'a\\nb\\x1b[31m'"
    assert len(shown("x" * 10_000)) == 103
    assert one_line("first\n  second\x1b[31m\tthird") == "first second [31m third"
    assert len(one_line("x" * 10_000)) == 303
