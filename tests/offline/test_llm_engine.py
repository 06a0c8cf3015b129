"""LLMEngine: requests that are added one by one, and read step by step. Also scripts that use it and AsyncLLMEngine."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from samples import swept

from tidewheel import (
    LLM,
    BeamSearchParams,
    LLMEngine,
    RequestOutput,
    RequestOutputKind,
    SamplingParams,
    TidewheelError,
)
from tidewheel.engine.errors import InvalidRequestError
from tidewheel.engine.llm_engine import LLMEngine as ByVllmsPath

PROMPT = "The wheel turns"
LONG = SamplingParams(max_tokens=900, ignore_eos=True)

STEPS = """
from tidewheel import EngineArgs, LLMEngine, SamplingParams

def main():
    engine = LLMEngine.from_engine_args(EngineArgs(max_num_seqs=4, kv_cache_space=0.05))
    waiting = [
        ("Tides are", SamplingParams(temperature=0, max_tokens=5, ignore_eos=True)),
        ("Mills", SamplingParams(max_tokens=2000, ignore_eos=True)),
    ]
    request_id = 0
    while waiting or engine.has_unfinished_requests():
        if waiting:
            engine.add_request(str(request_id), *waiting.pop(0))
            request_id += 1
        for output in engine.step():
            if output.finished:
                print(output.request_id, output.prompt, output.outputs[0].finish_reason)
            elif output.request_id == "1":
                engine.abort_request(["1"])
main()
"""
ASYNC = """
import asyncio
from tidewheel import SamplingParams
from tidewheel.engine.arg_utils import AsyncEngineArgs
from tidewheel.engine.async_llm_engine import AsyncLLMEngine
from tidewheel.utils import random_uuid

async def main():
    args = AsyncEngineArgs(max_num_seqs=4, kv_cache_space=0.05, enable_log_requests=False)
    engine = AsyncLLMEngine.from_engine_args(args)
    async for output in engine.generate("Tides are", SamplingParams(max_tokens=4, ignore_eos=True), random_uuid()):
        last = output
    print(len(last.request_id), last.prompt, last.outputs[0].finish_reason)
    engine.shutdown()

