"""What somebody may have meant by a flag that does not exist: by its meaning elsewhere, else by its letters."""

from __future__ import annotations

import difflib
from collections.abc import Collection

# The words of llama.cpp, Ollama, TGI and SGLang. What is no flag here is a sentence.
_MEANINGS = {
    "--max-model-len": "--ctx-size -c --num-ctx --n-ctx --context-length --context-size --max-seq-len "
    "--max-total-tokens --max-input-tokens --max-input-length --max-context-len --max-length",
    "--max-num-seqs": "--parallel -np --num-parallel --n-parallel --max-running-requests --max-batch-size "
    "--batch-slots",
    "--max-num-batched-tokens": "--batch-size -b --num-batch --ubatch-size -ub --chunked-prefill-size "
    "--max-batch-prefill-tokens --max-prefill-tokens",
    "--max-queue": "--max-concurrent-requests --max-queued-requests --max-pending-requests",
    "--threads-bind": "--threads -t --num-thread --num-threads --n-threads --threads-batch -tb --cpu-mask -C "
    "--cpu-range -Cr --numa --cpus --num-cpus --omp-threads-bind",
    "--device": "--n-gpu-layers -ngl --gpu-layers --num-gpu --main-gpu -mg --accelerator",
    "--tensor-parallel-size": "--tp --tp-size --num-shard --split-mode -sm",
    "--model": "--model-id --model-path -m --hf-repo -hf -hfr --hf-file -hff --model-url -mu --model-name-or-path",
    "--served-model-name": "--alias -a --model-name",
    "--download-dir": "--huggingface-hub-cache --cache-folder --hf-home",
    "--kv-cache-space": "--kv-cache-size --kv-cache-gb --cache-ram --mem-fraction-static --max-batch-total-tokens "
    "--cuda-memory-fraction",
    "--kv-cache-dtype": "--cache-type-k -ctk --cache-type-v -ctv --kv-cache-type",
    "--quantization": "--quantize --quant --load-in-4bit --load-in-8bit",
    "--no-enable-prefix-caching": "--disable-radix-cache --no-cache-prompt --disable-prefix-caching",
    "--enable-prefix-caching": "--cache-prompt --cache-reuse",
    "--chat-template": "--chat-template-file --jinja",
    "--log-level": "--verbose -v --verbosity -lv --loglevel --log-verbosity",
    "--disable-log-requests": "--log-disable --no-log-requests",
    "--api-key-file": "--api-key-path",
    "--disable-web-ui": "--no-webui --no-ui",
    "--ssl-certfile": "--ssl-cert-file --certfile",
    "--ssl-keyfile": "--ssl-key-file --keyfile",
    "--root-path": "--api-prefix --path-prefix",
    "--request-timeout": "--timeout -to",
    "--embedding-model": "--embedding --embeddings --reranking --rerank",
    "--rope-theta": "--rope-freq-base",
    "--rope-scaling": "--rope-freq-scale --rope-scale --yarn-orig-ctx --yarn-ext-factor",
    "--reasoning-parser": "--reasoning-format --think",
    "a request says it as max_tokens": "--n-predict -n --num-predict --predict --max-tokens --max-new-tokens",
    "a request says it as temperature, top_p, top_k, min_p, seed or stop, and --override-generation-config for all": (
        "--temp --temperature --top-p --top-k --min-p --repeat-penalty --repetition-penalty --presence-penalty "
        "--frequency-penalty --stop --samplers"
    ),
    "requests are always batched continuously": "--cont-batching -cb --no-cont-batching",
    "attention is always computed in tiles": "--flash-attn -fa --flash-attention --attention-backend",
    "weights are always mapped and packed": "--mlock --no-mmap --mmap --use-mmap --repack",
    "the model stays loaded": "--keep-alive --load-timeout --sleep-idle-seconds",
    "images are not served": "--mmproj -mm --mmproj-url",
}
_MEANT = {flag: meaning for meaning, flags in _MEANINGS.items() for flag in flags.split()}


def hint(flag: str, known: Collection[str]) -> str:
    """What is known that comes near, in words to stand behind the flag; "" if nothing does."""
    meant = _MEANT.get(flag)
    if meant is not None and not meant.startswith("--"):
        return f" ({meant})"
    if meant not in known:
        meant = next(iter(difflib.get_close_matches(flag, known, 1)), None)
    return f" (did you mean {meant}?)" if meant else ""
