"""LoRARequest: an adapter for each prompt, loaded when it is first named."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import lora_files
import pytest
from fake_hub import fake_hub, with_hub
from server.conftest import ServerProcess

from tidewheel import LLM, AsyncLLM, BeamSearchParams, LoRARequest, RequestOutput, SamplingParams
from tidewheel.engine.errors import EngineDeadError, InvalidRequestError
from tidewheel.lora.request import LoRARequest as ByVllmsPath
from tidewheel.server.options.model import DEMO_MODEL

PROMPTS = ["The wheel turns", "One, two, three,", "The tide is", "A mill by the sea"]
GREEDY = SamplingParams(temperature=0, max_tokens=10, ignore_eos=True)
SHAPES: dict[str, Any] = {"hidden": 256, "kv": 128, "layers": 6}  # the demo model's
OPTIONS: dict[str, Any] = {"enable_lora": True, "max_num_seqs": 4, "max_model_len": 512, "kv_cache_space": 0.1}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("adapters")
    for seed in range(3):
        lora_files.write(root / f"seed-{seed}", lora_files.tensors(seed, **SHAPES))
    lora_files.write(root / "of-another-model", lora_files.tensors())
    (root / "empty").mkdir()
    return root


@pytest.fixture(scope="module")
def llm(folders: Path) -> Iterator[LLM]:
    """An LLM with room for one adapter in memory. One adapter is named from the start."""
    named = {"name": "named", "path": str(folders / "seed-2")}
    with LLM(str(DEMO_MODEL), dtype="float32", lora_modules=[named], **OPTIONS) as loaded:
        yield loaded


@pytest.fixture(scope="module")
def expected(folders: Path) -> dict[str | None, list[list[int]]]:
    """The token ids that the server answers PROMPTS with, by adapter."""
    names = [f"seed-{seed}" for seed in range(3)]
    process = ServerProcess(
        *(str(DEMO_MODEL), "--dtype", "float32", "--served-model-name", "base", "--enable-lora", "--lora-modules"),
        *(f"{name}={folders / name}" for name in names),
    )
    try:
        return {None if name == "base" else name: _answers(process.url, name) for name in ("base", *names)}
    finally:
        process.stop()


def _answers(url: str, model: str) -> list[list[int]]:
    body = {"model": model, "prompt": PROMPTS, "temperature": 0, "max_tokens": 10, "ignore_eos": True}
    response = httpx.post(f"{url}/v1/completions", json={**body, "return_token_ids": True}, timeout=120)
    assert response.status_code == 200, response.text
    return [choice["token_ids"] for choice in response.json()["choices"]]


def request(folders: Path, name: str, number: int = 1) -> LoRARequest:
    return LoRARequest(name, number, str(folders / name))


def generate(llm: LLM, prompts: Any = PROMPTS, **options: Any) -> list[RequestOutput]:
    return llm.generate(prompts, GREEDY, use_tqdm=False, **options)


def tokens(outputs: list[RequestOutput]) -> list[list[int]]:
    return [output.outputs[0].token_ids for output in outputs]


def test_one_adapter_for_all_prompts(llm: LLM, folders: Path, expected: dict[str | None, Any]) -> None:
    assert ByVllmsPath is LoRARequest
    assert len({str(answers) for answers in expected.values()}) == len(expected), "adapters change answers"
    wanted = LoRARequest(lora_name="seed-0", lora_int_id=1, lora_path=str(folders / "seed-0"))
    assert (wanted.name, wanted.adapter_id, wanted.path) == ("seed-0", 1, str(folders / "seed-0"))
    outputs = generate(llm, lora_request=wanted)
    assert tokens(outputs) == expected["seed-0"]
    for output in outputs:
        assert output.lora_request == output.outputs[0].lora_request == wanted
        assert (output.encoder_prompt, output.encoder_prompt_token_ids) == (None, None)
    plain = generate(llm)
    assert tokens(plain) == expected[None]
    assert plain[0].lora_request is plain[0].outputs[0].lora_request is None


def test_an_adapter_for_each_prompt(llm: LLM, folders: Path, expected: dict[str | None, Any]) -> None:
    """More than fit into memory, and the model itself."""
    names = ["seed-1", None, "seed-0", "seed-1"]
    wanted = [None if name is None else request(folders, name) for name in names]
    outputs = generate(llm, lora_request=wanted)
    assert tokens(outputs) == [expected[name][i] for i, name in enumerate(names)]
    assert [output.lora_request for output in outputs] == wanted
    assert [output.prompt for output in outputs] == PROMPTS
    by_priority = generate(llm, lora_request=wanted, priority=[3, 2, 1, 0])
    assert tokens(by_priority) == tokens(outputs)


def test_adapters_of_an_engines_requests(llm: LLM, folders: Path, expected: dict[str | None, Any]) -> None:
    """Each is given back when its request ends, or is aborted: there is room for one."""
    engine = llm.llm_engine
    engine.add_request("aborted", PROMPTS[0], SamplingParams(max_tokens=400), lora_request=request(folders, "seed-2"))
    engine.abort_request("aborted")
    for name in ("seed-0", "seed-1"):
        engine.add_request(name, PROMPTS[0], GREEDY, lora_request=request(folders, name))
    with pytest.raises(InvalidRequestError, match="there is no"):
        engine.add_request("none", PROMPTS[0], GREEDY, lora_request=request(folders, "seed-9"))
    found = {}
    while engine.has_unfinished_requests():
        for output in engine.step():
            found[output.request_id] = output.outputs[0].token_ids
    assert found == {name: expected[name][0] for name in ("seed-0", "seed-1")}


def test_an_adapter_of_the_start(llm: LLM, folders: Path, expected: dict[str | None, Any]) -> None:
    """By its name and path, which may be written otherwise."""
    path = folders / "empty" / ".." / "seed-2"
    assert tokens(generate(llm, lora_request=LoRARequest("named", 9, str(path)))) == expected["seed-2"]


@pytest.mark.sweep
def test_adapters_of_the_hub(llm: LLM, folders: Path, expected: dict[str | None, Any], tmp_path: Path) -> None:
    """More of them than are downloaded at a time."""
    adapter = lora_files.contents(folders / "seed-1")
    wanted = [LoRARequest(f"poems-{i}", 20 + i, f"own/poems-{i}") for i in range(6)]
    with fake_hub({f"own/poems-{i}": adapter for i in range(6)}) as hub, with_hub(hub.endpoint, tmp_path):
        outputs = generate(llm, PROMPTS[:1] * 6, lora_request=wanted)
    assert tokens(outputs) == [expected["seed-1"][0]] * 6


def test_conversations_and_beams(llm: LLM, folders: Path) -> None:
    said = [{"role": "user", "content": "Who are you?"}]
    wanted = request(folders, "seed-1")
    with_adapter, without = llm.chat([said, said], GREEDY, False, [wanted, None])
    assert with_adapter.outputs[0].token_ids != without.outputs[0].token_ids
    assert (with_adapter.lora_request, without.lora_request) == (wanted, None)
    params = BeamSearchParams(beam_width=2, max_tokens=4)
    beams = [llm.beam_search("The tide", params, one)[0].sequences[0].tokens for one in (wanted, None)]
    assert beams[0] != beams[1]


def test_threads_that_want_different_adapters(llm: LLM, folders: Path, expected: dict[str | None, Any]) -> None:
    found: dict[str, Any] = {}

    def ask(name: str) -> None:
        found[name] = tokens(generate(llm, lora_request=request(folders, name)))

    threads = [threading.Thread(target=ask, args=(f"seed-{i}",)) for i in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    assert found == {name: answers for name, answers in expected.items() if name is not None}


@pytest.mark.parametrize(
    ("name", "path", "complaint"),
    [
        ("none", "no/such/folder", "there is no .*no/such/folder.*peft.*GGUF"),
        ("empty", "empty", "'empty' cannot be loaded: .*adapter"),
        ("other", "of-another-model", "'other' cannot be loaded: .*of-another-model.*do not fit the model"),
        ("named", "seed-0", "'named' is .*seed-2, not .*seed-0: give one of them another name"),
    ],
)
def test_adapters_that_cannot_be_used(
    llm: LLM, folders: Path, expected: dict[str | None, Any], name: str, path: str, complaint: str
) -> None:
    """They end their own call, and leave nothing in use."""
    bad = LoRARequest(name, 1, str(folders / path))
    fine = request(folders, "seed-0")
    with pytest.raises(InvalidRequestError, match=complaint) as raised:
        generate(llm, lora_request=[fine, fine, bad, fine])
    assert raised.value.param == "lora_request"
    assert tokens(generate(llm, lora_request=request(folders, "seed-1"))) == expected["seed-1"]


def test_a_prompt_that_cannot_be_served_releases_its_adapter(llm: LLM, folders: Path) -> None:
    with pytest.raises(InvalidRequestError, match="context"):
        generate(llm, ["fine"] * 60 + [[7] * 600], lora_request=request(folders, "seed-0"))  # most of them wait
    with pytest.raises(InvalidRequestError, match="token"):  # what the engine itself refuses
        generate(llm, [[7], [10**6]], lora_request=request(folders, "seed-0"))
    waiting = threading.Thread(target=generate, args=(llm,), kwargs={"lora_request": request(folders, "seed-1")})
    waiting.daemon = True
    waiting.start()
    waiting.join(60)
    assert not waiting.is_alive(), "an adapter is still in use"


@pytest.mark.parametrize(
    ("given", "complaint"),
    [
        ([None], "lora_request has 1 entries for 4 prompts"),
        ("seed-0", "must be a LoRARequest or a list"),
        (["seed-0"] * 4, "must have LoRARequests or None"),
    ],
    ids=str,
)
def test_requests_of_another_form(llm: LLM, given: Any, complaint: str) -> None:
    with pytest.raises(InvalidRequestError, match=complaint):
        generate(llm, lora_request=given)


@pytest.mark.parametrize("fields", [("", 1, "x"), ("x", 1, ""), ("x", 0, "x"), ("x", "1", "x")], ids=str)
def test_fields_that_mean_nothing(fields: Any) -> None:
    with pytest.raises(InvalidRequestError, match="lora_"):
        LoRARequest(*fields)


def test_fields_of_other_versions(folders: Path, caplog: pytest.LogCaptureFixture) -> None:
    older = LoRARequest("seed-0", 1, lora_local_path=str(folders / "seed-0"), long_lora_max_len=4096)
    assert older == request(folders, "seed-0")
    assert caplog.text.count("long_lora_max_len has no effect: the adapter's own context_length") == 1
    with pytest.raises(InvalidRequestError, match="load_inplace is not supported: give the changed adapter another"):
        LoRARequest("seed-0", 1, "/a", load_inplace=True)


def test_async_llm(folders: Path, expected: dict[str | None, Any]) -> None:
    async def ask(llm: AsyncLLM, name: str | None) -> list[int]:
        wanted = None if name is None else request(folders, name)
        outputs = [output async for output in llm.generate(PROMPTS[0], GREEDY, lora_request=wanted)]
        assert all(output.lora_request == output.outputs[0].lora_request == wanted for output in outputs)
        return outputs[-1].outputs[0].token_ids

    async def main() -> None:
        names = ["seed-0", None, "seed-1", "seed-2", "seed-0"]
        async with AsyncLLM(str(DEMO_MODEL), dtype="float32", **OPTIONS) as llm:
            found = await asyncio.wait_for(asyncio.gather(*(ask(llm, name) for name in names)), 120)
            assert found == [expected[name][0] for name in names]
            said = [{"role": "user", "content": "Who are you?"}]
            chats = llm.chat(said, GREEDY, lora_request=request(folders, "seed-1"))
            assert (await anext(chats)).lora_request == request(folders, "seed-1")
            await chats.aclose()  # who leaves early gives the adapter back
            assert await asyncio.wait_for(ask(llm, "seed-2"), 60) == expected["seed-2"][0]
            with pytest.raises(InvalidRequestError, match="there is no"):
                await ask(llm, "seed-9")
        with pytest.raises(EngineDeadError):
            await ask(llm, "seed-1")

    asyncio.run(main())


@pytest.mark.sweep
def test_a_prompt_must_fit_the_context_of_its_adapter(folders: Path, tmp_path: Path) -> None:
    """The model's is 2048 tokens."""
    longer = lora_files.write(tmp_path / "longer", lora_files.tensors(0, **SHAPES), context_length=4096)
    wanted = LoRARequest("longer", 1, str(longer))
    params = SamplingParams(max_tokens=1)
    long_text = "the tide " * 1100
    options = {**OPTIONS, "max_model_len": None, "long_lora_scaling_factors": 2.0}
    with LLM(str(DEMO_MODEL), max_loras=2, **options) as llm:
        for prompt in (list(range(100, 200)) * 21, long_text):
            [output] = llm.generate([prompt], params, use_tqdm=False, lora_request=wanted)
            assert 2048 < len(output.prompt_token_ids) < 4096
            for other in (None, request(folders, "seed-0")):
                with pytest.raises(InvalidRequestError, match="2048 tokens"):
                    llm.generate([prompt], params, use_tqdm=False, lora_request=other)
        said = [{"role": "user", "content": long_text}]
        assert llm.chat(said, params, False, wanted)[0].outputs[0].token_ids
        with pytest.raises(InvalidRequestError, match="2048 tokens"):
            llm.chat(said, params, False)


def test_a_model_without_adapters_refuses_them(folders: Path) -> None:
    with LLM(kv_cache_space=0.05) as llm, pytest.raises(InvalidRequestError, match="enable_lora=True"):
        generate(llm, lora_request=request(folders, "seed-0"))
