"""Reading config.json and generation_config.json."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tidewheel.engine.errors import ModelError
from tidewheel.engine.models.folder import read_config
from tidewheel.engine.models.generation import GenerationConfig, read_generation_config


def write(folder: Path, name: str, value: Any) -> None:
    (folder / name).write_text(json.dumps(value))


def test_end_tokens_of_both_files_count_once(tmp_path: Path) -> None:
    write(tmp_path, "generation_config.json", {"eos_token_id": [7, 5], "temperature": 0.6, "top_k": 20, "top_p": 0.9})
    assert read_generation_config(tmp_path, {"eos_token_id": 5, "bos_token_id": 1}) == GenerationConfig(
        eos_token_ids=(7, 5), bos_token_id=1, temperature=0.6, top_k=20, top_p=0.9
    )


def test_without_the_file_the_config_speaks(tmp_path: Path) -> None:
    assert read_generation_config(tmp_path, {"eos_token_id": [3]}) == GenerationConfig(eos_token_ids=(3,))
    assert read_generation_config(tmp_path, {"eos_token_id": None}) == GenerationConfig()


@pytest.mark.parametrize("value", ["</s>", [1, "2"], -1, True])
def test_end_tokens_that_are_no_ids_are_refused(tmp_path: Path, value: Any) -> None:
    with pytest.raises(ModelError, match=r"config\.json: eos_token_id"):
        read_generation_config(tmp_path, {"eos_token_id": value})


def test_sampling_values_that_are_no_numbers_are_refused(tmp_path: Path) -> None:
    write(tmp_path, "generation_config.json", {"temperature": "hot"})
    with pytest.raises(ModelError, match=r"generation_config\.json: temperature"):
        read_generation_config(tmp_path, {})


def test_config_json_is_read(tmp_path: Path) -> None:
    write(tmp_path, "config.json", {"architectures": ["X"]})
    assert read_config(tmp_path) == {"architectures": ["X"]}


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ('{"architectures": ', "config.json is not valid JSON"),
        ("[" * 100_000, "config.json is not valid JSON"),
        ("[]", "must hold a JSON object"),
        ("{}", "architectures"),
        ('{"architectures": [1]}', "architectures"),
        ("\0", "config.json is not valid JSON"),
    ],
)
def test_a_bad_config_json_is_refused(tmp_path: Path, text: str, names: str) -> None:
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(ModelError, match=names):
        read_config(tmp_path)


def test_no_config_json_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"has no config\.json"):
        read_config(tmp_path)
    with pytest.raises(ModelError, match="not a folder"):
        read_config(tmp_path / "none")
