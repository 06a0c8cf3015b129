"""Every flag of vLLM's server, from 0.5 on, and what becomes of it: `docs/vllm.md` is made of this.

A flag is written `--flag` if it is a switch, `--flag=` if it takes a value, `--flag=*` if it takes several, and
`--flag=value` for what is said of that value alone. A table has the flags by what is said of them.
"""

from __future__ import annotations

from tidewheel.engine.encoders.pooler_config import NO_STEPS

WORKS = {
    "": "--allow-credentials --allowed-headers --allowed-methods --allowed-origins --api-key --chat-template "
    "--config "
    "--default-chat-template-kwargs --device --disable-access-log-for-endpoints --disable-fastapi-docs "
    "--disable-log-requests --disable-log-stats "
    "--disable-uvicorn-access-log --download-dir --enable-force-include-usage --enable-lora "
    "--enable-prefix-caching --enable-request-id-headers --enable-tokenizer-info-endpoint --h11-max-header-count "
    "--h11-max-incomplete-event-size --host --interleave-mm-strings "
    "--language-model-only --log-level --long-lora-scaling-factors "
    "--lora-dtype --lora-modules --max-cpu-loras "
    "--max-lora-rank --max-loras --max-model-len --max-num-batched-tokens --max-num-seqs --middleware "
    "--mm-processor-cache-gb "
    "--otlp-traces-endpoint --port --response-role --return-tokens-as-token-ids --revision --root-path "
    "--scheduler-delay-factor --seed --served-model-name --shutdown-timeout --ssl-ca-certs --ssl-cert-reqs "
    "--ssl-certfile --ssl-keyfile --enable-ssl-refresh "
    "--tokenizer --tokenizer-revision --trust-request-chat-template --uds --uvicorn-log-level",
    "also as NAME=MODEL, and several times for several models (docs/many-models.md)": "--model",
    "no effect, and the log says so: adapters are not sharded": "--fully-sharded-loras",
    "with the methods `ngram`, `suffix`, `mtp`, `eagle3` and `draft_model` (docs/speculation.md)": (
        "--speculative-config --speculative-model --num-speculative-tokens --speculative-max-model-len "
        "--speculative-disable-by-batch-size --speculative-model-quantization --ngram-prompt-lookup-max "
        "--ngram-prompt-lookup-min --spec-method --spec-model --spec-tokens"
    ),
    "1, or the value of --tensor-parallel-size: a draft model runs on the same cores": (
        "--speculative-draft-tensor-parallel-size"
    ),
    "replicas on Ray Serve (docs/scale-out.md)": "--data-parallel-size",
    "processes on CPUs, here or on Ray, each with some layers (docs/scale-out.md)": "--pipeline-parallel-size",
    "`ray` for replicas or stages on Ray, `mp` for local stages (docs/scale-out.md); `uni` is accepted without "
    "effect": ("--distributed-executor-backend"),
    "0 or 256; no effect, and the log says so: adapters cannot add tokens": "--lora-extra-vocab-size",
    "`half` and `float` are `float16` and `float32`": "--dtype",
    "requests are logged unless this is turned off": "--enable-log-requests",
    "prompts are logged only with it, cut to this many characters, or token ids if they have no text": "--max-log-len",
    "answers are cut to --max-log-len, if that is given": "--enable-log-outputs",
    "`auto`, `safetensors`, `pt`, `gguf` and `dummy`": "--load-format",
    "`auto` uses the model's file, `vllm` uses none": "--generation-config",
    "`auto`, and `mistral` with mistral-common (docs/models.md); `hf`, `slow` and `fast` are accepted without effect": (
        "--tokenizer-mode"
    ),
    "tool calls are found without it": "--enable-auto-tool-choice",
    "`auto` sees by the files whether a model embeds, classifies or scores (docs/pooling.md)": "--runner",
    "`embed` and `classify`": "--convert",
    "what it stands for: --runner and --convert": "--task",
    "`pooling_type` (CLS, LAST and MEAN), `use_activation` and `dimensions` (docs/pooling.md)": (
        "--pooler-config --override-pooler-config"
    ),
    "`auto` finds the format in the chat template": "--tool-call-parser --reasoning-parser",
    "gptq, awq, compressed-tensors, fp8, bitsandbytes and mxfp4 are detected without it; int8 and int4 quantize the "
    "weights during loading": "--quantization",
    "`fp8` means `fp8_e4m3`; int8 and int4 also work": "--kv-cache-dtype",
    "with `--kv-cache-dtype fp8_e4m3` on a CPU; one scale for K and V of a layer": "--quantization-param-path",
    "16 images and 2 videos by default; audio must be 0": "--limit-mm-per-prompt",
    "for all requests; those of a request take precedence": "--mm-processor-kwargs",
    "`rgba_background_color` and `image_mode` (RGB) for images, `num_frames` and `fps` for videos": "--media-io-kwargs",
    "without it, requests bring their images; vLLM fetches them from everywhere": "--allowed-media-domains",
    "files of this folder, as `file:///...`": "--allowed-local-media-path",
    "accelerators only; on a CPU the log says that it has no effect": "--gpu-memory-utilization "
    "--device-memory-utilization --enforce-eager --max-seq-len-to-capture --max-context-len-to-capture",
    "in blocks of 16 tokens on a CPU; takes precedence over --kv-cache-space": "--num-gpu-blocks-override",
    "like --kv-cache-space, but in bytes instead of GiB": "--kv-cache-memory-bytes",
    "on a CPU, the number of groups of cores (docs/processors.md), in each stage of "
    "a pipeline": "--tensor-parallel-size",
    "20 by default, -1 for the whole vocabulary; --max-answer-size bounds an answer": "--max-logprobs",
    "temperature, top_p, top_k, min_p, repetition_penalty, and max_new_tokens, which limits all answers": (
        "--override-generation-config"
    ),
    "the log names fields that change nothing": "--hf-overrides",
    "the context is cut to the smallest window": "--disable-sliding-window",
    "for models with one rope for all layers; use --hf-overrides for others": "--rope-scaling --rope-theta",
    "limits waiting sequences, not requests": "--max-num-queued-reqs",
    "prompts are token ids, and answers have `token_ids`; a request that needs text is refused": (
        "--skip-tokenizer-init"
    ),
}

