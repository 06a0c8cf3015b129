"""The model families, one file each: `ARCHITECTURES` and `describe`. `parts` and `names` are what they share."""

from collections.abc import Callable

from ..config import ConfigReader
from ..description import ModelDescription
from . import (
    cohere,
    falcon,
    gemma2,
    gemma3,
    gpt2,
    gpt_neox,
    granite,
    llama,
    mistral,
    mpt,
    olmo,
    olmo2,
    opt,
    phi3,
    qwen2,
    qwen3,
    smollm3,
    stablelm,
)

__all__ = ["FAMILIES"]

_Describe = Callable[[str, ConfigReader, int | None], ModelDescription]

# By architecture: describes the config of one, for a context of so many tokens if that is given.
FAMILIES: dict[str, _Describe] = {
    architecture: family.describe
    for family in (
        cohere,
        falcon,
        gemma2,
        gemma3,
        gpt2,
        gpt_neox,
        granite,
        llama,
        mistral,
        mpt,
        olmo,
        olmo2,
        opt,
        phi3,
        qwen2,
        qwen3,
        smollm3,
        stablelm,
    )
    for architecture in family.ARCHITECTURES
}
