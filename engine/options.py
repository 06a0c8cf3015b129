"""The options of an engine: what to serve, and how."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import field
from typing import Any, Literal, get_args

from .adapters.options import LoraOptions
from .declaring.option import REQUIRED, Options, option
from .declaring.record import record
from .declaring.values import above, at_least, count, json_object, number, number_or_none, whole_number
from .devices import DEVICE_NAMES
from .media.options import MediaOptions
from .pipeline_options import PipelineOptions
from .speculation.options import Eagle3, Mtp, SpeculativeOptions
from .weights import LOAD_FORMATS
from .weights.dtypes import DType, KvCacheDType
from .weights.quantization import GROUP_SIZES, Method
from .weights.quantized import QUANTIZATION_ALIASES, CheckpointMethod

DEFAULT_MAX_LOGPROBS = 20
DEFAULT_KV_OFFLOAD_SPACE = 16.0  # GiB

_DTYPE_ALIASES = {"half": "float16", "float": "float32"}
_KV_CACHE_DTYPE_ALIASES = {**_DTYPE_ALIASES, "fp8": "fp8_e4m3"}


def logprobs_limit(max_logprobs: int, vocab_size: int) -> int:
    """How many tokens `max_logprobs` lets a request ask for at a place: -1 is the whole vocabulary."""
    return vocab_size if max_logprobs == -1 else min(max_logprobs, vocab_size)


@record(frozen=True)
class EngineOptions(Options):
    """What to serve and how. None and "auto" leave the choice to the model, the device and the machine.

    `kv_cache_space` and `kv_offload_space` are in GiB, `max_step_ms` in milliseconds, `step_timeout` in seconds, the
    other maxima in tokens and sequences. `lora` says which adapters there are, `speculative` how tokens are drafted,
    `pipeline` how layers are shared out to processes, `media` which images requests may have. `device_options` are
    options that single devices have, a group a device (see `devices`): the group of the device that runs takes effect.
    Raises OptionError for a value that is out of range.
    """

    model: str = option(REQUIRED, "a folder, a .gguf file or a Hugging Face hub id, such as owner/name:Q4_K_M")
    revision: str | None = option(None, "the hub's branch, tag or commit", metavar="NAME")
    download_dir: str | None = option(None, "where hub downloads are kept [the hub's cache]", metavar="FOLDER")
    load_format: str = option("auto", "where weights come from; dummy makes random ones", choices=LOAD_FORMATS)
    tokenizer: str | None = option(None, "a folder, .gguf file or hub id to take the tokenizer from [the model's]")
    tokenizer_revision: str | None = option(
        None,
        "the branch, tag or commit of the tokenizer [--revision, if the tokenizer is the model's own]",
        metavar="NAME",
    )
    tokenizer_mode: str = option(
        "auto",
        "mistral reads tekken.json or tokenizer.model.v3, and encodes conversations, with mistral-common; needs the "
        "extra mistral",
        choices=("auto", "mistral"),
    )
    skip_tokenizer_init: bool = option(False, "read no tokenizer: prompts and answers are token ids")
    hf_overrides: Mapping[str, Any] | None = option(
        None,
        'fields that override those of config.json, e.g. {"sliding_window": null}',
        parse=json_object,
        metavar="JSON",
    )
    rope_scaling: Mapping[str, Any] | None = option(
        None,
        'how positions are scaled, e.g. {"rope_type": "yarn", "factor": 4, "original_max_position_embeddings": 32768}',
        parse=json_object,
        metavar="JSON",
    )
    rope_theta: float | None = option(
        None, "the base of the rope's frequencies", parse=number, check=above(0), metavar="BASE"
    )
    disable_sliding_window: bool = option(False, "cut the context to the model's smallest attention window")
    dtype: DType | Literal["auto"] = option(
        "auto",
        "the weights' type (half and float are float16 and float32)",
        parse=lambda text: _DTYPE_ALIASES.get(text, text),
        choices=("auto", *get_args(DType)),
    )
    quantization: Method | CheckpointMethod | None = option(
        None,
        "store weights in fewer bits; they are quantized while they are loaded. gptq, awq, compressed-tensors, fp8, "
        "bitsandbytes, mxfp4 and gguf name a checkpoint's own method, which is also detected without this option; fp8 "
        "quantizes other checkpoints, on accelerators",
        parse=lambda text: QUANTIZATION_ALIASES.get(text, text),
        choices=tuple(dict.fromkeys((*get_args(Method), *get_args(CheckpointMethod)))),
    )
    quantization_group_size: int | None = option(
        None,
        "inputs that share a scale in int4-fast weights: 32, 64 or 128 [32]",
        parse=count,
        check=lambda size: None if size in GROUP_SIZES else "must be 32, 64 or 128",
        metavar="N",
    )
    quantization_zero_points: bool = option(False, "give int4-fast weights zero points")
    kv_cache_dtype: KvCacheDType | Literal["auto"] = option(
        "auto",
        "the type of K and V in the cache (fp8 is fp8_e4m3); auto is the type of the weights, or the checkpoint's "
        "kv_cache_scheme",
        parse=lambda text: _KV_CACHE_DTYPE_ALIASES.get(text, text),
        choices=("auto", *get_args(KvCacheDType)),
    )
    quantization_param_path: str | None = option(
        None,
        "a JSON file with a scale for K and V of each layer in a cache of fp8_e4m3 [the checkpoint's, or 1]",
        metavar="FILE",
    )
    device: str = option("auto", "what runs the model", choices=DEVICE_NAMES)
    max_model_len: int | None = option(
        None,
        "the context in tokens, e.g. 4096, 4k or 4K; auto and -1 are the model's, or what fits [auto]",
        parse=lambda text: None if text in ("auto", "-1") else count(text),
        check=at_least(1),
        metavar="TOKENS",
    )
    max_num_seqs: int = option(128, "most sequences in one step", parse=count, check=at_least(1), metavar="N")
    max_num_batched_tokens: int = option(
        2048, "most tokens in one step", parse=count, check=at_least(1), metavar="TOKENS"
    )
    max_logprobs: int = option(
        DEFAULT_MAX_LOGPROBS,
        "how many of the most likely tokens a request may ask for at each position; -1 is the whole vocabulary",
        parse=whole_number,
        check=at_least(-1),
        metavar="N",
    )
    max_step_ms: float = option(
        75.0, "how long the prompts in a step may delay running answers", parse=number, check=above(0), metavar="MS"
    )
    scheduler_delay_factor: float = option(
        0.0,
        "while other requests run, new prompts wait this many times as long as the last step that began a prompt",
        parse=number,
        check=at_least(0),
        metavar="FACTOR",
    )
    kv_cache_space: float | None = option(
        None,
        "memory for the KV cache in GiB [a share of what is free]",
        parse=number_or_none,
        check=at_least(0),
        metavar="GIB",
        env_aliases=("VLLM_CPU_KVCACHE_SPACE",),
    )
    num_gpu_blocks_override: int | None = option(
        None,
        "number of KV blocks, regardless of --kv-cache-space and the memory [as many as fit]",
        parse=count,
        check=at_least(1),
        metavar="N",
    )
    kv_offload: str | None = option(
        None,
        "a folder for KV blocks that do not fit in memory, which the next start reuses; each server needs its own "
        "[none]",
        metavar="FOLDER",
    )
    kv_offload_space: float | None = option(
        None,
        f"disk space for --kv-offload in GiB [{DEFAULT_KV_OFFLOAD_SPACE:g}]",
        parse=number,
        check=above(0),
        metavar="GIB",
    )
    enable_prefix_caching: bool = option(True, "reuse the KV blocks of prompts with the same beginning")
    seed: int | None = option(
        None,
        "makes answers to requests without a seed reproducible after a restart, if they arrive in the same order; "
        "also seeds the random weights of --load-format dummy",
        parse=whole_number,
        metavar="N",
    )
    step_timeout: float | None = option(
        120.0,
        "write all threads' stacks to stderr when a step takes longer than this; 0 turns this off",
        parse=number_or_none,
        check=at_least(0),
        metavar="SECONDS",
    )
    lora: LoraOptions = field(default_factory=LoraOptions)
    speculative: SpeculativeOptions = field(default_factory=SpeculativeOptions)
    pipeline: PipelineOptions = field(default_factory=PipelineOptions)
    media: MediaOptions = field(default_factory=MediaOptions)
    device_options: tuple[Options, ...] = ()

    def _contradictions(self) -> Iterator[str]:
        if self.quantization != "int4-fast":
            yield from self._needing(
                ("quantization_group_size", "quantization_zero_points"), "--quantization int4-fast"
            )
        if self.disable_sliding_window and self.lora.enable_lora and self.lora.long_lora_scaling_factors:
            yield "--long-lora-scaling-factors and --disable-sliding-window contradict each other: drop one"
        asked = self.speculative.speculation
        if self.kv_offload is not None:
            yield from self._against_kv_offload(asked)
        if self.pipeline.stages > 1:
            yield from self._against_stages(asked)

    def _against_kv_offload(self, asked: object) -> Iterator[str]:
        if isinstance(asked, Mtp | Eagle3):
            method = "mtp" if isinstance(asked, Mtp) else "eagle3"
            yield (
                f'--kv-offload does not go with --speculative-config {{"method": "{method}"}}, because draft tokens '
                'are written to blocks before these are stored: drop one of them, or use {"method": "ngram"}'
            )
        if not self.enable_prefix_caching:
            yield "--kv-offload keeps cached prefixes: drop it, or drop --no-enable-prefix-caching"
        if self.load_format == "dummy":
            yield "--kv-offload needs weights from files: drop it, or drop --load-format dummy"

    def _against_stages(self, asked: object) -> Iterator[str]:
        stages = f"--pipeline-parallel-size {self.pipeline.stages}"
        if self.kv_offload is not None:
            yield f"{stages} and --kv-offload do not work together: leave one of them out"
        if isinstance(asked, Eagle3):
            yield (
                f"{stages} and EAGLE3 layers do not work together, because EAGLE3 layers read the inputs of layers "
                "in several stages: leave one of them out, or draft with another method"
            )
