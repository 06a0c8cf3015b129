"""GGUF files of tiny models, written by the `gguf` package as llama.cpp's converter would write them."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import gguf
import gguf_hybrids
import gguf_layouts
import models_zoo
import numpy as np
from numpy.typing import NDArray
from safetensors.numpy import load_file

Quantize = Callable[[str, NDArray[np.float32]], tuple[NDArray[Any], Any]]

_TOP = {
    "model.embed_tokens.weight": "token_embd.weight",
    "model.norm.weight": "output_norm.weight",
    "lm_head.weight": "output.weight",
}
_ENUM = {
    "llama": gguf.MODEL_ARCH.LLAMA, "qwen2": gguf.MODEL_ARCH.QWEN2, "qwen3": gguf.MODEL_ARCH.QWEN3,
    "gemma": gguf.MODEL_ARCH.GEMMA,
    "gemma2": gguf.MODEL_ARCH.GEMMA2, "gemma3_text": gguf.MODEL_ARCH.GEMMA3, "phi3": gguf.MODEL_ARCH.PHI3,
    "granite": gguf.MODEL_ARCH.GRANITE, "smollm3": gguf.MODEL_ARCH.SMOLLM3, "olmo2": gguf.MODEL_ARCH.OLMO2,
    "exaone4": gguf.MODEL_ARCH.EXAONE4, "glm4": gguf.MODEL_ARCH.GLM4, "ernie4_5": gguf.MODEL_ARCH.ERNIE4_5,
    "hunyuan_v1_dense": gguf.MODEL_ARCH.HUNYUAN_DENSE, "ministral3": gguf.MODEL_ARCH.MISTRAL3,
    "cohere": gguf.MODEL_ARCH.COMMAND_R, "cohere2": gguf.MODEL_ARCH.COHERE2, "stablelm": gguf.MODEL_ARCH.STABLELM,
    "starcoder2": gguf.MODEL_ARCH.STARCODER2, "phi": gguf.MODEL_ARCH.PHI2, "gpt2": gguf.MODEL_ARCH.GPT2,
    "gpt_bigcode": gguf.MODEL_ARCH.STARCODER, "gpt_neox": gguf.MODEL_ARCH.GPTNEOX, "falcon": gguf.MODEL_ARCH.FALCON,
    "bloom": gguf.MODEL_ARCH.BLOOM, "mpt": gguf.MODEL_ARCH.MPT,
    "mixtral": gguf.MODEL_ARCH.LLAMA, "qwen2_moe": gguf.MODEL_ARCH.QWEN2MOE, "qwen3_moe": gguf.MODEL_ARCH.QWEN3MOE,
    "olmoe": gguf.MODEL_ARCH.OLMOE, "granitemoe": gguf.MODEL_ARCH.GRANITE_MOE, "gpt_oss": gguf.MODEL_ARCH.GPT_OSS,
    "glm4_moe": gguf.MODEL_ARCH.GLM4_MOE, "ernie4_5_moe": gguf.MODEL_ARCH.ERNIE4_5_MOE,
    "gemma3n_text": gguf.MODEL_ARCH.GEMMA3N, "gemma4_text": gguf.MODEL_ARCH.GEMMA4,
    "deepseek_v2": gguf.MODEL_ARCH.DEEPSEEK2,
    "deepseek_v3": gguf.MODEL_ARCH.DEEPSEEK2, "glm4_moe_lite": gguf.MODEL_ARCH.DEEPSEEK2,
    "minicpm3": gguf.MODEL_ARCH.MINICPM3, "olmo": gguf.MODEL_ARCH.OLMO, "olmo3": gguf.MODEL_ARCH.OLMO2,
    "glm": gguf.MODEL_ARCH.CHATGLM, "llama4_text": gguf.MODEL_ARCH.LLAMA4,
    "hunyuan_v1_moe": gguf.MODEL_ARCH.HUNYUAN_MOE, "granitemoeshared": gguf.MODEL_ARCH.GRANITE_MOE,
    "phimoe": gguf.MODEL_ARCH.PHIMOE,
}  # fmt: skip
_GRANITES = ("granite", "granitemoe", "granitemoeshared", "granitemoehybrid")
_PERMUTED = ("llama", "smollm3", "mixtral", "ministral3", "olmo", "bamba", *_GRANITES)
_COUNTS = ("num_local_experts", "n_routed_experts", "num_experts")
_LAYER = re.compile(r"(?:model|backbone)\.layers\.(\d+)\.(.+)")


def as_float32(name: str, data: NDArray[np.float32]) -> tuple[NDArray[Any], Any]:
    return data, gguf.GGMLQuantizationType.F32


def quantized(kind: Any) -> Quantize:
    """Matrices, and stacks of them, in that type; vectors in float32."""

    def quantize(name: str, data: NDArray[np.float32]) -> tuple[NDArray[Any], Any]:
        return (gguf.quants.quantize(data, kind), kind) if data.ndim >= 2 else as_float32(name, data)

    return quantize


def write(
    path: Path,
    model: Any,
    tokenizer: Any = None,
    pre: str = "gpt-2",
    quantize: Quantize = as_float32,
    arch: Any = None,
    old: bool = False,
) -> Path:
    """The transformers model, and its tokenizer if there is one, in one file.

    `arch` is another architecture that has the same weights. `old`: as earlier converters wrote it.
    """
    config = model.config
    if config.model_type == "gemma4_text":
        config.allow_global_per_layer_attribute_access = True
    arch = arch or gguf_hybrids.architecture(config) or _ENUM[config.model_type]
    names = gguf.get_tensor_name_map(arch, config.num_hidden_layers)
    writer = gguf.GGUFWriter(path, gguf.MODEL_ARCH_NAMES[arch])
    _write_config(writer, config)
    gguf_layouts.adjust(writer, config, old)
    for name, data in gguf_layouts.model_tensors(model).items():
        writer.add_tensor(name, data)
    ends = (".weight", ".bias")
    for name, parameter in model.state_dict().items():
        if (name == "lm_head.weight" and config.tie_word_embeddings) or gguf_layouts.STACKED.match(name):
            continue
        data = parameter.float().numpy()
        part = _LAYER.fullmatch(name)
        if part and (
            moved := gguf_layouts.layer_tensors(config, part[2], data, old) or _of_experts(config, part[2], data)
        ):
            for stored_name, one in moved.items():
                stored, kind = quantize(stored_name, np.ascontiguousarray(one))
                writer.add_tensor(f"blk.{part[1]}.{stored_name}", stored, raw_dtype=kind)
            continue
        for original, part in gguf_hybrids.converted(name, data, config, old):
            is_named = original.startswith("blk.")
            found = original if is_named else names.get_name(original, ends)
            found = found or names.get_name(original.removeprefix("transformer."), ends)
            assert found is not None, original
            stored, kind = quantize(found, np.ascontiguousarray(_changed(original, part, config)))
            writer.add_tensor(found, stored, raw_dtype=kind)
    if tokenizer is not None:
        write_tokenizer(writer, tokenizer, pre)
    return finish(writer)


def write_adapter(path: Path, config: Any, folder: Path, kind: Any = gguf.GGMLQuantizationType.F32) -> Path:
    """The adapter that peft saved to `folder`, of a model of transformers' `config`, as llama.cpp's converter would."""
    arch = gguf_hybrids.architecture(config) or _ENUM[config.model_type]
    names = gguf.get_tensor_name_map(arch, config.num_hidden_layers)
    writer = gguf.GGUFWriter(path, gguf.MODEL_ARCH_NAMES[arch])
    writer.add_type("adapter")
    writer.add_string("adapter.type", "lora")
    said = json.loads((folder / "adapter_config.json").read_text())
    writer.add_float32("adapter.lora.alpha", float(said["lora_alpha"]))
    tensors = _with_stacked_experts(load_file(folder / "adapter_model.safetensors"))
    for key in [key for key in tensors if key.endswith(("lora_A.weight", "lora_embedding_A"))]:
        module = key.removeprefix("base_model.model.").rpartition(".lora_")[0] + ".weight"
        a, b = tensors[key], tensors["B".join(key.rsplit("A", 1))]
        if key.endswith("lora_embedding_A"):
            a = a.T
        elif module.endswith("linear_attn.out_proj.weight"):
            ((_, a),) = gguf_hybrids.converted(module, a, config)
        else:
            ((_, b),) = gguf_hybrids.converted(module, b, config)
        stored = names.get_name(module, (".weight",))
        for part, data in (("a", a), ("b", _changed(module, b, config))):
            of_kind = kind if data.shape[-1] % gguf.GGML_QUANT_SIZES[kind][0] == 0 else gguf.GGMLQuantizationType.F32
            blocks = gguf.quants.quantize(np.ascontiguousarray(data), of_kind)
            writer.add_tensor(f"{stored}.lora_{part}", blocks, raw_dtype=of_kind)
    return finish(writer)


def _with_stacked_experts(tensors: dict[str, NDArray[np.float32]]) -> dict[str, NDArray[np.float32]]:
    """Matrices of all experts of a layer as one tensor, by the name without their number."""
    found: dict[str, Any] = {}
    for key, data in tensors.items():
        of_experts = re.fullmatch(r"(.+\.experts)\.(\d+)\.(.+)", key)
        if of_experts is None:
            found[key] = data
        else:
            found.setdefault(f"{of_experts[1]}.{of_experts[3]}", {})[int(of_experts[2])] = data
    return {
        key: np.stack([data[i] for i in range(len(data))]) if isinstance(data, dict) else data
        for key, data in found.items()
    }


def _changed(name: str, data: NDArray[np.float32], config: Any) -> NDArray[np.float32]:
    """What a file holds of a tensor that keeps its name."""
    is_permuted = config.model_type in _PERMUTED and name.split(".")[-2] in ("q_proj", "k_proj")
    if is_permuted:
        count = config.num_attention_heads if ".q_proj." in name else _kv_heads(config)
        data = data.reshape(count, 2, -1, *data.shape[1:]).swapaxes(1, 2).reshape(data.shape)
    plus_one = config.model_type in ("gemma", "gemma2", "gemma3_text", *gguf_hybrids.DELTA_NETS)
    if plus_one and name.endswith("norm.weight") and not name.endswith("linear_attn.norm.weight"):
        data = data + 1
    if config.model_type == "gpt2" and name.split(".")[-2] in ("c_attn", "c_proj", "c_fc"):
        data = data.T if data.ndim == 2 else data
    if config.model_type in ("gpt_neox", "falcon", "bloom") and "query_key_value" in name:
        data = _qkv_in_rows(data, _kv_heads(config), config.hidden_size // config.num_attention_heads)
    return data


def _of_experts(config: Any, name: str, data: NDArray[np.float32]) -> dict[str, NDArray[np.float32]]:
    """The tensors of a file that are made of one of experts, of routers and of sinks; none of others."""
    for block in ("mlp.", "block_sparse_moe.", "mixer.", "feed_forward."):
        name = name.removeprefix(block)
    in_turn, transposed = config.model_type == "gpt_oss", config.model_type in ("gpt_oss", "llama4_text")
    if name.startswith("experts.gate_up_proj"):
        kind = "bias" if name.endswith("bias") else "weight"
        data = data.swapaxes(1, 2) if transposed and kind == "weight" else data
        half = data.shape[1] // 2
        gate, up = (data[:, ::2], data[:, 1::2]) if in_turn else (data[:, :half], data[:, half:])
        return {f"ffn_gate_exps.{kind}": gate, f"ffn_up_exps.{kind}": up}
    if name.startswith("experts.down_proj"):
        kind = "bias" if name.endswith("bias") else "weight"
        return {f"ffn_down_exps.{kind}": data.swapaxes(1, 2) if transposed and kind == "weight" else data}
    if config.model_type == "granitemoeshared" and name == "shared_mlp.input_linear.weight":
        gate, up = np.split(data, 2)
        return {"ffn_gate_shexp.weight": gate, "ffn_up_shexp.weight": up}
    if name.startswith("experts.up_proj"):
        return {"ffn_up_exps.weight": data}
    simple = {
        "gate.weight": "ffn_gate_inp.weight",
        "router.weight": "ffn_gate_inp.weight",
        "router.bias": "ffn_gate_inp.bias",
        "gate.e_score_correction_bias": "exp_probs_b.bias",
        "gate.moe_statics.e_score_correction_bias": "exp_probs_b.bias",
        "expert_bias": "exp_probs_b.bias",
        "shared_expert_gate.weight": "ffn_gate_inp_shexp.weight",
        "self_attn.sinks": "attn_sinks.weight",
    }
    return {simple[name]: data.squeeze()} if name in simple else {}


def _kv_heads(config: Any) -> int:
    if config.model_type == "falcon" and not config.new_decoder_architecture:
        return 1 if config.multi_query else int(config.num_attention_heads)
    names = ("num_kv_heads", "num_key_value_heads")
    return int(next((found for name in names if (found := getattr(config, name, None))), config.num_attention_heads))


def _qkv_in_rows(data: NDArray[np.float32], kv_heads: int, head_dim: int) -> NDArray[np.float32]:
    """From queries, key and value of each KV head to all queries, all keys, all values."""
    groups = data.reshape(kv_heads, -1, head_dim, *data.shape[1:])
    parts = (groups[:, :-2], groups[:, -2:-1], groups[:, -1:])
    return np.concatenate([part.reshape(-1, *data.shape[1:]) for part in parts])


def finish(writer: Any) -> Path:
    """Writes everything that the writer was given."""
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    path: Path = writer.path
    return path


def _write_config(writer: Any, config: Any) -> None:
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    length = getattr(config, "max_position_embeddings", None) or getattr(config, "max_seq_len", 2048)
    writer.add_context_length(length)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    if config.model_type == "mamba2":
        writer.add_feed_forward_length(0)
        writer.add_head_count(0)
        writer.add_layer_norm_rms_eps(config.layer_norm_epsilon)
        gguf_hybrids.write_config(writer, config)
        return
    inner = ("intermediate_size", "ffn_hidden_size", "n_inner")
    sizes = [size for name in inner if (size := getattr(config, name, None))]
    if config.model_type != "nemotron_h":
        writer.add_feed_forward_length(sizes[0] if sizes else 4 * config.hidden_size)
    writer.add_head_count(config.num_attention_heads)
    kv_heads, attending = _kv_heads(config), gguf_hybrids.attending(config)
    writer.add_head_count_kv([kv_heads if attends else 0 for attends in attending] if attending else kv_heads)
    if rms_norm_eps := getattr(config, "rms_norm_eps", None) or getattr(config, "norm_eps", None):
        writer.add_layer_norm_rms_eps(rms_norm_eps)
    if config.model_type == "nemotron_h":
        writer.add_layer_norm_rms_eps(config.layer_norm_epsilon)
    names = ("layer_norm_eps", "layer_norm_epsilon", "norm_epsilon")
    for eps in [eps for name in names if (eps := getattr(config, name, None))]:
        writer.add_layer_norm_eps(eps)
    gguf_hybrids.write_config(writer, config)
    writer.add_key_length(head_dim)
    writer.add_value_length(head_dim)
    _write_rope(writer, config, head_dim)
    _write_options(writer, config)


def _write_rope(writer: Any, config: Any, head_dim: int) -> None:
    rope: Mapping[str, Any] | None = getattr(config, "rope_parameters", None)
    if rope is None:
        return
    rope = rope.get("full_attention", rope)
    writer.add_rope_freq_base(rope["rope_theta"])
    writer.add_rope_dimension_count(int(head_dim * rope.get("partial_rotary_factor", 1.0)))
    kind = rope["rope_type"]
    if rope.get("alpha") and writer.arch == "hunyuan_vl":
        writer.add_rope_scaling_alpha(rope["alpha"])
        kind = "default"
    elif rope.get("alpha"):
        del writer.kv_data[0][f"{writer.arch}.rope.freq_base"]
        writer.add_rope_freq_base(rope["rope_theta"] * rope["alpha"] ** (head_dim / (head_dim - 2)))
        kind = "default"
    if rope.get("llama_4_scaling_beta"):
        writer.add_attn_temperature_scale(rope["llama_4_scaling_beta"])
        writer.add_rope_scaling_yarn_log_mul(rope["mscale_all_dim"])
    if kind == "llama3":
        from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

        scaled, _ = ROPE_INIT_FUNCTIONS[kind](config, "cpu")
        plain = rope["rope_theta"] ** -(np.arange(0, head_dim, 2) / head_dim)
        writer.add_tensor("rope_freqs.weight", (plain / scaled.numpy()).astype(np.float32))
    elif kind == "longrope":
        writer.add_tensor("rope_factors_long.weight", np.array(rope["long_factor"], np.float32))
        writer.add_tensor("rope_factors_short.weight", np.array(rope["short_factor"], np.float32))
        writer.add_rope_scaling_orig_ctx_len(rope["original_max_position_embeddings"])
    elif kind not in ("default", "proportional"):
        writer.add_rope_scaling_type(gguf.RopeScalingType(kind))
        writer.add_rope_scaling_factor(rope["factor"])
        if kind == "yarn":
            writer.add_rope_scaling_orig_ctx_len(rope["original_max_position_embeddings"])


def _write_options(writer: Any, config: Any) -> None:
    if config.model_type in ("phi3", "gemma2", "gemma3_text", "cohere2", "exaone4"):
        writer.add_sliding_window(config.sliding_window or 0)
    if config.model_type == "gemma2":
        writer.add_attn_logit_softcapping(config.attn_logit_softcapping)
    if config.model_type.startswith("gemma") and getattr(config, "final_logit_softcapping", None):
        writer.add_final_logit_softcapping(config.final_logit_softcapping)
    if config.model_type == "gemma3_text":
        writer.add_rope_freq_base_swa(config.rope_parameters["sliding_attention"]["rope_theta"])
        writer.add_sliding_window_pattern(config.layer_types.index("full_attention") + 1)
    _write_experts(writer, config)
    if config.model_type == "exaone4" and config.sliding_window:
        writer.add_sliding_window_pattern([kind == "sliding_attention" for kind in config.layer_types])
    if config.model_type in ("cohere", "cohere2"):
        writer.add_logit_scale(config.logit_scale)
    if config.model_type == "mpt":
        writer.add_max_alibi_bias(config.attn_config.alibi_bias_max)
    if config.model_type == "gpt_neox":
        writer.add_parallel_residual(config.use_parallel_residual)
    if config.model_type in _GRANITES:
        writer.add_attention_scale(config.attention_multiplier)
        writer.add_embedding_scale(config.embedding_multiplier)
        writer.add_residual_scale(config.residual_multiplier)
        writer.add_logit_scale(config.logits_scaling)


def _write_experts(writer: Any, config: Any) -> None:
    count = next((n for name in _COUNTS if (n := getattr(config, name, None)) is not None), None)
    if count is None or gguf_hybrids.architecture(config) == gguf.MODEL_ARCH.NEMOTRON_H:
        return
    writer.add_expert_count(count)
    if used := getattr(config, "num_experts_per_tok", None):
        writer.add_expert_used_count(used)
    if size := getattr(config, "moe_intermediate_size", None):
        writer.add_expert_feed_forward_length(size)
    if config.model_type == "qwen2_moe":
        writer.add_expert_shared_feed_forward_length(config.shared_expert_intermediate_size)
    if config.model_type == "granitemoeshared":
        writer.add_expert_shared_feed_forward_length(config.shared_intermediate_size)
    if config.model_type == "gpt_oss":
        writer.add_sliding_window(config.sliding_window)
    if config.model_type == "glm4_moe":
        writer.add_expert_shared_count(config.n_shared_experts)
        writer.add_leading_dense_block_count(config.first_k_dense_replace)
        writer.add_expert_weights_scale(config.routed_scaling_factor)
        writer.add_expert_weights_norm(config.norm_topk_prob)
        writer.add_expert_gating_func(gguf.ExpertGatingFuncType.SIGMOID)
        writer.add_expert_group_count(config.n_group)
        writer.add_expert_group_used_count(config.topk_group)
    if config.model_type == "ernie4_5_moe":
        writer.add_expert_shared_count(config.moe_num_shared_experts)
        writer.add_leading_dense_block_count(config.moe_layer_start_index)
        writer.add_interleave_moe_layer_step(config.moe_layer_interval)


def write_tokenizer(writer: Any, tokenizer: Any, pre: str) -> None:
    """A byte-level tokenizer of transformers."""
    fast = tokenizer.backend_tokenizer
    model = json.loads(fast.to_str())["model"]
    added = fast.get_added_tokens_decoder()
    tokens, types = [], []
    for token_id in range(fast.get_vocab_size()):
        tokens.append(fast.id_to_token(token_id))
        kind = gguf.TokenType.NORMAL
        if token_id in added:
            kind = gguf.TokenType.CONTROL if added[token_id].special else gguf.TokenType.USER_DEFINED
        types.append(kind)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre)
    writer.add_token_list(tokens)
    writer.add_token_types(types)
    writer.add_token_merges([" ".join(merge) for merge in model["merges"]])
    if tokenizer.bos_token_id is not None:
        writer.add_bos_token_id(tokenizer.bos_token_id)
    if tokenizer.eos_token_id is not None:
        writer.add_eos_token_id(tokenizer.eos_token_id)
    if tokenizer.chat_template:
        writer.add_chat_template(tokenizer.chat_template)


def zoo_file(path: Path, name: str, quantize: Quantize = as_float32) -> Path:
    """A model of the zoo, with the zoo's tokenizer."""
    return write(path, models_zoo.model(name), models_zoo.train_tokenizer(), quantize=quantize)
