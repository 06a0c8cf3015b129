"""XLM-RoBERTa in Jina's own code (https://arxiv.org/abs/2409.10173): with rope, and low-rank adapters of tasks."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from ...models.config import ConfigReader
from ...models.module_tensors import fused_qkv
from ...models.rope import rope_from_config
from ...models.tensor_ref import TensorRef
from ..model import EmbeddingSpec, EncoderModel, TasksSpec
from .parts import Layout, Modules, encoder, layer_norm, plain_mlp, post_norm_layer, two_way

_MOST_TASKS = 64
_NORMS = {"embedding_norm": "emb_ln", "attention_sum_norm": "norm1", "mlp_sum_norm": "norm2"}
_MATRICES = {"qkv": "mixer.Wqkv", "o": "mixer.out_proj", "up": "mlp.fc1", "down": "mlp.fc2"}
_PARTS = {"qkv": ("q", "k", "v"), "o": ("o",), "up": ("up",), "down": ("down",)}
_TABLES = {"words": "embeddings.word_embeddings", "types": "embeddings.token_type_embeddings"}
# Where torch keeps a matrix that has adapters, and those.
_ADAPTED, _LORA = ".parametrizations.weight.original", ".parametrizations.weight.0.lora_"


def model(architecture: str, config: ConfigReader) -> EncoderModel:
    """XLM-RoBERTa with rope, for embeddings."""
    config.refuse("is_decoder", False)
    config.refuse("emb_pooler")
    hidden, count = config.integer("hidden_size"), config.num_layers("num_hidden_layers")
    norm, attention = layer_norm(config), two_way(config, bias=True)
    config = config.with_fields(rope_theta=config.number("rotary_emb_base", 10_000.0))
    rope = rope_from_config(config, config.integer("rotary_emb_dim", attention.head_dim), None)
    layer = post_norm_layer(replace(attention, rope=rope.spec), plain_mlp(config), norm)
    tasks = _tasks(config, count)
    layouts = [
        Layout(_modules(attention.q_size, weight), "encoder.layers.", ("", "roberta."))
        for weight in (".weight", _ADAPTED)
    ]
    padding = config.integer("pad_token_id", 1)
    made = encoder(
        hidden,
        (layer,) * count,
        EmbeddingSpec(config.integer("vocab_size"), num_types=config.integer("type_vocab_size", 2), norm=norm),
        layouts,
        max_length=config.integer("max_position_embeddings") - padding - 1,
    )
    if tasks is None:
        return made
    names = [f"{name}.lora_{kind}" for name in (*tasks.matrices, *_TABLES) for kind in "ab"]
    return replace(made, tasks=tasks, tensors={**made.tensors, **layouts[0].places(names)})


def _modules(size: int, weight: str) -> Modules:
    """Where matrices lie whose names end in `weight`."""
    modules: dict[str, str | TensorRef] = {**_NORMS}
    for name, module in _MATRICES.items():
        fused = fused_qkv(module, size) if name == "qkv" else {name: TensorRef(module)}
        for part, ref in fused.items():
            modules[f"{part}.weight"] = replace(ref, name=f"{module}{weight}")
            modules[f"{part}.bias"] = replace(ref, name=f"{module}.bias")
    modules |= {name: f"{module}{weight}" for name, module in _TABLES.items()}
    lora = {**_MATRICES, **_TABLES}
    modules |= {
        f"{name}.lora_{kind}": f"{module}{_LORA}{kind.upper()}" for name, module in lora.items() for kind in "ab"
    }
    return modules


def _tasks(config: ConfigReader, count: int) -> TasksSpec | None:
    names = config.raw("lora_adaptations")
    if names is None:
        return None
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise config.error("lora_adaptations", "a list of names")
    if not 0 < len(set(names)) == len(names) <= _MOST_TASKS:
        raise config.error("lora_adaptations", f"up to {_MOST_TASKS} names, all of them different")
    said = config.raw("task_instructions")
    instructions: Mapping[str, object] = said if isinstance(said, dict) else {}
    rank = config.integer("lora_rank", 4)
    return TasksSpec(
        prompts={name: str(instructions.get(name) or "") for name in names},
        rank=rank,
        scale=config.number("lora_alpha", 1.0) / rank,
        matrices={
            f"layers.{index}.{name}": tuple(f"layers.{index}.{part}" for part in parts)
            for index in range(count)
            for name, parts in _PARTS.items()
        },
    )
