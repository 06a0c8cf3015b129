"""llama.cpp's runner of pictures: its library mtmd, chunk by chunk as its server evaluates a prompt."""

from __future__ import annotations

import ctypes
import hashlib
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import job
import pictures_job as pictures


class LlamaCpp:
    """A model and its projector, with one sequence. What a prompt has in common with the last one is kept."""

    def __init__(self, given: pictures.PicturesJob) -> None:
        import llama_cpp as llama
        from llama_cpp import mtmd_cpp as mtmd

        self.version = llama.__version__
        self._llama, self._mtmd, self._job = llama, mtmd, given
        assert given.file is not None
        assert given.projector is not None
        llama.llama_backend_init()
        model = llama.llama_model_load_from_file(given.file.encode(), llama.llama_model_default_params())
        if not model:
            raise RuntimeError(f"{given.file} cannot be loaded")
        options = llama.llama_context_default_params()
        options.n_ctx = given.context
        options.n_batch = job.STEP_TOKENS
        options.n_threads = options.n_threads_batch = len(given.cpus)
        options.swa_full = True  # else the second question could not use what is known of the picture
        self._context = llama.llama_init_from_model(model, options)
        own = mtmd.mtmd_context_params_default()
        own.use_gpu, own.print_timings, own.n_threads = False, False, len(given.cpus)
        self._vision = mtmd.mtmd_init_from_file(given.projector.encode(), model, own)
        if not self._context or not self._vision:
            raise RuntimeError(f"there is no context for {given.file} and {given.projector}")
        self._sampler = llama.llama_sampler_init_greedy()
        self._known: bytes | None = None  # the picture at the beginning of the cache
        self._known_end = 0  # the position behind it
        self._towers: list[float] = []

    def ask(self, picture: Path, question: str) -> float:
        """Seconds from a file and a question to the first token of the answer, decoded greedily."""
        started = time.perf_counter()
        llama, mtmd = self._llama, self._mtmd
        data = picture.read_bytes()
        digest = hashlib.sha256(data).digest()
        buffer = (ctypes.c_uint8 * len(data)).from_buffer_copy(data)
        bitmap = mtmd.mtmd_helper_bitmap_init_from_buf(self._vision, buffer, len(data), False)
        if not bitmap:
            raise RuntimeError(f"{picture} cannot be decoded")
        text = self._job.prompt(question, mtmd.mtmd_default_marker().decode()).encode()
        chunks = mtmd.mtmd_input_chunks_init()
        given = mtmd.mtmd_input_text(text, len(text), False, True)
        bitmaps = (mtmd.mtmd_bitmap_p_ctypes * 1)(bitmap)
        if status := mtmd.mtmd_tokenize(self._vision, chunks, ctypes.byref(given), bitmaps, 1):
            raise RuntimeError(f"mtmd_tokenize returned {status}")
        all_chunks = [mtmd.mtmd_input_chunks_get(chunks, i) for i in range(mtmd.mtmd_input_chunks_size(chunks))]
        images = [i for i, chunk in enumerate(all_chunks) if self._is_image(chunk)]
        memory = llama.llama_get_memory(self._context)
        first, past, tower = 0, 0, 0.0
        if digest == self._known and llama.llama_memory_seq_rm(memory, 0, self._known_end, -1):
            first, past = images[-1] + 1, self._known_end
        else:
            llama.llama_memory_clear(memory, True)
        for i in range(first, len(all_chunks)):
            past, seconds = self._evaluate(all_chunks[i], past, is_last=i == len(all_chunks) - 1)
            tower += seconds
            if i == images[-1]:
                self._known, self._known_end = digest, past
        llama.llama_sampler_sample(self._sampler, self._context, -1)
        if tower:
            self._towers.append(tower)
        taken = time.perf_counter() - started
        mtmd.mtmd_input_chunks_free(chunks)
        mtmd.mtmd_bitmap_free(bitmap)
        return taken

    def _is_image(self, chunk: Any) -> bool:
        return bool(self._mtmd.mtmd_input_chunk_get_type(chunk) == self._mtmd.MTMD_INPUT_CHUNK_TYPE_IMAGE)

    def _evaluate(self, chunk: Any, past: int, *, is_last: bool) -> tuple[int, float]:
        """The position behind a chunk that begins at `past`, and the seconds that the tower took."""
        mtmd, end, seconds = self._mtmd, self._llama.llama_pos(past), 0.0
        batch = job.STEP_TOKENS
        if self._is_image(chunk):
            started = time.perf_counter()
            status = mtmd.mtmd_encode_chunk(self._vision, chunk)
            seconds = time.perf_counter() - started
            embeddings = mtmd.mtmd_get_output_embd(self._vision)
            status = status or mtmd.mtmd_helper_decode_image_chunk(
                self._vision, self._context, chunk, embeddings, past, 0, batch, ctypes.byref(end),
                mtmd.mtmd_helper_post_decode_callback(), None,
            )  # fmt: skip
        else:
            status = mtmd.mtmd_helper_eval_chunk_single(
                self._vision, self._context, chunk, past, 0, batch, is_last, ctypes.byref(end)
            )
        if status:
            raise RuntimeError(f"a chunk could not be evaluated: {status}")
        return end.value, seconds

    def others(self) -> Iterator[tuple[str, Callable[[], pictures.Figures]]]:
        """The tower, in the questions that were asked."""
        yield pictures.TOWER, lambda: self._towers[1:]  # the first one was to warm up


if __name__ == "__main__":
    pictures.run(LlamaCpp, *job.begin())
