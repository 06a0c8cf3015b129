"""EngineArgs and FlexibleArgumentParser: the scripts of vLLM's documentation with another import."""

from __future__ import annotations

import argparse
import dataclasses
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tidewheel import LLM, AsyncEngineArgs, AsyncLLM, AsyncLLMEngine, EngineArgs
from tidewheel.engine.arg_utils import EngineArgs as ByVllmsPath
from tidewheel.engine.declaring.option import OptionError
from tidewheel.server.options.vllm_flags import vllm_flags
from tidewheel.utils import FlexibleArgumentParser

SMALL = {"kv_cache_space": 0.05, "max_num_seqs": 4}

BASIC = """
from tidewheel import LLM, EngineArgs
from tidewheel.utils.argparse_utils import FlexibleArgumentParser

def create_parser():
    parser = FlexibleArgumentParser()
    EngineArgs.add_cli_args(parser)
    parser.set_defaults(max_num_seqs=4, trust_remote_code=True)
    group = parser.add_argument_group("sampling")
    group.add_argument("--max-tokens", type=int)
    group.add_argument("--prompts", nargs="+")
    return parser

def main(args):
    max_tokens, prompts = args.pop("max_tokens"), args.pop("prompts")
    llm = LLM(**args)
    params = llm.get_default_sampling_params()
    params.max_tokens, params.ignore_eos = max_tokens, True
    for output in llm.generate(prompts, params, use_tqdm=False):
        print(output.prompt, len(output.outputs[0].token_ids))

if __name__ == "__main__":
    main(vars(create_parser().parse_args()))
"""


def parsed(*line: str) -> argparse.Namespace:
    parser = FlexibleArgumentParser()
    EngineArgs.add_cli_args(parser)
    return parser.parse_args(line)


