"""The command line and the environment of `tidewheel serve`."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from tidewheel.engine.adapters.options import LoraOptions
from tidewheel.engine.declaring.option import OptionError, Options, options_of
from tidewheel.engine.devices import DEVICE_OPTIONS
from tidewheel.engine.devices.cpu.options import CpuOptions
from tidewheel.engine.devices.graph.options import GraphOptions
from tidewheel.engine.encoders.options import EncoderOptions
from tidewheel.engine.media.options import MediaOptions
from tidewheel.engine.options import EngineOptions
from tidewheel.engine.pipeline_options import PipelineOptions
from tidewheel.engine.speculation.options import SpeculativeOptions
from tidewheel.server.app_options import AppOptions
from tidewheel.server.commands.cli import main
from tidewheel.server.http.limits import AdmissionLimits, ConnectionLimits
from tidewheel.server.http.options import HttpOptions
from tidewheel.server.options.config_file import ConfigFileOptions
from tidewheel.server.options.hosting import HostingOptions
from tidewheel.server.options.replicas import ReplicaOptions
from tidewheel.server.options.serve import ServeOptions, parse_options
from tidewheel.server.telemetry.logs import LogOptions

OWNERS: tuple[type[Options], ...] = (
    EngineOptions,
    LoraOptions,
    SpeculativeOptions,
    PipelineOptions,
    MediaOptions,
    *DEVICE_OPTIONS,
    EncoderOptions,
    ConfigFileOptions,
    AppOptions,
    AdmissionLimits,
    HttpOptions,
    ConnectionLimits,
    LogOptions,
    ReplicaOptions,
    HostingOptions,
)


def parse(*arguments: str, **environment: str) -> ServeOptions:
    return parse_options(arguments, environment)


def refusal(capsys: pytest.CaptureFixture[str], *arguments: str, **environment: str) -> str:
    with pytest.raises(SystemExit) as exit_info:
        parse(*arguments, **environment)
    assert exit_info.value.code == 2
    message = capsys.readouterr().err
    assert message.count("\n") == 1
    return message


def test_what_is_not_given_is_as_declared() -> None:
    options = parse("m")
    assert options.engine == EngineOptions("m")
    assert (options.app, options.http) == (AppOptions(), HttpOptions())
    assert (options.encoders, options.log) == (EncoderOptions(), LogOptions())


def test_without_a_model_the_embedded_one_is_served_under_its_name() -> None:
    options = parse()
    assert (Path(options.engine.model) / "config.json").is_file()
    assert options.app.served_model_names == ("tidewheel-demo",)
    assert parse("--served-model-name", "mine").app.served_model_names == ("mine",)
    assert options.shown["model"] is None


def test_a_vllm_command_line_works() -> None:
    options = parse(
        "Qwen/Qwen3-0.6B", "--host", "0.0.0.0", "--port", "9000", "--max-model-len", "4k", "--max-num-seqs=8",
        "--max-num-batched-tokens", "2K", "--dtype", "half", "--served-model-name", "a", "b", "--api-key", "x",
        "--api-key", "y", "--enable-auto-tool-choice", "--tool-call-parser", "hermes", "--disable-log-requests",
        "--no-enable-prefix-caching", "--uvicorn-log-level", "warning", "--generation-config", "vllm", "--seed", "3",
        "--reasoning-parser", "qwen3", "--trust-request-chat-template",
        "--default-chat-template-kwargs", '{"enable_thinking": false}',
    )  # fmt: skip
    engine, app = options.engine, options.app
    assert (engine.model, engine.max_model_len, engine.max_num_seqs) == ("Qwen/Qwen3-0.6B", 4000, 8)
    assert (engine.max_num_batched_tokens, engine.dtype, engine.enable_prefix_caching) == (2048, "float16", False)
    assert (options.http.host, options.http.port, app.served_model_names) == ("0.0.0.0", 9000, ("a", "b"))
    assert (app.api_keys, app.log_requests) == (("x", "y"), False)
    assert (options.log.log_level, app.tool_call_parser, app.reasoning_parser) == ("warning", "hermes", "qwen3")
    assert app.default_chat_template_kwargs == {"enable_thinking": False}
    assert app.trust_request_chat_template


def test_limits_and_times_reach_those_who_keep_to_them() -> None:
    options = parse(
        "--max-queue", "0", "--max-answer-size", "1M", "--request-timeout", "2.5", "--max-body-size", "32M",
        "--h11-max-incomplete-event-size", "4K", "--read-timeout", "0", "--write-timeout", "5",
        "--shutdown-timeout", "0",
    )  # fmt: skip
    assert options.app.admission == AdmissionLimits(max_queue=0, max_answer_bytes=2**20, request_timeout_s=2.5)
    assert options.app.max_body_bytes == 32 * 2**20
    limits = ConnectionLimits(max_header_bytes=4096, read_timeout_s=None, write_timeout_s=5)
    assert (options.http.limits, options.http.shutdown_timeout) == (limits, 0)


def test_options_of_a_device_are_a_group_if_any_was_given() -> None:
    given = parse("m", "--device", "torch", "--threads-bind", "auto", TIDEWHEEL_CACHE_DIR="kept")
    assert given.engine.device_options == (CpuOptions(cache_dir="kept"),)
    assert (given.shown["threads_bind"], given.shown["cache_dir"]) == ("auto", "kept")
    assert parse("m", "--device", "torch").engine.device_options == ()
    assert parse("--cache-dir", "kept").engine.device_options == (CpuOptions(cache_dir="kept"),)  # the embedded model


@pytest.mark.parametrize(
    ("device", "quantization"),
    [("auto", "int8-channel"), ("cpu", "int8-channel"), ("torch", None), ("graph-cpu", None)],
)
def test_the_embedded_model_is_quantized_on_the_cpu(device: str, quantization: str | None) -> None:
    assert parse("--device", device).engine.quantization == quantization
    assert parse("--device", device, "--dtype", "bfloat16").engine.quantization is None
    assert parse("m", "--device", device).engine.quantization is None


def test_what_is_shown_has_the_names_of_flags_and_no_secrets() -> None:
    shown = parse("m", "--api-key", "k", "--disable-web-ui", "--max-body-size", "1K", TIDEWHEEL_PORT="81").shown
    assert (shown["model"], shown["disable_web_ui"], shown["disable_fastapi_docs"]) == ("m", True, False)
    assert (shown["max_body_size"], shown["port"], shown["allowed_methods"]) == (1024, 81, ("*",))
    secrets = {"admin_api_key", "api_key", "otlp_traces_endpoint", "shared_store", "shared_store_password"}
    assert not shown.keys() & {"api_keys", *secrets}
    assert shown.keys() | secrets == {option.name for owner in OWNERS for option in options_of(owner)}


@pytest.mark.parametrize("text", ["{", "[1]", "true"])
def test_template_variables_are_a_json_object(capsys: pytest.CaptureFixture[str], text: str) -> None:
    assert "--default-chat-template-kwargs" in refusal(capsys, "--default-chat-template-kwargs", text)
    variable = "TIDEWHEEL_DEFAULT_CHAT_TEMPLATE_KWARGS"
    assert variable in refusal(capsys, **{variable: text})


def test_the_environment_is_used_where_the_command_line_is_silent() -> None:
    environment = {
        "TIDEWHEEL_MODEL": "m",
        "TIDEWHEEL_PORT": "81",
        "TIDEWHEEL_API_KEY": "a b",
        "TIDEWHEEL_ENABLE_PREFIX_CACHING": "0",
        "TIDEWHEEL_DISABLE_LOG_REQUESTS": "1",
        "TIDEWHEEL_DTYPE": "float",
    }
    options = parse(**environment)
    engine, app = options.engine, options.app
    assert (engine.model, engine.enable_prefix_caching, engine.dtype) == ("m", False, "float32")
    assert (options.http.port, app.api_keys, app.log_requests) == (81, ("a", "b"), False)
    assert parse("--port", "82", **environment).http.port == 82
    assert parse("n", **environment).engine.model == "n"


def test_lists_may_be_written_as_json() -> None:
    for arguments in (('["http://a", "http://b"]',), ("http://a", "http://b")):
        assert parse("--allowed-origins", *arguments).app.allowed_origins == ("http://a", "http://b")
        assert parse(TIDEWHEEL_ALLOWED_ORIGINS=" ".join(arguments)).app.allowed_origins == ("http://a", "http://b")
    assert parse("--root-path", "/api/").app.root_path == "/api"


def test_vllms_variables_are_aliases() -> None:
    assert parse(VLLM_API_KEY="k").app.api_keys == ("k",)
    assert parse(VLLM_API_KEY="k", TIDEWHEEL_API_KEY="l").app.api_keys == ("l",)
    environment = {"VLLM_CPU_KVCACHE_SPACE": "4", "VLLM_CPU_OMP_THREADS_BIND": "0-3|4-7"}
    model = parse(**environment).engine
    assert (model.kv_cache_space, model.device_options) == (4.0, (CpuOptions(threads_bind="0-3|4-7"),))
    assert parse(**environment, TIDEWHEEL_KV_CACHE_SPACE="0.5").engine.kv_cache_space == 0.5
    assert parse(VLLM_CPU_KVCACHE_SPACE="0").engine.kv_cache_space is None


def test_a_kv_cache_has_types_of_its_own() -> None:
    assert parse("--kv-cache-dtype", "fp8").engine.kv_cache_dtype == "fp8_e4m3"
    assert parse(TIDEWHEEL_KV_CACHE_DTYPE="int8").engine.kv_cache_dtype == "int8"
    assert parse("--kv-cache-dtype", "half").engine.kv_cache_dtype == "float16"


def test_unknown_options_are_refused_by_name_with_a_hint(capsys: pytest.CaptureFixture[str]) -> None:
    message = refusal(capsys, "m", "--max-model-length", "5")
    assert "--max-model-length" in message
    assert "did you mean --max-model-len?" in message
    assert "--node-rank" in refusal(capsys, "m", "--node-rank=2")
    several = refusal(capsys, "--ctx-size", "4096", "-c", "9", "--n-predict", "5", "--threads=4", "--nonsense")
    assert "--ctx-size (did you mean --max-model-len?), -c (did you mean --max-model-len?)" in several
    said = "set max_tokens in a request, or max_new_tokens in --override-generation-config for all requests"
    assert f"--n-predict ({said}), --threads (did you mean --threads-bind?)" in several
    assert several.endswith("--nonsense; see --help\n")
    told = refusal(capsys, "--cors", "--ssl", "--workers=4", "--system-prompt", "x", "--offline", "--log-requests")
    assert "--cors (did you mean --allowed-origins?), --ssl (name the files with --ssl-keyfile and --ssl-cert" in told
    assert (
        "--workers (--data-parallel-size starts several servers: see docs/scale-out.md), --system-prompt (send" in told
    )
    assert "--offline (set HF_HUB_OFFLINE=1), --log-requests (use --enable-log-requests, which is" in told
    assert "--cuda-graph (graphs are captured" in refusal(capsys, "m", "--cuda-graph")
    assert "second" in refusal(capsys, "m", "second")
    assert "--max-model" in refusal(capsys, "--max-model", "5")  # no abbreviations


@pytest.mark.parametrize(
    ("flag", "meant"),
    [
        ("--max-model-length", "--max-model-len"),  # slips
        ("--prot", "--port"),
        ("--ctx-sise", "--max-model-len"),
        ("--max-tokens-total", "--max-model-len"),  # words of a flag, in another order
        ("--context-window", "--max-model-len"),
        ("--max-sequences", "--max-num-seqs"),
        ("--gpu-util", "--gpu-memory-utilization"),
        ("--prefix-cache", "--enable-prefix-caching"),
        ("--draft-model", "--speculative-model"),
        ("--gpus", "--tensor-parallel-size"),
        ("--bogus", None),  # half of the letters of --uds
        ("--bogus-key", None),
        ("--frobnicate", None),
        ("--enable", None),  # whose only word tells nothing
    ],
)
def test_hints_are_near_in_meaning(capsys: pytest.CaptureFixture[str], flag: str, meant: str | None) -> None:
    message = refusal(capsys, "m", flag)
    assert f"unknown option {flag}{f' (did you mean {meant}?)' if meant else ''}; see --help" in message
    variable = "TIDEWHEEL_" + flag[2:].upper().replace("-", "_")
    of_variable = None if meant is None else "TIDEWHEEL_" + meant[2:].upper().replace("-", "_")
    said = f"${variable}{f' (did you mean {of_variable}?)' if of_variable else ''}; see --help"
    assert said in refusal(capsys, "m", **{variable: "1"})


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["--port", "70000"], "--port"),
        (["--port", "http"], "--port: must be a whole number, got 'http'"),
        (["--max-step-ms", "soon"], "--max-step-ms: must be a number, got 'soon'"),
        (["--max-model-len", "0"], "--max-model-len"),
        (["--max-model-len", "4q"], "--max-model-len"),
        (["--dtype", "int3"], "--dtype"),
        (["--dtype", "fp8"], "--dtype"),
        (["--kv-cache-dtype", "fp8_e3m4"], "--kv-cache-dtype"),
        (["--device", "abacus"], "--device"),
        (["--kv-cache-space", "-1"], "--kv-cache-space"),
        (["--kv-cache-space", "nan"], "--kv-cache-space"),
        (["--max-step-ms", "inf"], "--max-step-ms"),
        (["--enable-auto-tool-choice", "--tool-call-parser", "none"], "--tool-call-parser"),
        (["--tool-call-parser", "harmony"], "--tool-call-parser"),
        (["--reasoning-parser", "harmony"], "--reasoning-parser"),
        (["a", "--model", "b"], "--model"),
        (["--api-key", ""], "--api-key"),
        (["--api-key", "two words"], "--api-key"),
        (["--allow-credentials"], "--allowed-origins"),
        (["--allowed-methods", "GET"], "--allowed-origins"),
        (["--allowed-origins", "[1]"], "--allowed-origins"),
        (["--ssl-certfile", "c", "--ssl-cert-reqs", "3"], "--ssl-cert-reqs"),
        (["--ssl-certfile", "c", "--ssl-cert-reqs", "required"], "--ssl-ca-certs"),
        (["--ssl-certfile", "c", "--ssl-ca-certs", "a"], "--ssl-cert-reqs"),
        (["--root-path", "api"], "--root-path"),
        (["--log-format", "xml"], "--log-format"),
        (["--embedding-model", "a", "--served-embedding-model-name", "b", "c"], "--served-embedding-model-name"),
        (["--embedding-model", "a", "a"], "--served-embedding-model-name"),
        (["--embedding-threads", "0"], "--embedding-threads"),
        (["--enable-lora=False"], "--enable-lora takes no value: use --enable-lora or --no-enable-lora, got"),
        (["--no_enable_prefix_caching=1"], "use --enable-prefix-caching or --no-enable-prefix-caching, got '--no-enab"),
    ],
)
def test_unusable_values_name_their_option(
    capsys: pytest.CaptureFixture[str], arguments: list[str], named: str
) -> None:
    assert named in refusal(capsys, *arguments)


@pytest.mark.parametrize(
    ("variable", "value", "said"),
    [
        ("TIDEWHEEL_PORT", "x", "must be a whole number, got 'x'"),
        ("TIDEWHEEL_DTYPE", "int3", "must be one of auto"),
        ("TIDEWHEEL_DISABLE_ACCESS_LOG", "maybe", "must be 1 or 0"),
        ("VLLM_CPU_KVCACHE_SPACE", "much", "must be a number, got 'much'"),
    ],
)
def test_unusable_variables_are_named(capsys: pytest.CaptureFixture[str], variable: str, value: str, said: str) -> None:
    assert f"${variable}: {said}" in refusal(capsys, **{variable: value})


@pytest.mark.parametrize(
    ("owner", "values", "said"),
    [
        (
            EngineOptions,
            {"model": "m", "dtype": "int3"},
            "dtype: must be one of auto, float32, bfloat16, float16",
        ),
        (HttpOptions, {"port": 65536}, "port: must be between 0 and 65535, got 65536"),
        (HttpOptions, {"ssl_keyfile": "k"}, "--ssl-keyfile needs --ssl-certfile"),
        (ConnectionLimits, {"max_header_bytes": 0}, "max_header_bytes: must be at least 1, got 0"),
        (AppOptions, {"api_keys": ["k", "two words"]}, "api_keys: a key must have at least one character"),
        (AppOptions, {"root_path": "api"}, "root_path: must begin with a slash, like /api, got 'api'"),
        (AppOptions, {"allow_credentials": True}, "--allow-credentials needs --allowed-origins"),
        (AppOptions, {"unknown_parameters": "drop"}, "unknown_parameters: must be one of refuse, warn, ignore"),
    ],
)
def test_a_program_is_held_to_the_same_ranges(owner: type[Options], values: Mapping[str, Any], said: str) -> None:
    with pytest.raises(OptionError, match=re.escape(said)):
        owner(**values)


def test_buckets_are_given_as_vllm_users_know_it(capsys: pytest.CaptureFixture[str]) -> None:
    given = parse(
        "m",
        "--decode-bs-bucket-step=128",
        VLLM_PROMPT_BS_BUCKET_MAX="4",
        VLLM_PROMPT_QUERY_BUCKET_STEP="256",
        TIDEWHEEL_DECODE_SEQ_BUCKET_MAX="2K",
        VLLM_EXPONENTIAL_BUCKETING="True",
        VLLM_GRAPH_PROMPT_RATIO="0.5",
        VLLM_SKIP_WARMUP="true",
    )
    assert given.engine.device_options == (
        GraphOptions(
            bucketing="exponential",
            prompt_bs_bucket_max=4,
            prompt_seq_bucket_step=256,
            decode_bs_bucket_step=128,
            decode_seq_bucket_max=2048,
            graph_prompt_ratio=0.5,
            skip_warmup=True,
        ),
    )
    said = refusal(capsys, "m", "--decode-block-bucket-max=8", VLLM_DECODE_SEQ_BUCKET_MAX="8")
    assert "--decode-block-bucket-max counts the blocks of all sequences" in said
    assert "VLLM_BUCKETING_STRATEGY: must be one of linear" in refusal(capsys, "m", VLLM_BUCKETING_STRATEGY="pad")


def test_a_key_is_never_repeated(capsys: pytest.CaptureFixture[str]) -> None:
    assert "two words" not in refusal(capsys, "--api-key", "two words")
    with pytest.raises(OptionError) as refused:
        AppOptions(api_keys=["two words"])
    assert "two words" not in str(refused.value)
    assert "a-key" not in repr(AppOptions(api_keys=["a-key"]))


@pytest.mark.parametrize(
    ("wanted", "shown", "hidden"),
    [
        ("max-num-seqs", "--max-num-seqs N", "--max-model-len"),
        ("max_num", "--max-num-batched-tokens TOKENS", "--seed"),
        ("ModelConfig", "--revision NAME", "--port"),
        ("CacheConfig", "--kv-cache-space GIB", "--seed"),
        ("Frontend", "--allowed-origins", "--seed"),
        ("listgroup", "model\n", "--"),
        ("page", "--port", "nothing that is hidden"),
    ],
)
def test_help_for_a_part(capsys: pytest.CaptureFixture[str], wanted: str, shown: str, hidden: str) -> None:
    with pytest.raises(SystemExit, match=r"^0$"):
        parse(f"--help={wanted}")
    printed = capsys.readouterr().out
    assert shown in printed
    assert hidden not in printed
    assert "no option has 'wheel' in its name; --help shows" in refusal(capsys, "--help=wheel")


def test_help_shows_every_option(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exit_info:
        parse("--help")
    assert exit_info.value.code == 0
    text = capsys.readouterr().out
    for option in (option for owner in OWNERS for option in options_of(owner)):
        assert re.search(rf"{option.flag}\b", text)
    assert "VLLM_CPU_KVCACHE_SPACE" in text


def test_the_command_itself(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--version"]) == 0
    assert capsys.readouterr().out.startswith("tidewheel ")
    assert main(["--help"]) == 0
    assert "serve" in capsys.readouterr().out
    assert main([]) == 2
    assert main(["sevre"]) == 2
    assert "did you mean serve?" in capsys.readouterr().err


def test_all_mistakes_are_told_together(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "options.yaml"
    file.write_text("port: 70000\nnonsense: 1\nmax-num-seqs: 4\n")
    line = "m --max-model-len x --unknown 5 --seed --ssl-keyfile k --allow-credentials --ssl-cert-reqs optional "
    line += "--headless --pipeline-parallel-size 2 --pipeline-split 1,2,3 --lora-modules a=/a a=/b "
    line += "--speculative-model org/draft --ngram-prompt-lookup-max 4 --num-speculative-tokens 99 --kv-offload kept "
    line += "--no-enable-prefix-caching"
    environment = {
        "TIDEWHEEL_SHUTDOWN_TIMEOUT": "-1",
        "TIDEWHEEL_MAX_MODEL_LENGTH": "9",
        "VLLM_USE_MODELSCOPE": "1",
        "VLLM_CPU_KVCACHE_SPACE": "much",
        "TIDEWHEEL_HEADLESS": "1",
    }
    with pytest.raises(SystemExit) as exit_info:
        parse_options([*line.split(), "--config", str(file)], environment)
    assert exit_info.value.code == 2
    first, *mistakes = capsys.readouterr().err.splitlines()
    assert first == f"tidewheel serve: {len(mistakes)} things are wrong:"
    expected = (
        "unknown option --unknown",
        "argument --max-model-len: ",
        "argument --seed: expected one argument",
        "--headless is not supported",
        f"{file}: unknown option --nonsense",
        f"{file}: argument --port: must be between 0 and 65535",
        "unknown environment variable $TIDEWHEEL_MAX_MODEL_LENGTH (did you mean TIDEWHEEL_MAX_MODEL_LEN?)",
        "$VLLM_USE_MODELSCOPE is not supported",
        "$VLLM_CPU_KVCACHE_SPACE: ",
        "$TIDEWHEEL_SHUTDOWN_TIMEOUT: must be at least 0",
        "--lora-modules needs --enable-lora",
        "--lora-modules: two adapters have the same name",
        "--ngram-prompt-lookup-max is not supported with draft_model",
        "--num-speculative-tokens must be a number of at least 1 and at most 64, not 99",
        "--pipeline-split names 3 stages",
        "--kv-offload keeps cached prefixes",
        "--allow-credentials needs --allowed-origins",
        "--ssl-keyfile and --ssl-cert-reqs need --ssl-certfile",
        "clients are checked with both",
    )
    for words, mistake in zip(expected, mistakes, strict=True):
        assert mistake.startswith(f"  {words}")
