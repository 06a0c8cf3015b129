"""The options of devices with graphs, and the buckets that they mean."""

from __future__ import annotations

import logging
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tidewheel.engine.declaring.option import OptionError, options_of
from tidewheel.engine.devices.bucketing import Bucket, StepSizes
from tidewheel.engine.devices.graph.buckets import bucket_ranges, plan_buckets
from tidewheel.engine.devices.graph.options import GraphOptions
from tidewheel.engine.errors import DeviceError

SIZES = StepSizes(block_size=128, max_model_len=2048, max_num_seqs=4, max_num_batched_tokens=4096)
EXAMPLE = GraphOptions(
    prompt_bs_bucket_step=32, prompt_seq_bucket_max=1024, decode_bs_bucket_step=128, decode_seq_bucket_max=2048
)


def test_every_bucket_variable_is_a_flag_and_an_environment_variable() -> None:
    by_flag = {option.flag: option.variables for option in options_of(GraphOptions)}
    for name in ("PROMPT_BS", "PROMPT_SEQ", "DECODE_BS", "DECODE_BLOCK", "DECODE_SEQ"):
        for bound in ("MIN", "STEP", "MAX"):
            variable = f"{name}_BUCKET_{bound}"
            flag = "--" + variable.lower().replace("_", "-")
            assert by_flag[flag][:2] == (f"TIDEWHEEL_{variable}", f"VLLM_{variable}")
    for flag, variable in {
        "--graph-reserved-mem": "VLLM_GRAPH_RESERVED_MEM",
        "--graph-prompt-ratio": "VLLM_GRAPH_PROMPT_RATIO",
        "--graph-prompt-strategy": "VLLM_GRAPH_PROMPT_STRATEGY",
        "--graph-decode-strategy": "VLLM_GRAPH_DECODE_STRATEGY",
        "--skip-warmup": "VLLM_SKIP_WARMUP",
        "--bucketing-file": "VLLM_BUCKETING_FROM_FILE",
    }.items():
        assert variable in by_flag[flag]
    assert {"--enforce-eager", "--max-seq-len-to-capture"} <= by_flag.keys()


@pytest.mark.parametrize(
    ("text", "strategy"),
    [("linear", "linear"), ("lin", "linear"), ("exp", "exponential"), ("True", "exponential"), ("false", "linear")],
)
def test_names_that_gaudi_users_have_for_strategies_are_known(text: str, strategy: str) -> None:
    (option,) = (option for option in options_of(GraphOptions) if option.field == "bucketing")
    assert option.read(text) == strategy


