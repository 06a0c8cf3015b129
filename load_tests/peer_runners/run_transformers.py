"""transformers' runner: `generate` in eager torch, all prompts in one batch."""

from __future__ import annotations

import time
from typing import Any

import job


class Transformers:
    """A model that generates a batch of prompts of one length."""

    def __init__(self, given: job.Job) -> None:
        import torch
        import transformers

        self.version = transformers.__version__
        self._torch = torch
        torch.set_num_threads(len(given.cpus))
        dtype = getattr(torch, given.weights)
        self._model: Any = transformers.AutoModelForCausalLM.from_pretrained(given.model, dtype=dtype).eval()

    def generate(self, prompts: list[list[int]], new_tokens: int) -> list[job.Arrivals]:
        """Decode greedily exactly `new_tokens` after each prompt: when each sequence's tokens came."""
        times: list[float] = []

        def note_the_time(ids: Any, scores: Any, **_: Any) -> Any:
            times.append(time.perf_counter())
            return self._torch.zeros(len(ids), dtype=self._torch.bool)

        with self._torch.inference_mode():
            ids = self._torch.tensor(prompts)
            self._model.generate(
                ids,
                attention_mask=self._torch.ones_like(ids),
                do_sample=False,
                min_new_tokens=new_tokens,
                max_new_tokens=new_tokens,
                pad_token_id=0,
                stopping_criteria=[note_the_time],
            )
        return [[(when, 1) for when in times] for _ in prompts]


if __name__ == "__main__":
    job.run(Transformers)
