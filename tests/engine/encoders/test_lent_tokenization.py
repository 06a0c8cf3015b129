"""LentEncoderTokenizer: inputs are as those of the tokenizer that is made here, whatever becomes of the process."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import encoder_zoo as zoo
import gguf_encoders
import pytest
from engine.lending import lend
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tidewheel.engine.encoders.lent_tokenization import LentEncoderTokenizer
from tidewheel.engine.encoders.tokenization import EncoderTokenizer
from tidewheel.engine.errors import ModelError

TEXT = st.text(max_size=30) | st.lists(st.sampled_from([*zoo.WORDS, "[SEP]", "</s>", "é"]), max_size=12).map(" ".join)


@pytest.fixture(scope="module", params=["bert", "roberta-cls", "gguf"])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Or a file."""
    if request.param == "gguf":
        return gguf_encoders.write(zoo.native_folder("bert"), tmp_path_factory.mktemp("gguf") / "model.gguf")
    return zoo.folder(request.param)


@pytest.fixture(scope="module")
def lent(folder: Path) -> Iterator[LentEncoderTokenizer]:
    lent, process = lend(lambda: LentEncoderTokenizer(folder))
    yield lent
    assert lent.is_lent
    lent.settle()
    assert process.poll() is not None
    assert not lent.is_lent
    assert lent.encode("the tide", "turns") == EncoderTokenizer.load(folder).encode("the tide", "turns")


def test_inputs_are_as_those_of_the_files(folder: Path, lent: LentEncoderTokenizer) -> None:
    own = EncoderTokenizer.load(folder)

    @settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
    @given(TEXT, st.none() | TEXT, st.booleans(), st.none() | st.integers(6, 30))
    def check(first: str, second: str | None, special: bool, limit: int | None) -> None:
        asked: dict[str, Any] = {"add_special_tokens": special, "truncate_to": limit}
        assert lent.encode(first, second, **asked) == own.encode(first, second, **asked)
        assert lent.cut(first, 3) == own.cut(first, 3)
        assert lent.prompt_length(first) == own.prompt_length(first)

    check()
    long = "the tide turns " * 2000
    assert lent.encode(long) == own.encode(long)
    assert lent.encode(long, at_most=9).is_too_long
    for name in ("vocab_size", "pad_token_id"):
        assert getattr(lent, name) == getattr(own, name)
    for token in ("the", "no token", None):
        assert lent.token_id(token) == own.token_id(token)
    with pytest.raises(UnicodeEncodeError):
        lent.encode("\ud800")


def test_without_its_process_it_is_made_here(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    folder = shutil.copytree(zoo.folder("bert"), tmp_path / "bert")
    own = EncoderTokenizer.load(folder, lower_case=True, pairs=True)
    lent, process = lend(lambda: LentEncoderTokenizer(folder, lower_case=True, pairs=True))
    process.kill()
    kept = (folder / "tokenizer.json").rename(folder / "kept")
    with pytest.raises(ModelError, match="is not what it was when it was loaded"):
        lent.encode("The tide")
    kept.rename(folder / "tokenizer.json")
    assert lent.encode("The TIDE") == own.encode("The TIDE")
    assert not lent.is_lent
    assert caplog.text.count("its process has ended") == 1


def test_what_is_no_tokenizer_is_not_lent(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="the process that makes a tokenizer has ended"):
        LentEncoderTokenizer(tmp_path)
