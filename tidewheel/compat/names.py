"""Where vLLM has the names that scripts import: the modules, what each has, and where that is here."""

from __future__ import annotations

_OUTPUTS = (
    "ClassificationOutput ClassificationRequestOutput CompletionOutput EmbeddingOutput EmbeddingRequestOutput "
    "PoolingOutput PoolingRequestOutput RequestOutput ScoringOutput ScoringRequestOutput"
)
_PARAMS = "BeamSearchParams GuidedDecodingParams RequestOutputKind SamplingParams StructuredOutputsParams"
_PROMPTS = "PromptType TextPrompt TokensPrompt"

MODULES = {
    "config": "",
    "engine.arg_utils": "AsyncEngineArgs EngineArgs",
    "engine.async_llm_engine": "AsyncLLMEngine",
    "engine.llm_engine": "LLMEngine",
    "entrypoints": "",
    "entrypoints.llm": "LLM",
    "entrypoints.openai": "",
    "inputs": _PROMPTS,
    "inputs.data": _PROMPTS,
    "logprobs": "Logprob",
    "lora": "",
    "lora.request": "LoRARequest",
    "outputs": _OUTPUTS,
    "pooling_params": "PoolingParams",
    "sampling_params": _PARAMS,
    "sequence": "Logprob RequestMetrics",
    "utils": "FlexibleArgumentParser random_uuid",
    "utils.argparse_utils": "FlexibleArgumentParser",
    "v1": "",
    "v1.engine": "",
    "v1.engine.async_llm": "AsyncLLM",
    "v1.engine.llm_engine": "LLMEngine",
}
"""The names of each module. They are in `tidewheel` itself, or in SOURCES."""

SOURCES = {
    "FlexibleArgumentParser": "offline.argument_parser",
    "Logprob": "offline.outputs",
    "RequestMetrics": "offline.outputs",
    "random_uuid": "compat.utils",
}

COMMANDS = {"entrypoints.openai.api_server": "api_server.py", "entrypoints.openai.run_batch": "run_batch.py"}
"""The files of modules that `python -m` runs."""