def test_a_script_with_a_command_line_and_a_file(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(BASIC)
    (tmp_path / "options.yaml").write_text("max_tokens: 9\nkv-cache-space: 0.05\nprompts: [One two, Three]\n")
    line = [sys.executable, "script.py", "--config", "options.yaml", "--max_tokens", "3", "-tp", "1"]
    done = subprocess.run(line, capture_output=True, text=True, cwd=tmp_path, timeout=120)
    assert (done.returncode, done.stdout) == (0, "One two 3\nThree 3\n"), done.stderr
    assert "trust_remote_code has no effect" in done.stderr


def test_arguments_make_an_llm() -> None:
    args = EngineArgs(max_model_len="1k", swap_space=4, **SMALL)
    assert ByVllmsPath is EngineArgs
    assert (args.model, args.max_num_seqs, args.block_size) == (None, 4, None)
    assert repr(args) == "EngineArgs(max_model_len='1k', swap_space=4, kv_cache_space=0.05, max_num_seqs=4)"
    assert dataclasses.replace(args, seed=1) != args == EngineArgs(**args.given())
    for llm in (LLM(**dataclasses.asdict(args)), LLM.from_engine_args(args)):
        with llm, pytest.raises(Exception, match="context is 1000"):
            llm.generate([[5] * 1000], use_tqdm=False)
    assert AsyncLLMEngine is AsyncLLM
    assert isinstance(AsyncLLMEngine.from_engine_args(AsyncEngineArgs(disable_log_requests=True, **SMALL)), AsyncLLM)


def test_what_is_refused() -> None:
    with pytest.raises(TypeError, match="EngineArgs has no option max_model_length; did you mean max_model_len"):
        EngineArgs(max_model_length=5)
    with pytest.raises(OptionError, match="cpu_offload_gb is not supported"):
        LLM.from_engine_args(EngineArgs.from_cli_args(parsed("--cpu-offload-gb", "4")))


def test_flags_mean_what_arguments_mean() -> None:
    line = (
        "--max_model_len 2k --no-enable-prefix-caching --enable-lora --lora_modules a=/a b=/b --trust-remote-code "
        "--hf_overrides.rope_theta 5 -q int8 -O3 --num-scheduler-steps 8 --kv-cache-memory-bytes 536870912"
    )
    args = EngineArgs.from_cli_args(parsed(*line.split()))
    assert (args.enable_prefix_caching, args.trust_remote_code, args.seed) == (False, True, None)
    expected = EngineArgs(
        max_model_len=2000, enable_prefix_caching=False, enable_lora=True, lora_modules=["a=/a", "b=/b"],
        trust_remote_code=True, hf_overrides={"rope_theta": 5}, quantization="int8", optimization_level=3,
        num_scheduler_steps=8, kv_cache_memory_bytes=1 << 29,
    )  # fmt: skip
    read, meant = args.options(), expected.options()
    assert read == meant
    assert {note.partition(" ")[0] for note in read.notes} == {note.partition(" ")[0] for note in meant.notes}


def test_every_flag_of_the_server_is_a_field() -> None:
    names = {field.name for field in dataclasses.fields(EngineArgs)}  # type: ignore[arg-type]
    assert {name.removeprefix("--").replace("-", "_") for name in vllm_flags()} <= names


def test_flags_of_the_parser_stay_its_own() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--cache-dir", default="mine")
    args = AsyncEngineArgs.add_cli_args(parser).parse_args(["--max-num-seqs", "3"])
    assert (args.cache_dir, args.max_num_seqs) == ("mine", 3)


@pytest.fixture
def parser() -> FlexibleArgumentParser:
    made = FlexibleArgumentParser(prog="script")
    made.add_argument("--two_words", type=int, default=0)
    made.add_argument("--list-of", nargs="+", default=[])
    made.add_argument("--verbose", action="store_true")
    made.add_argument("--json")
    made.add_argument("-n", type=int)
    made.add_argument("what", nargs="?")
    return made


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("--two_words 1", {"two_words": 1}),
        ("--two-words=1 here", {"two_words": 1, "what": "here"}),
        ("-n 3 --json.a.b 1", {"n": 3, "json": '{"a": {"b": 1}}'}),
        ("-- --two_words", {"what": "--two_words"}),
        ("--config FILE", {"two_words": 7, "list_of": ["a", "b"]}),
        ("here --config=FILE --two_words 8 --list_of c", {"what": "here", "two_words": 8, "list_of": ["c"]}),
    ],
)
def test_spellings(parser: FlexibleArgumentParser, tmp_path: Path, line: str, expected: dict[str, Any]) -> None:
    (tmp_path / "file").write_text("two-words: 7\nlist_of: [a, b]\nverbose: false\n")
    args = parser.parse_args(line.replace("FILE", str(tmp_path / "file")).split())
    defaults = {"two_words": 0, "list_of": [], "verbose": False, "json": None, "n": None, "what": None}
    assert vars(args) == defaults | expected


def test_subparsers_know_them_too(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("list_of: [a, b]\n")
    parser = FlexibleArgumentParser()
    sub = parser.add_subparsers().add_parser("run")
    sub.add_argument("--list-of", nargs="+")
    sub.add_argument("--max-tokens", type=int)
    args = parser.parse_args(["run", "--config", str(tmp_path / "file"), "--max_tokens", "4"])
    assert vars(args) == {"list_of": ["a", "b"], "max_tokens": 4}


@pytest.mark.parametrize(
    ("line", "complaint"),
    [
        ("--config none.yaml", "--config: .*none.yaml"),
        ("--config", "--config: expected one argument"),
        ("--two", "unrecognized arguments: --two"),
    ],
)
def test_lines_that_cannot_be_read(
    parser: FlexibleArgumentParser, capsys: pytest.CaptureFixture[str], line: str, complaint: str
) -> None:
    with pytest.raises(SystemExit):
        parser.parse_args(line.split())
    assert re.search(complaint, capsys.readouterr().err)
