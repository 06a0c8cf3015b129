"""Command lines of `vllm serve`, as its documentation has them: each starts as it says, or is refused in a sentence."""

from __future__ import annotations

import re
import shlex
from collections import defaultdict
from pathlib import Path
from typing import Any

import msgspec
import pytest

from tidewheel.engine.media.decode_settings import MAX_FRAMES, DecodeSettings
from tidewheel.server.options.serve import SERVE_OPTIONS, ServeOptions, parse_options
from tidewheel.server.options.variables import KNOWN
from tidewheel.server.options.vllm_flags import CONVERTED, vllm_flags
from tidewheel.server.options.vllm_table import RENAMED, SHORT, WORKS
from tidewheel.server.options.vllm_variables import REFUSED as VARIABLES_REFUSED
from tidewheel.server.options.vllm_variables import why_idle

WORKING = {name for names in WORKS.values() for name in names.split()}


def parse(line: str, **environment: str) -> ServeOptions:
    return parse_options(shlex.split(line), environment)


def refusal(capsys: pytest.CaptureFixture[str], line: str, **environment: str) -> str:
    with pytest.raises(SystemExit) as exit_info:
        parse(line, **environment)
    assert exit_info.value.code == 2
    return capsys.readouterr().err


@pytest.mark.parametrize(
    ("line", "shown"),
    [
        ("Qwen/Qwen3-0.6B", {"model": "Qwen/Qwen3-0.6B"}),
        ("--model meta-llama/Llama-3.1-8B-Instruct --port 8001", {"port": 8001}),
        ("--model-tag m --dtype auto --api-key token-abc123", {"model": "m"}),
        ("m --max_model_len 4096 --max_num_seqs=16", {"max_model_len": 4096, "max_num_seqs": 16}),
        ("m --enable-auto-tool-choice --tool-call-parser hermes", {"tool_call_parser": "hermes"}),
        ("m --reasoning-parser deepseek_r1 --enable-reasoning", {"reasoning_parser": "deepseek_r1"}),
        ("m -tp 2 --distributed-executor-backend mp", {"tensor_parallel_size": 2}),
        (
            "m -pp 3 --pipeline-split 4,2,4 --distributed-executor-backend mp",
            {"pipeline_parallel_size": 3, "pipeline_split": (4, 2, 4)},
        ),
        (
            "m -dp 2 --distributed-executor-backend ray",
            {"data_parallel_size": 2, "distributed_executor_backend": "ray"},
        ),
        ("m -dp 2 --data-parallel-backend ray", {"data_parallel_size": 2}),
        (
            "m -pp 2 --distributed-executor-backend ray",
            {"pipeline_parallel_size": 2, "distributed_executor_backend": "ray"},
        ),
        ("m -q awq_marlin --trust-remote-code", {"quantization": "awq"}),
        ("m -q auto_gptq --tool-call-parser qwen3_json", {"quantization": "gptq", "tool_call_parser": "hermes"}),
        ("m -O3", {}),
        ("m -O.level=3 -O.cudagraph_mode FULL", {}),
        ("m -O3 --enforce-eager", {"enforce_eager": True}),
        ("m --compilation-config '{\"level\": 3}'", {}),
        ("m -cc.mode=3 --async-scheduling", {}),
        ("m --swap-space 16 --use-v2-block-manager --block-size 16", {}),
        ("m --disable-custom-all-reduce --max-parallel-loading-workers 2 --disable-log-stats", {}),
        ("m --gpu-memory-utilization 0.95 --enable-chunked-prefill", {"gpu_memory_utilization": 0.95}),
        ("m --no-enable-chunked-prefill --no-enable-prefix-caching", {"enable_prefix_caching": False}),
        ("--enable-chunked-prefill False m", {"model": "m"}),
        ("m --tokenizer-mode mistral --load-format mistral", {"tokenizer_mode": "mistral"}),
        ("m --uvicorn-log-level trace", {"log_level": "debug"}),
        ("m --disable-frontend-multiprocessing --tokenizer-pool-size 4 --num-lookahead-slots 1", {}),
        ("m --tokenizer-mode auto --load-format bitsandbytes --quantization bitsandbytes", {"load_format": "auto"}),
        ("m --task embed", {"task": "embed"}),
        (
            "m --runner pooling --convert classify --override-pooler-config.use_activation false",
            {"runner": "pooling", "convert": "classify", "pooler_config": {"use_activation": False}},
        ),
        ("m --task generate --runner generate --pipeline-parallel-size 1 -dp 1 --nnodes 1", {}),
        ("m --guided-decoding-backend xgrammar --scheduling-policy priority", {}),
        ("m --disable-log-requests --uvicorn-log-level warning", {"disable_log_requests": True}),
        ("m --no-enable-log-requests", {"disable_log_requests": True}),
        ("m --enable-log-requests", {"disable_log_requests": False}),
        ("m --max-num-queued-reqs 7", {"max_queue": 7}),
        (
            "m --speculative-config.method ngram --speculative-config.num_speculative_tokens 4",
            {"speculative_config": {"method": "ngram", "num_speculative_tokens": 4}},
        ),
        (
            "m --speculative-config.method qwen3_next_mtp --speculative-config.num_speculative_tokens 2",
            {"speculative_config": {"method": "qwen3_next_mtp", "num_speculative_tokens": 2}},
        ),
        (
            'm --speculative-config \'{"method": "suffix", "suffix_decoding_max_spec_factor": 2}\'',
            {"speculative_config": {"method": "suffix", "suffix_decoding_max_spec_factor": 2}},
        ),
        (
            "m --speculative-model [ngram] --num-speculative-tokens 5 --ngram-prompt-lookup-max 4",
            {"speculative_model": "[ngram]", "num_speculative_tokens": 5, "ngram_prompt_lookup_max": 4},
        ),
        (
            "m --speculative-model org/draft --num-speculative-tokens 5 --speculative-draft-tensor-parallel-size 1 "
            "--speculative-model-quantization gptq_marlin",
            {
                "speculative_model": "org/draft",
                "num_speculative_tokens": 5,
                "speculative_draft_tensor_parallel_size": 1,
                "speculative_model_quantization": "gptq_marlin",
            },
        ),
        (
            "m --default-chat-template-kwargs.enable_thinking false",
            {"default_chat_template_kwargs": {"enable_thinking": False}},
        ),
        ("m --enable-lora --lora-modules a=/a b=/b --max-loras 2 --max-lora-rank 64", {}),
        ("m --no-enable-prompt-adapter --no-trust-remote-code", {}),
        ("m --cpu-offload-gb 0 --mm-processor-cache-gb 0 --language-model-only", {}),
        ("m --numa-bind --enable-expert-parallel --enable-eplb", {}),
        (
            "m --enable-log-requests --enable-log-outputs --max-log-len 2048",
            {"disable_log_requests": False, "enable_log_outputs": True, "max_log_len": 2048},
        ),
        ("m --cuda-graph-sizes 1 2 4 --seed 7", {"seed": 7}),
        ("--cudagraph-capture-sizes 1 2 --model m", {"model": "m"}),
        ("m --scheduler-delay-factor 0.5", {"scheduler_delay_factor": 0.5}),
        ("m --host 0.0.0.0 --allowed-origins '[\"*\"]' --ssl-certfile c --ssl-keyfile k", {"host": "0.0.0.0"}),
        ("m --max-model-len auto", {"max_model_len": None}),
        ("m --max-model-len -1", {"max_model_len": None}),
        ("--served-model-name a b --swap-space 4 m", {"model": "m", "served_model_name": ("a", "b")}),
        ("--api-key k --hf-overrides.rope_theta 1e6 m", {"model": "m", "hf_overrides": {"rope_theta": 1e6}}),
        (
            "m --hf-overrides '{\"a\": 1}' --hf-overrides.b.c+ 2 --hf-overrides.b.c+=x,3",
            {"hf_overrides": {"a": 1, "b": {"c": [2, "x", 3]}}},
        ),
        ('m --limit-mm-per-prompt \'{"image": 0, "video":0}\'', {"limit_mm_per_prompt": {"image": 0, "video": 0}}),
        ("m --limit-mm-per-prompt.image 4", {"limit_mm_per_prompt": {"image": 4}}),
        ("m --limit-mm-per-prompt image=2,video=0", {"limit_mm_per_prompt": {"image": 2, "video": 0}}),
        (
            'm --limit-mm-per-prompt \'{"image": {"count": 5, "width": 512}, "audio": 0}\'',
            {"limit_mm_per_prompt": {"image": 5, "audio": 0}},
        ),
        (
            "m --allowed-media-domains a.org B.example.com --allowed-local-media-path /data --interleave-mm-strings",
            {
                "allowed_media_domains": ("a.org", "b.example.com"),
                "allowed_local_media_path": "/data",
                "interleave_mm_strings": True,
            },
        ),
        (
            "m --mm-processor-kwargs.max_pixels 1003520 --mm-processor-cache-gb 0 --language-model-only",
            {"mm_processor_kwargs": {"max_pixels": 1003520}, "mm_processor_cache_gb": 0, "language_model_only": True},
        ),
        (
            "m --image-input-type pixel_values --image-token-id 32000 --image-input-shape 1,3,336,336 "
            "--image-feature-size 576 --enable-log-deltas",
            {},
        ),
        ("m --skip-model-name-validation --log-stats-interval 5", {"log_stats_interval": 5.0}),
        ("--kv-cache-memory-bytes 512M m", {"model": "m", "kv_cache_space": 0.5}),
        ("m --kv-cache-memory-bytes=1073741824", {"kv_cache_space": 1.0}),
        ("m --kv-cache-dtype fp8 --calculate-kv-scales --preemption-mode recompute", {"kv_cache_dtype": "fp8_e4m3"}),
    ],
)  # fmt: skip
def test_a_line_that_works(line: str, shown: dict[str, Any]) -> None:
    options = parse(line)
    assert {name: options.shown[name] for name in shown} == shown


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("m -dp 4 --data-parallel-size-local 2", "--data-parallel-size-local is not supported: a server is one"),
        ("m --preemption-mode swap", "--preemption-mode is not supported: a preempted sequence is computed again"),
        ("m --load-format tensorizer", "--load-format tensorizer is not supported: convert the model"),
        ("m --load-format=sharded_state", "--load-format sharded_state is not supported"),
        ("m --enable-prompt-adapter --prompt-adapters a=b c=d", "--prompt-adapters is not supported: such adapters"),
        ("m --limit-mm-per-prompt '{\"audio\": 2}'", "--limit-mm-per-prompt: audio is not served"),
        ("m --media-io-kwargs '{\"audio\": {}}'", "must have objects for image and video"),
        ("m --media-io-kwargs.video.backend opencv", "must have no video.backend: what is supported for video is"),
        ("m --media-io-kwargs.image.image_mode L", "must have RGB as image.image_mode"),
        ("m --media-io-kwargs '{\"image\": {\"rgba_background_color\": [1, 2]}}'", "three numbers from 0 to 255"),
        ("m --media-io-kwargs.video.num_frames 0", "must have a number from 1 to 768, or -1 for as many as there are,"),
        ("m --media-io-kwargs.video.fps 0", "must have a number from 0.01 to 1000 as video.fps"),
        ("m --image-min-tokens 9 --image-max-tokens 8", "--image-min-tokens must be at most --image-max-tokens"),
        ("m --limit-mm-per-prompt.image two", "must have numbers of at most 1024"),
        ("m --limit-mm-per-prompt.picture 2", "must have numbers of at most 1024 for image, video and audio"),
        ("m --limit-mm-per-prompt.image 2000", "must have numbers of at most 1024"),
        ("m --image-input-type image_features", "--image-input-type is not supported: the model computes images"),
        ("m --image-processor org/name", "--image-processor is not supported: the processor is that of the model's"),
        ("m --disable-image-processor", "--disable-image-processor is not supported: images are sent as files"),
        ("m --allowed-media-domains https://example.org/a", "must be a host's name such as images.example.org"),
        ("m --allowed-local-media-path data", "--allowed-local-media-path must be an absolute path"),
        ("m --image-fetch-timeout 0", "must be above 0"),
        ("m --mmproj-url https://x/y.gguf", "unknown option --mmproj-url (download the file and name it with --mmproj"),
        ("m --kv-transfer-config '{\"kv_connector\": \"NixlConnector\"}'", "--kv-transfer-config is not supported"),
        ("m --cpu-offload-gb 10", "--cpu-offload-gb is not supported: weights stay in memory"),
        ("m --task embed --runner generate", "--task embed and --runner generate contradict each other"),
        ("m --runner draft", "--runner draft is not supported: --speculative-config names a draft model"),
        ("m --convert reward", "--convert reward is not supported: reward models need no conversion"),
        ("m --pooler-config.pooling_type ALL", "must not have the pooling_type ALL, because texts"),
        ("m --pooler-config.step_tag_id 3", "must not have step_tag_id, because scores are not picked"),
        ("m --pooler-config.pooling MEAN", "must have pooling_type, use_activation, normalize, dimensions only"),
        ("m --pooler-config.use_activation 1", "must have true or false as use_activation"),
        ("m --runner generate --pooler-config.dimensions 64", "--pooler-config needs --runner pooling"),
        ("m --pooling-type MEAN", "--pooling-type is not supported: --pooler-config has a field for it"),
        ("m --config-format custom", "--config-format is not supported: convert"),
        ("m -dp 4 --distributed-executor-backend mp", "--data-parallel-size needs --distributed-executor-backend ray"),
        (
            "m -pp 2 -dp 2 --distributed-executor-backend ray",
            "--pipeline-parallel-size and --data-parallel-size do not work together",
        ),
        ("m -pp 2 --pipeline-split 1,2,3", "--pipeline-split names 3 stages"),
        ("m --headless --grpc", "--grpc is not supported"),
        ("m --tokenizer-mode custom", "--tokenizer-mode custom is not supported: custom tokenizer code is never run"),
        ("m --tokenizer-mode deepseek_v32", "--tokenizer-mode deepseek_v32 is not supported: the model's own files"),
        ("m --hf-token secret-of-mine", "set HF_TOKEN"),
        ("m --kv-cache-memory-bytes much", "--kv-cache-memory-bytes: 'much' is not a number"),
        ("m --logits-processors a.b", "--logits-processors is not supported: requests have logit_bias"),
        ('m --speculative-config \'{"method": "eagle", "model": "x"}\'', "the method 'eagle' is not supported"),
        (
            "m --speculative-config.method=ngram --speculative-config.quantization=fp8",
            "quantization is not supported with ngram",
        ),
        (
            "m --speculative-model org/draft --ngram-prompt-lookup-max 5",
            "--ngram-prompt-lookup-max is not supported with draft_model: leave it out",
        ),
        ("m --speculative-config.method draft_model", "draft_model needs a model"),
        ("m --reasoning-parser minimax_m2_append_think", "use minimax_m2, which separates it, or none"),
        ("m --speculative-model org/draft --speculative-model-quantization int3", "quantization must be one of int8"),
        ("m --speculative-config.model 7", "model must be a string, not 7"),
        (
            "m --num-speculative-tokens 5 --ngram-prompt-lookup-max 4",
            "--num-speculative-tokens and --ngram-prompt-lookup-max lack a method, which --speculative-config names",
        ),
        ("m --speculative-config.max_model_len 9", "--speculative-config with max_model_len lacks a method"),
        (
            "m --num-speculative-tokens 5 --speculative-config.num_speculative_tokens 4 --speculative-model [ngram]",
            "--num-speculative-tokens 5 and num_speculative_tokens 4 of --speculative-config contradict each other",
        ),
        (
            'm --speculative-config \'{"method": "ngram", "prompt_lookup_min": 6, "prompt_lookup_max": 5}\'',
            "prompt_lookup_min 6 is more than prompt_lookup_max 5",
        ),
        (
            'm --speculative-config \'{"method": "ngram", "num_speculative_tokens": 1000}\'',
            "num_speculative_tokens must be a number of at least 1 and at most 64, not 1000",
        ),
        (
            'm --speculative-config \'{"method": "suffix", "prompt_lookup_max": 5}\'',
            "prompt_lookup_max is not supported with suffix; supported are method, model, num_speculative_tokens",
        ),
        (
            'm --speculative-config \'{"method": "ngram", "suffix_decoding_max_tree_depth": 5}\'',
            "suffix_decoding_max_tree_depth is not supported",
        ),
        (
            'm --speculative-config \'{"method": "suffix", "suffix_decoding_min_token_prob": 1.5}\'',
            "suffix_decoding_min_token_prob must be a number from 0 to 1, not 1.5",
        ),
        (
            'm --speculative-config \'{"method": "suffix", "suffix_decoding_max_cached_requests": 1e9}\'',
            "suffix_decoding_max_cached_requests must be a number from 0 to 100000, not 1000000000.0",
        ),
        ('m --speculative-config \'{"method": "suffix", "model": "x"}\'', "suffix has no model; leave it out"),
        ("m --enable-sleep-mode", "--enable-sleep-mode is not supported: servers of several models have /sleep"),
    ],
)  # fmt: skip
def test_a_line_that_is_refused(capsys: pytest.CaptureFixture[str], line: str, said: str) -> None:
    message = refusal(capsys, line)
    assert said in message
    assert "secret" not in message
    assert message.count("\n") == 1 or "things are wrong:\n  " in message


