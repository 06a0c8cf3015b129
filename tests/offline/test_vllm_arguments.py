"""The arguments of vLLM's LLM that are no options here: one line in the log, or a reason and a way out."""

from __future__ import annotations

import asyncio
import importlib
from typing import Any

import encoder_zoo as zoo
import pytest

import tidewheel
from tidewheel import (
    LLM,
    AsyncLLM,
    BeamSearchParams,
    EngineArgs,
    LLMEngine,
    LoRARequest,
    SamplingParams,
)
from tidewheel.engine.declaring.option import OptionError
from tidewheel.engine.errors import InvalidRequestError
from tidewheel.offline.options import offline_options
from tidewheel.server.options.model import MODEL_OPTIONS
from tidewheel.server.options.vllm_flags import vllm_flags

LLM_FLAGS = {option.flag for option in MODEL_OPTIONS}


PLACES = {
    "engine.arg_utils": "AsyncEngineArgs EngineArgs",
    "engine.async_llm_engine": "AsyncLLMEngine",
    "engine.llm_engine": "LLMEngine",
    "entrypoints.llm": "LLM",
    "inputs": "TextPrompt TokensPrompt",
    "lora.request": "LoRARequest",
    "outputs": "CompletionOutput EmbeddingRequestOutput PoolingRequestOutput RequestOutput ScoringRequestOutput",
    "pooling_params": "PoolingParams",
    "sampling_params": "BeamSearchParams GuidedDecodingParams RequestOutputKind SamplingParams StructuredOutputsParams",
    "v1.engine.async_llm": "AsyncLLM",
    "v1.engine.llm_engine": "LLMEngine",
}


@pytest.mark.parametrize("place", PLACES)
def test_names_are_where_vllm_has_them(place: str) -> None:
    module = importlib.import_module(f"tidewheel.{place}")
    for name in PLACES[place].split():
        assert name in tidewheel.__all__
        assert getattr(module, name) is getattr(tidewheel, name)


def test_bytes_of_the_kv_cache_are_gib_here() -> None:
    options = offline_options(None, "auto", {"kv_cache_memory_bytes": 1 << 29})
    assert options.engine is not None
    assert options.engine.kv_cache_space == 0.5
    with pytest.raises(OptionError, match="kv_cache_memory_bytes: must be at least 1"):
        offline_options(None, "auto", {"kv_cache_memory_bytes": 0})


def test_what_has_no_effect_is_a_line_in_the_log(caplog: pytest.LogCaptureFixture) -> None:
    """Once, with the reason. What LLM has is used."""
    of_vllm: dict[str, Any] = {
        "trust_remote_code": True, "swap_space": 4, "disable_log_stats": True, "block_size": 16,
        "disable_custom_all_reduce": True, "cpu_offload_gb": 0.0, "load_format": "auto", "tokenizer_mode": "slow",
        "compilation_config": {"level": 3}, "worker_use_ray": False, "kv_transfer_config": {},
        "distributed_executor_backend": "mp", "served_model_name": "m", "task": "generate", "tensor_parallel_size": 1,
        "tokenizer_revision": None, "enable_chunked_prefill": None,
    }  # fmt: skip
    with (
        caplog.at_level("WARNING", "tidewheel.offline.model"),
        LLM(kv_cache_space=0.05, override_generation_config={"temperature": 0.25}, **of_vllm) as llm,
    ):
        assert llm.get_default_sampling_params().temperature == 0.25
    said = [record.getMessage() for record in caplog.records if record.name == "tidewheel.offline.model"]
    assert [text.partition(" has no effect: ")[0] for text in said] == [
        "trust_remote_code", "swap_space", "disable_log_stats", "block_size", "disable_custom_all_reduce",
        "cpu_offload_gb=0.0", "tokenizer_mode='slow'", "compilation_config", "worker_use_ray", "kv_transfer_config",
        "distributed_executor_backend='mp'", "served_model_name",
    ]  # fmt: skip
    assert said[1].endswith("a preempted sequence is computed again, so KV blocks are never swapped")


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        ({"trust_remote_code": "yes"}, "trust_remote_code must be True or False"),
        ({"cpu_offload_gb": 4}, "cpu_offload_gb is not supported: .*; quantization makes them smaller"),
        ({"tokenizer_mode": "custom"}, "tokenizer_mode='custom' is not supported: .* tokenizer.json"),
        ({"hf_token": "secret"}, "^hf_token is not supported: set HF_TOKEN$"),
        ({"data_parallel_size": 2}, "data_parallel_size is not supported: .*starts replicas"),
        (
            {"enable_sleep_mode": True, "max_num_scheduled_tokens": 64},
            "2 things are wrong:\n  enable_sleep_mode is not supported: .*shutdown.*\n"
            "  max_num_scheduled_tokens is not supported: max_num",
        ),
        (
            {"max_loras": 0, "max_lora_rank": 0, "hf_token": "secret", "quantization_zero_points": True},
            "^4 things are wrong:\n  hf_token is .*\n  max_loras: must be .*\n  max_lora_rank: must be .*\n"
            "  --quantization-zero-points needs --quantization int4-fast$",
        ),
        ({"task": "cluster"}, "task: must be one of .*classify"),
        ({"model": "m", "pooler_config": {"pooling_type": "STEP"}}, "must not have the pooling_type STEP"),
        ({"task": "embed", "runner": "generate"}, "contradict each other"),
    ],
    ids=str,
)
def test_what_is_not_supported(options: dict[str, Any], complaint: str) -> None:
    with pytest.raises(OptionError, match=complaint):
        LLM(**options)


