"""Tiny EAGLE3 checkpoints beside models of the zoo, and what their layers compute, in float64."""

from __future__ import annotations

import copy
import functools
import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import models_zoo
from models_zoo import VOCAB_SIZE


@dataclass(frozen=True)
class Kind:
    """A layer to make, for a model of `layers` layers: whose rows it reads, and how its checkpoint says so."""

    model_type: str
    layers: int
    watched: tuple[int, ...]
    config: dict[str, Any] = field(default_factory=dict)
    size: int = 64
    draft_vocab: int = 200
    own_embedding: bool = False
    bias: bool = False
    speculator: bool = False  # its config has the form of vLLM's speculators

    @property
    def adds_normed(self) -> bool:
        return bool(self.config.get("norm_before_residual"))


KINDS = {
    # As the authors have it: low, middle and high ones of six layers, and the model's embedding.
    "llama": Kind("llama", 6, (2, 3, 3), {"architectures": ["LlamaForCausalLMEagle3"]}),
    # In SGLang's words: rows are taken behind these layers.
    "qwen3": Kind(
        "qwen3",
        5,
        (1, 2, 4),
        {"eagle_config": {"eagle_aux_hidden_state_layer_ids": [0, 1, 3], "use_aux_hidden_state": True}},
        draft_vocab=VOCAB_SIZE,
        own_embedding=True,
    ),
    "speculator": Kind(
        "llama",
        4,
        (0, 3, 1),
        {"eagle_aux_hidden_state_layer_ids": [0, 3, 1], "norm_before_residual": True},
        size=48,
        own_embedding=True,
        bias=True,
        speculator=True,
    ),
}


@functools.cache
def model(name: str) -> Any:
    """The model that a layer is for, in transformers."""
    kind = KINDS[name]
    base = models_zoo.CASES[kind.model_type]
    case = models_zoo.Case(kind.model_type, {**base.config, "num_hidden_layers": kind.layers})
    return models_zoo.build(case, seed=3)


class Oracle:
    """The layer over a whole sequence, in float64, around transformers' attention, MLP and norms.

    See https://arxiv.org/abs/2503.01840. The row of a token is made of its embedding and of the inputs of three of the
    model's layers for the token before. So the first token has no row, and the second has position 0.
    """

    def __init__(self, kind: Kind, target: Any) -> None:
        import torch
        from transformers import LlamaConfig
        from transformers.models.llama.modeling_llama import (
            LlamaAttention,
            LlamaMLP,
            LlamaRMSNorm,
            LlamaRotaryEmbedding,
        )

        self.kind, self.model = kind, target
        self.config = LlamaConfig(
            hidden_size=kind.size,
            intermediate_size=112,
            num_hidden_layers=1,
            num_attention_heads=4,
            num_key_value_heads=4 if kind.size == 64 else 2,
            head_dim=16,
            vocab_size=VOCAB_SIZE,
            attention_bias=kind.bias,
            max_position_embeddings=256,
            attn_implementation="eager",
        )
        attention = LlamaAttention(self.config, layer_idx=0)
        for part in ("q_proj", "k_proj", "v_proj"):
            outputs = getattr(attention, part).out_features
            setattr(attention, part, torch.nn.Linear(2 * kind.size, outputs, bias=kind.bias))
        norms = {
            part: LlamaRMSNorm(kind.size, eps=self.config.rms_norm_eps)
            for part in ("input_layernorm", "hidden_norm", "post_attention_layernorm")
        }
        at = "layers.0" if kind.speculator else "midlayer"
        self.parts: dict[str, Any] = {
            f"{at}.self_attn": attention,
            f"{at}.mlp": LlamaMLP(self.config),
            **{f"{at}.{part}": norm for part, norm in norms.items()},
            "norm": LlamaRMSNorm(kind.size, eps=self.config.rms_norm_eps),
            "fc": torch.nn.Linear(len(kind.watched) * self.model.config.hidden_size, kind.size, bias=False),
            "lm_head": torch.nn.Linear(kind.size, kind.draft_vocab, bias=False),
        }
        if kind.own_embedding:
            self.parts["embed_tokens"] = torch.nn.Embedding(VOCAB_SIZE, kind.size)
        self.rotary = LlamaRotaryEmbedding(self.config)
        generator = torch.Generator().manual_seed(17)
        with torch.no_grad():
            for part in self.parts.values():
                for weight in part.parameters():
                    noise = torch.randn(weight.shape, generator=generator)
                    weight.copy_(1 + 0.2 * noise if weight.ndim == 1 else noise * 1.5 / min(weight.shape) ** 0.5)
        chosen = torch.randperm(VOCAB_SIZE, generator=generator)[: kind.draft_vocab].sort().values
        self.token_ids = torch.arange(VOCAB_SIZE) if kind.draft_vocab == VOCAB_SIZE else chosen

    def part(self, name: str) -> Any:
        """A module by the end of its name."""
        return next(part for full, part in self.parts.items() if full.rpartition(".")[2] == name)

    def logits(self, tokens: Sequence[int], count: int) -> list[Any]:
        """The logits of `count` greedy draft tokens one after the other, behind the last of the tokens."""
        import torch

        exact = _exact(self)
        with torch.no_grad():
            ids = torch.tensor([tokens])
            given = exact.model.model(ids[:, :-1], output_hidden_states=True).hidden_states
            left = exact.part("fc")(torch.cat([given[i][0] for i in self.kind.watched], dim=-1))
            drafted: list[Any] = []
            for _ in range(count):
                rows = exact.run(ids[0, 1:], left)
                row = torch.full((VOCAB_SIZE,), -torch.inf, dtype=torch.float64)
                row[self.token_ids] = exact.part("lm_head")(exact.part("norm")(rows[-1]))
                drafted.append(row)
                left = torch.cat([left, rows[-1:]])
                ids = torch.cat([ids, row.argmax().reshape(1, 1)], dim=1)
        return drafted

    def run(self, ids: Any, left: Any) -> Any:
        """The layer's rows [T, size] of tokens [T], and the fused rows of the tokens before each."""
        import torch

        embed = self.part("embed_tokens") if self.kind.own_embedding else self.model.model.embed_tokens
        normed = self.part("hidden_norm")(left)
        both = torch.cat([self.part("input_layernorm")(embed(ids)), normed], dim=-1)[None]
        positions = torch.arange(len(ids))[None]
        mask = torch.full((len(ids), len(ids)), -torch.inf, dtype=both.dtype).triu(1)[None, None]
        attended, _ = self.part("self_attn")(both, self.rotary(both, positions), mask)
        rows = (normed if self.kind.adds_normed else left) + attended[0]
        return rows + self.part("mlp")(self.part("post_attention_layernorm")(rows))

    def save(self, folder: Path) -> Path:
        """Its checkpoint."""
        import torch
        from safetensors.torch import save_file

        kind = self.kind
        tensors = {
            f"{module}.{name}": weight.contiguous().clone()
            for module, part in self.parts.items()
            for name, weight in part.state_dict().items()
        }
        if kind.draft_vocab != VOCAB_SIZE:
            tensors["d2t"] = self.token_ids - torch.arange(kind.draft_vocab)
            tensors["t2d"] = torch.isin(torch.arange(VOCAB_SIZE), self.token_ids)
        folder.mkdir()
        save_file(tensors, folder / "model.safetensors")
        layer = {**self.config.to_dict(), "rope_theta": 10000.0}
        config: dict[str, Any] = {**layer, "architectures": ["LlamaForCausalLMEagle3"]}
        if kind.speculator:
            config = {"architectures": ["Eagle3Speculator"], "transformer_layer_config": layer}
        config |= {"draft_vocab_size": kind.draft_vocab, "target_hidden_size": self.model.config.hidden_size}
        (folder / "config.json").write_text(json.dumps({**config, **kind.config}))
        return folder