BLOCKS = (Path(__file__).parent / "vllm_lines.txt").read_text("utf-8").split("\n\n")[1:]


@pytest.fixture(scope="module")
def defaults() -> dict[str, Any]:
    return dict(parse("").shown)


@pytest.mark.parametrize("block", BLOCKS, ids=[block.partition("\n")[0][:60] for block in BLOCKS])
def test_a_line_as_people_run_it(
    defaults: dict[str, Any],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    block: str,
) -> None:
    line, *rows = block.replace("\\\n", " ").strip().split("\n")
    expected = {sign: [row[2:] for row in rows if row[0] == sign] for sign in "|=~!"}
    *given, _, rest = re.split(r"(vllm serve|python3?(?: -u)? -m vllm.entrypoints.openai.api_server) ", line)
    environment = dict(word.split("=", 1) for word in shlex.split(given[0]))
    monkeypatch.chdir(tmp_path)
    Path("config.yaml").write_text("\n".join(expected["|"]))
    if expected["!"]:
        said = refusal(capsys, rest, **environment).removeprefix("tidewheel serve: ").split("\n")[:-1]
        found = {"=": [], "~": [], "!": said if len(said) == 1 else [sentence[2:] for sentence in said[1:]]}
    else:
        options = parse(rest, **environment)
        shown = {name: value for name, value in options.shown.items() if value != defaults[name]}
        if options.app.api_keys:
            shown["api_key"] = options.app.api_keys
        notes = [*options.notes, *options.app.without_effect(), *options.engine.lora.without_effect()]
        notes += options.engine.media.without_effect()
        written = [f"{name}: {msgspec.json.encode(value).decode()}" for name, value in shown.items()]
        found = {"=": written, "~": notes, "!": []}
    for sign, lines in found.items():
        assert len(lines) == len(expected[sign]), lines
        for begin, text in zip(expected[sign], lines, strict=True):
            assert text == begin if sign == "=" else text.startswith(begin)


