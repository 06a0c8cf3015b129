"""A model with a large vocabulary is loaded beside another one that streams."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import encoder_zoo as zoo
import pytest
from server.hosting.conftest import HostServer, StartHost
from server.waiting import eventually

from tidewheel.engine.encoders.tokenization import EncoderTokenizer
from tidewheel.engine.hosting import kept_tokenizers
from tidewheel.engine.hosting.turns import Turns
from tidewheel.engine.text.tokenizer import Tokenizer
from tidewheel.engine.text.tokenizer_backends import TokenizersBackend


def tokenizer_of(host: HostServer, name: str) -> Tokenizer:
    loaded = host.models.unit(host.models.catalog.find(name)).loaded
    assert loaded is not None
    assert loaded.engines.chat is not None
    return loaded.engines.chat.tokenizer


def test_its_tokenizer_is_made_elsewhere_until_nothing_streams(
    start_host: StartHost, dummy_model: Path, other_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    host = start_host("--model", f"one={dummy_model}", "--model", f"two={other_model}", "--load-format", "dummy")

    def ask(model: str) -> Any:
        body = {"model": model, "messages": [{"role": "user", "content": "high tide"}], "max_tokens": 8, "seed": 1}
        answer = host.http.post("/v1/chat/completions", json=body)
        assert answer.status_code == 200, answer.text
        return answer.json()["choices"], answer.json()["usage"]["prompt_tokens"]

    monkeypatch.setattr(kept_tokenizers, "LARGE_VOCABULARY", 1)
    expected = ask("one")
    assert not tokenizer_of(host, "one").is_lent, "nothing streamed"
    body = {"model": "one", "prompt": "x", "max_tokens": 500, "n": 8, "ignore_eos": True, "stream": True}
    with monkeypatch.context() as patch, host.http.stream("POST", "/v1/completions", json=body) as streamed:
        lines = streamed.iter_lines()
        assert next(lines).startswith("data: ")

        def read(path: Path) -> None:
            raise AssertionError(f"{path} was read in the server's process")

        patch.setattr(TokenizersBackend, "load", read)
        assert ask("two") == expected
        assert tokenizer_of(host, "two").is_lent
    eventually(lambda: host.models.host.status("one").leases == 0, "it is still in use")
    for model in host.models.loaded:
        model.loaded_at -= 60
    eventually(lambda: not tokenizer_of(host, "two").is_lent, "it is still lent")
    assert ask("two") == expected


def test_that_of_an_encoder_too_and_it_is_kept(
    start_host: StartHost, dummy_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    host = start_host(f"--model=chat={dummy_model}", f"--model=encoder={zoo.native_folder('bert')}")

    def tokenizer() -> EncoderTokenizer:
        loaded = host.models.unit(host.models.catalog.find("encoder")).loaded
        assert loaded is not None
        return loaded.engines.encoders.encoders["encoder"].tokenizer

    def embed() -> Any:
        answer = host.http.post("/v1/embeddings", json={"model": "encoder", "input": ["high tide", "the wheel"]})
        assert answer.status_code == 200, answer.text
        return answer.json()["data"]

    def read(folder: Path, **options: bool) -> None:
        raise AssertionError(f"{folder} was read in the server's process")

    monkeypatch.setattr(kept_tokenizers, "LARGE_VOCABULARY", 1)
    with monkeypatch.context() as patch:
        patch.setattr(Turns, "is_taken", True)  # as while another model streams
        patch.setattr(EncoderTokenizer, "load", read)
        expected = embed()
        lent = tokenizer()
        assert lent.is_lent
        assert host.http.post("/models/unload", json={"model": "encoder"}).status_code == 200
        assert embed() == expected
        assert tokenizer() is lent
    for model in host.models.loaded:
        model.loaded_at -= 60
    eventually(lambda: not lent.is_lent, "it is still lent")
    assert embed() == expected
