"""The shipped folder: complete, small enough, and consistent with the scripts beside it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

FOLDER = Path(__file__).parents[3] / "server" / "demo"


def test_weights_are_small_bfloat16_and_complete() -> None:
    data = (FOLDER / "model.safetensors").read_bytes()
    assert len(data) <= 13_000_000
    header = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])
    header.pop("__metadata__", None)
    assert {entry["dtype"] for entry in header.values()} == {"BF16"}
    whole = json.loads((FOLDER / "config.json").read_text())
    config, vision = whole["text_config"], whole["vision_config"]
    assert sum(name.startswith("language_model.") for name in header) == 2 + 9 * config["num_hidden_layers"]
    assert sum(name.startswith("vision_tower.") for name in header) == 3 + 16 * vision["num_hidden_layers"]
    embedding = header["language_model.model.embed_tokens.weight"]
    assert embedding["shape"] == [config["vocab_size"], config["hidden_size"]]


def test_tokenizer_keeps_digits_single_and_round_trips() -> None:
    tokenizers = pytest.importorskip("tokenizers")
    tokenizer = tokenizers.Tokenizer.from_file(str(FOLDER / "tokenizer.json"))
    assert tokenizer.encode("4738").tokens == ["4", "7", "3", "8"]
    text = 'Grüße, 47 + 38?\n<tool_call>\n{"name": "f"}\n</tool_call>'
    assert tokenizer.decode(tokenizer.encode(text).ids) == text
    whole = json.loads((FOLDER / "config.json").read_text())
    config = whole["text_config"]
    assert tokenizer.token_to_id("<image>") == whole["image_token_index"]
    assert tokenizer.get_vocab_size() <= config["vocab_size"]
    assert tokenizer.token_to_id("<|im_end|>") == config["eos_token_id"]


def test_shipped_template_is_the_trained_one() -> None:
    source = (FOLDER.parents[1] / "tools" / "demo_model" / "chat.py").read_text()
    template = json.loads((FOLDER / "tokenizer_config.json").read_text())["chat_template"]
    assert f'CHAT_TEMPLATE = r"""\n{template}\n"""' in source
