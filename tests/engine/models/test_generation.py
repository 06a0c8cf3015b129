"""Reading config.json and generation_config.json."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tidewheel.engine.errors import ModelError
from tidewheel.engine.files.folder import read_config
from tidewheel.engine.models.generation import GenerationConfig, read_generation_config, sampling_defaults


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


@pytest.mark.parametrize(
    ("field", "value", "rule"),
    [
        ("temperature", float("nan"), "between 0 and 100, got nan"),
        ("temperature", -0.5, "between 0 and 100"),
        ("temperature", 10**400, "between 0 and 100"),
        ("top_p", 0, "above 0 and at most 1"),
        ("top_p", float("inf"), "above 0 and at most 1"),
        ("min_p", 1.5, "between 0 and 1"),
        ("top_k", -2, "between 1 and 2147483647"),
        ("top_k", 2**31, "between 1 and 2147483647"),
        ("repetition_penalty", 0.0, "between 0.01 and 100"),
        ("max_new_tokens", 0, "an integer above 0"),
    ],
)
def test_suggestions_that_no_request_could_make_are_refused(
    tmp_path: Path, field: str, value: float, rule: str
) -> None:
    write(tmp_path, "generation_config.json", {field: value})
    with pytest.raises(ModelError, match=rf"generation_config\.json: {field} must be {rule}"):
        sampling_defaults(read_generation_config(tmp_path, {}))


def test_suggestions_are_the_fields_that_are_there(tmp_path: Path) -> None:
    write(tmp_path, "generation_config.json", {"temperature": 0.5, "top_k": 20.0, "top_p": None, "max_new_tokens": 9})
    defaults = {"temperature": 0.5, "top_k": 20, "max_tokens": 9}
    assert sampling_defaults(read_generation_config(tmp_path, {})) == defaults


@pytest.mark.parametrize("top_k", [float("nan"), float("inf"), 2.5])
def test_a_top_k_that_is_no_integer_is_refused(tmp_path: Path, top_k: float) -> None:
    write(tmp_path, "generation_config.json", {"top_k": top_k})
    with pytest.raises(ModelError, match="top_k must be an integer, got"):
        read_generation_config(tmp_path, {})


def test_end_tokens_are_bounded(tmp_path: Path) -> None:
    assert len(read_generation_config(tmp_path, {"eos_token_id": [*range(1000)]}).eos_token_ids) == 1000
    with pytest.raises(ModelError, match="eos_token_id has 1001 tokens, more than the 1000 there may be"):
        read_generation_config(tmp_path, {"eos_token_id": [*range(1001)]})
    with pytest.raises(ModelError, match="eos_token_id must be a token id"):
        read_generation_config(tmp_path, {"eos_token_id": 2**31})