SHORT = {
    "-ac": "--attention-config",
    "-asc": "--api-server-count",
    "-cc": "--compilation-config",
    "-dc": "--diffusion-config",
    "-dcp": "--decode-context-parallel-size",
    "-dp": "--data-parallel-size",
    "-dpa": "--data-parallel-address",
    "-dpb": "--data-parallel-backend",
    "-dpe": "--data-parallel-external-lb",
    "-dph": "--data-parallel-hybrid-lb",
    "-dpl": "--data-parallel-size-local",
    "-dpm": "--data-parallel-multi-port-external-lb",
    "-dpn": "--data-parallel-rank",
    "-dpp": "--data-parallel-rpc-port",
    "-dpr": "--data-parallel-start-rank",
    "-ep": "--enable-expert-parallel",
    "-n": "--nnodes",
    "-O": "--optimization-level",
    "-pcp": "--prefill-context-parallel-size",
    "-pp": "--pipeline-parallel-size",
    "-q": "--quantization",
    "-r": "--node-rank",
    "-sc": "--speculative-config",
    "-spec-draft-tp": "--speculative-draft-tensor-parallel-size",
    "-tp": "--tensor-parallel-size",
}

RENAMED = {
    "--device-memory-utilization": "--gpu-memory-utilization",
    "--enable-log-requests": "--no-disable-log-requests",
    "--max-context-len-to-capture": "--max-seq-len-to-capture",
    "--max-num-queued-reqs": "--max-queue",
    "--model-tag": "--model",
    "--no-enable-log-requests": "--disable-log-requests",
    "--override-pooler-config": "--pooler-config",
    "--spec-method": "--speculative-config.method",
    "--spec-model": "--speculative-model",
    "--spec-tokens": "--num-speculative-tokens",
}

