"""vLLM's environment variables, from 0.5 on, that are no options here: what becomes of them, and why.

A name may end with `*`, for all that begin so and have no line of their own. `docs/vllm.md` is made of this.
"""

from __future__ import annotations

from collections.abc import Iterator
from fnmatch import fnmatchcase

REFUSED = {
    "VLLM_USE_MODELSCOPE": "models come from the Hugging Face Hub: download the model, and serve its folder",
    "VLLM_LOGGING_CONFIG_PATH": "use --log-level and --log-format",
    "VLLM_MODEL_REDIRECT_PATH": "serve the folder that the file names, and give its other name with "
    "--served-model-name",
}
"""They ask for what is not there, with what to do instead, unless they are 0 or empty."""

IDLE = {
    "/server_info and /reset_prefix_cache are always served, and /sleep and /wake_up by servers of several models; "
    "vLLM's other endpoints for developers, such as /pause, /collective_rpc and /update_weights, are not": (
        "VLLM_SERVER_DEV_MODE"
    ),
    "answers never depend on the batch": "VLLM_BATCH_INVARIANT",
    "--rope-scaling or --hf-overrides extends the context beyond the model's": ("VLLM_ALLOW_LONG_MAX_MODEL_LEN"),
    "no usage statistics are sent": "VLLM_NO_USAGE_STATS VLLM_DO_NOT_TRACK VLLM_USAGE_SOURCE VLLM_USAGE_STATS_SERVER",
    "--host and --port say where the server listens": "VLLM_HOST_IP VLLM_PORT VLLM_LOOPBACK_IP",
    "--device chooses the device": "VLLM_TARGET_DEVICE VLLM_OPENVINO_DEVICE",
    "--kv-cache-space and --kv-cache-dtype set the size and the type of the KV cache": "VLLM_OPENVINO_*",
    "packed weights are kept in --cache-dir, downloads in --download-dir, and nothing else is kept": "VLLM_CACHE_ROOT "
    "VLLM_CONFIG_ROOT VLLM_ASSETS_CACHE VLLM_ASSETS_CACHE_MODEL_CLEAN",
    "the log goes to stderr, with colours on a terminal unless NO_COLOR is set; see --log-level and --log-format": (
        "VLLM_CONFIGURE_LOGGING VLLM_LOGGING_STREAM VLLM_LOGGING_PREFIX VLLM_LOGGING_COLOR VLLM_DISABLE_LOG_LOGO "
        "VLLM_NO_DEPRECATION_WARNING"
    ),
    "bodies are not logged; --max-log-len logs prompts": "VLLM_REQUEST_BODY_LOG_LEVEL",
    "--log-stats-interval is the time between log lines about throughput": "VLLM_LOG_BATCHSIZE_INTERVAL",
    "--step-timeout sets when a step takes too long": "VLLM_ENGINE_ITERATION_TIMEOUT_S "
    "VLLM_EXECUTE_MODEL_TIMEOUT_SECONDS",
    "a server whose engine has failed exits, so that it can be restarted": "VLLM_KEEP_ALIVE_ON_ENGINE_DEATH",
    "the server is one process, except for the stages of a pipeline": "VLLM_USE_V1 VLLM_USE_V2_MODEL_RUNNER "
    "VLLM_ENABLE_V1_MULTIPROCESSING VLLM_WORKER_MULTIPROC_METHOD VLLM_WORKER_SHUTDOWN_TIMEOUT_SECONDS "
    "VLLM_ENGINE_READY_TIMEOUT_S VLLM_RPC_* VLLM_MQ_MAX_CHUNK_BYTES_MB VLLM_RINGBUFFER_WARNING_INTERVAL "
    "VLLM_MSGPACK_ZERO_COPY_THRESHOLD VLLM_V1_OUTPUT_PROC_CHUNK_SIZE VLLM_SLEEP_WHEN_IDLE VLLM_USE_SPINLOOP_EXT "
    "VLLM_PROCESS_NAME_PREFIX VLLM_INSTANCE_ID VLLM_USE_RUST_* VLLM_RUST_FRONTEND_PATH "
    "VLLM_ALLOW_INSECURE_SERIALIZATION VLLM_ALLOW_ENGINE_USE_RAY VLLM_OBJECT_STORAGE_SHM_BUFFER "
    "VLLM_OBJECT_STORAGE_SHM_BUFFER_NAME VLLM_LOGITS_PROCESSOR_THREADS",
    "--data-parallel-size starts replicas on Ray Serve (docs/scale-out.md)": "VLLM_DP_* VLLM_RAY_* VLLM_USE_RAY_* "
    "VLLM_ELASTIC_EP_* VLLM_DISABLE_NCCL_FOR_DP_SYNCHRONIZATION",
    "servers share no KV cache; --kv-offload FOLDER keeps a server's KV blocks on disk": "VLLM_NIXL_* VLLM_MOONCAKE_* "
    "VLLM_MORIIO_* VLLM_P2P_* VLLM_EC_* VLLM_KV_EVENTS_USE_INT_BLOCK_HASHES VLLM_KV_OFFLOAD_MAX_BATCH_DESCRIPTORS "
    "VLLM_USE_SIMPLE_KV_OFFLOAD VLLM_WEIGHT_OFFLOADING_*",
    "there are no plugins; --middleware adds code around requests": "VLLM_PLUGINS",
    "adapters are looked for only in the folder of --lora-resolver-cache-dir": "VLLM_LORA_RESOLVER_HF_REPO_LIST",
    "responses are kept up to --max-stored-responses": "VLLM_ENABLE_RESPONSES_API_STORE",
    "the server has its own limits (docs/security.md)": "VLLM_CHAT_TEMPLATE_RENDER_TIMEOUT VLLM_CHAT_TEMPLATE_FUEL "
    "VLLM_TOOL_PARSE_REGEX_TIMEOUT_SECONDS VLLM_REGEX_COMPILATION_TIMEOUT_S VLLM_MAX_BAD_WORDS_TOTAL_TOKENS "
    "VLLM_MAX_NUM_BAD_WORDS VLLM_MAX_STOP_STRINGS VLLM_XGRAMMAR_CACHE_MB VLLM_V0_USE_OUTLINES_CACHE "
    "VLLM_V1_USE_OUTLINES_CACHE",
    "calls follow their schema if tool_choice requires a call": "VLLM_ENFORCE_STRICT_TOOL_CALLING "
    "VLLM_BEAM_ALWAYS_CONSTRAIN_OUTPUT",
    "clients run tools, never the server; --default-chat-template-kwargs sets variables of the chat template": (
        "VLLM_GPT_OSS_* VLLM_SYSTEM_START_DATE VLLM_TOOL_JSON_ERROR_AUTOMATIC_RETRY "
        "VLLM_USE_EXPERIMENTAL_PARSER_CONTEXT"
    ),
    "Cohere's own API is not served": "VLLM_ENABLE_COHERE_API",
    "each request has the id that its client gave, or a random one": "VLLM_DISABLE_REQUEST_ID_RANDOMIZATION",
    "beam search is always available": "VLLM_ALLOW_DEPRECATED_BEAM_SEARCH",
    "frames of videos come as images, and sound is not served": "VLLM_VIDEO_* VLLM_AUDIO_* VLLM_MAX_AUDIO_*",
    "images have their own limits (docs/security.md)": "VLLM_MAX_MEDIA_* VLLM_MAX_EMBED_DECODE_BYTES",
    "an image is fetched once, and kept only as --mm-processor-cache-gb says": "VLLM_MEDIA_* VLLM_MM_*",
    "tidewheel inspect shows a model, tidewheel bench --profile measures kernels, and /metrics has the rest": (
        "VLLM_TRACE_FUNCTION VLLM_TORCH_PROFILER_* VLLM_TORCH_CUDA_PROFILE VLLM_PROFILER_* "
        "VLLM_CUSTOM_SCOPES_FOR_PROFILING VLLM_NVTX_SCOPES_FOR_PROFILING VLLM_LOG_MODEL_INSPECTION VLLM_DEBUG_* "
        "VLLM_GC_DEBUG VLLM_PATTERN_MATCH_DEBUG VLLM_COMPUTE_NANS_IN_LOGITS VLLM_RAISE_ON_LOGIT_NANS "
        "VLLM_FLAT_LOGPROBS "
        "VLLM_FLATTEN_LOGPROBS VLLM_MOE_ROUTING_SIMULATION_STRATEGY VLLM_RANDOMIZE_DP_DUMMY_INPUTS "
        "VLLM_GPU_SYNC_CHECK "
        "VLLM_TUNED_CONFIG_FOLDER VLLM_ADAPTIVE_VERIFICATION_PROFILE_CONTEXT_LEN"
    ),
    "the best kernels of this processor are chosen at the start; TIDEWHEEL_ISA forces a level": "VLLM_CPU_SGL_KERNEL "
    "VLLM_CPU_ATTN_SPLIT_KV VLLM_CPU_AVX512BF16 VLLM_CPU_AVX512VNNI VLLM_CPU_DISABLE_AVX512 "
    "VLLM_CPU_INT4_W4A8 VLLM_CPU_CI_ENV VLLM_ZENTORCH_WEIGHT_PREPACK "
    "VLLM_FLOAT32_MATMUL_PRECISION VLLM_USE_FASTOKENS VLLM_DISABLED_KERNELS VLLM_CUSTOM_OPS VLLM_ATTENTION_BACKEND "
    "VLLM_KV_CACHE_LAYOUT VLLM_SSM_CONV_STATE_LAYOUT VLLM_FLASH_* VLLM_FLASHINFER_* VLLM_USE_FLASHINFER_* "
    "VLLM_DISABLE_FLASHINFER_PREFILL VLLM_HAS_FLASHINFER_CUBIN VLLM_BLOCKSCALE_FP8_GEMM_FLASHINFER VLLM_MLA_* "
    "VLLM_TRITON_* VLLM_USE_TRITON_* VLLM_USE_TRTLLM_* VLLM_USE_CUDNN_PREFILL VLLM_MARLIN_* VLLM_MXFP4_* "
    "VLLM_MXFP8_* "
    "VLLM_NVFP4_GEMM_BACKEND VLLM_USE_NVFP4_CT_EMULATIONS VLLM_QUARK_EMU_MEM_OPT VLLM_B12X_* VLLM_HUMMING_* "
    "VLLM_MOE_* VLLM_*_MOE VLLM_ENABLE_MOE_* VLLM_FUSED_MOE_CHUNK_SIZE VLLM_ENABLE_FUSED_MOE_ACTIVATION_CHUNKING "
    "VLLM_ENABLE_K3_LATENT_MOE_TAIL_FUSION VLLM_USE_FUSED_MOE_GROUPED_TOPK VLLM_DEEP_GEMM_WARMUP "
    "VLLM_SKIP_DEEP_GEMM_WARMUP VLLM_USE_DEEP_GEMM* VLLM_DEEPEP* VLLM_USE_FBGEMM VLLM_USE_OINK_OPS "
    "VLLM_ENABLE_HPC_OPS VLLM_COHERE2_ATTN_MOE_DUAL_STREAM_TOKEN_THRESHOLD VLLM_USE_HW_AGNOSTIC "
    "VLLM_GDN_DECODE_KERNEL VLLM_ENABLE_FLA_PACKED_RECURRENT_DECODE "
    "VLLM_KIMI_* VLLM_ENABLE_GEMM_RS VLLM_REPLICATE_EMBED VLLM_SPARSE_INDEXER_MAX_LOGITS_MB "
    "VLLM_USE_PACKED_HMA_KV_CACHE VLLM_PREFIX_CACHE_RETENTION_INTERVAL VLLM_LORA_DISABLE_PDL "
    "VLLM_LORA_ENABLE_DUAL_STREAM VLLM_ALLOW_CHUNKED_LOCAL_ATTN_WITH_HYBRID_KV_CACHE "
    "VLLM_ALLOW_DEPRECATED_BLOCK_MANAGER_V1 VLLM_V1_USE_PREFILL_DECODE_ATTENTION VLLM_USE_AITER_UNIFIED_ATTENTION "
    "VLLM_ROCM_* VLLM_XPU_* VLLM_HPU_USE_DELAYED_SAMPLING VLLM_USE_HPU_CONTIGUOUS_CACHE_FETCH",
    "kernels are built in, and the buckets of an accelerator determine what is compiled (docs/devices/buckets.md)": (
        "VLLM_TORCH_COMPILE_* VLLM_COMPILE_* VLLM_DISABLE_COMPILE_CACHE VLLM_USE_AOT_COMPILE VLLM_FORCE_AOT_LOAD "
        "VLLM_USE_MEGA_AOT_ARTIFACT VLLM_USE_STANDALONE_COMPILE VLLM_USE_BYTECODE_HOOK VLLM_USE_BREAKABLE_CUDAGRAPH "
        "VLLM_USE_LAYERNAME VLLM_ENABLE_PREGRAD_PASSES VLLM_ENABLE_INDUCTOR_* VLLM_ENABLE_CUDAGRAPH_GC "
        "VLLM_DISABLE_PAD_FOR_CUDAGRAPH VLLM_MEMORY_PROFILER_ESTIMATE_CUDAGRAPHS VLLM_DYNAMO_USE_CUSTOM_DISPATCHER "
        "VLLM_ENABLE_STARTUP_PLAN VLLM_TPU_* VLLM_XLA_*"
    ),
    "it only concerns communication between accelerators": "VLLM_NCCL_* VLLM_USE_NCCL_SYMM_MEM "
    "VLLM_DISABLE_PYNCCL "
    "VLLM_ALLREDUCE_* VLLM_ALL2ALL_BACKEND VLLM_SKIP_P2P_CHECK VLLM_DCP_* VLLM_USE_DIRECT_DCP_* VLLM_DBO_COMM_SMS "
    "VLLM_DISTRIBUTED_USE_SPLIT_GROUP VLLM_GPU_NIC_PCIE_MAPPING VLLM_NIC_SELECTION_VARS "
    "VLLM_MULTI_STREAM_GEMM_TOKEN_THRESHOLD VLLM_SHARED_EXPERTS_STREAM_TOKEN_THRESHOLD "
    "VLLM_DISABLE_SHARED_EXPERTS_STREAM VLLM_DISABLE_DSV4_MEGAMOE_SHARED_EXPERT_FUSION "
    "VLLM_STEP5_SHARD_SP_SHARED_EXPERT",
    "it only concerns CUDA's libraries": "VLLM_CUDA_* VLLM_CUDART_SO_PATH VLLM_ENABLE_CUDA_COMPATIBILITY "
    "VLLM_WSL2_ENABLE_PIN_MEMORY",
    "weights are mapped and read once": "VLLM_FASTSAFETENSORS_QUEUE_SIZE",
    "it only concerns vLLM's own build and tests": "VLLM_MAIN_CUDA_VERSION VLLM_USE_PRECOMPILED "
    "VLLM_USE_PRECOMPILED_RUST VLLM_PRECOMPILED_WHEEL_LOCATION "
    "VLLM_SKIP_PRECOMPILED_VERSION_SUFFIX VLLM_SKIP_VERSION_SUFFIX VLLM_DOCKER_BUILD_CONTEXT VLLM_BUILD_* "
    "VLLM_IMAGE_TAG VLLM_INSTALL_PUNICA_KERNELS VLLM_CI_USE_S3 VLLM_TEST_*",
}
"""Variables that have no effect here, with the reason."""


def why_idle(name: str) -> str | None:
    """Why a variable has no effect; None for one that vLLM does not have either. An exact name goes first."""
    groups = [(why, names.split()) for why, names in IDLE.items()]
    exact = (why for why, names in groups if name in names)
    alike = (why for why, names in groups if any(fnmatchcase(name, pattern) for pattern in names))
    return next(exact, None) or next(alike, None)


def idle_lines(names: list[str]) -> Iterator[str]:
    """What to log of variables that are set and that `why_idle` knows: a line for each reason."""
    by_reason: dict[str, list[str]] = {}
    for name in sorted(names):
        by_reason.setdefault(why_idle(name) or "", []).append(name)
    for why, together in by_reason.items():
        yield f"{', '.join(together)} {'has' if len(together) == 1 else 'have'} no effect: {why}"
