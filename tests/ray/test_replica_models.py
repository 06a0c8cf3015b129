"""A replica's models as routers hear of them, without Ray."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from server.conftest import dummy_model
from starlette.testclient import TestClient

from tidewheel.engine.errors import TidewheelError
from tidewheel.ray.options import parse_arguments
from tidewheel.ray.policy import DEFAULT_MODEL
from tidewheel.ray.prefixes import model_key
from tidewheel.ray.replica_models import models_of
from tidewheel.ray.shared_state import without_own_state

__all__ = ["dummy_model"]  # a fixture


def test_a_replica_names_the_models_that_it_has_loaded(dummy_model: Path, tmp_path: Path) -> None:
    other = shutil.copytree(dummy_model, tmp_path / "model")
    one, two = {"model": str(dummy_model), "aliases": ["first"]}, {"model": str(other), "aliases": ["second"]}
    config = tmp_path / "models.yaml"
    config.write_text(json.dumps({"models": {"two": two, "one": one}, "load-format": "dummy", "kv-cache-space": 0.01}))
    models = models_of(parse_arguments(["--config", str(config)], {}))
    body = {"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 2}
    with TestClient(models.app) as client:
        assert models.loaded == []
        for model, loaded in (("first", ["one", "first"]), (None, ["two", "second", "one", "first"])):
            answer = client.post("/v1/chat/completions", json=body if model is None else {"model": model, **body})
            assert answer.status_code == 200, answer.text
            numbers = {model_key(name) for name in loaded}
            assert {*models.loaded} == (numbers if model else {*numbers, DEFAULT_MODEL})
        assert len([*models.engines]) == 2
        assert (models.num_waiting, models.failure) == (0, None)


def test_several_replicas_keep_no_models_of_their_own(tmp_path: Path) -> None:
    options = parse_arguments(["--models-dir", str(tmp_path), "--allow-model-management"], {})
    with pytest.raises(TidewheelError, match="--allow-model-management needs a single replica"):
        without_own_state(options)
    config = tmp_path / "models.yaml"
    config.write_text(json.dumps({"models": {"one": {"model": "one", "kv-offload": "folder"}}}))
    with pytest.raises(TidewheelError, match="--kv-offload needs a single replica"):
        without_own_state(parse_arguments(["--config", str(config)], {}))