ACCEPTED = {
    "without a method, weights stay as the checkpoint stores them": "--quantization=None",
    "adapters' biases are always added": "--enable-lora-bias",
    "an adapter costs time only for the rows that use it": "--specialize-active-lora",
    "a preempted sequence is computed again, so KV blocks are never swapped": "--swap-space= "
    "--preemption-mode=recompute",
    "kernels are built in, and the buckets of an accelerator determine what is compiled (docs/devices/buckets.md)": (
        "--optimization-level= --compilation-config= --performance-mode= --enable-flashinfer-autotune "
        "--cudagraph-capture-sizes=* --cuda-graph-sizes=* --max-cudagraph-capture-size= --ir-op-priority= "
        "--jit-monitor-mode= --jit-monitor-verbose --max-paddings="
    ),
    "the best kernels of this processor are chosen at the start": "--attention-backend= --attention-config= "
    "--moe-backend= --linear-backend= --mamba-backend= --mamba-ssu-algorithm= --gdn-prefill-backend= "
    "--kda-prefill-backend= --kda-decode-backend= --kernel-config= --monokernel --sparse-indexer-topk-backend= "
    "--enable-bf16x3-router-gemm --split-qkv "
    "--disable-cascade-attn --use-fp64-gumbel --enable-flash-late-interaction "
    "--use-gpu-for-pooling-score",
    "the device chooses the size of a block": "--block-size= --mamba-block-size=",
    "sliding windows have their own blocks, and recurrent states their own snapshots": "--use-v2-block-manager "
    "--disable-hybrid-kv-cache-manager --swa-bounded-replay --mamba-cache-mode= "
    "--mamba-cache-philox-rounds= --enable-mamba-cache-stochastic-rounding --enable-mamba-shared-prefix-checkpoint "
    "--prefix-match-unit= --use-replayssm --replayssm-buffer-len= --prefix-cache-retention-interval=",
    "layers that share K and V of an earlier one compute only the rows that are read": "--kv-sharing-fast-prefill",
    "recurrent states are kept in float32": "--mamba-cache-dtype= --mamba-ssm-cache-dtype=",
    "the server finds cached prompts by its own hash": "--prefix-caching-hash-algo=",
    "scales from the first request's K and V would change later answers; fp8_e4m3 uses the checkpoint's scales, or "
    "those of a file": "--calculate-kv-scales",
    "prompts are computed in chunks wherever the device supports it": "--enable-chunked-prefill",
    "--max-step-ms bounds how long prompts may hold up running answers": "--max-num-partial-prefills= "
    "--max-num-prefill-seqs= --use-padding-aware-scheduling --max-long-partial-prefills= "
    "--long-prefill-token-threshold= --long-prefill-token-threshold-adaptive "
    "--prefill-schedule-interval=",
    "one step is planned while the last one is delivered": "--num-scheduler-steps= --multi-step-stream-outputs= "
    "--num-lookahead-slots= --async-scheduling --use-async-output-proc --disable-async-output-proc "
    "--scheduler-reserve-full-isl --watermark=",
    "--step-timeout sets when a step takes too long": "--watchdog-config=",
    "within a priority, clients take turns, and each is served first come, first served": "--scheduling-policy=",
    "tokens are streamed as soon as they are generated": "--stream-interval=",
    "the server is one process, with a thread for each core, except for the stages of a pipeline": (
        "--disable-frontend-multiprocessing --distributed-executor-backend=uni --api-server-count=1 "
        "--worker-cls=auto "
        "--max-parallel-loading-workers= --disable-custom-all-reduce --distributed-timeout-seconds= "
        "--cpu-distributed-timeout-seconds= --enable-shm-tensor-arena --disable-nccl-for-dp-synchronization "
        "--enable-nccl-comm-suspend --enable-batch-sharded-sampling --dp-sync-interval= --enable-hc-sp"
    ),
    "the server runs on one machine anyway": "--data-parallel-size=1 "
    "--data-parallel-size-local=1 --data-parallel-rank=0 --decode-context-parallel-size=1 "
    "--prefill-context-parallel-size=1 --nnodes=1 --node-rank=0 --data-parallel-backend=mp --master-addr= "
    "--master-port= --cp-kv-cache-interleave-size= --dcp-kv-cache-interleave-size= --dcp-comm-backend= "
    "--dcp-q-replicate",
    "replicas always run on Ray Serve": "--data-parallel-backend=ray",
    "all experts are in the memory of this machine": "--enable-expert-parallel --enable-ep-weight-filter "
    "--enable-eplb --eplb-config= --num-redundant-experts= --eplb-window-size= --eplb-step-interval= "
    "--eplb-log-balancedness --expert-placement-strategy= --all2all-backend= --enable-dbo --ubatch-size= "
    "--dbo-decode-token-threshold= --dbo-prefill-token-threshold=",
    "threads are bound to cores, with a group for each NUMA node; --threads-bind chooses other cores": "--numa-bind",
    "texts are tokenized in threads beside the engine's": "--tokenizer-pool-size= --tokenizer-pool-type= "
    "--tokenizer-pool-extra-config= --renderer-num-workers=",
    "all these modes load the same tokenizer": "--tokenizer-mode=auto --tokenizer-mode=hf --tokenizer-mode=slow "
    "--tokenizer-mode=fast",
    "no code that comes with a model is ever run": "--trust-remote-code --code-revision=",
    "config.json is read, which Mistral's repositories have in addition to params.json": "--config-format=mistral",
    "models are always read this way": "--config-format=auto --config-format=hf --model-impl=auto --model-impl=vllm "
    "--allow-deprecated-quantization",
    "the format is found in the checkpoint": "--load-format=bitsandbytes --load-format=hf --load-format=mistral",
    "weights are mapped and read once": "--load-format=fastsafetensors --load-format=runai_streamer "
    "--use-tqdm-on-load --weights-load-device= --pt-load-map-location= --model-loader-extra-config= "
    "--safetensors-load-strategy= "
    "--safetensors-prefetch-num-threads= --safetensors-prefetch-block-size= --ignore-patterns=*",
    "--kv-offload FOLDER keeps KV blocks on disk": "--kv-offloading-size=0 --kv-offloading-backend=native",
    "weights and KV cache stay in the memory that they were loaded into": "--cpu-offload-gb=0 "
    "--offload-backend= --offload-group-size= --offload-num-in-group= --offload-prefetch-step= --offload-params=* "
    "--cpu-offload-params=* --enable-cumem-allocator",
    "there is one engine; its statistics are on /metrics and in the log": "--aggregate-engine-logging "
    "--enable-logging-iteration-details --log-error-stack --fail-on-environ-validation",
    "an answer is logged once, when it has ended": "--enable-log-deltas --exclude-log-deltas",
    "/metrics always has all measurements": "--show-hidden-metrics-for-version= --collect-detailed-traces=* "
    "--kv-cache-metrics --kv-cache-metrics-sample= --cudagraph-metrics --enable-mfu-metrics "
    "--per-request-spec-decode-metrics=none",
    "tool_choice none always leaves the tools out of the prompt": "--exclude-tools-when-tool-choice-none",
    "/load is always served": "--enable-server-load-tracking",
    "usage always says how many tokens of a prompt were cached": "--enable-prompt-tokens-details",
    "the page /docs needs nothing from the internet": "--enable-offline-docs",
    "the chat template shows whether it reads texts or parts": "--chat-template-content-format= "
    "--chat-template-text-format=",
    "log-probabilities are those of the model's own logits": "--logprobs-mode=raw_logprobs",
    "--reasoning-parser is enough": "--enable-reasoning",
    "the chat template's enable_thinking turns thinking off": "--anthropic-disabled-thinking-effort=",
    "Cohere's own API is not served": "--cohere-is-reasoning-model --cohere-format=",
    "llguidance compiles every structured output": "--guided-decoding-backend= --structured-outputs-config= "
    "--guided-decoding-disable-fallback --tool-strict-level=auto",
    "drafting changes no token and no log-probability, and draft tokens are always verified by the same kernels": (
        "--spec-decoding-acceptance-method=rejection_sampler --speculative-disable-mqa-scorer "
        "--disable-logprobs-during-spec-decoding"
    ),
    "streams have no keep-alive events, only tokens": "--sse-keep-alive-interval=0",
    "system_fingerprint is made from the version and the model's name": "--fingerprint-mode=full "
    "--fingerprint-mode=hash",
    "--mm-processor-cache-gb sets the memory for images that were processed; 0 keeps none": (
        "--disable-mm-preprocessor-cache --mm-cache-preprocessor --mm-processor-cache-type= --mm-hasher-algorithm= "
        "--mm-shm-cache-max-object-size-mb="
    ),
    "images are computed on the CPU, between steps": "--mm-encoder-tp-mode= --mm-encoder-attn-backend= "
    "--mm-encoder-attn-dtype= --mm-tensor-ipc= --mm-processor-device= --mm-ipc-gpu-memory-gb= "
    "--mm-device-do-normalize --enable-multimodal-encoder-data-parallel --skip-mm-profiling",
    "prompts are computed in chunks, with images or without": "--disable-chunked-mm-input",
    "the model computes images itself": "--image-input-type=pixel_values",
    "the model's files say which token stands for an image": "--image-token-id=",
    "images are resized as the model's processor does it": "--image-input-shape=",
    "the number of an image's tokens follows from its size": "--image-feature-size=",
}


