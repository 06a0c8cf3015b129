"""OpenVINO GenAI's runner: its continuous batching, on a GGUF file."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import job


class OpenvinoGenai:
    """A pipeline whose steps are run one by one."""

    def __init__(self, given: job.Job) -> None:
        import numpy as np
        import openvino
        import openvino_genai as genai

        self.version = genai.__version__.partition("-")[0]
        self._config = genai.GenerationConfig
        self._tensor: Callable[[list[int]], Any] = lambda ids: openvino.Tensor(np.array([ids]))
        scheduler = genai.SchedulerConfig()
        scheduler.cache_size = given.cache_gib
        scheduler.max_num_batched_tokens = job.STEP_TOKENS
        scheduler.max_num_seqs = given.max_sequences
        scheduler.enable_prefix_caching = False
        self._pipeline = genai.ContinuousBatchingPipeline(
            given.file, scheduler, "CPU", {"INFERENCE_NUM_THREADS": len(given.cpus)}
        )

    def generate(self, prompts: list[list[int]], new_tokens: int) -> list[job.Arrivals]:
        """Decode greedily exactly `new_tokens` after each prompt: when each sequence's tokens came."""
        config = self._config(max_new_tokens=new_tokens, ignore_eos=True, do_sample=False)
        handles = [self._pipeline.add_request(i, self._tensor(ids), config) for i, ids in enumerate(prompts)]
        arrivals: list[job.Arrivals] = [[] for _ in prompts]
        while self._pipeline.has_non_finished_requests():
            self._pipeline.step()
            now = time.perf_counter()
            for handle, came in zip(handles, arrivals, strict=True):
                if handle.can_read():
                    came.append((now, sum(len(output.generated_ids) for output in handle.read().values())))
        return arrivals


if __name__ == "__main__":
    job.run(OpenvinoGenai)
