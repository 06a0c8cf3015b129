"""The command line and the environment of `tidewheel serve`."""

from __future__ import annotations

import dataclasses
import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tidewheel.engine.load import EngineOptions
from tidewheel.server.commands.cli import main
from tidewheel.server.options.serve import ModelOptions, ServerOptions, parse_options
from tidewheel.server.options.values import count


def parse(*arguments: str, **environment: str) -> tuple[ModelOptions, ServerOptions]:
    return parse_options(arguments, environment)


def refusal(capsys: pytest.CaptureFixture[str], *arguments: str, **environment: str) -> str:
    with pytest.raises(SystemExit) as exit_info:
        parse(*arguments, **environment)
    assert exit_info.value.code == 2
    message = capsys.readouterr().err
    assert message.count("\n") == 1
    return message


def test_defaults_are_the_engines() -> None:
    model, server = parse()
    assert (model, server) == (ModelOptions(), ServerOptions())
    ours = dataclasses.asdict(model)
    assert ours.pop("model") is None
    theirs = dataclasses.asdict(EngineOptions("m"))
    theirs.pop("model")
    assert ours == theirs
    assert (server.tool_call_parser, server.reasoning_parser) == ("auto", "auto")
    assert parse("--tool-call-parser", "none")[1].tool_call_parser == "none"


def test_a_vllm_command_line_works() -> None:
    model, server = parse(
        "Qwen/Qwen3-0.6B", "--host", "0.0.0.0", "--port", "9000", "--max-model-len", "4k", "--max-num-seqs=8",
        "--max-num-batched-tokens", "2K", "--dtype", "half", "--served-model-name", "a", "b", "--api-key", "x",
        "--api-key", "y", "--enable-auto-tool-choice", "--tool-call-parser", "hermes", "--disable-log-requests",
        "--no-enable-prefix-caching", "--uvicorn-log-level", "warning", "--generation-config", "vllm", "--seed", "3",
        "--reasoning-parser", "qwen3", "--trust-request-chat-template",
        "--default-chat-template-kwargs", '{"enable_thinking": false}',
    )  # fmt: skip
    assert (model.model, model.max_model_len, model.max_num_seqs) == ("Qwen/Qwen3-0.6B", 4000, 8)
    assert (model.max_num_batched_tokens, model.dtype, model.enable_prefix_caching) == (2048, "float16", False)
    assert (server.host, server.port, server.served_model_name) == ("0.0.0.0", 9000, ("a", "b"))
    assert (server.api_key, server.disable_log_requests) == (("x", "y"), True)
    assert (server.log_level, server.tool_call_parser, server.reasoning_parser) == ("warning", "hermes", "qwen3")
    assert server.default_chat_template_kwargs == {"enable_thinking": False}
    assert server.trust_request_chat_template


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
    model, server = parse(**environment)
    assert (model.model, model.enable_prefix_caching, model.dtype) == ("m", False, "float32")
    assert (server.port, server.api_key, server.disable_log_requests) == (81, ("a", "b"), True)
    assert parse("--port", "82", **environment)[1].port == 82
    assert parse("n", **environment)[0].model == "n"


def test_lists_may_be_written_as_json() -> None:
    for arguments in (('["http://a", "http://b"]',), ("http://a", "http://b")):
        assert parse("--allowed-origins", *arguments)[1].allowed_origins == ("http://a", "http://b")
        assert parse(TIDEWHEEL_ALLOWED_ORIGINS=" ".join(arguments))[1].allowed_origins == ("http://a", "http://b")
    assert parse("--root-path", "/api/")[1].root_path == "/api"


def test_vllms_variables_are_aliases() -> None:
    assert parse(VLLM_API_KEY="k")[1].api_key == ("k",)
    assert parse(VLLM_API_KEY="k", TIDEWHEEL_API_KEY="l")[1].api_key == ("l",)
    environment = {"VLLM_CPU_KVCACHE_SPACE": "4", "VLLM_CPU_OMP_THREADS_BIND": "0-3|4-7"}
    model, _ = parse(**environment)
    assert (model.kv_cache_space, model.threads_bind) == (4.0, "0-3|4-7")
    assert parse(**environment, TIDEWHEEL_KV_CACHE_SPACE="0.5")[0].kv_cache_space == 0.5
    assert parse(VLLM_CPU_KVCACHE_SPACE="0")[0].kv_cache_space is None


def test_a_kv_cache_has_types_of_its_own() -> None:
    assert parse("--kv-cache-dtype", "fp8")[0].kv_cache_dtype == "fp8_e5m2"
    assert parse(TIDEWHEEL_KV_CACHE_DTYPE="int8")[0].kv_cache_dtype == "int8"
    assert parse("--kv-cache-dtype", "half")[0].kv_cache_dtype == "float16"


def test_unknown_options_are_refused_by_name_with_a_hint(capsys: pytest.CaptureFixture[str]) -> None:
    message = refusal(capsys, "m", "--max-model-length", "5")
    assert "--max-model-length" in message
    assert "did you mean --max-model-len?" in message
    assert "--tensor-parallel-size" in refusal(capsys, "m", "--tensor-parallel-size=2")
    assert "second" in refusal(capsys, "m", "second")
    assert "--max-model" in refusal(capsys, "--max-model", "5")  # no abbreviations


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["--port", "70000"], "--port"),
        (["--port", "http"], "--port"),
        (["--max-model-len", "0"], "--max-model-len"),
        (["--max-model-len", "4q"], "--max-model-len"),
        (["--dtype", "int3"], "--dtype"),
        (["--dtype", "fp8"], "--dtype"),
        (["--kv-cache-dtype", "fp8_e4m3"], "--kv-cache-dtype"),
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
    ],
)
def test_unusable_values_name_their_option(
    capsys: pytest.CaptureFixture[str], arguments: list[str], named: str
) -> None:
    assert named in refusal(capsys, *arguments)


@pytest.mark.parametrize(
    ("variable", "value"),
    [
        ("TIDEWHEEL_PORT", "x"),
        ("TIDEWHEEL_DTYPE", "int3"),
        ("TIDEWHEEL_DISABLE_ACCESS_LOG", "maybe"),
        ("VLLM_CPU_KVCACHE_SPACE", "much"),
    ],
)
def test_unusable_variables_are_named(capsys: pytest.CaptureFixture[str], variable: str, value: str) -> None:
    assert f"${variable}" in refusal(capsys, **{variable: value})


@settings(deadline=None)
@given(st.integers(0, 10**9))
def test_counts(number: int) -> None:
    assert count(str(number)) == number
    assert count(f"{number}k") == number * 1000
    assert count(f"{number}K") == number * 1024
    assert count(f"{number}.5k") == number * 1000 + 500


def test_help_shows_every_option(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exit_info:
        parse("--help")
    assert exit_info.value.code == 0
    text = capsys.readouterr().out
    for group in (ModelOptions, ServerOptions):
        for spec in dataclasses.fields(group):
            assert re.search(rf"--{spec.name.replace('_', '-')}\b", text)
    assert "VLLM_CPU_KVCACHE_SPACE" in text


def test_the_command_itself(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--version"]) == 0
    assert capsys.readouterr().out.startswith("tidewheel ")
    assert main(["--help"]) == 0
    assert "serve" in capsys.readouterr().out
    assert main([]) == 2
    assert main(["sevre"]) == 2
    assert "did you mean serve?" in capsys.readouterr().err
