"""A line in the log now and then while the server is busy: what it computed, and what it holds."""

from __future__ import annotations

import asyncio
import logging
import time

from tidewheel.engine.core.engine import Engine, EngineStats

logger = logging.getLogger("tidewheel.throughput")


async def log_throughput(engine: Engine, every_s: float) -> None:
    """Logs until it is cancelled. Times without work are not logged."""
    before, began = engine.stats(), time.monotonic()
    while True:
        await asyncio.sleep(every_s)
        now, ended = engine.stats(), time.monotonic()
        fields = _fields(before, now, ended - began)
        if any(fields[name] for name in ("prompt_tokens_per_s", "generation_tokens_per_s", "running", "waiting")):
            logger.info(
                "prompts %(prompt_tokens_per_s).1f tokens/s, answers %(generation_tokens_per_s).1f tokens/s, "
                "%(running)d running, %(waiting)d waiting, KV cache %(kv_cache_usage_perc).1f %%, "
                "prompts found in cache %(prefix_hit_perc).1f %%",
                fields,
                extra={"fields": fields},
            )
        before, began = now, ended


def _fields(before: EngineStats, now: EngineStats, seconds: float) -> dict[str, float]:
    prompt_tokens = now.prompt_tokens_total - before.prompt_tokens_total
    cached = now.cached_prompt_tokens_total - before.cached_prompt_tokens_total
    return {
        "prompt_tokens_per_s": prompt_tokens / seconds,
        "generation_tokens_per_s": (now.generation_tokens_total - before.generation_tokens_total) / seconds,
        "running": now.num_running,
        "waiting": now.num_waiting,
        "kv_cache_usage_perc": 100 * now.kv_blocks_used / now.kv_blocks_total if now.kv_blocks_total else 0.0,
        "prefix_hit_perc": 100 * cached / prompt_tokens if prompt_tokens else 0.0,
    }