def _exact(oracle: Oracle) -> Oracle:
    cached = getattr(oracle, "exact", None)
    if cached is None:
        cached = copy.copy(oracle)
        cached.model = copy.deepcopy(oracle.model).double()
        cached.parts = {name: copy.deepcopy(part).double() for name, part in oracle.parts.items()}
        oracle.exact = cached  # type: ignore[attr-defined]
    return cached


@functools.cache
def oracle(name: str) -> Oracle:
    """The layer of KINDS[name]."""
    return Oracle(KINDS[name], model(name))


@functools.cache
def folders(name: str) -> tuple[Path, Path]:
    """The folders of the model and of its layer."""
    folder = models_zoo._root / f"{name}-under-eagle3"
    model(name).save_pretrained(folder)
    return folder, oracle(name).save(models_zoo._root / f"{name}-eagle3")


@functools.cache
def agreeing_folders(noise: float = 0.002) -> tuple[Path, Path]:
    """Folders of a model whose layers add almost nothing, and of a layer that therefore predicts the same as the model.

    Then the next token depends only on a token's embedding, except for what layers add, of size `noise`. The tokens of
    the layer attend to themselves: queries and keys are the same for all, and rope turns other positions' away.
    """
    import torch

    kind = Kind("llama", 6, (2, 3, 3), {"norm_before_residual": True}, draft_vocab=300, bias=True)
    base = models_zoo.CASES["llama"]
    case = models_zoo.Case("llama", {**base.config, "num_hidden_layers": kind.layers})
    target = models_zoo.build(case, seed=5)
    made = Oracle(kind, target)
    with torch.no_grad():
        target.model.embed_tokens.weight.mul_(10)
        target.lm_head.weight.mul_(4)  # so it is sure of what follows
        for weight_name, weight in target.model.named_parameters():
            if weight_name.endswith(("o_proj.weight", "down_proj.weight")):
                weight.mul_(noise)
        attention = made.part("self_attn")
        for part in ("q_proj", "k_proj"):
            getattr(attention, part).weight.zero_()
            getattr(attention, part).bias.copy_(torch.tensor([16.0] * 8 + [0.0] * 8).repeat(4))
        attention.v_proj.weight.copy_(torch.eye(64, 128))
        attention.o_proj.weight.copy_(torch.eye(64))
        attention.v_proj.bias.zero_()
        attention.o_proj.bias.zero_()
        made.part("mlp").down_proj.weight.zero_()
        made.part("hidden_norm").weight.zero_()  # so nothing is left of the tokens before
        made.part("input_layernorm").weight.fill_(1.0)
        made.part("norm").load_state_dict(target.model.norm.state_dict())
        made.part("lm_head").weight.copy_(target.lm_head.weight[made.token_ids])
    folder = models_zoo._root / "agreeing-under-eagle3"
    target.save_pretrained(folder)
    return folder, made.save(models_zoo._root / "agreeing-eagle3")