@pytest.mark.parametrize("name", sorted(vllm_flags()))
def test_every_flag_of_the_server_is_an_argument(name: str) -> None:
    argument = name.removeprefix("--").replace("-", "_")
    for flag in vllm_flags()[name]:
        if flag.value is None and name in LLM_FLAGS:
            continue  # LLM's own
        given = {argument: True if flag.takes == 0 else flag.value or "9"}
        if flag.accepted:
            [note] = offline_options(None, "auto", given).notes
            assert note.startswith(argument)
            assert " has no effect: " in note
        else:
            with pytest.raises(OptionError, match=f"^{argument}.* is not supported: "):
                offline_options(None, "auto", given)


@pytest.mark.parametrize(("task", "runner"), [("auto", "auto"), ("generate", "auto"), ("auto", "generate")])
def test_a_task_that_generates(task: str, runner: str) -> None:
    assert offline_options(None, runner, {"task": task}).engine is not None


@pytest.mark.sweep
def test_a_task_that_embeds(caplog: pytest.LogCaptureFixture) -> None:
    with LLM(str(zoo.folder("bert")), task="embed", max_model_len=64) as llm:
        assert llm.embed("the tide", use_tqdm=False)[0].outputs.hidden_size
        with pytest.raises(InvalidRequestError, match=r"has 66 tokens, and .* takes 64"):
            llm.embed([[5] * 66], use_tqdm=False)


HI: list[dict[str, Any]] = [{"role": "user", "content": "Hi"}]
ONE = SamplingParams(max_tokens=1)


@pytest.mark.parametrize("kind", [LLM, LLMEngine, AsyncLLM])
def test_how_an_engine_is_started(kind: Any, caplog: pytest.LogCaptureFixture) -> None:
    arguments = EngineArgs(kv_cache_space=0.05)
    with pytest.raises(TypeError, match="no option usage"):
        kind.from_engine_args(arguments, usage="x")
    engine = kind.from_engine_args(arguments, usage_context="LLM_CLASS", stat_loggers=[object], start_engine_loop=None)
    for name in ("usage_context", "stat_loggers"):
        assert caplog.text.count(f"{name} has no effect: ") == 1
    assert "start_engine_loop" not in caplog.text
    if kind is AsyncLLM:
        asyncio.run(_shut_down(engine))
    else:
        engine.shutdown()


async def _shut_down(llm: AsyncLLM) -> None:
    await llm.shutdown()


def test_what_calls_have_in_vllm_alone(caplog: pytest.LogCaptureFixture) -> None:
    """A line in the log that is said once, or a reason; nothing is said of what asks for nothing."""
    with LLM(kv_cache_space=0.05) as llm:
        for form in ("auto", "openai", "openai"):
            llm.chat(HI, ONE, use_tqdm=False, priority=1, chat_template_content_format=form, mm_processor_kwargs={})
        llm.generate("Hi", ONE, use_tqdm=False, tokenization_kwargs=None, guided_options_request=None)
        llm.beam_search("Hi", BeamSearchParams(beam_width=2, max_tokens=1), concurrency_limit=4, priority=2)
        llm.reset_prefix_cache(reset_running_requests=True)
        llm.llm_engine.add_request("a", "Hi", ONE, arrival_time=1.0)
        for refused in ("tokenization_kwargs", "mm_processor_kwargs"):
            with pytest.raises(InvalidRequestError, match=f"^{refused} is not supported: ") as error:
                llm.generate("Hi", ONE, **{refused: {"truncation": True}})
            assert error.value.param == refused
        for name in ("generate", "chat", "embed", "encode"):
            with pytest.raises(TypeError, match=rf"^LLM.{name}\(\) got an unexpected .* 'bogus'"):
                getattr(llm, name)("Hi", bogus=1)
    said = [record.getMessage().partition(" has no effect: ")[0] for record in caplog.records]
    assert said == ["chat_template_content_format", "concurrency_limit", "reset_running_requests", "arrival_time"]


def test_calls_of_encoders_have_no_adapters(caplog: pytest.LogCaptureFixture) -> None:
    with LLM(str(zoo.folder("bert")), runner="pooling") as llm:
        for call in (llm.embed, llm.encode):
            assert call(["the tide"], use_tqdm=False, lora_request=None)
            with pytest.raises(InvalidRequestError, match="lora_request is not supported: adapters are of models that"):
                call(["the tide"], lora_request=LoRARequest("a", 1, "/a"))
        assert llm.score("the tide", "the corn", use_tqdm=False, priority=[3])
    assert caplog.text.count("priority has no effect: ") == 1


def test_calls_of_asyncio(caplog: pytest.LogCaptureFixture) -> None:
    async def main() -> None:
        async with AsyncLLM(kv_cache_space=0.05) as llm:
            for _ in range(2):
                async for output in llm.generate(
                    "Hi", ONE, trace_headers={"traceparent": "0"}, data_parallel_rank=None
                ):
                    assert output.outputs[0].token_ids
            with pytest.raises(InvalidRequestError, match="mm_processor_kwargs has no settings for this model"):
                await anext(llm.chat(HI, ONE, mm_processor_kwargs={"a": 1}))

    asyncio.run(main())
    assert [record.getMessage() for record in caplog.records] == [
        "trace_headers has no effect: only the server sends traces"
    ]


def test_another_name_of_an_option() -> None:
    old, new = (
        offline_options(None, "auto", {name: 8}) for name in ("max_context_len_to_capture", "max_seq_len_to_capture")
    )
    assert old == new != offline_options(None, "auto", {})
    assert not old.notes
