"""tiktoken.model, split by the tokenizers library as by tiktoken itself."""

from __future__ import annotations

import base64
import json
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from engine.tiny_tokenizers import TEXT
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tokenizers import models, pre_tokenizers, trainers

from tidewheel.engine.errors import ModelError
from tidewheel.engine.text.splitting import SPLITTINGS
from tidewheel.engine.text.tokenizer import Tokenizer
from tidewheel.engine.text.tokenizer_backends import CHARACTER_OF_BYTE

PARTS = [
    *"aeinorstT .,-_<>1\n\t\0\u0301\u200béüÇßшÅ潮車回。が😀👍🏽ﬁ½Ａ한",
    *" the| wheel|tide| Turns|IT'S|it's'll|corn.|def f(x):\n    return|潮車 wheel|12345|\r\n\n| \n ".split("|"),
]
texts = st.lists(st.sampled_from(PARTS) | st.text(max_size=3), max_size=12).map("".join)
CHECKED = settings(max_examples=200, deadline=None, suppress_health_check=list(HealthCheck))
KIMI = {"AutoTokenizer": ["tokenization_kimi.TikTokenTokenizer", None]}
NUM_SPECIAL = 256


@pytest.fixture(scope="module")
def ranks() -> dict[bytes, int]:
    made = tokenizers.Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    made.train_from_iterator(
        [*TEXT, "a  b    c        d"] * 2,
        trainers.BpeTrainer(vocab_size=500, initial_alphabet=alphabet, show_progress=False),
    )
    byte_of = {character: byte for byte, character in CHARACTER_OF_BYTE.items()}
    return {bytes(byte_of[c] for c in token): i for token, i in made.get_vocab().items()}


def write(folder: Path, ranks: dict[bytes, int], **config: Any) -> Tokenizer:
    lines = (
        base64.b64encode(token) + b" %d\n" % rank for token, rank in sorted(ranks.items(), key=lambda item: item[1])
    )
    (folder / "tiktoken.model").write_bytes(b"".join(lines))
    (folder / "tokenizer_config.json").write_text(json.dumps({"auto_map": KIMI, **config}))
    return Tokenizer.load(folder)


def test_texts_are_split_as_by_tiktoken(tmp_path: Path, ranks: dict[bytes, int]) -> None:
    tiktoken = pytest.importorskip("tiktoken")
    size = len(ranks)
    names = {size: "[BOS]", size + 2: "<|im_end|>", size + 4: "<|im_user|>"}
    added = {str(i): {"content": name, "special": True} for i, name in names.items()}
    tokenizer = write(tmp_path, ranks, added_tokens_decoder=added, eos_token="<|im_end|>")
    special = {names.get(i, f"<|reserved_token_{i}|>"): i for i in range(size, size + NUM_SPECIAL)}
    (pattern,) = SPLITTINGS["kimi-k2"].patterns
    oracle = tiktoken.Encoding("kimi", pat_str=pattern, mergeable_ranks=ranks, special_tokens=special)
    assert tokenizer.vocab_size == oracle.n_vocab
    assert tokenizer.eos_token_id == size + 2

    @CHECKED
    @given(texts)
    def check(text: str) -> None:
        ids = tokenizer.encode(text)
        assert ids == oracle.encode(text, allowed_special="all")
        assert tokenizer.decode(ids) == oracle.decode(ids) == text
        detokenizer = tokenizer.detokenizer()
        assert "".join([*map(detokenizer.push, ids), detokenizer.flush()]) == text

    check()
    for text in ("<|im_user|>user tide<|im_end|>[BOS]", f"a<|reserved_token_{size + 1}|> b"):
        assert tokenizer.encode(text) == oracle.encode(text, allowed_special="all")


def test_ranks_with_other_code_are_left_to_transformers(tmp_path: Path, ranks: dict[bytes, int]) -> None:
    """Nothing but that code says how texts are cut."""
    with pytest.raises(ModelError, match="transformers"):
        write(tmp_path, ranks, auto_map={"AutoTokenizer": ["own.TikTokenTokenizer", None]})


@pytest.mark.parametrize("change", [{b"a": 5}, {b"ab": 700}, {b"\x00" * 2000: 0}])
def test_broken_ranks_are_refused_by_their_file(
    tmp_path: Path, ranks: dict[bytes, int], change: dict[bytes, int]
) -> None:
    with pytest.raises(ModelError, match=r"tiktoken\.model"):
        write(tmp_path, ranks | change)
    (tmp_path / "tiktoken.model").write_bytes(b"YQ== 0\n")
    with pytest.raises(ModelError, match=r"tiktoken\.model must have .* a token for each byte"):
        Tokenizer.load(tmp_path)
    for content in (b"a b", b"YQ==", b"YQ== 1", b"? 0"):
        (tmp_path / "tiktoken.model").write_bytes(content)
        with pytest.raises(ModelError, match=r"tiktoken\.model must have lines"):
            Tokenizer.load(tmp_path)