def _of(flag: str, values: str) -> str:
    """A flag with each of these values."""
    return " ".join(f"{flag}={value}" for value in values.split())


_MANY_SERVERS = (
    "a server is one process on one machine; with --distributed-executor-backend ray, --data-parallel-size starts "
    "several, and --pipeline-parallel-size splits the layers of one between machines (docs/scale-out.md)"
)

REFUSED = {
    "tool_choice none always keeps the tools out of the prompt; leave it out": (
        "--expand-tools-even-if-tool-choice-none"
    ),
    "a preempted sequence is computed again; leave it out": "--preemption-mode=",
    _MANY_SERVERS: "--data-parallel-size-local= --data-parallel-rank= --data-parallel-start-rank= "
    "--data-parallel-address= --data-parallel-rpc-port= --data-parallel-backend= --data-parallel-hybrid-lb "
    "--data-parallel-external-lb --data-parallel-multi-port-external-lb --data-parallel-supervisor-port= "
    "--dp-supervisor-probe-interval-s= --dp-supervisor-probe-timeout-s= --dp-supervisor-probe-failure-threshold= "
    "--nnodes= --node-rank= --headless --api-server-count= --worker-use-ray --engine-use-ray "
    "--ray-workers-use-nsight --decode-context-parallel-size= --prefill-context-parallel-size= --enable-elastic-ep "
    "--elastic-ep-max-dp-size= --enable-scale-out --enable-fault-tolerance --fault-tolerance-config= --tokens-only",
    "the server speaks only HTTP; leave it out": "--grpc --grpc-port=",
    "name the cores with --threads-bind, such as 0-31|32-63": "--numa-bind-nodes=* --numa-bind-cpus=*",
    "name them with CUDA_VISIBLE_DEVICES or the variable of your accelerator (docs/devices/README.md)": (
        "--device-ids="
    ),
    "other users of this machine see it on the command line; set HF_TOKEN": "--hf-token=",
    "OpenVINO is not used: --device cpu runs models on Intel's processors, --device xpu on its GPUs, nothing on NPUs": (
        "--device=openvino"
    ),
    "a GGUF file describes its model, and other models have a config.json in their folder: leave it out, or set "
    "single fields with --hf-overrides": "--hf-config-path=",
    "convert the model to Hugging Face's config.json and safetensors": "--config-format= "
    "--load-format=ipc_cache --load-format=npcache --load-format=tensorizer --load-format=sharded_state "
    "--load-format=runai_streamer_sharded "
    "--load-format=modelexpress --load-format=instanttensor",
    "models are run by the server's own code; docs/models.md lists them": "--model-impl= --model-class-overrides=",
    "custom tokenizer code is never run; use a folder with a tokenizer.json, which --tokenizer can name": (
        "--tokenizer-mode=custom"
    ),
    "the model's own files define its tokenizer, and --chat-template the format of chats; leave it out": (
        _of(
            "--tokenizer-mode",
            "alpamayo2_super cohere deepseek_v32 deepseek_v4 grok2 hy_v3 inkling kimi_audio kimi_k3 qwen_vl",
        )
    ),
    "--pooler-config has a field for it": "--pooling-type= --pooling-norm --pooling-softmax",
    NO_STEPS: "--pooling-step-tag-id= --pooling-returned-token-ids=*",
    "reward models need no conversion: leave it out": "--convert=reward",
    "--speculative-config names a draft model": "--runner=draft",
    "plug-ins are not run: requests are texts or token ids": "--io-processor-plugin=",
    "marlin is a kernel of vLLM's: use gptq_marlin or awq_marlin, or leave it out, and the format is found in the "
    "checkpoint": "--quantization=marlin",
    "this is a kernel of vLLM's: leave it out, and the format is found in the checkpoint": _of(
        "--quantization", "bitblas gptq_bitblas gptq_marlin_24 humming ipex moe_wna16"
    ),
    "int8 and int4 quantize weights while they are loaded: use one of them": _of(
        "--quantization",
        "deepspeedfp experts_int8 fp8_per_block fp8_per_channel fp8_per_tensor int8_per_channel_weight_only mxfp8 "
        "online ptpc_fp8 rtn tpu_int8",
    ),
    "checkpoints in this format are not read: use an unquantized one with --quantization int8 or int4, or one in a "
    "format that docs/models.md lists": _of(
        "--quantization",
        "aqlm auto-round deepseek_v4_fp8 fbgemm_fp8 fp_quant hqq modelopt modelopt_fp4 modelopt_mixed "
        "modelopt_mxfp8 neuron_quant nvfp4_per_token petit_nvfp4 qqq quark squeezellm torchao",
    ),
    "leave it out: QUANT_CONFIG alone makes Gaudi cards compute in FP8, see docs/devices/hpu.md": "--quantization=inc",
    "--quantization takes one method for all weights, with --quantization-group-size": "--quantization-config=",
    "K and V have the same type in all layers: see --kv-cache-dtype": "--kv-cache-dtype-skip-layers=*",
    "weights stay in memory; --quantization makes them smaller": "--cpu-offload-gb=",
    "on a CPU, the KV cache is in memory already: --kv-cache-space makes it larger, and --kv-offload FOLDER extends "
    "it to a disk": ("--kv-offloading-size= --kv-offloading-backend="),
    "servers share no KV cache; --kv-offload FOLDER keeps a server's KV blocks on disk": "--kv-transfer-config= "
    "--kv-events-config= --ec-transfer-config= --ec-manager-config=",
    "--max-num-batched-tokens limits the tokens of a step": "--max-num-scheduled-tokens=",
    "--max-num-seqs limits the sequences of a step, and --max-queue those that wait": "--max-num-active-seqs= "
    "--max-num-queued-tokens=",
    "servers of several models have /sleep and /wake_up without it, also with one model and --max-loaded-models 1 "
    "(docs/many-models.md)": "--enable-sleep-mode --sleep-mode-backend= --sleep-mode-offload-cudagraph "
    "--sleep-preserve-parameter-names=*",
    "weights are read from files alone; start the server again to change them": "--weight-transfer-config=",
    "vLLM's classes do not exist here; --middleware adds code around requests": "--scheduler-cls= --worker-cls= "
    "--worker-extension-cls= --additional-config= --override-neuron-config=",
    "requests have logit_bias, bad_words, allowed_token_ids and structured output instead": "--logits-processors=* "
    "--logits-processor-pattern=",
    "parsers are built in: see --tool-call-parser and --reasoning-parser": "--tool-parser-plugin= "
    "--reasoning-parser-plugin= --reasoning-config=",
    "tool calls in this format are not parsed: leave it out, and the format is looked for in the chat template "
    "(docs/structured-output.md)": _of(
        "--tool-call-parser",
        "beam dots hf k2_horizon muse musespark1x plamo3 step5",
    ),
    "reasoning in this format is not parsed: leave it out, and the format is looked for in the chat template "
    "(docs/structured-output.md)": _of(
        "--reasoning-parser",
        "beam granite_thinking_parser hf k2_horizon minicpmv muse musespark1x plamo3 step5",
    ),
    "it leaves the reasoning in the answer; use minimax_m2, which separates it, or none": _of(
        "--reasoning-parser", "minimax_m2_append_think"
    ),
    "a request's effort is mapped to the nearest one that the chat template knows": ("--reasoning-effort-map="),
    "clients run tools, never the server": "--tool-server=",
    "calls follow their schema if tool_choice requires a call": "--tool-strict-level=",
    "requests use guided_whitespace_pattern and additionalProperties instead": (
        "--guided-decoding-disable-any-whitespace --guided-decoding-disable-additional-properties"
    ),
    "prompts are text or token ids": "--enable-prompt-embeds",
    "use --log-level and --log-format json": "--logging-config= --log-config-file=",
    "times are on /metrics, in the log and in --otlp-traces-endpoint": "--enable-per-request-metrics "
    "--per-request-spec-decode-metrics= --enable-layerwise-nvtx-tracing --custom-histogram-buckets=",
    "tidewheel bench --profile measures kernels": "--profiler-config=",
    "Python's own ciphers are used; a proxy may choose others": "--ssl-ciphers=",
    "raise the timeouts of the proxy that drops idle streams": "--sse-keep-alive-interval=",
    "system_fingerprint is always made from the version and the model's name": "--fingerprint-mode= "
    "--fingerprint-value=",
    "logits are not returned; log-probabilities are those of the model's own logits": "--logprobs-mode=",
    "answers have only text, token ids and log-probabilities": "--enable-return-routed-experts "
    "--return-sampling-mask "
    "--enable-trace-replay --aux-output-config= --watermark-config=",
    "attention is computed in the type of the model's weights; see --dtype": "--override-attention-dtype=",
    "such models are not served; docs/models.md lists those that are": "--diffusion-config= --engram-config=",
}

