"""vLLM's runner, on its CPU backend: its engine, without the server around it."""

from __future__ import annotations

import os
import time
from typing import Any

import job


class VllmCpu:
    """An engine whose steps are run one by one."""

    def __init__(self, given: job.Job) -> None:
        os.environ["VLLM_CPU_KVCACHE_SPACE"] = str(given.cache_gib)
        os.environ["VLLM_CPU_OMP_THREADS_BIND"] = ",".join(map(str, given.cpus))
        os.environ["VLLM_NO_USAGE_STATS"] = "1"
        import vllm
        import vllm.lora.request

        self.version = vllm.__version__
        self._sampling = vllm.SamplingParams
        adapted = {}
        if given.adapters:
            count = len(given.adapters)
            adapted = {"enable_lora": True, "max_loras": count, "max_cpu_loras": count, "max_lora_rank": given.rank}
        self._adapters = [
            vllm.lora.request.LoRARequest(f"adapter-{i}", i + 1, path) for i, path in enumerate(given.adapters)
        ]
        is_dtype = given.weights in job.DTYPES
        self._engine = vllm.LLM(
            given.model,
            dtype=given.weights if is_dtype else "bfloat16",
            quantization=None if is_dtype else given.weights,
            max_model_len=given.longest,
            max_num_seqs=given.max_sequences,
            max_num_batched_tokens=max(job.STEP_TOKENS, given.max_sequences),
            enable_prefix_caching=False,
            **adapted,
        ).llm_engine

    def generate(self, prompts: list[list[int]], new_tokens: int) -> list[job.Arrivals]:
        """Decode greedily exactly `new_tokens` after each prompt: when each sequence's tokens came."""
        return self._generate(prompts, new_tokens, [None] * len(prompts))

    def generate_adapted(self, prompts: list[list[int]], new_tokens: int, adapters: list[int]) -> list[job.Arrivals]:
        """The same, each prompt with one of the job's adapters."""
        return self._generate(prompts, new_tokens, [self._adapters[i] for i in adapters])

    def _generate(self, prompts: list[list[int]], new_tokens: int, adapters: list[Any]) -> list[job.Arrivals]:
        sampling = self._sampling(temperature=0.0, max_tokens=new_tokens, ignore_eos=True)
        for i, (ids, adapter) in enumerate(zip(prompts, adapters, strict=True)):
            self._engine.add_request(str(i), {"prompt_token_ids": ids}, sampling, lora_request=adapter)
        arrivals: list[job.Arrivals] = [[] for _ in prompts]
        seen = [0] * len(prompts)
        while self._engine.has_unfinished_requests():
            outputs = self._engine.step()
            now = time.perf_counter()
            for output in outputs:
                i, total = int(output.request_id), len(output.outputs[0].token_ids)
                if total > seen[i]:
                    arrivals[i].append((now, total - seen[i]))
                    seen[i] = total
        return arrivals


if __name__ == "__main__":
    job.run(VllmCpu)