# The names are facts about vLLM's versions; what becomes of each is in the server's own table.
def rows_of(name: str) -> list[list[str]]:
    lines = (Path(__file__).parent / name).read_text("utf-8").splitlines()
    return [line.split() for line in lines if not line.startswith("#")]


FLAGS = rows_of("vllm_flags.txt")


@pytest.mark.parametrize("takes", ["switch", "value", "several"])
def test_every_flag_of_every_version_is_known(takes: str) -> None:
    names = [name for name, _, _, kind in FLAGS if kind == takes]
    assert len(names) > 10
    declared = {flag for option in SERVE_OPTIONS for flag in (option.flag, *option.declaration.flag_aliases)}
    known = declared | vllm_flags().keys() | RENAMED.keys() | SHORT.keys() | CONVERTED.keys()
    # `-O` and the switches that turn another off are spellings.
    assert {name for name in names if name not in known and name.replace("--no-", "--") not in known} == set()
    for name in names:
        for flag in vllm_flags().get(name, ()):
            assert flag.takes == {"switch": 0, "value": 1, "several": 2}[takes], name


def test_every_switch_of_every_version_can_be_turned_off() -> None:
    for name in (name for name, _, _, takes in FLAGS if takes == "switch" and re.match("--(?!no-)", name)):
        try:
            parse(f"m {name.replace('--', '--no-', 1)}")
        except SystemExit:
            pytest.fail(name)


