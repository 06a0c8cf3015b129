"""The GGUF architectures that are supported, one entry each, and how a file of one becomes a config."""

from __future__ import annotations

import difflib

from ...errors import ModelError
from ...files.wording import shown
from ...models.config import MAX_LAYERS
from . import config_fields, experts, gemmas, hybrids, latents, names
from .architecture import GgufArchitecture, anyhow
from .config import Config, norm_eps, rope_by_sections
from .fields import Fields
from .reader import GgufFile

_Variants = tuple[GgufArchitecture, ...]


def variants_of(name: str) -> _Variants:
    """The models whose files have this `general.architecture`."""
    entry = ARCHITECTURES[name]
    return (entry,) if isinstance(entry, GgufArchitecture) else entry


def architecture_of(file: GgufFile) -> GgufArchitecture:
    """The file's architecture. Raises ModelError, naming it, for one that is not supported."""
    name = Fields(file).text("general.architecture")
    if name not in ARCHITECTURES:
        near = difflib.get_close_matches(name, ARCHITECTURES)
        like = f"similar names that are supported: {', '.join(near)}; " if near else ""
        raise ModelError(
            f"{file.path}: GGUF architecture {shown(name)} is not supported; {like}docs/models.md has the whole list"
        )
    for architecture in variants_of(name):
        if architecture.serves(Fields(file, f"{name}.")):
            return architecture
    raise ModelError(f"{file.path}: models of architecture {name} with experts are not supported")


def config_of(file: GgufFile) -> Config:
    """The model's config.json, made from the file. Raises ModelError, naming the file and the key."""
    architecture = architecture_of(file)
    fields = Fields(file, Fields(file).text("general.architecture") + ".")
    embedding = file.tensors.get("token_embd.weight")
    if embedding is None:
        raise ModelError(f"{file.path} has no tensor token_embd.weight: it holds no language model, or a part of one")
    layers = fields.integer("block_count")
    if layers > MAX_LAYERS:  # before there is anything of each
        raise fields.error("block_count", f"at most {MAX_LAYERS}")
    config: Config = {
        "architectures": [architecture.name],
        "vocab_size": embedding.shape[0],
        "hidden_size": fields.integer("embedding_length"),
        "num_hidden_layers": layers,
        "max_position_embeddings": fields.integer("context_length"),
        "tie_word_embeddings": "output.weight" not in file.tensors,
        **norm_eps(fields, architecture.layer_norm),
    }
    if architecture.attending:
        config["num_attention_heads"] = fields.integer("attention.head_count")
        config |= architecture.heads(fields, config)
        config |= architecture.rope(file, fields, config)
    return config | architecture.fields(file, fields, config)


