"""Models give transformers' tokens in chunks of any size and on several chips, or heads are refused."""

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


# Two sizes of steps are compiled. In `make test`, test_executor.py mixes the chunks of a model with a window.
@pytest.mark.sweep
@pytest.mark.parametrize("name", ["mistral-window", "mpt"])
def test_it_does_not_matter_how_prompts_are_chunked_and_mixed(name: str) -> None:
    from engine.devices.tpu.making import load_folder

    executor = load_folder(models_zoo.folder(name), max_num_batched_tokens=32)
    for chunk in (3, 4):
        check_greedy(name, Harness(executor, seed=chunk).generate(models_zoo.prompts(), OUTPUT_TOKENS, chunk))
    for prompt in models_zoo.prompts():
        check_greedy(name, Harness(executor).generate([prompt], OUTPUT_TOKENS, chunk=32))
    executor.close()


# 2 KV heads are divided by 2 and doubled for 4; one is given to all; 4 and 6 are divided. Also divided are experts, and
# the heads of latents and of recurrences, where there are enough.
@pytest.mark.parametrize(
    ("name", "num_devices"),
    [
        ("llama-bias", 4),
        *(
            pytest.param(*others, marks=pytest.mark.sweep)
            for others in [
                ("mpt", 2),
                ("llama-mqa", 4),
                ("llama", 2),
                ("gemma3", 4),
                ("olmo2", 4),
                ("falcon-one-norm", 2),
                ("opt-350m", 4),
                ("deepseek-v3", 4),
                ("gpt-oss", 2),
                ("qwen3_next-experts", 2),
                ("qwen3_5", 4),
                ("falcon-h1", 2),
                ("nemotron-h-experts", 2),
                ("lfm2", 4),
                ("gemma3n", 2),
            ]
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
