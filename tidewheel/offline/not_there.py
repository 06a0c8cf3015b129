"""Names that vLLM's classes have and these lack: the error says what to use instead."""

from __future__ import annotations

from typing import TYPE_CHECKING, NoReturn

from tidewheel.engine.errors import InvalidRequestError

_INSTEAD = {
    "encode() gives it, with PoolingParams(task='token_classify')": "reward",
    "LLM and AsyncLLM have it": "classify",
    "the model stays in memory; shutdown() frees it, and a new object loads it again": "sleep wake_up is_sleeping "
    "pause_generation resume_generation is_paused release_kv_cache_memory",
    "the model is not a torch module, and no worker processes run it; `tidewheel inspect` describes it": (
        "collective_rpc apply_model model_executor engine_core get_world_size"
    ),
    "a model's weights cannot be changed; make a new object for others": "init_weight_transfer_engine "
    "start_weight_update update_weights finish_weight_update",
    "tidewheel bench --profile measures kernels": "start_profile stop_profile profile",
    "each RequestOutput has metrics, and `tidewheel serve` has more on /metrics": "get_metrics do_log_stats "
    "do_log_stats_with_interval logger_manager",
    "only the server sends traces": "is_tracing_enabled",
    "use get_tokenizer()": "tokenizer",
    "use has_unfinished_requests()": "has_unfinished_requests_dp",
    "pass tokenizer= when you load the model; apply_chat_template of get_tokenizer() makes prompts": (
        "set_tokenizer preprocess_chat preprocess_cmpl renderer input_preprocessor processor input_processor"
    ),
    "llm_engine takes requests one by one, and generate() a list": "enqueue enqueue_chat wait_for_completion",
    "images are found in memory only by their content; mm_processor_cache_gb=0 keeps none": "reset_mm_cache "
    "reset_encoder_cache",
    "name the adapter with lora_request; it is loaded when it is first named": "add_lora remove_lora list_loras "
    "pin_lora",
    "there are no config objects; pass arguments when you load the model": "create_engine_config "
    "create_model_config create_speculative_config vllm_config get_vllm_config get_decoding_config "
    "get_scheduler_config get_parallel_config get_lora_config cache_config scheduler_config parallel_config "
    "lora_config",
    "check_health() raises an error if the engine has failed": "errored is_running is_stopped dead_error",
    "from_engine_args() makes one": "from_vllm_config",
    "LLM has it": "beam_search",
    "use decode() for each": "batch_decode",
    "use id_to_token()": "convert_ids_to_tokens",
    "use token_to_id()": "convert_tokens_to_ids",
    "use special_tokens_map": "all_special_tokens all_special_ids special_tokens",
    "prompts are batched without padding": "pad_token pad_token_id padding_side pad",
    "use id_to_token() for ids below vocab_size": "get_vocab vocab",
}
_WHY = {name: why for why, names in _INSTEAD.items() for name in names.split()}


class NotThereError(InvalidRequestError, AttributeError):
    """An attribute of vLLM's that this class lacks: `hasattr` is False."""


class NamesOfVllm:
    """Base of a class with vLLM's names. For those that it lacks, the error says what to use instead."""

    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> NoReturn:
            owner = type(self).__name__
            if name in _WHY:
                raise NotThereError(f"{owner}.{name} is not supported: {_WHY[name]}", name)
            raise AttributeError(f"{owner!r} object has no attribute {name!r}", name=name, obj=self)
