"""The application that Serve runs is refused where it cannot be, before anything is started."""

from __future__ import annotations

from typing import Any

import pytest

from tidewheel.engine.errors import TidewheelError

pytestmark = pytest.mark.filterwarnings("ignore:Using extra keyword arguments on `Field`:DeprecationWarning")


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"batch_dir": "/files"}, "--batch-dir needs a single replica"),
        ({"max_stored_responses": 10}, "--max-stored-responses 10 needs a single replica"),
        ({"enable_lora": "true", "allow_runtime_lora_updating": "true"}, "-lora-updating needs a single replica"),
        ({"kv_offload": "/kv"}, "--kv-offload needs a single replica"),
        ({"read_timeout": "7"}, "--read-timeout has no effect on Ray Serve"),
        ({"port": "8001"}, "--port is not the application's"),
        ({"max_model_length": "4096"}, "unknown option --max-model-length"),
        ({"data_parallel_size": "2"}, "give the application num_replicas instead"),
        ({"num_cpus": "0"}, "num_cpus must be at least 1"),
        ({"router": "magic"}, "router must be one of prefix, power-of-two"),
        ({"max_replicas": "3"}, "give num_replicas, or min_replicas and max_replicas"),
    ],
)
def test_an_application_that_cannot_be(options: dict[str, Any], said: str) -> None:
    import tidewheel.ray

    with pytest.raises(TidewheelError, match=said):
        tidewheel.ray.app({"num_replicas": "3", **options})
