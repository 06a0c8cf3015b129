"""An adapter that is written while it is read is refused, or read whole; nothing ends the process."""

from __future__ import annotations

import os
import shutil
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lora_files
import pytest

from tidewheel.engine.adapters.peft_folder import read_peft_folder
from tidewheel.engine.errors import ModelError
from tidewheel.engine.models import describe
from tidewheel.engine.weights.lora import LoraAdapter

from .test_bad_folders import LLAMA

WEIGHTS = "adapter_model.safetensors"


def read(folder: Path) -> LoraAdapter:
    return read_peft_folder(folder, describe(LLAMA, None), 16)


def _cut(folder: Path) -> None:
    os.truncate(folder / WEIGHTS, 100)


def _grow(folder: Path) -> None:
    with (folder / WEIGHTS).open("ab") as file:
        file.write(b"more")


def _write_again(folder: Path) -> None:
    lora_files.write(folder, lora_files.tensors(9))


def _replace(folder: Path) -> None:
    (lora_files.write(folder / "new", lora_files.tensors(9)) / WEIGHTS).replace(folder / WEIGHTS)


def _remove(folder: Path) -> None:
    (folder / WEIGHTS).unlink()


@pytest.mark.parametrize("change", [_cut, _grow, _write_again, _replace, _remove])
def test_weights_that_change_while_they_are_read_are_refused(
    tmp_path: Path, change: Callable[[Path], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = lora_files.write(tmp_path)
    copy = shutil.copyfileobj

    def and_meanwhile(source: Any, target: Any, length: int) -> None:
        target.write(source.read(1000))
        change(folder)
        copy(source, target, length)

    monkeypatch.setattr(shutil, "copyfileobj", and_meanwhile)
    with pytest.raises(ModelError, match="changed while it was read; load it again when it is complete"):
        read(folder)


@pytest.mark.parametrize("change", [_cut, _write_again, _remove])
def test_what_was_read_stays_as_it_was(tmp_path: Path, change: Callable[[Path], None]) -> None:
    content = lora_files.tensors(1) | lora_files.head_of_its_own(1)
    folder = lora_files.write(tmp_path / "a", content, modules_to_save=["lm_head"])
    expected = read(lora_files.write(tmp_path / "b", content, modules_to_save=["lm_head"]))
    adapter = read(folder)
    change(folder)
    # Its head is a view of what was read.
    assert (adapter.matrices["head"].data == expected.matrices["head"].data).all()


def test_a_config_that_changes_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = lora_files.write(tmp_path)
    copy = shutil.copyfileobj

    def and_meanwhile(*arguments: Any) -> None:
        copy(*arguments)
        (folder / "adapter_config.json").write_text(lora_files.json.dumps({**lora_files.CONFIG, "lora_alpha": 9}))

    monkeypatch.setattr(shutil, "copyfileobj", and_meanwhile)
    with pytest.raises(ModelError, match="changed while the adapter was read"):
        read(folder)


def test_an_adapter_that_is_written_again_and_again_is_read_whole_or_refused(tmp_path: Path) -> None:
    folder = lora_files.write(tmp_path, lora_files.tensors(0))
    whole = {read(lora_files.write(tmp_path / str(seed), lora_files.tensors(seed))).digest for seed in range(2)}
    ended = threading.Event()

    def write() -> None:
        seed = 0
        while not ended.is_set():
            seed = 1 - seed
            lora_files.write(folder, lora_files.tensors(seed))

    writer = threading.Thread(target=write)
    writer.start()
    try:
        found = [_digest_or_error(folder) for _ in range(100)]
    finally:
        ended.set()
        writer.join()
    assert {one for one in found if isinstance(one, str)} <= whole
    assert read(folder).digest in whole


def _digest_or_error(folder: Path) -> str | ModelError:
    try:
        return read(folder).digest
    except ModelError as error:
        return error
