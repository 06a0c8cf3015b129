"""Guesses what a flag that does not exist was meant to be: by its meaning elsewhere, a slip, or its words.

Similar letters alone prove nothing: `--gpus` and `--uds` have most of theirs in common.
"""

from __future__ import annotations

import difflib
import math
import re
from collections import Counter
from collections.abc import Collection, Iterable

# The words of llama.cpp, Ollama, TGI, SGLang and uvicorn. What is no flag here is a sentence.
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
    "--tensor-parallel-size": "--tp --tp-size --num-shard --split-mode -sm --gpus --num-gpus --gpu-count",
    "--model": "--model-id --model-path -m --hf-repo -hf -hfr --hf-file -hff --model-url -mu --model-name-or-path",
    "--served-model-name": "--alias -a --model-name",
    "--download-dir": "--huggingface-hub-cache --cache-folder --hf-home",
    "--kv-cache-space": "--kv-cache-size --kv-cache-gb --cache-ram --mem-fraction-static --max-batch-total-tokens "
    "--cuda-memory-fraction --kv-cache-memory",
    "--kv-cache-dtype": "--cache-type-k -ctk --cache-type-v -ctv --kv-cache-type",
    "--quantization": "--quantize --quant --load-in-4bit --load-in-8bit",
    "--no-enable-prefix-caching": "--disable-radix-cache --no-cache-prompt --disable-prefix-caching",
    "--enable-prefix-caching": "--cache-prompt --cache-reuse --prefix-cache",
    "--chat-template": "--chat-template-file --jinja",
    "--log-level": "--verbose -v --verbosity -lv --loglevel --log-verbosity",
    "--disable-log-requests": "--log-disable --no-log-requests",
    "--allowed-origins": "--cors --enable-cors --cors-origins --cors-allow-origins --allow-origins",
    "--enforce-eager": "--disable-cuda-graph --disable-cuda-graphs --no-cuda-graph",
    "--api-key-file": "--api-key-path --api-keys-file --keys-file",
    "--admin-api-key": "--admin-key --master-key",
    "--allowed-hosts": "--allow-hosts --trusted-hosts --allowed-host",
    "--disable-web-ui": "--no-webui --no-ui",
    "--ssl-certfile": "--ssl-cert-file --certfile",
    "--ssl-keyfile": "--ssl-key-file --keyfile",
    "--root-path": "--api-prefix --path-prefix",
    "--request-timeout": "--timeout -to",
    "--embedding-model": "--embedding --embeddings --reranking --rerank",
    "--rope-theta": "--rope-freq-base",
    "--rope-scaling": "--rope-freq-scale --rope-scale --yarn-orig-ctx --yarn-ext-factor",
    "--reasoning-parser": "--reasoning-format --think",
    "set max_tokens in a request, or max_new_tokens in --override-generation-config for all requests": (
        "--n-predict -n --num-predict --predict --max-tokens --max-new-tokens"
    ),
    "set temperature, top_p, top_k, min_p, seed or stop in a request, or in --override-generation-config for all "
    "requests": (
        "--temp --temperature --top-p --top-k --min-p --repeat-penalty --repetition-penalty --presence-penalty "
        "--frequency-penalty --stop --samplers"
    ),
    "requests are always batched continuously": "--cont-batching -cb --no-cont-batching",
    "attention is always computed in tiles": "--flash-attn -fa --flash-attention --attention-backend",
    "on a CPU, weights and KV cache are in its memory already": "--cpu-offload --offload --no-kv-offload",
    "weights are always mapped and packed": "--mlock --no-mmap --mmap --use-mmap --repack",
    "--memory": "--max-memory --vram-budget",
    "--models-dir": "--models-path --model-dir --model-store --ollama-models",
    "--max-loaded-models": "--models-max --max-active-backends",
    "--model-idle-timeout": "--keep-alive --keepalive --sleep-idle-seconds --ttl",
    "models: in the file of --config has a section for each model": "--models-preset",
    "a model is loaded when a request names it, and may take as long as it needs": "--models-autoload --load-timeout",
    "name the files with --ssl-keyfile and --ssl-certfile": "--ssl --tls --https",
    "--data-parallel-size starts several servers: see docs/scale-out.md": "--workers --num-workers",
    "send it as a request's first message, with the role system": "--system-prompt --system-message --system -sys",
    "set HF_HUB_OFFLINE=1": "--offline --local-files-only",
    "graphs are captured on devices that have them, unless --enforce-eager is given": "--cuda-graph --cuda-graphs "
    "--enable-cuda-graph --use-cuda-graph",
    "use --enable-log-requests, which is the default": "--log-requests",
    "download the file and name it with --mmproj": "--mmproj-url -mmu",
    "--language-model-only": "--no-mmproj-auto",
    "--allowed-local-media-path": "--media-path",
}
_MEANT = {flag: meaning for meaning, flags in _MEANINGS.items() for flag in flags.split()}

