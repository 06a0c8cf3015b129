"""KeptTokenizers: a tokenizer is made once for the same files."""

from __future__ import annotations

from pathlib import Path

from tidewheel.engine.hosting.kept_tokenizers import KeptTokenizers, files_version
from tidewheel.engine.text.no_tokenizer import NoTokenizer
from tidewheel.engine.text.tokenizer import Tokenizer


def test_a_tokenizer_is_made_anew_only_if_its_files_have_changed(tmp_path: Path) -> None:
    kept, made = KeptTokenizers(2), list[Tokenizer]()

    def get(path: Path, mode: str = "auto") -> Tokenizer:
        def make() -> Tokenizer:
            made.append(NoTokenizer(8))
            return made[-1]

        return kept.get(path, files_version(path), mode, make)

    folders = [tmp_path / name for name in "abc"]
    for folder in folders:
        folder.mkdir()
        (folder / "tokenizer.json").write_text("{}")
    first = get(folders[0])
    assert get(folders[0]) is first
    assert get(folders[0], "mistral") is not first
    assert get(folders[0]) is first
    (folders[0] / "tokenizer.json").write_text("{ }")
    second = get(folders[0])
    assert second is not first
    get(folders[1])
    assert get(folders[0]) is second
    get(folders[2])
    get(folders[1])
    assert len(made) == 6
    assert get(folders[0]) is not second, "the one that was asked for longest ago is not kept"
    file = folders[0] / "model.gguf"
    file.write_text("one")
    of_file = get(file)
    assert get(file) is of_file
    file.rename(folders[0] / "other.gguf")
    file.write_text("two")
    assert get(file) is not of_file