def test_options_need_neither_torch_nor_numpy() -> None:
    code = (
        "import sys, tidewheel.engine.devices.graph.options; print([m for m in ('torch', 'numpy') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"


@pytest.mark.parametrize(
    ("sizes", "expected"),
    [
        (
            StepSizes(128, 4096, 256, 8192),
            {
                "prompt_batch": "[1, 32, 64]",
                "prompt_seq": "[128, 128, 4096]",
                "decode_batch": "[1, 32, 256]",
                "decode_size": "[128, 128, 8192]",
            },
        ),
        (
            StepSizes(16, 256, 5, 2048),
            {
                "prompt_batch": "[1, 5, 5]",
                "prompt_seq": "[16, 16, 256]",
                "decode_batch": "[1, 5, 5]",
                "decode_size": "[16, 16, 128]",
            },
        ),
    ],
)
def test_defaults_are_those_of_vllm(sizes: StepSizes, expected: dict[str, str]) -> None:
    ranges = bucket_ranges(GraphOptions(), sizes)
    assert {name: str(getattr(ranges, name)) for name in expected} == expected
    assert ranges.decode_unit == "block"


def test_tokens_of_each_sequence_are_by_default_those_of_the_longest() -> None:
    ranges = bucket_ranges(GraphOptions(decode_seq_bucket_min=256), SIZES)
    assert (str(ranges.decode_size), ranges.decode_unit) == ("[256, 128, 2048]", "seq")


def test_the_log_shows_ranges_and_buckets(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    plan_buckets(EXAMPLE, SIZES)
    prompts = [(n, q) for n in (1, 2, 4) for q in range(128, 1025, 128)]
    decodes = [(n, q) for n in (1, 2, 4) for q in range(128, 2049, 128)]
    prompt_config, prompt_list, context_list, decode_config, decode_list = caplog.messages
    assert prompt_config == "Prompt bucket config (min, step, max_warmup) bs:[1, 32, 4], seq:[128, 128, 1024]"
    assert prompt_list == f"Generated 24 prompt buckets: {prompts}"
    assert context_list.startswith("Generated 19 context buckets (bs, seq, blocks): [(1, 128, 2), (1, 128, 4)")
    assert decode_config == "Decode bucket config (min, step, max_warmup) bs:[1, 128, 4], seq:[128, 128, 2048]"
    assert decode_list == f"Generated 48 decode buckets: {decodes}"


def test_the_log_shows_what_is_left_out(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    plan_buckets(GraphOptions(), StepSizes(128, 2048, 4, 2048, max_prefill_seqs=1))
    plan_buckets(GraphOptions(), StepSizes(16, 64, 4, 48))
    assert "Decode bucket config (min, step, max_warmup) bs:[1, 4, 4], block:[128, 128, 128]" in caplog.messages
    assert "Generated 3 decode buckets: [(1, 16), (2, 32), (4, 64)]" in caplog.messages
    assert "Left out 8 prompt buckets that are more than a step: 48 tokens" in caplog.messages
    assert (
        "Left out 21 decode buckets that no step needs: a sequence has at most 4 blocks, a step 48 tokens"
        in caplog.messages
    )


def test_where_any_width_costs_the_same_buckets_differ_in_sequences_and_tokens() -> None:
    sizes = StepSizes(128, 8192, 256, 2048, any_width=True)
    plan = plan_buckets(GraphOptions(), sizes)
    assert {bucket.width for bucket in plan.prompts + plan.decodes} == {64}
    assert plan.contexts == ()
    assert plan.num_buckets < 50 < plan_buckets(GraphOptions(), sizes._replace(any_width=False)).num_buckets
    asked_for = plan_buckets(GraphOptions(decode_seq_bucket_min=4096, decode_seq_bucket_step=4096), sizes)
    assert {bucket.width for bucket in asked_for.decodes} == {32, 64}


def test_many_buckets_are_warned_of(caplog: pytest.LogCaptureFixture) -> None:
    plan = plan_buckets(GraphOptions(), StepSizes(128, 131072, 128, 2048))
    fewer = plan_buckets(GraphOptions(bucketing="exponential"), StepSizes(128, 131072, 128, 2048))
    assert caplog.messages == [
        f"{plan.num_buckets} buckets take a long time to compile and capture; "
        f"--bucketing exponential makes only {fewer.num_buckets}"
    ]
    assert fewer.num_buckets < 200


@settings(max_examples=25, deadline=None)
@given(
    st.builds(
        StepSizes,
        block_size=st.sampled_from([1, 16, 128]),
        max_model_len=st.integers(1, 500),
        max_num_seqs=st.integers(1, 40),
        max_num_batched_tokens=st.integers(1, 500),
        max_prefill_seqs=st.none() | st.integers(1, 3),
    ),
    st.sampled_from(["linear", "exponential"]),
    st.sampled_from([{}, {"decode_seq_bucket_min": 1}]),
    st.data(),
)
def test_by_default_every_launch_has_a_bucket(
    sizes: StepSizes, strategy: Any, given_bounds: dict[str, Any], data: st.DataObject
) -> None:
    plan = plan_buckets(GraphOptions(bucketing=strategy, **given_bounds), sizes)
    query_len = data.draw(st.integers(1, min(sizes.max_model_len, sizes.max_num_batched_tokens)))
    width = data.draw(st.integers(sizes.blocks(query_len), sizes.max_width))
    assert plan.prompt(1, query_len, width) is not None
    batch_size = data.draw(st.integers(1, min(sizes.max_num_seqs, sizes.max_num_batched_tokens)))
    assert plan.decode(batch_size, data.draw(st.integers(1, sizes.max_width))) is not None


def test_a_maximum_that_is_given_is_obeyed() -> None:
    options = GraphOptions(prompt_seq_bucket_max=1000, decode_bs_bucket_step=3, decode_bs_bucket_max=3)
    plan = plan_buckets(options, SIZES)
    assert plan.prompt(1, 897, 8) is None
    assert plan.decode(4, 1) is None
    options = GraphOptions(decode_block_bucket_min=5, decode_block_bucket_step=5, decode_block_bucket_max=12)
    blocks = plan_buckets(options, SIZES)
    assert blocks.decodes == tuple(Bucket(n, 1, w) for n, w in [(1, 5), (1, 10), (2, 3), (2, 5), (4, 2), (4, 3)])


@pytest.mark.parametrize(
    ("values", "said"),
    [
        (
            {"prompt_bs_bucket_min": 8, "prompt_bs_bucket_max": 4},
            "--prompt-bs-bucket-min 8 is more than --prompt-bs-bucket-max 4",
        ),
        ({"decode_block_bucket_step": 0}, "decode_block_bucket_step: must be at least 1, got 0"),
        (
            {"decode_block_bucket_max": 8, "decode_seq_bucket_min": 8},
            "--decode-block-bucket-max counts the blocks of all sequences and --decode-seq-bucket-min the tokens of",
        ),
        (
            {"bucketing_file": "f", "prompt_seq_bucket_max": 8},
            "--bucketing-file has all buckets: leave out --prompt-seq-bucket-max",
        ),
        ({"bucketing_file": "f", "bucketing": "exponential"}, "leave out --bucketing"),
        ({"bucketing": "pad"}, "bucketing: must be one of linear, exponential"),
        ({"graph_prompt_ratio": 1.5}, "graph_prompt_ratio: must be between 0 and 1"),
        ({"graph_prompt_strategy": "best"}, "graph_prompt_strategy: must be one of min_tokens, max_bs"),
    ],
)
def test_contradictions_are_refused(values: dict[str, Any], said: str) -> None:
    with pytest.raises(OptionError) as error:
        GraphOptions(**values)
    assert said in str(error.value)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (
            GraphOptions(prompt_seq_bucket_min=4000),
            "--prompt-seq-bucket-min 4000 is more than --prompt-seq-bucket-max, which is 2048 here",
        ),
        (
            GraphOptions(prompt_seq_bucket_min=100, prompt_seq_bucket_step=64, prompt_seq_bucket_max=120),
            "--prompt-seq-bucket-min, -step and -max [100, 64, 120] leave no size",
        ),
        (
            GraphOptions(prompt_bs_bucket_min=4, prompt_seq_bucket_min=2048),
            "no prompt bucket of bs:[4, 4, 4] and [2048, 128, 2048] fits a step of 4096 tokens",
        ),
    ],
)
def test_what_does_not_fit_the_model_is_refused(options: GraphOptions, said: str) -> None:
    with pytest.raises(DeviceError) as error:
        plan_buckets(options, SIZES)
    assert said in str(error.value)


def test_buckets_may_come_from_a_file(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    file = tmp_path / "buckets.txt"
    file.write_text("([1, 2], 128, 0)\n(1, 128, 2)\n(4, 1, [8, 16])\n", "utf-8")
    plan = plan_buckets(GraphOptions(bucketing_file=str(file)), SIZES)
    assert plan.num_buckets == 5
    assert caplog.messages == [
        f"The buckets are those of {file}",
        "Generated 2 prompt buckets: [(1, 128), (2, 128)]",
        "Generated 1 context buckets (bs, seq, blocks): [(1, 128, 3)]",
        "Generated 2 decode buckets: [(4, 8), (4, 16)]",
    ]
    missing = tmp_path / "none.txt"
    with pytest.raises(DeviceError, match=r"--bucketing-file .*none\.txt cannot be read: .*No such file"):
        plan_buckets(GraphOptions(bucketing_file=str(missing)), SIZES)
