"""The model families, one file each: `ARCHITECTURES` and `describe`. `parts` and `names` are what they share."""

import sys
from collections.abc import Callable

from ..config import ConfigReader
from ..description import ModelDescription
from . import (
    bamba,
    bloom,
    cohere,
    deepseek,
    ernie4_5,
    ernie4_5_moe,
    exaone4,
    falcon,
    falcon_h1,
    gemma2,
    gemma3,
    gemma3n,
    gemma4,
    glm,
    glm4_moe,
    gpt2,
    gpt_bigcode,
    gpt_neox,
    gpt_oss,
    gptj,
    granite,
    granitemoe,
    granitemoehybrid,
    hunyuan_v1_dense,
    hunyuan_v1_moe,
    internlm2,
    lfm2,
    lfm2_moe,
    llama,
    llama4,
    mamba2,
    minicpm,
    minicpm3,
    ministral3,
    mistral,
    mixtral,
    mpt,
    nemotron_h,
    olmo,
    olmo2,
    olmo3,
    olmoe,
    opt,
    phi,
    phi3,
    qwen2,
    qwen2_moe,
    qwen3,
    qwen3_5,
    qwen3_5_moe,
    qwen3_moe,
    qwen3_next,
    smollm3,
    stablelm,
    starcoder2,
)
from .listing import Listing

__all__ = ["FAMILIES", "listing_of"]

_Describe = Callable[[str, ConfigReader, int | None], ModelDescription]

# By architecture: describes the config of one, for a context of so many tokens if that is given.
FAMILIES: dict[str, _Describe] = {
    architecture: family.describe
    for family in (
        bamba,
        bloom,
        cohere,
        deepseek,
        ernie4_5,
        ernie4_5_moe,
        exaone4,
        falcon,
        falcon_h1,
        gemma2,
        gemma3,
        gemma3n,
        gemma4,
        glm,
        glm4_moe,
        gpt2,
        gpt_bigcode,
        gpt_neox,
        gpt_oss,
        gptj,
        granite,
        granitemoe,
        granitemoehybrid,
        hunyuan_v1_dense,
        hunyuan_v1_moe,
        internlm2,
        lfm2,
        lfm2_moe,
        llama,
        llama4,
        mamba2,
        minicpm,
        minicpm3,
        ministral3,
        mistral,
        mixtral,
        mpt,
        nemotron_h,
        olmo,
        olmo2,
        olmo3,
        olmoe,
        opt,
        phi,
        phi3,
        qwen2,
        qwen2_moe,
        qwen3,
        qwen3_5,
        qwen3_5_moe,
        qwen3_moe,
        qwen3_next,
        smollm3,
        stablelm,
        starcoder2,
    )
    for architecture in family.ARCHITECTURES
}


def listing_of(architecture: str) -> Listing:
    """What the documentation says of one of FAMILIES' architectures."""
    listings: dict[str, Listing] = sys.modules[FAMILIES[architecture].__module__].ARCHITECTURES
    return listings[architecture]
