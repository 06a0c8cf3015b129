"""Every family gives transformers' greedy tokens, on one device and on several."""

from __future__ import annotations

import models_zoo
import pytest
from harness import Harness, check_greedy
from optional_packages import require_packages

from tidewheel.engine.errors import DeviceError

pytest.importorskip("jax")
torch = pytest.importorskip("torch")
require_packages("transformers")

OUTPUT_TOKENS = 16


@pytest.fixture(scope="module", autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


@pytest.mark.parametrize("name", models_zoo.swept(models_zoo.EVERYWHERE))
def test_greedy_tokens_and_logits_are_those_of_transformers(name: str) -> None:
    from engine.devices.tpu.making import load_folder

    executor = load_folder(models_zoo.folder(name))
    check_greedy(name, Harness(executor).generate(models_zoo.prompts(), OUTPUT_TOKENS, chunk=2))
    executor.close()


@pytest.mark.parametrize("name", ["mistral-window", "mpt"])
def test_it_does_not_matter_how_prompts_are_chunked_and_mixed(name: str) -> None:
    from engine.devices.tpu.making import load_folder

    executor = load_folder(models_zoo.folder(name), max_num_batched_tokens=128)
    for chunk in (5, 16):
        check_greedy(name, Harness(executor, seed=chunk).generate(models_zoo.prompts(), OUTPUT_TOKENS, chunk))
    for prompt in models_zoo.prompts():
        check_greedy(name, Harness(executor).generate([prompt], OUTPUT_TOKENS))
    executor.close()


# 2 KV heads are divided by 2 and doubled for 4; one is given to all; 4 and 6 are divided.
@pytest.mark.parametrize(
    ("name", "num_devices"),
    [
        ("llama-bias", 4),
        ("llama-mqa", 4),
        ("mpt", 2),
        *(
            pytest.param(*others, marks=pytest.mark.sweep)
            for others in [("llama", 2), ("gemma3", 4), ("olmo2", 4), ("falcon-one-norm", 2), ("opt-350m", 4)]
        ),
    ],
)
def test_several_devices_give_the_tokens_of_one(name: str, num_devices: int) -> None:
    from engine.devices.tpu.making import load_folder

    executor = load_folder(models_zoo.folder(name), num_devices)
    check_greedy(name, Harness(executor).generate(models_zoo.prompts(), OUTPUT_TOKENS, chunk=2))
    executor.close()


def test_heads_that_chips_cannot_share_are_refused_with_a_way_out() -> None:
    from engine.devices.tpu.making import load_folder

    with pytest.raises(DeviceError, match=r"6 query heads with 6 KV heads .* 4 chips: choose .*size 1 or 2 or 3 or 6$"):
        load_folder(models_zoo.folder("mpt"), 4)
    with pytest.raises(DeviceError, match="needs as many chips, and JAX finds 4 here: choose at most 4"):
        load_folder(models_zoo.folder("mpt"), 6)
