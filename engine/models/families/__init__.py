"""The model families, one file each: `ARCHITECTURES` and `describe`. They share `parts` and `names`."""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module
from typing import Protocol, cast

from ..config import ConfigReader
from ..description import ModelDescription
from .listing import Listing

__all__ = ["FAMILIES", "Family", "family_of"]


class Family(Protocol):
    """What the module of a family has."""

    ARCHITECTURES: Mapping[str, Listing]

    def describe(self, architecture: str, config: ConfigReader, max_model_len: int | None) -> ModelDescription:
        """Describes the config of one of ARCHITECTURES, for a context of `max_model_len` tokens if it is given."""
        ...


def family_of(architecture: str) -> Family:
    """The family of one of FAMILIES' architectures."""
    return cast(Family, import_module(f".{FAMILIES[architecture]}", __package__))


# By architecture, the module that describes it. It is imported when a model has that architecture: all together take a
# good part of the time in which a small model starts.
FAMILIES: Mapping[str, str] = {
    "BambaForCausalLM": "bamba",
    "BloomForCausalLM": "bloom",
    "CohereForCausalLM": "cohere",
    "Cohere2ForCausalLM": "cohere",
    "DeepseekV2ForCausalLM": "deepseek",
    "DeepseekV3ForCausalLM": "deepseek",
    "Glm4MoeLiteForCausalLM": "deepseek",
    "Ernie4_5ForCausalLM": "ernie4_5",
    "Ernie4_5_MoeForCausalLM": "ernie4_5_moe",
    "Exaone4ForCausalLM": "exaone4",
    "FalconForCausalLM": "falcon",
    "FalconH1ForCausalLM": "falcon_h1",
    "GemmaForCausalLM": "gemma",
    "Gemma2ForCausalLM": "gemma2",
    "Gemma3ForCausalLM": "gemma3",
    "Gemma3nForCausalLM": "gemma3n",
    "Gemma4ForCausalLM": "gemma4",
    "GlmForCausalLM": "glm",
    "Glm4ForCausalLM": "glm",
    "Glm4MoeForCausalLM": "glm4_moe",
    "GPT2LMHeadModel": "gpt2",
    "GPTBigCodeForCausalLM": "gpt_bigcode",
    "GPTNeoXForCausalLM": "gpt_neox",
    "GptOssForCausalLM": "gpt_oss",
    "GPTJForCausalLM": "gptj",
    "GraniteForCausalLM": "granite",
    "GraniteMoeForCausalLM": "granitemoe",
    "GraniteMoeHybridForCausalLM": "granitemoehybrid",
    "GraniteMoeSharedForCausalLM": "granitemoe",
    "HunYuanDenseV1ForCausalLM": "hunyuan_v1_dense",
    "HunYuanMoEV1ForCausalLM": "hunyuan_v1_moe",
    "InternLM2ForCausalLM": "internlm2",
    "Lfm2ForCausalLM": "lfm2",
    "Lfm2MoeForCausalLM": "lfm2_moe",
    "LlamaForCausalLM": "llama",
    "Llama4ForCausalLM": "llama4",
    "Mamba2ForCausalLM": "mamba2",
    "MiniCPMForCausalLM": "minicpm",
    "MiniCPM3ForCausalLM": "minicpm3",
    "Ministral3ForCausalLM": "ministral3",
    "MistralForCausalLM": "mistral",
    "MinistralForCausalLM": "mistral",
    "MixtralForCausalLM": "mixtral",
    "MPTForCausalLM": "mpt",
    "MptForCausalLM": "mpt",
    "NemotronHForCausalLM": "nemotron_h",
    "OlmoForCausalLM": "olmo",
    "Olmo2ForCausalLM": "olmo2",
    "Olmo3ForCausalLM": "olmo3",
    "OlmoeForCausalLM": "olmoe",
    "OPTForCausalLM": "opt",
    "PhiForCausalLM": "phi",
    "Phi3ForCausalLM": "phi3",
    "Phi3VForCausalLM": "phi3",
    "Phi4MMForCausalLM": "phi3",
    "Phi4MultimodalForCausalLM": "phi3",
    "PhiMoEForCausalLM": "phimoe",
    "PhimoeForCausalLM": "phimoe",
    "Qwen2ForCausalLM": "qwen2",
    "Qwen2MoeForCausalLM": "qwen2_moe",
    "Qwen3ForCausalLM": "qwen3",
    "Qwen3_5ForCausalLM": "qwen3_5",
    "Qwen3_5ForConditionalGeneration": "qwen3_5",
    "Qwen3_5MoeForCausalLM": "qwen3_5_moe",
    "Qwen3_5MoeForConditionalGeneration": "qwen3_5_moe",
    "Qwen3MoeForCausalLM": "qwen3_moe",
    "Qwen3NextForCausalLM": "qwen3_next",
    "SmolLM3ForCausalLM": "smollm3",
    "StableLmForCausalLM": "stablelm",
    "Starcoder2ForCausalLM": "starcoder2",
}
