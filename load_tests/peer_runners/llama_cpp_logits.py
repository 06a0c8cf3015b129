"""llama.cpp's logits of windows of tokens.

usage: llama_cpp_logits.py FILE.gguf THREADS

It reads windows, `[[token, ...], ...]`, as JSON from its input, and writes float32 numbers to its output: for each
window the logits of all its tokens, `[tokens, vocabulary]`.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import llama_cpp
import numpy as np


def write_logits(file: Path, threads: int, windows: list[list[int]], out: Any) -> None:
    """Write the logits of all tokens of each window. Raises RuntimeError if llama.cpp fails."""
    llama_cpp.llama_backend_init()
    model = llama_cpp.llama_model_load_from_file(str(file).encode(), llama_cpp.llama_model_default_params())
    if not model:
        raise RuntimeError(f"{file} cannot be loaded")
    longest = max(map(len, windows))
    options = llama_cpp.llama_context_default_params()
    options.n_ctx = options.n_batch = options.n_ubatch = longest
    options.n_threads = options.n_threads_batch = threads
    context = llama_cpp.llama_init_from_model(model, options)
    if not context:
        raise RuntimeError(f"there is no context for {longest} tokens")
    vocab_size = llama_cpp.llama_vocab_n_tokens(llama_cpp.llama_model_get_vocab(model))
    batch = llama_cpp.llama_batch_init(longest, 0, 1)
    for window in windows:
        llama_cpp.llama_memory_clear(llama_cpp.llama_get_memory(context), True)
        batch.n_tokens = len(window)
        for i, token in enumerate(window):
            batch.token[i], batch.pos[i] = token, i
            batch.n_seq_id[i], batch.seq_id[i][0] = 1, 0
            batch.logits[i] = True
        if status := llama_cpp.llama_decode(context, batch):
            raise RuntimeError(f"llama_decode returned {status}")
        logits = np.ctypeslib.as_array(llama_cpp.llama_get_logits(context), shape=(len(window), vocab_size))
        out.write(logits.tobytes())
    out.flush()


def main() -> None:
    """Do what the command line says."""
    out = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # what llama.cpp prints is not for the reader
    write_logits(Path(sys.argv[1]), int(sys.argv[2]), json.load(sys.stdin), out)


if __name__ == "__main__":
    main()
