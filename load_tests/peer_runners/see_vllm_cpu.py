"""vLLM's runner of pictures, on its CPU backend: its engine, without the server around it."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import job
import pictures_job as pictures


class VllmCpu:
    """An engine with caches of prefixes and of pictures, as its server has them."""

    def __init__(self, given: pictures.PicturesJob) -> None:
        os.environ["VLLM_CPU_KVCACHE_SPACE"] = str(given.cache_gib)
        os.environ["VLLM_CPU_OMP_THREADS_BIND"] = ",".join(map(str, given.cpus))
        os.environ["VLLM_NO_USAGE_STATS"] = "1"
        import vllm

        self.version = vllm.__version__
        self._job = given
        self._sampling = vllm.SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True)
        is_dtype = given.weights in job.DTYPES
        self._engine = vllm.LLM(
            given.model,
            dtype=given.weights if is_dtype else "bfloat16",
            quantization=None if is_dtype else given.weights,
            max_model_len=given.context,
            max_num_seqs=1,
            max_num_batched_tokens=given.context,
            limit_mm_per_prompt={"image": 1, "video": 0},
            # Else it first encodes the largest image that the model takes: minutes, for one of 16,384 tokens.
            skip_mm_profiling=True,
        )

    def ask(self, picture: Path, question: str) -> float:
        """Seconds from a file and a question to the first token of the answer, decoded greedily."""
        from PIL import Image

        started = time.perf_counter()
        with Image.open(picture) as image:
            prompt = {"prompt": self._job.prompt(question), "multi_modal_data": {"image": image.convert("RGB")}}
        self._engine.generate(prompt, self._sampling, use_tqdm=False)
        return time.perf_counter() - started

    def others(self) -> Iterator[tuple[str, Callable[[], pictures.Figures]]]:
        """Nothing: its tower runs in another process."""
        return iter(())


if __name__ == "__main__":
    pictures.run(VllmCpu, *job.begin())
