"""OpenVINO GenAI's runner of pictures: its VLMPipeline, on a folder that optimum-intel exported."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import job
import pictures_job as pictures


class OpenvinoGenai:
    """A pipeline with a cache of prefixes."""

    def __init__(self, given: pictures.PicturesJob) -> None:
        import numpy as np
        import openvino
        import openvino_genai as genai

        self.version = genai.__version__.partition("-")[0]
        self._job = given
        self._tensor: Callable[[Any], Any] = lambda image: openvino.Tensor(np.asarray(image)[None])
        self._config = genai.GenerationConfig(max_new_tokens=1, ignore_eos=True, do_sample=False)
        self._config.apply_chat_template = False
        scheduler = genai.SchedulerConfig()
        scheduler.cache_size = given.cache_gib
        scheduler.enable_prefix_caching = True
        options = {"INFERENCE_NUM_THREADS": len(given.cpus), "scheduler_config": scheduler}
        self._pipeline = genai.VLMPipeline(given.file, "CPU", **options)
        self._towers: list[float] = []

    def ask(self, picture: Path, question: str) -> float:
        """Seconds from a file and a question to the first token of the answer, decoded greedily."""
        from PIL import Image

        started = time.perf_counter()
        with Image.open(picture) as image:
            tensor = self._tensor(image.convert("RGB"))
        prompt = self._job.prompt(question, "<ov_genai_image_0>")
        result = self._pipeline.generate(prompt, images=[tensor], generation_config=self._config)
        taken = time.perf_counter() - started
        self._towers.append(result.perf_metrics.get_prepare_embeddings_duration().mean / 1e3)
        return taken

    def others(self) -> Iterator[tuple[str, Callable[[], pictures.Figures]]]:
        """The tower, in the first questions: what it calls preparing embeddings."""
        yield pictures.TOWER, lambda: self._towers[1::2]  # the first one was to warm up


if __name__ == "__main__":
    pictures.run(OpenvinoGenai, *job.begin())