asyncio.run(main())
"""


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM(max_num_seqs=4, max_model_len=1024, kv_cache_space=0.1) as loaded:
        yield loaded


@pytest.fixture
def engine(llm: LLM) -> LLMEngine:
    assert not llm.llm_engine.has_unfinished_requests(), "a test has left requests"
    return llm.llm_engine


def params(**fields: Any) -> SamplingParams:
    return SamplingParams(**{"seed": 3, "max_tokens": 12, "ignore_eos": True, **fields})


def outputs_of(engine: LLMEngine) -> dict[str, list[RequestOutput]]:
    """All outputs until nothing runs, by request."""
    found: dict[str, list[RequestOutput]] = {}
    while engine.has_unfinished_requests():
        outputs = engine.step()
        assert outputs
        for output in outputs:
            found.setdefault(output.request_id, []).append(output)
    assert engine.step() == []
    return found


def test_answers_grow_to_those_of_generate(llm: LLM, engine: LLMEngine) -> None:
    assert engine is llm.llm_engine
    assert isinstance(engine, ByVllmsPath)
    wanted = {f"r{i}": params(seed=i, max_tokens=4 + 3 * i, n=1 + i % 2, logprobs=1) for i in range(6)}
    for name, one in wanted.items():
        engine.add_request(name, PROMPT, one, priority=1)
    assert engine.get_num_unfinished_requests() == 6
    found = outputs_of(engine)
    alone = llm.generate([PROMPT] * 6, [*wanted.values()], use_tqdm=False)
    assert [found[name][-1].outputs for name in wanted] == [output.outputs for output in alone]
    for grown in found.values():
        assert [output.finished for output in grown] == [False] * (len(grown) - 1) + [True]
        lengths = [sum(len(one.token_ids) for one in output.outputs) for output in grown]
        assert lengths == sorted({*lengths}), "each output is as it was, and has more than the one before"


def test_an_aborted_request_leaves_the_others(engine: LLMEngine) -> None:
    engine.add_request("long", PROMPT, LONG)
    engine.add_request("short", PROMPT, params())
    outputs, unfinished = engine.step(), engine.get_num_unfinished_requests()
    engine.abort_request("long")
    engine.abort_request(["long", "never there"])
    assert engine.get_num_unfinished_requests() == unfinished - 1
    outputs += outputs_of(engine).get("short", [])
    assert [output.request_id for output in outputs if output.finished] == ["short"]
    engine.add_request("long", PROMPT, params())  # its id is free again
    assert outputs_of(engine)["long"][-1].outputs[0].finish_reason == "length"


def test_errors_of_a_request_are_its_own(llm: LLM, engine: LLMEngine) -> None:
    engine.add_request("fine", PROMPT, params(max_tokens=60))
    refused: list[tuple[Any, Any, Any, str]] = [
        ("fine", PROMPT, params(), "'fine' runs already"),
        ("empty", "", params(), "no tokens"),
        ("long", [5] * 2000, params(), "context is 1024"),
        ("beams", PROMPT, BeamSearchParams(beam_width=2, max_tokens=2), "params must be SamplingParams"),
    ]
    for *arguments, complaint in refused:
        with pytest.raises(InvalidRequestError, match=complaint):
            engine.add_request(*arguments)
    impossible = SamplingParams(allowed_token_ids=[5], bad_words=[llm.get_tokenizer().decode([5])])
    engine.add_request("impossible", PROMPT, impossible)
    found = outputs_of(engine)
    assert sorted(found) == ["fine", "impossible"]
    [failed] = found["impossible"][-1].outputs
    assert failed.finish_reason == "error"
    assert "no token that can come next" in (failed.error or "")
    assert len(found["fine"][-1].outputs[0].token_ids) == 60


def test_kinds_of_outputs(llm: LLM, engine: LLMEngine) -> None:
    long: dict[str, Any] = {"n": 2, "logprobs": 0, "max_tokens": 300}
    engine.add_request("delta", PROMPT, params(**long, output_kind=RequestOutputKind.DELTA))
    engine.add_request("final", PROMPT, params(**long, output_kind=RequestOutputKind.FINAL_ONLY))
    found = outputs_of(engine)
    [final] = found["final"]
    assert final.finished
    for whole in final.outputs:
        pieces = [one for output in found["delta"] for one in output.outputs if one.index == whole.index]
        assert len(pieces) > 1
        assert "".join(piece.text for piece in pieces) == whole.text
        assert [token for piece in pieces for token in piece.token_ids] == whole.token_ids
        assert [entry for piece in pieces for entry in piece.logprobs or []] == whole.logprobs


def test_a_step_that_waits_ends_with_the_last_request(engine: LLMEngine) -> None:
    engine.add_request("final", PROMPT, params(max_tokens=900, output_kind=RequestOutputKind.FINAL_ONLY))
    threading.Timer(0.02, engine.abort_request, ["final"]).start()
    assert engine.step() == []
    assert not engine.has_unfinished_requests()


def test_the_end_of_an_llm_is_that_of_its_engine() -> None:
    llm = LLM(max_num_seqs=4, kv_cache_space=0.05)
    llm.llm_engine.add_request("long", PROMPT, LONG)
    llm.llm_engine.shutdown()
    with pytest.raises(TidewheelError, match="shut down"):
        llm.llm_engine.step()
    with pytest.raises(TidewheelError, match="shut down"):
        llm.generate(PROMPT, use_tqdm=False)


@pytest.mark.parametrize(("script", "shown"), [(STEPS, "0 Tides are length"), swept(ASYNC, "32 Tides are length")])
def test_scripts(tmp_path: Path, script: str, shown: str) -> None:
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, cwd=tmp_path, timeout=120)
    notes = [line for line in done.stderr.splitlines() if "has no effect" not in line]
    assert (done.returncode, done.stdout.strip(), notes) == (0, shown, [])
