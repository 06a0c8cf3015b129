"""Clients of embeddings and rankings that have an environment of their own, which `make clients` makes.

What each does is in scenarios/. Their vectors and orders are compared with transformers'.
"""

from __future__ import annotations

import json
import subprocess
from typing import Any

import encoder_zoo as zoo
import numpy as np
import pytest
from clients.conftest import node_environment
from clients.scenarios.common import DOCUMENTS, QUERY
from clients.test_other_clients import PYTHON, SCENARIOS
from server.conftest import RunningServer, StartServer
from system_tools import say_skipped

from tidewheel.engine.encoders.load import load_encoders

pytestmark = pytest.mark.clients


@pytest.fixture(scope="module")
def server(start_server: StartServer) -> RunningServer:
    models = {"embed": "bert", "rank": "bert-cross"}
    return start_server(encoders=load_encoders([str(zoo.folder(name)) for name in models.values()], list(models)))


@pytest.mark.parametrize("name", sorted(path.name for path in SCENARIOS.glob("embeds_with_*")))
def test_vectors_and_orders_are_transformers(name: str, server: RunningServer) -> None:
    if not PYTHON.exists():
        lack = "Skipped: the tests with other clients need their packages (make clients)"
        say_skipped(lack)
        pytest.skip(lack.removeprefix("Skipped: "))
    environment = {key: value for key, value in node_environment().items() if not key.startswith("PYTHON")}
    command = [str(PYTHON), str(SCENARIOS / name), server.url]
    done = subprocess.run(command, capture_output=True, text=True, timeout=280, env=environment)
    assert done.returncode == 0, done.stderr
    results: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    wanted = zoo.reference("bert", DOCUMENTS)
    for vectors in results["vectors"].values():
        np.testing.assert_allclose(vectors, wanted, rtol=1e-4, atol=2e-5)
    scores = zoo.reference("bert-cross", [(QUERY, document) for document in DOCUMENTS])[:, 0]
    for order in results["orders"].values():
        assert order == np.argsort(-scores)[:2].tolist()
    if "bits" in results:
        np.testing.assert_array_equal(results["bits"], np.packbits(wanted > 0, axis=1))
    if "found" in results:
        (query,) = zoo.reference("bert", [QUERY])
        assert results["found"]
        assert results["found"] == np.argsort(-(wanted @ query)).tolist()[: len(results["found"])]