def test_every_flag_in_one_line_is_told_once(capsys: pytest.CaptureFixture[str]) -> None:
    line = " ".join(word for name, _, _, takes in FLAGS for word in [name, *([] if takes == "switch" else ["1"])])
    said = refusal(capsys, f"m {line}")
    assert "unknown" not in said
    assert said.count("--headless is not supported") == 1


def test_every_variable_of_every_version_is_known() -> None:
    options = {name for option in SERVE_OPTIONS for name in option.variables}
    for name, *_ in rows_of("vllm_variables.txt"):
        assert name in options | KNOWN.keys() | VARIABLES_REFUSED.keys() or why_idle(name), name


def test_what_has_no_effect_is_a_line_in_the_log() -> None:
    assert parse("m --swap-space 4 -O3 --no-enable-prompt-adapter").notes == [
        "--swap-space has no effect: a preempted sequence is computed again, so KV blocks are never swapped",
        "--optimization-level has no effect: kernels are built in, and the buckets of an accelerator determine what "
        "is compiled (docs/devices/buckets.md)",
        "--no-enable-prompt-adapter has no effect: it is never on",
    ]


def test_vllms_variables_of_fetched_images_are_options() -> None:
    shown = parse("m", VLLM_IMAGE_FETCH_TIMEOUT="7.5", VLLM_MEDIA_URL_ALLOW_REDIRECTS="0").shown
    assert (shown["image_fetch_timeout"], shown["media_url_allow_redirects"]) == (7.5, False)
    assert parse("m").engine.media.limits == {"image": 16, "video": 2}
    assert parse("m --limit-mm-per-prompt video=0").engine.media.limits == {"image": 16, "video": 0}
    assert not parse("m --limit-mm-per-prompt image=0").engine.media.wants_vision


