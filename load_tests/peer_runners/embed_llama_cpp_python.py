"""llama.cpp's runner for embeddings: batches through its library, on a GGUF file.

usage: embed_llama_cpp_python.py FILE.gguf mean|cls|lasttoken THREADS

Standard input has a list of texts in each line, which are lists of token ids. For each line comes one back: how many
seconds it took, and what is pooled of each text's vectors.
"""

from __future__ import annotations

import json
import os
import sys
import time
from typing import Any

_BATCH_TOKENS = 1024  # padding is not needed, and larger batches are not faster
_MAX_TEXTS = 64


class LlamaCpp:
    """A model and a context that pools."""

    def __init__(self, file: str, pooling: str, threads: int) -> None:
        import llama_cpp as llama

        self._llama = llama
        self._quiet = llama.llama_log_callback(lambda *_: None)  # it must live as long as the library may call it
        llama.llama_log_set(self._quiet, None)
        llama.llama_backend_init()
        self._model = llama.llama_model_load_from_file(file.encode(), llama.llama_model_default_params())
        if not self._model:
            raise RuntimeError(f"{file} cannot be loaded")
        self._width = llama.llama_model_n_embd(self._model)
        options = llama.llama_context_default_params()
        options.embeddings = True
        options.pooling_type = {
            "mean": llama.LLAMA_POOLING_TYPE_MEAN,
            "cls": llama.LLAMA_POOLING_TYPE_CLS,
            "lasttoken": llama.LLAMA_POOLING_TYPE_LAST,
        }[pooling]
        options.n_ctx = options.n_batch = options.n_ubatch = _BATCH_TOKENS  # a text must lie in one of these
        options.n_seq_max = _MAX_TEXTS
        options.kv_unified = True
        options.n_threads = options.n_threads_batch = threads
        self._context = llama.llama_init_from_model(self._model, options)
        if not self._context:
            raise RuntimeError(f"there is no context of {_BATCH_TOKENS} tokens")
        self._batch = llama.llama_batch_init(_BATCH_TOKENS, 0, 1)

    def embed(self, texts: list[list[int]]) -> list[list[float]]:
        """The pooled vectors, in the order of the texts."""
        vectors: list[list[float]] = [[]] * len(texts)
        batch: list[int] = []
        for index in sorted(range(len(texts)), key=lambda i: len(texts[i])):
            if batch and (len(batch) == _MAX_TEXTS or sum(len(texts[i]) for i in (*batch, index)) > _BATCH_TOKENS):
                self._run(texts, batch, vectors)
                batch = []
            batch.append(index)
        self._run(texts, batch, vectors)
        return vectors

    def _run(self, texts: list[list[int]], batch: list[int], vectors: list[list[float]]) -> None:
        llama, row = self._llama, 0
        memory = llama.llama_get_memory(self._context)
        if memory:
            llama.llama_memory_clear(memory, True)
        for sequence, index in enumerate(batch):
            for position, token in enumerate(texts[index]):
                self._batch.token[row], self._batch.pos[row] = token, position
                self._batch.n_seq_id[row], self._batch.seq_id[row][0] = 1, sequence
                self._batch.logits[row] = True
                row += 1
        self._batch.n_tokens = row
        compute = llama.llama_decode if memory else llama.llama_encode  # encoders have no cache
        if status := compute(self._context, self._batch):
            raise RuntimeError(f"{compute.__name__} returned {status}")
        for sequence, index in enumerate(batch):
            pooled: Any = llama.llama_get_embeddings_seq(self._context, sequence)
            vectors[index] = pooled[: self._width]


def main() -> None:
    """Answer until standard input ends."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what the library prints is no answer
    peer = LlamaCpp(sys.argv[1], sys.argv[2], int(sys.argv[3]))
    for line in sys.stdin:
        texts = json.loads(line)
        started = time.perf_counter()
        vectors = peer.embed(texts)
        print(json.dumps([time.perf_counter() - started, vectors]), file=answers, flush=True)


if __name__ == "__main__":
    main()
