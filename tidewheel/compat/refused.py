"""Names of vLLM that cannot be imported from here: errors that say why, and what to do instead.

Imported only when such a name is asked for, because the server starts without it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NoReturn

_OBJECTS_OF_OPTIONS = "options are no objects; give them to LLM or EngineArgs as keyword arguments, which can be dicts"
_NO_IMAGES = "prompts take images of PIL in multi_modal_data; vLLM's helpers for them, sound and video are not here"
_NO_PROCESSORS = "SamplingParams has logit_bias, bad_words, allowed_token_ids and structured_outputs instead"
_BUILT_IN = "kernels are built in and chosen at the start; `tidewheel devices` shows them"
_ONE_PROCESS = "the model runs in this process; `with LLM(...)`, or its shutdown(), frees all of it"
_ENGINES = "LLM, AsyncLLM and LLMEngine of `tidewheel` are the ways in"
_PARSERS = "no parsers are registered; --tool-call-parser and --reasoning-parser of `tidewheel serve` choose one"
_OWN_MODELS = "models are described in Tidewheel's own code, and no others are run; docs/models.md lists them"

_NAMES = {
    _OWN_MODELS: "ModelRegistry",
    _NO_PROCESSORS: "LogitsProcessor",
    _ONE_PROCESS: "destroy_model_parallel destroy_distributed_environment cleanup_dist_env_and_memory",
    "give pooler_config a dict with the same keys": "PoolerConfig",
    "a prompt is a text or token ids: TextPrompt or TokensPrompt": "EmbedsPrompt ExplicitEncoderDecoderPrompt",
    "PromptType is its name now": "PromptInputs PromptStrictInputs SingletonPrompt",
    "EngineArgs is its name now": "ServerArgs",
    "LLM(..., distributed_executor_backend='ray') connects to Ray itself, and `serve run tidewheel.ray:app` starts "
    "replicas there": "initialize_ray_cluster initialize_cluster",
    "servers share no KV cache; kv_offload='FOLDER' keeps a model's KV blocks on disk": (
        "KVTransferConfig KVEventsConfig"
    ),
    "kernels are built in; leave compilation_config and attention_config out": (
        "CompilationConfig CompilationMode CompilationLevel CUDAGraphMode PassConfig AttentionConfig"
    ),
    "give speculative_config a dict with the same keys": "SpeculativeConfig",
    "no usage statistics are sent; leave usage_context out": "UsageContext",
}
_MODULES = {
    _OWN_MODELS: "model_executor",
    _NO_IMAGES: "assets multimodal",
    _NO_PROCESSORS: "logits_process v1.sample",
    _BUILT_IN: "attention compilation _custom_ops device_allocator forward_context platforms scalar_type triton_utils",
    _ONE_PROCESS: "distributed executor worker v1.executor v1.worker",
    _ENGINES: "core engine.multiprocessing engine.output_processor engine.protocol v1 beam_search",
    _PARSERS: "reasoning tool_parsers entrypoints.openai.tool_parsers entrypoints.openai.reasoning_parsers",
    "LLM.get_tokenizer() gives the tokenizer": "tokenizers transformers_utils",
    "LLM.chat() renders conversations, and `tidewheel serve` those of clients": "entrypoints.chat_utils renderers",
    "`tidewheel serve` is the server; its options are its interface, and --middleware adds code to it": "entrypoints",
    "adapters are named with LoRARequest of tidewheel.lora.request": "lora",
    "code of plug-ins is not run": "plugins",
    "no usage statistics are sent; leave usage_context out": "usage",
    "logging.getLogger(__name__) makes a logger": "logger",
    "`tidewheel serve --help` names the environment variable of each option": "envs",
    "each RequestOutput has metrics, and `tidewheel serve` has more on /metrics": "engine.metrics v1.metrics",
    "`tidewheel bench` measures": "benchmarks profiler",
    "FlexibleArgumentParser and random_uuid are here; the others are vLLM's own helpers": "utils",
}


def _by_name(reasons: Mapping[str, str]) -> dict[str, str]:
    return {name: why for why, names in reasons.items() for name in names.split()}


_WHY = _by_name(_NAMES)
_WHY_NO_MODULE = _by_name(_MODULES)


def why_not(name: str) -> str | None:
    """Why there is no class or function of this name of vLLM's, and what to do instead; None for any other name."""
    return _WHY.get(name)


def refuse_import(path: str) -> None:
    """Raise ImportError if `path`, which was not found, is vLLM's: a module, or a name within one."""
    *modules, name = path.split(".")[1:]
    if name in _WHY:
        raise ImportError(f"{'.'.join(['tidewheel', *modules])} has no {name}: {_WHY[name]}")
    for end in range(len(modules) + 1, 0, -1):
        why = _WHY_NO_MODULE.get(".".join([*modules, name][:end]))
        if why is not None:
            raise ModuleNotFoundError(f"there is no {path}: {why}")


def refuse_name(module: str, name: str) -> NoReturn:
    """The `__getattr__` of a module that is no package. Raises ImportError for a name of vLLM's: of an AttributeError,
    `from module import name` would show nothing.
    """
    why = _WHY.get(name)
    if why is None and module == "tidewheel.config" and not name.startswith("_"):
        why = _OBJECTS_OF_OPTIONS
    if why is None:
        raise AttributeError(f"module {module!r} has no attribute {name!r}")
    raise ImportError(f"{module} has no {name}: {why}")