NOT_YET = {
    "such adapters are not served; those that peft saves as LoRA are, with --enable-lora": "--default-mm-loras= "
    "--enable-tower-connector-lora --enable-mixed-moe-lora-format "
    "--enable-moe-shared-loras --max-lora-cls-labels= --qlora-adapter-name-or-path= --enable-prompt-adapter "
    "--prompt-adapters=* --max-prompt-adapters= --max-prompt-adapter-token=",
    "each adapter's own files name the layers that it changes": "--lora-target-modules=*",
    "drafting changes no token and no log-probability; leave it out": "--spec-decoding-acceptance-method= "
    "--typical-acceptance-sampler-posterior-threshold= --typical-acceptance-sampler-posterior-alpha=",
    "all frames of a video that are taken are computed, and sound is not served": "--video-pruning-rate= "
    "--video-pruning-method= --omni",
    "the chat template and the model's files say what stands for an image": "--mm-placeholder-str-override=",
    "requests bring images, not embeddings": "--enable-mm-embeds",
    "the weights that compute images are stored as the checkpoint has them": "--mm-encoder-fp8-scale-path= "
    "--mm-encoder-fp8-scale-save-path= --mm-encoder-fp8-scale-save-margin=",
    "a server computes images and text": "--mm-encoder-only",
    "requests may change sizes alone, within the room that the server has": "--trust-request-mm-kwargs",
    "the model computes images itself; use pixel_values, or leave it out": "--image-input-type=",
    "the processor is that of the model's own files; leave it out": "--image-processor= --image-processor-revision=",
    "images are sent as files, not as tensors; leave it out": "--disable-image-processor",
}
"""Refused until the server has an option of that name."""
