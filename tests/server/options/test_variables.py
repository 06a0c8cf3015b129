"""Environment variables: those that are not read are refused, or named in the log."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tidewheel.engine.devices.cpu.options import CpuOptions
from tidewheel.server.options.serve import SERVE_OPTIONS, ServeOptions, parse_options
from tidewheel.server.options.variables import KNOWN

ROOT = Path(__file__).parents[3]
FILES = ("Dockerfile.*", "docker-compose.yml", "deploy/**/*", "engine/**/*.py", "native/**/*.[ch]*", "tests/**/*.py")


def parse(**environment: str) -> ServeOptions:
    return parse_options(["m"], environment)


def refusal(capsys: pytest.CaptureFixture[str], **environment: str) -> str:
    with pytest.raises(SystemExit):
        parse(**environment)
    return capsys.readouterr().err


def test_unknown_variables_are_refused_all_at_once(capsys: pytest.CaptureFixture[str]) -> None:
    said = refusal(capsys, TIDEWHEEL_MAX_MODEL_LENGTH="5", TIDEWHEEL_NONSENSE="1")
    assert "$TIDEWHEEL_MAX_MODEL_LENGTH (did you mean TIDEWHEEL_MAX_MODEL_LEN?), $TIDEWHEEL_NONSENSE" in said
    assert said.count("\n") == 1
    assert parse(TIDEWHEEL_NONSENSE="").notes == []


def test_what_surrounds_the_server_may_be_set() -> None:
    parse(**dict.fromkeys(KNOWN, "1"))
    parse(TIDEWHEEL_CHAT_SERVICE_HOST="10.0.0.1", TIDEWHEEL_CHAT_PORT_80_TCP_ADDR="10.0.0.1")
    parse(TIDEWHEEL_CHAT_PORT="tcp://10.0.0.1:80", TIDEWHEEL_CHAT_SERVICE_PORT_HTTP="80")


def test_every_variable_of_the_repository_is_known() -> None:
    known = {*KNOWN, *(name for option in SERVE_OPTIONS for name in option.variables)}
    text = "".join(path.read_text("utf-8", "ignore") for name in FILES for path in ROOT.glob(name) if path.is_file())
    read = r'(?:environ(?:\.get)?[\[(]|getenv\()"(TIDEWHEEL_\w+)"|\$\{(TIDEWHEEL_\w+):|^ +(TIDEWHEEL_\w+)='
    found = {name for names in re.findall(read, text, re.MULTILINE) for name in names if name}
    assert {"TIDEWHEEL_ISA", "TIDEWHEEL_PORT", "TIDEWHEEL_IMAGE"} <= found
    assert found - known == set()


def test_variables_of_vllms_flags_are_as_the_flags(capsys: pytest.CaptureFixture[str]) -> None:
    assert [note.split()[0] for note in parse(TIDEWHEEL_SWAP_SPACE="4").notes] == ["--swap-space"]
    assert "--mm-encoder-only is not supported" in refusal(capsys, TIDEWHEEL_MM_ENCODER_ONLY="1")
    parse(TIDEWHEEL_MM_ENCODER_ONLY="0")


def test_vllms_variables_are_read_or_named(capsys: pytest.CaptureFixture[str]) -> None:
    assert parse(VLLM_LOGGING_LEVEL="DEBUG").log.log_level == "debug"
    assert parse(VLLM_HTTP_TIMEOUT_KEEP_ALIVE="9").http.keep_alive_timeout_s == 9
    assert parse(VLLM_CPU_NUM_OF_RESERVED_CPU="2").engine.device_options == (CpuOptions(reserved_cpus=2),)
    assert parse(VLLM_CPU_OMP_THREADS_BIND="all").engine.device_options == (CpuOptions(),)
    assert "threads are always bound to cores" in refusal(capsys, VLLM_CPU_OMP_THREADS_BIND="nobind")
    assert parse(VLLM_MAX_N_SEQUENCES="9").app.admission.max_n == 9
    assert parse(VLLM_HTTP_MAX_REQUEST_BODY_SIZE="1048576").app.max_body_bytes == 1 << 20
    assert parse(VLLM_LOG_STATS_INTERVAL="2.5").app.log_stats_interval == 2.5
    assert parse(VLLM_SKIP_MODEL_NAME_VALIDATION="1").app.skip_model_name_validation
    assert parse(VLLM_DEBUG_LOG_API_SERVER_RESPONSE="true").app.enable_log_outputs
    assert parse(
        TIDEWHEEL_PIPELINE_PARALLEL_SIZE="2", VLLM_PP_LAYER_PARTITION="3,5"
    ).engine.pipeline.pipeline_split == (
        3,
        5,
    )
    notes = parse(VLLM_USE_V1="1", VLLM_CPU_SGL_KERNEL="1", VLLM_ATTENTION_BACKEND="x", VLLM_SERVER_DEV_MODE="1").notes
    assert sorted(note.partition(" no effect: ")[0] for note in notes) == [
        "VLLM_ATTENTION_BACKEND, VLLM_CPU_SGL_KERNEL have",
        "VLLM_SERVER_DEV_MODE has",
        "VLLM_USE_V1 has",
    ]
    assert any("/reset_prefix_cache" in note for note in notes)
    (note,) = parse(VLLM_LOGING_LEVEL="debug").notes
    assert note.startswith("VLLM_LOGING_LEVEL (did you mean VLLM_LOGGING_LEVEL?) has no effect: neither")
    assert "$VLLM_USE_MODELSCOPE is not supported: " in refusal(capsys, VLLM_USE_MODELSCOPE="True")
    assert parse(VLLM_USE_MODELSCOPE="False").notes == []
