"""Families whose code lies beside their weights: they are models of transformers with other names."""

from __future__ import annotations

import beside_zoo
import models_zoo
import numpy as np
import pytest
from harness import Harness, load, make_device
from model_configs import MINICPM
from optional_packages import require_packages

from tidewheel.engine.errors import ModelError
from tidewheel.engine.models import describe

require_packages("transformers")


@pytest.mark.parametrize("name", beside_zoo.NAMES)
def test_it_computes_what_the_model_of_transformers_computes(name: str) -> None:
    torch = pytest.importorskip("torch")
    tokens = models_zoo.prompts()[-1]
    with torch.no_grad():
        expected = beside_zoo.model(name)(torch.tensor([tokens])).logits[0].numpy()
    executor = load(make_device("torch"), beside_zoo.folder(name))
    logits = Harness(executor).logits(tokens)
    executor.close()
    assert np.abs(logits - expected).max() <= 1e-4 * np.abs(expected).max()


def test_what_minicpm_does_beyond_that_is_refused() -> None:
    with pytest.raises(ModelError, match="sparse_config"):
        describe({**MINICPM, "sparse_config": {"kernel_size": 32}})
    with pytest.raises(ModelError, match="num_experts"):
        describe({**MINICPM, "num_experts": 8})