# Words of one meaning, by the one that stands for them all.
_SAME = {
    "batch": "batched batches batching",
    "cache": "caches cached caching",
    "certificate": "cert certs certfile",
    "context": "ctx window",
    "disable": "disabled no off without",
    "length": "len size limit",
    "log": "logs logging",
    "lora": "loras adapter adapters",
    "max": "maximum most",
    "parallel": "parallelism concurrent concurrency",
    "quantization": "quantize quant",
    "request": "requests req reqs",
    "sequence": "seq seqs sequences",
    "speculative": "draft drafts speculation",
    "thread": "threads",
    "token": "tokens",
    "utilization": "util",
}
_IDLE = {"enable", "enabled", "num", "number", "count", "n"}  # words that tell nothing
_WORD = {other: word for word, others in _SAME.items() for other in others.split()}

_SLIP = 0.8  # this part of two names' letters is alike, in their order
_KINSHIP = 0.5  # this part of two names' words is alike, rare ones counted more


def hint(flag: str, known: Collection[str]) -> str:
    """The nearest known flags, as words to put behind the flag; "" if none is near.

    `known` are flags, or the names of environment variables.
    """
    meant = _MEANT.get(flag) or _MEANT.get("--" + _bare(flag))
    if meant is None:
        near = _near(flag, [*known, *_MEANT])
        meant = _MEANT.get(near, near)
    if meant in _MEANINGS and " " in meant:
        return f" ({meant})"
    name = {_bare(name): name for name in known}.get(_bare(meant)) or _near(flag, known)
    return f" (did you mean {name}?)" if name else ""


def _near(flag: str, names: Collection[str]) -> str:
    """The one of `names` that a slip has turned into `flag`, else the one with most of its words; "" if none has."""
    bare = {_bare(name): name for name in reversed([*names])}
    asked = _bare(flag)
    slips = difflib.get_close_matches(asked, bare, 1, _SLIP) or [n for n in bare if sorted(n) == sorted(asked)]
    if slips:
        return bare[slips[0]]
    words = {name: _words(name) for name in bare}
    uses = Counter(word for of_one in words.values() for word in of_one)

    def weight(of: Iterable[str]) -> float:
        return sum(math.log(1 + len(bare) / (uses[word] or 1)) for word in of)

    def kinship(name: str) -> float:
        common = words[name] & _words(asked)
        return weight(common) / weight(words[name] | _words(asked)) if common else 0.0

    best = max(bare, key=kinship, default="")
    return bare[best] if best and kinship(best) >= _KINSHIP else ""


def _bare(name: str) -> str:
    return name.lower().lstrip("-").removeprefix("tidewheel_").replace("_", "-")


def _words(name: str) -> frozenset[str]:
    return frozenset(_WORD.get(word, word) for word in re.split(r"[-.]", _bare(name)) if word and word not in _IDLE)
