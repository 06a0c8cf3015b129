"""--kv-offload through the engine: restarts change no bit, and what cannot be offloaded is refused by name."""

from __future__ import annotations

import asyncio
import json
from dataclasses import replace
from pathlib import Path

import models_zoo
import pytest
from optional_packages import require_packages

from tidewheel.engine.core.engine import EngineStats
from tidewheel.engine.core.request import Request
from tidewheel.engine.declaring.option import OptionError
from tidewheel.engine.errors import DeviceError, ModelError
from tidewheel.engine.hosting.cores import SharedCores
from tidewheel.engine.loading.load import EngineLoad, load_engine
from tidewheel.engine.options import EngineOptions
from tidewheel.engine.sampling_params import SamplingParams

require_packages("transformers")
pytest.importorskip("tidewheel._native")

PROMPT = tuple((7 * i) % 300 + 4 for i in range(100))
Answer = tuple[tuple[int, ...], str]


def options(model: str = "llama", **others: object) -> EngineOptions:
    folder = str(models_zoo.folder(model, tokenizer=True))
    return replace(EngineOptions(folder, device="cpu", max_model_len=256, kv_cache_space=0.05), **others)


def serve(
    given: EngineOptions, *requests: Request, cores: SharedCores | None = None
) -> tuple[list[Answer], EngineStats]:
    """One life of an engine: the tokens and log-probabilities of each request, and what was counted."""

    async def main() -> tuple[list[Answer], EngineStats]:
        with EngineLoad(given, cores=cores) as load:
            engine = load.engine()
        engine.start()
        answers = []
        for request in requests:
            outputs = [output async for output in engine.submit(request)]
            tokens = tuple(token for output in outputs for token in output.token_ids)
            answers.append((tokens, repr([output.logprobs for output in outputs])))
        await engine.stop()
        return answers, engine.stats()

    return asyncio.run(main())


def request(salt: str | None = None, **sampling: object) -> Request:
    usual = {"max_tokens": 12, "temperature": 0.8, "seed": 5, "logprobs": 3, "ignore_eos": True}
    return Request("r", PROMPT, SamplingParams(**(usual | sampling)), cache_salt=salt)  # type: ignore[arg-type]


@pytest.mark.parametrize("kv_cache_dtype", ["auto", "int8", "int4"])
def test_a_restart_changes_no_bit(tmp_path: Path, kv_cache_dtype: str) -> None:
    plain = options(kv_cache_dtype=kv_cache_dtype)
    kept = replace(plain, kv_offload=str(tmp_path))
    expected, none = serve(plain, request())
    assert none.offload is None
    first, written = serve(kept, request())
    again, read = serve(kept, request(), request())
    assert first + again == 3 * expected
    assert written.offload is not None
    assert (written.offload.tier.blocks_written, written.cached_prompt_tokens_total) == (6, 0)
    assert read.offload is not None
    assert (read.offload.tier.blocks_read, read.offload.tokens_found) == (6, 96)
    assert read.cached_prompt_tokens_total == 2 * 96


def test_a_model_finds_its_blocks_again_while_others_have_the_folder(tmp_path: Path) -> None:
    """It is unloaded and loaded again, in the turns of another model that stays."""
    kept, cores = options(kv_offload=str(tmp_path)), SharedCores()
    staying = replace(kept, dtype="bfloat16")
    expected, _ = serve(options(), request())
    with EngineLoad(staying, cores=cores) as load:
        engine = load.engine()
    try:
        first, _ = serve(kept, request(), cores=cores)
        again, read = serve(kept, request(), cores=cores)
    finally:
        engine.close()
    assert first + again == 2 * expected
    assert read.cached_prompt_tokens_total == 96
    assert serve(staying, request())[1].cached_prompt_tokens_total == 0


def test_only_the_same_model_computed_alike_finds_its_blocks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kept = options(kv_offload=str(tmp_path))
    serve(kept, request("mine"))
    (level, *others) = json.loads(json.dumps(_levels()))
    for changed in (
        replace(kept, model=str(models_zoo.folder("qwen3", tokenizer=True))),
        replace(kept, kv_cache_dtype="int8"),
        replace(kept, dtype="bfloat16"),
        replace(kept, quantization="int8"),
    ):
        assert serve(changed, request("mine"))[1].cached_prompt_tokens_total == 0
    if others:
        monkeypatch.setenv("TIDEWHEEL_ISA", others[0])
        assert serve(kept, request("mine"))[1].cached_prompt_tokens_total == 0
        monkeypatch.setenv("TIDEWHEEL_ISA", level)
    assert serve(kept, request(), request("yours"))[1].cached_prompt_tokens_total == 0
    assert serve(kept, request("mine"))[1].cached_prompt_tokens_total == 96


def _levels() -> list[str]:
    from tidewheel import _native

    return _native.available_isa_levels()


def test_an_engine_that_never_started_gives_the_folder_back(tmp_path: Path) -> None:
    kept = options(kv_offload=str(tmp_path))
    load_engine(kept).close()
    with EngineLoad(kept):
        pass
    serve(kept, request())


def test_a_folder_in_use_is_refused(tmp_path: Path) -> None:
    engine = load_engine(options(kv_offload=str(tmp_path)))
    with pytest.raises(ModelError, match="in use by another server"):
        load_engine(options(kv_offload=str(tmp_path)))
    engine.close()


@pytest.mark.parametrize(
    ("model", "changed", "error", "message"),
    [
        ("mistral-window", {}, ModelError, "layers with a sliding window: drop it, or add --disable-sliding-window"),
        ("qwen3_5", {}, ModelError, "has recurrent layers: drop it"),
        ("llama", {"load_format": "dummy"}, OptionError, "needs weights from files"),
        ("llama", {"enable_prefix_caching": False}, OptionError, "drop --no-enable-prefix-caching"),
        ("llama", {"device": "torch"}, DeviceError, "the torch device cannot keep KV blocks on disk"),
        ("llama", {"kv_offload_space": 1e-6}, ModelError, "less than one KV block"),
    ],
)
def test_what_cannot_be_offloaded_is_refused_by_name(
    tmp_path: Path, model: str, changed: dict[str, object], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        load_engine(options(model, **({"kv_offload": str(tmp_path)} | changed)))


def test_a_space_without_a_folder_is_reported(caplog: pytest.LogCaptureFixture) -> None:
    load_engine(options(kv_offload_space=1.0)).close()
    assert "--kv-offload-space has no effect: name a folder with --kv-offload" in caplog.messages


def test_blocks_that_were_divided_by_other_scales_are_not_found(tmp_path: Path) -> None:
    kept = options(kv_offload=str(tmp_path / "kept"), kv_cache_dtype="fp8_e4m3")
    serve(kept, request())
    cache = {"dtype": "float8_e4m3fn", "scaling_factor": {"0": {"0": 0.5, "1": 0.5}}}
    scales = tmp_path / "scales.json"
    scales.write_text(json.dumps({"kv_cache": cache}))
    assert serve(replace(kept, quantization_param_path=str(scales)), request())[1].cached_prompt_tokens_total == 0
    assert serve(kept, request())[1].cached_prompt_tokens_total == 96