def test_how_media_are_decoded_is_an_option() -> None:
    assert parse("m").engine.media.decoding == DecodeSettings()
    line = "m --media-io-kwargs.video.num_frames -1 --media-io-kwargs.image.rgba_background_color=[1,2,3]"
    media = parse(line, VLLM_MAX_IMAGE_PIXELS="1000").engine.media
    assert media.decoding == DecodeSettings(1000, (1, 2, 3), MAX_FRAMES, 2.0)
    assert media.frames_per_second is None
    media = parse('m --media-io-kwargs \'{"video": {"fps": 4}}\' --max-image-pixels 2k').engine.media
    assert (media.decoding, media.frames_per_second) == (DecodeSettings(2000, fps=4.0), 4)


def test_every_flag_is_works_or_accepted_or_refused() -> None:
    declared = {flag for option in SERVE_OPTIONS for flag in (option.flag, *option.declaration.flag_aliases)}
    choices = {option.flag: option.declaration.choices or () for option in SERVE_OPTIONS}
    assert declared | RENAMED.keys() | CONVERTED.keys() >= WORKING
    assert {*SHORT.values()} <= WORKING | vllm_flags().keys()
    for name, flags in vllm_flags().items():
        values = [flag.value for flag in flags]
        assert len(values) == len({*values}), f"{name} is listed twice"
        assert (None in values) != (name in WORKING), name
        assert len({flag.takes for flag in flags}) == 1, name
        assert not {flag.value for flag in flags if not flag.accepted} & {*choices.get(name, ())}, name


def test_every_flag_is_read_under_its_name(capsys: pytest.CaptureFixture[str]) -> None:
    declared = {option.flag for option in SERVE_OPTIONS}
    accepted = defaultdict[int, dict[str, str]](dict)  # words by name; a flag's values are in lines of their own
    for name, flags in vllm_flags().items():
        for number, flag in enumerate(flags):
            if flag.value is None and name in declared:
                continue  # what was not there yet when the table was written
            words = name if flag.takes == 0 else f"{name} {flag.value or 9}"
            if flag.accepted:
                accepted[number][name] = words
            else:
                assert f"{name} " in refusal(capsys, f"m {words}")
    for names in accepted.values():
        notes = parse(" ".join(["m", *names.values()])).notes
        assert [name for name in names if not any(note.startswith(f"{name} has no effect") for note in notes)] == []
