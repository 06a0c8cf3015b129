"""The memory that an engine gives back when it has no requests for a while."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest

from tidewheel.engine.core.request import Request
from tidewheel.engine.loading.load import load_engine
from tidewheel.engine.machine.memory import resident_bytes
from tidewheel.engine.options import EngineOptions
from tidewheel.engine.sampling_params import SamplingParams

pytest.importorskip("tidewheel._native")

MIB = 2**20
TOKENS = 2048
MLP = 8192  # numbers of a token in the largest buffer of activations; the last layer computes few tokens' alone
CONFIG = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 64, "intermediate_size": MLP,
    "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 320,
    "max_position_embeddings": 2 * TOKENS, "rms_norm_eps": 1e-5, "rope_theta": 10000.0, "hidden_act": "silu",
    "tie_word_embeddings": True,
}  # fmt: skip


# The engine has to rest twice until it gives memory back.
def test_activations_take_memory_only_while_there_is_work(tmp_path: Path) -> None:
    """And results after a rest are the same as before."""
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    options = EngineOptions(
        str(tmp_path),
        device="cpu",
        load_format="dummy",
        skip_tokenizer_init=True,
        max_num_batched_tokens=TOKENS,
        enable_prefix_caching=False,
        kv_cache_space=0.01,
    )
    activations = TOKENS * MLP * 4  # bytes

    async def main() -> None:
        engine = load_engine(options)
        engine.start()

        async def answer() -> list[int]:
            sampling = SamplingParams(max_tokens=4, temperature=0.0, ignore_eos=True)
            stream = engine.submit(Request("r", tuple(i % 300 for i in range(TOKENS)), sampling))
            return [token async for output in stream for token in output.token_ids]

        for _ in range(2):
            tokens = await answer()
            busy = resident_bytes()
            for _ in range(1200):
                await asyncio.sleep(0.05)
                if resident_bytes() < busy - activations + 8 * MIB:
                    break
            else:
                pytest.fail(f"{busy / MIB:.0f} MiB, and after a rest still {resident_bytes() / MIB:.0f}")
        assert await answer() == tokens
        await engine.stop()

    asyncio.run(main())