ARCHITECTURES: dict[str, GgufArchitecture | _Variants] = {
    "llama": (
        GgufArchitecture("LlamaForCausalLM", rotated_pairs=True, fields=config_fields.llama),
        GgufArchitecture("MixtralForCausalLM", rotated_pairs=True, fields=experts.mixtral, serves=anyhow),
    ),
    "qwen2": GgufArchitecture("Qwen2ForCausalLM"),
    "qwen3": GgufArchitecture("Qwen3ForCausalLM"),
    "gemma": GgufArchitecture("GemmaForCausalLM", norms_plus_one=True),
    "gemma2": GgufArchitecture("Gemma2ForCausalLM", names.SANDWICH_NORMS, norms_plus_one=True, fields=gemmas.gemma(46)),
    "gemma3": GgufArchitecture("Gemma3ForCausalLM", names.SANDWICH_NORMS, norms_plus_one=True, fields=gemmas.gemma3),
    "phi3": GgufArchitecture("Phi3ForCausalLM", fields=config_fields.phi3),
    "phimoe": GgufArchitecture("PhiMoEForCausalLM", fields=experts.phimoe, serves=anyhow),
    "granite": GgufArchitecture("GraniteForCausalLM", rotated_pairs=True, fields=config_fields.granite),
    "qwen35": GgufArchitecture(
        "Qwen3_5ForCausalLM",
        hybrids.QWEN35_MODULES,
        norms_plus_one=True,
        fields=hybrids.qwen35,
        vectors=hybrids.DELTA_NET_TENSORS,
        rope=rope_by_sections(interleaved=True),
    ),
    "qwen35moe": GgufArchitecture(
        "Qwen3_5MoeForCausalLM",
        hybrids.QWEN35_MODULES,
        norms_plus_one=True,
        fields=hybrids.qwen35_moe,
        serves=anyhow,
        vectors=hybrids.DELTA_NET_TENSORS,
        rope=rope_by_sections(interleaved=True),
    ),
    "qwen3next": GgufArchitecture(
        "Qwen3NextForCausalLM",
        hybrids.QWEN35_MODULES,
        norms_plus_one=True,
        fields=hybrids.qwen3_next,
        serves=anyhow,
        vectors=hybrids.DELTA_NET_TENSORS,
        places=hybrids.delta_net_reference,
    ),
    "granitehybrid": GgufArchitecture(
        "GraniteMoeHybridForCausalLM",
        names.PRE_NORMS | hybrids.mamba_modules("mamba"),
        rotated_pairs=True,
        fields=config_fields.granite_hybrid,
        serves=anyhow,
        vectors=hybrids.mamba_tensors("mamba"),
        places=hybrids.mlp_reference,
    ),
    "falcon-h1": GgufArchitecture(
        "FalconH1ForCausalLM",
        hybrids.FALCON_H1_MODULES,
        fields=hybrids.falcon_h1,
        vectors=hybrids.FALCON_H1_TENSORS,
    ),
    "nemotron_h": GgufArchitecture(
        "NemotronHForCausalLM",
        hybrids.NEMOTRON_H_MODULES,
        fields=hybrids.nemotron_h,
        vectors=hybrids.mamba_tensors("mixer"),
    ),
    "nemotron_h_moe": GgufArchitecture(
        "NemotronHForCausalLM",
        hybrids.NEMOTRON_H_MODULES,
        fields=hybrids.nemotron_h_moe,
        serves=anyhow,
        vectors=hybrids.mamba_tensors("mixer"),
    ),
    "mamba2": GgufArchitecture(
        "Mamba2ForCausalLM",
        hybrids.MAMBA2_MODULES,
        fields=hybrids.mamba2,
        vectors=hybrids.mamba_tensors("mixer"),
        attending=False,
    ),
    "lfm2moe": GgufArchitecture(
        "Lfm2MoeForCausalLM",
        hybrids.LFM2_MODULES,
        fields=hybrids.lfm2_moe,
        serves=anyhow,
        top=names.TOP | hybrids.LFM2_TOP,
    ),
    "lfm2": GgufArchitecture(
        "Lfm2ForCausalLM", hybrids.LFM2_MODULES, fields=hybrids.lfm2, top=names.TOP | hybrids.LFM2_TOP
    ),
    "smollm3": GgufArchitecture("SmolLM3ForCausalLM", rotated_pairs=True, fields=config_fields.llama),
    "qwen2moe": GgufArchitecture("Qwen2MoeForCausalLM", fields=experts.qwen2_moe, serves=anyhow),
    "qwen3moe": GgufArchitecture("Qwen3MoeForCausalLM", fields=experts.qwen3_moe, serves=anyhow),
    "olmoe": GgufArchitecture("OlmoeForCausalLM", fields=experts.olmoe, serves=anyhow),
    "granitemoe": (
        GgufArchitecture(
            "GraniteMoeSharedForCausalLM",
            rotated_pairs=True,
            fields=config_fields.granite_moe_shared,
            serves=experts.has_shared_expert,
        ),
        GgufArchitecture("GraniteMoeForCausalLM", rotated_pairs=True, fields=config_fields.granite_moe, serves=anyhow),
    ),
    "gpt-oss": GgufArchitecture("GptOssForCausalLM", names.POST_ATTENTION_NORM, fields=experts.gpt_oss, serves=anyhow),
    "glm4moe": GgufArchitecture(
        "Glm4MoeForCausalLM",
        names.POST_ATTENTION_NORM,
        fields=experts.glm4_moe,
        serves=anyhow,
        rope=rope_by_sections(interleaved=False),
    ),
    "ernie4_5-moe": GgufArchitecture("Ernie4_5_MoeForCausalLM", fields=experts.ernie4_5_moe, serves=anyhow),
    "qwen2vl": GgufArchitecture("Qwen2ForCausalLM", rope=rope_by_sections(interleaved=False)),
    "qwen3vl": GgufArchitecture("Qwen3ForCausalLM", rope=rope_by_sections(interleaved=True)),
    "qwen3vlmoe": GgufArchitecture(
        "Qwen3MoeForCausalLM", fields=experts.qwen3_moe, serves=anyhow, rope=rope_by_sections(interleaved=True)
    ),
    "paddleocr": GgufArchitecture(
        "LlamaForCausalLM", fields=config_fields.llama, rope=rope_by_sections(interleaved=False)
    ),
    "olmo2": (
        GgufArchitecture("Olmo2ForCausalLM", names.POST_NORMS, serves=config_fields.has_no_window),
        GgufArchitecture(
            "Olmo3ForCausalLM", names.POST_NORMS, fields=config_fields.olmo3, serves=config_fields.has_window
        ),
    ),
    "exaone4": GgufArchitecture("Exaone4ForCausalLM", names.POST_NORMS, fields=config_fields.exaone4),
    "glm4": GgufArchitecture(
        "Glm4ForCausalLM", names.GLM_NORMS, fields=config_fields.glm4, rope=rope_by_sections(interleaved=False)
    ),
    "ernie4_5": GgufArchitecture("Ernie4_5ForCausalLM", fields=config_fields.ernie),
    "hunyuan-dense": GgufArchitecture("HunYuanDenseV1ForCausalLM", names.HUNYUAN, fields=config_fields.hunyuan),
    "hunyuan_vl": GgufArchitecture("HunYuanDenseV1ForCausalLM", names.HUNYUAN, fields=config_fields.hunyuan_vl),
    "mistral3": GgufArchitecture("Ministral3ForCausalLM", rotated_pairs=True, fields=config_fields.ministral3),
    "command-r": GgufArchitecture("CohereForCausalLM", layer_norm=True, fields=config_fields.command_r),
    "cohere2": GgufArchitecture("Cohere2ForCausalLM", layer_norm=True, fields=config_fields.cohere2),
    "stablelm": GgufArchitecture("StableLmForCausalLM", layer_norm=True, fields=config_fields.stablelm),
    "starcoder2": GgufArchitecture(
        "Starcoder2ForCausalLM", names.STARCODER2, layer_norm=True, fields=config_fields.starcoder2
    ),
    "phi2": GgufArchitecture("PhiForCausalLM", names.PHI, layer_norm=True, fields=config_fields.phi2),
    "gpt2": GgufArchitecture(
        "GPT2LMHeadModel", names.GPT2, layer_norm=True, outputs_first=True, fields=config_fields.gpt2
    ),
    "starcoder": GgufArchitecture("GPTBigCodeForCausalLM", names.GPT2, layer_norm=True, fields=config_fields.gpt2),
    "gptneox": GgufArchitecture(
        "GPTNeoXForCausalLM", names.NEOX, layer_norm=True, qkv_in_rows=True, fields=config_fields.gptneox
    ),
    "falcon": GgufArchitecture(
        "FalconForCausalLM", names.FALCON, layer_norm=True, qkv_in_rows=True, fields=config_fields.falcon
    ),
    "bloom": GgufArchitecture(
        "BloomForCausalLM", names.BLOOM, layer_norm=True, qkv_in_rows=True, fields=config_fields.bloom
    ),
    "mpt": GgufArchitecture("MptForCausalLM", names.MPT, layer_norm=True, fields=config_fields.mpt),
    "gemma3n": GgufArchitecture(
        "Gemma3nForCausalLM",
        gemmas.GEMMA3N,
        fields=gemmas.gemma3n,
        top=gemmas.PER_LAYER_TOP,
        vectors=gemmas.GEMMA3N_TENSORS,
        heads=gemmas.gemma3n_heads,
        unused=gemmas.shared_kv,
    ),
    "gemma4": GgufArchitecture(
        "Gemma4ForCausalLM",
        gemmas.GEMMA4,
        fields=gemmas.gemma4,
        top=gemmas.PER_LAYER_TOP,
        vectors=gemmas.GEMMA4_TENSORS,
        heads=gemmas.gemma4_heads,
        rope=gemmas.gemma4_rope,
        serves=anyhow,
        unused=gemmas.shared_kv,
    ),
    "deepseek2": (
        GgufArchitecture(
            "DeepseekV3ForCausalLM",
            latents.LATENTS,
            fields=latents.deepseek_v3,
            serves=latents.takes_sigmoids,
            own=latents.UPS,
            heads=latents.latent_heads,
            rope=latents.deepseek_rope,
        ),
        GgufArchitecture(
            "DeepseekV2ForCausalLM",
            latents.LATENTS,
            fields=latents.deepseek_v2,
            serves=latents.takes_softmax,
            own=latents.UPS,
            heads=latents.latent_heads,
            rope=latents.deepseek_rope,
        ),
    ),
    "minicpm3": GgufArchitecture("MiniCPM3ForCausalLM", latents.LATENTS, own=latents.UPS, heads=latents.latent_heads),
    "minicpm": GgufArchitecture("MiniCPMForCausalLM", rotated_pairs=True, fields=config_fields.minicpm),
    "internlm2": GgufArchitecture(
        "InternLM2ForCausalLM",
        names.INTERNLM2,
        rotated_pairs=True,
        fields=config_fields.internlm2,
        top=names.TOP | names.INTERNLM2_TOP,
        own=names.INTERNLM2_HEADS,
    ),
    "olmo": GgufArchitecture("OlmoForCausalLM", rotated_pairs=True, layer_norm=True, fields=config_fields.olmo),
    "chatglm": GgufArchitecture("GlmForCausalLM", fields=config_fields.glm4),
    "llama4": GgufArchitecture("Llama4ForCausalLM", names.LLAMA4, fields=experts.llama4, serves=anyhow),
    "hunyuan-moe": GgufArchitecture(
        "HunYuanMoEV1ForCausalLM", names.HUNYUAN, fields=experts.hunyuan_moe, serves=anyhow
    ),
}
