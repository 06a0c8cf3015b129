"""The names of tensors in GGUF files, by the names in Hugging Face's checkpoints.

Names of files: https://github.com/ggml-org/llama.cpp/blob/master/gguf-py/gguf/constants.py.
"""

from __future__ import annotations

from collections.abc import Container

TOP = {
    "model.embed_tokens.weight": "token_embd.weight",
    "model.norm.weight": "output_norm.weight",
    "lm_head.weight": "output.weight",
    "lm_head.bias": "output.bias",
    "model.norm.bias": "output_norm.bias",
    "model.final_layernorm.weight": "output_norm.weight",
    "model.final_layernorm.bias": "output_norm.bias",
    "backbone.embeddings.weight": "token_embd.weight",
    "backbone.norm_f.weight": "output_norm.weight",
    "transformer.wte.weight": "token_embd.weight",
    "transformer.wpe.weight": "position_embd.weight",
    "transformer.word_embeddings.weight": "token_embd.weight",
    "transformer.word_embeddings_layernorm.weight": "token_embd_norm.weight",
    "transformer.word_embeddings_layernorm.bias": "token_embd_norm.bias",
    "transformer.ln_f.weight": "output_norm.weight",
    "transformer.ln_f.bias": "output_norm.bias",
    "transformer.norm_f.weight": "output_norm.weight",
    "gpt_neox.embed_in.weight": "token_embd.weight",
    "gpt_neox.final_layer_norm.weight": "output_norm.weight",
    "gpt_neox.final_layer_norm.bias": "output_norm.bias",
    "embed_out.weight": "output.weight",
}
MODULES = {
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "self_attn.qkv_proj": "attn_qkv",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "mlp.gate_up_proj": "ffn_up",
    "input_layernorm": "attn_norm",
    # Of a layer for drafts.
    "enorm": "nextn.enorm",
    "hnorm": "nextn.hnorm",
    "eh_proj": "nextn.eh_proj",
    "shared_head.norm": "nextn.shared_head_norm",
}
# Qwen's layer for drafts lies beside the model's. Where other checkpoints have it as one more of the layers, its
# tensors have these names.
QWEN_MTP = {
    "mtp.pre_fc_norm_embedding.weight": "enorm.weight",
    "mtp.pre_fc_norm_hidden.weight": "hnorm.weight",
    "mtp.fc.weight": "eh_proj.weight",
    "mtp.norm.weight": "shared_head.norm.weight",
}
PRE_NORMS = {"post_attention_layernorm": "ffn_norm"}
POST_ATTENTION_NORM = {"post_attention_layernorm": "post_attention_norm"}
SANDWICH_NORMS = {
    "post_attention_layernorm": "post_attention_norm",
    "pre_feedforward_layernorm": "ffn_norm",
    "post_feedforward_layernorm": "post_ffw_norm",
}
# What is added after a residual block only, and the same with GLM-4's names for it.
POST_NORMS = {
    "post_attention_layernorm": "post_attention_norm",
    "post_feedforward_layernorm": "post_ffw_norm",
}
GLM_NORMS = {**PRE_NORMS, "post_self_attn_layernorm": "post_attention_norm", "post_mlp_layernorm": "post_ffw_norm"}
# Modules with names of their own.
PHI = {"self_attn.dense": "attn_output", "mlp.fc1": "ffn_up", "mlp.fc2": "ffn_down"}
STARCODER2 = {**PRE_NORMS, "mlp.c_fc": "ffn_up", "mlp.c_proj": "ffn_down"}
HUNYUAN = {**PRE_NORMS, "self_attn.query_layernorm": "attn_q_norm", "self_attn.key_layernorm": "attn_k_norm"}
GPT2 = {
    "ln_1": "attn_norm",
    "ln_2": "ffn_norm",
    "attn.c_attn": "attn_qkv",
    "attn.c_proj": "attn_output",
    "mlp.c_fc": "ffn_up",
    "mlp.c_proj": "ffn_down",
}
NEOX = {
    **PRE_NORMS,
    "attention.query_key_value": "attn_qkv",
    "attention.dense": "attn_output",
    "mlp.dense_h_to_4h": "ffn_up",
    "mlp.dense_4h_to_h": "ffn_down",
}
BLOOM = {**NEOX, "self_attention.query_key_value": "attn_qkv", "self_attention.dense": "attn_output"}
FALCON = {**BLOOM, "ln_attn": "attn_norm_2", "ln_mlp": "attn_norm"}
MPT = {
    "norm_1": "attn_norm",
    "norm_2": "ffn_norm",
    "attn.Wqkv": "attn_qkv",
    "attn.out_proj": "attn_output",
    "ffn.up_proj": "ffn_up",
    "ffn.down_proj": "ffn_down",
}
INTERNLM2 = {
    "attention_norm": "attn_norm",
    "attention.wo": "attn_output",
    "ffn_norm": "ffn_norm",
    "feed_forward.w1": "ffn_gate",
    "feed_forward.w3": "ffn_up",
    "feed_forward.w2": "ffn_down",
}
INTERNLM2_TOP = {"model.tok_embeddings.weight": "token_embd.weight", "output.weight": "output.weight"}
# What its checkpoints hold in one matrix.
INTERNLM2_HEADS = {f"{head}.{kind}": f"attn_{head}.{kind}" for head in ("q", "k", "v") for kind in ("weight", "bias")}
LLAMA4 = {
    **PRE_NORMS,
    "feed_forward.gate_proj": "ffn_gate",
    "feed_forward.up_proj": "ffn_up",
    "feed_forward.down_proj": "ffn_down",
}


def has_qkv(tensors: Container[str], layer: int, of: str, kind: str = "weight") -> bool:
    """Whether a layer has the tensor `of` queries (q), keys (k) or values (v), which may be in one with the others."""
    return any(f"blk.{layer}.attn_{name}.{kind}" in tensors for name in (of, "qkv"))
