"""llama.cpp's runner: batches through its library, as its server builds them, on a GGUF file."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import job

_ROUND_TOKENS = 256  # a sequence's share of the cache is rounded to a multiple of this

Entry = tuple[int, int, int, bool]  # token, position, sequence, whether a next token is wanted


class LlamaCpp:
    """A model, with a context for each number of sequences in which every sequence has a KV cache of its own."""

    def __init__(self, given: job.Job) -> None:
        import llama_cpp as llama

        self.version = llama.__version__
        self._llama = llama
        llama.llama_backend_init()
        assert given.file is not None
        model = llama.llama_model_load_from_file(given.file.encode(), llama.llama_model_default_params())
        if not model:
            raise RuntimeError(f"{given.file} cannot be loaded")
        self._contexts = {n: self._context(model, n, given) for n in {s.prompts for s in given.scenarios}}
        self._batch = llama.llama_batch_init(job.STEP_TOKENS, 0, 1)
        self._sampler = llama.llama_sampler_init_greedy()

    def _context(self, model: Any, num_sequences: int, given: job.Job) -> Any:
        longest = max(s.prompt_tokens + s.new_tokens for s in given.scenarios if s.prompts == num_sequences)
        options = self._llama.llama_context_default_params()
        options.n_seq_max = num_sequences
        options.n_ctx = num_sequences * -(-longest // _ROUND_TOKENS) * _ROUND_TOKENS
        options.n_batch = job.STEP_TOKENS
        options.n_threads = options.n_threads_batch = len(given.cpus)
        context = self._llama.llama_init_from_model(model, options)
        if not context:
            raise RuntimeError(f"there is no context for {num_sequences} sequences of {longest} tokens")
        return context

    def generate(self, prompts: list[list[int]], new_tokens: int) -> list[job.Arrivals]:
        """Decode greedily exactly `new_tokens` after each prompt: when each sequence's tokens came."""
        context = self._contexts[len(prompts)]
        self._llama.llama_memory_clear(self._llama.llama_get_memory(context), True)
        arrivals: list[job.Arrivals] = [[] for _ in prompts]
        step = list(_prompt_entries(prompts))
        for produced in range(new_tokens):
            tokens = self._decode(context, step, arrivals)
            step = [(token, len(prompts[i]) + produced, i, True) for i, token in sorted(tokens.items())]
        return arrivals

    def _decode(self, context: Any, entries: list[Entry], arrivals: list[job.Arrivals]) -> dict[int, int]:
        """Compute the entries in batches as large as possible; the next token of each sequence that wants one."""
        tokens: dict[int, int] = {}
        for start in range(0, len(entries), job.STEP_TOKENS):
            part = entries[start : start + job.STEP_TOKENS]
            for i, (token, position, sequence, wanted) in enumerate(part):
                self._batch.token[i], self._batch.pos[i] = token, position
                self._batch.n_seq_id[i], self._batch.seq_id[i][0] = 1, sequence
                self._batch.logits[i] = wanted
            self._batch.n_tokens = len(part)
            if status := self._llama.llama_decode(context, self._batch):
                raise RuntimeError(f"llama_decode returned {status}")
            for i, (_, _, sequence, wanted) in enumerate(part):
                if wanted:
                    tokens[sequence] = self._llama.llama_sampler_sample(self._sampler, context, i)
                    arrivals[sequence].append((time.perf_counter(), 1))
        return tokens


def _prompt_entries(prompts: list[list[int]]) -> Iterator[Entry]:
    for sequence, ids in enumerate(prompts):
        for position, token in enumerate(ids):
            yield token, position, sequence, position == len(ids) - 1


if __name__ == "__main__":
    job.run(LlamaCpp)
