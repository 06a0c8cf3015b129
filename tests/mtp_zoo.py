"""Tiny models whose checkpoints have a layer for drafts (MTP), and that layer in transformers' own modules."""

from __future__ import annotations

import copy
import functools
import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import models_zoo
import pytest

QWENS = ("qwen3_next", "qwen3_next-experts", "qwen3_5", "qwen3_5-experts")
LATER_LAYERS = ("deepseek-v3", "glm4-moe-lite", "glm4-moe")


class Oracle:
    """The layer's forward pass over a whole sequence, in float64, around transformers' decoder layer.

    Transformers leaves these layers out. Their equations are in https://arxiv.org/abs/2412.19437, 2.2. The row at
    position p is made of the token there and of the model's last hidden row at p - 1, behind its final norm. At
    position 0 the layer gets a row of zeros.
    """

    def __init__(self, name: str, model: Any = None) -> None:
        import torch

        self.model = model or models_zoo.model(name)
        inner, hidden = self.model.model, self.model.config.hidden_size
        layers = inner.layers
        self.layer = copy.deepcopy(next(layer for layer in reversed(layers) if hasattr(layer, "self_attn")))
        self.embedding_norm, self.hidden_norm, self.norm = (copy.deepcopy(inner.norm) for _ in range(3))
        self.project = torch.nn.Linear(2 * hidden, hidden, bias=False)
        self.is_later_layer = name in LATER_LAYERS
        generator = torch.Generator().manual_seed(9)
        with torch.no_grad():
            for part in self.parts().values():
                for weight in part.parameters():
                    noise = torch.randn(weight.shape, generator=generator)
                    small = weight.ndim == 1
                    weight.copy_(0.2 * noise if small else noise * 1.5 / min(weight.shape[-2:]) ** 0.5)

    def parts(self) -> dict[str, Any]:
        """Its modules by their names in checkpoints."""
        if self.is_later_layer:
            at = f"model.layers.{self.model.config.num_hidden_layers}"
            return {
                f"{at}.enorm": self.embedding_norm,
                f"{at}.hnorm": self.hidden_norm,
                f"{at}.eh_proj": self.project,
                at: self.layer,
                f"{at}.shared_head.norm": self.norm,
            }
        return {
            "mtp.pre_fc_norm_embedding": self.embedding_norm,
            "mtp.pre_fc_norm_hidden": self.hidden_norm,
            "mtp.fc": self.project,
            "mtp.layers.0": self.layer,
            "mtp.norm": self.norm,
        }

    def tensors(self) -> dict[str, Any]:
        """Its weights as checkpoints have them."""
        found = {}
        for module, part in self.parts().items():
            for name, weight in part.state_dict().items():
                weight = weight.float().contiguous()
                if not self.model.config.model_type.startswith("qwen3_5") and ".experts." in name:
                    for expert, matrix in enumerate(weight):
                        stem = f"{module}.mlp.experts.{expert}"
                        if name.endswith("down_proj"):
                            found[f"{stem}.down_proj.weight"] = matrix.contiguous()
                            continue
                        gate, up = matrix.chunk(2)
                        found[f"{stem}.gate_proj.weight"] = gate.contiguous()
                        found[f"{stem}.up_proj.weight"] = up.contiguous()
                else:
                    found[f"{module}.{name}"] = weight
        return found

    def logits(self, tokens: Sequence[int], count: int) -> list[Any]:
        """The logits of `count` greedy draft tokens one after the other, behind the last of the tokens."""
        import torch

        exact = _exact(self)
        inner = exact.model.model
        with torch.no_grad():
            ids = torch.tensor([tokens])
            left = inner(ids[:, :-1]).last_hidden_state[0] if len(tokens) > 1 else torch.empty(0, self._size).double()
            drafted: list[Any] = []
            for _ in range(count):
                rows = exact.run(ids, left)
                normed = exact.norm(rows)
                drafted.append(exact.model.lm_head(normed[-1]))
                left = torch.cat([left, (rows if self.is_later_layer else normed)[-1:]])
                ids = torch.cat([ids, drafted[-1].argmax().reshape(1, 1)], dim=1)
        return drafted

    @property
    def _size(self) -> int:
        return int(self.model.config.hidden_size)

    def run(self, ids: Any, left: Any) -> Any:
        """The layer's rows [T, hidden] of tokens [1, T], and what the model left of all but the last."""
        import torch

        inner = self.model.model
        embedded = self.embedding_norm(inner.embed_tokens(ids[0]))
        rows = self.project(torch.cat([embedded[1:], self.hidden_norm(left)], dim=-1))
        rows = torch.cat([torch.zeros_like(embedded[:1]), rows])[None]
        length = rows.shape[1]
        positions = torch.arange(length)[None]
        mask = torch.full((length, length), float("-inf"), dtype=rows.dtype).triu(1)[None, None]
        turned = inner.rotary_emb(rows, positions)
        rows = self.layer(rows, position_embeddings=turned, attention_mask=mask, position_ids=positions)
        return (rows[0] if isinstance(rows, tuple) else rows)[0]


def _exact(oracle: Oracle) -> Oracle:
    cached = getattr(oracle, "exact", None)
    if cached is None:
        cached = copy.copy(oracle)
        cached.model = copy.deepcopy(oracle.model).double()
        for name in ("layer", "embedding_norm", "hidden_norm", "norm", "project"):
            setattr(cached, name, copy.deepcopy(getattr(oracle, name)).double())
        if hasattr(cached.model, "set_experts_implementation"):
            cached.model.set_experts_implementation("eager")
            if hasattr(cached.layer.mlp, "experts"):
                cached.layer.mlp.experts.config = cached.model.config
        oracle.exact = cached  # type: ignore[attr-defined]
    return cached


def agreeing(name: str, noise: float) -> Oracle:
    """A model whose layers add almost nothing, and a layer for drafts that therefore predicts the same as the model.

    Then the next token depends only on a token's embedding, except for what layers add, of size `noise`.
    """
    import torch

    model = models_zoo.build(models_zoo.CASES[name], seed=5)
    oracle = Oracle(name, model)
    size = model.config.hidden_size
    with torch.no_grad():
        model.model.embed_tokens.weight.mul_(10)
        for module in (model.model, oracle.layer):
            for weight_name, weight in module.named_parameters():
                if weight_name.endswith(("o_proj.weight", "out_proj.weight", "down_proj.weight", "down_proj")):
                    weight.mul_(noise)
        oracle.project.weight.zero_()
        oracle.project.weight[:, :size] = torch.eye(size)
        oracle.embedding_norm.weight.zero_()  # the weight is 1 plus this
        oracle.norm.load_state_dict(model.model.norm.state_dict())
    return oracle


@functools.cache
def agreeing_folder(name: str, noise: float = 0.002) -> Path:
    """The folder of that model."""
    return save(agreeing(name, noise), models_zoo._root / f"{name}-agreeing-mtp")


def save(oracle: Oracle, folder: Path) -> Path:
    """The checkpoint of a model with its layer for drafts."""
    from safetensors.torch import load_file, save_file

    oracle.model.save_pretrained(folder)
    if oracle.is_later_layer:
        config = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps({**config, "num_nextn_predict_layers": 1}))
    file = folder / "model.safetensors"
    save_file({**load_file(file), **oracle.tensors()}, file)
    return folder


@functools.cache
def gguf_file(name: str) -> Path:
    """The model of `folder(name)` as llama.cpp's converter writes it: the layer is one more of the model's."""
    import gguf
    import gguf_files

    case, of_drafts = models_zoo.CASES[name], oracle(name)
    count = of_drafts.model.config.num_hidden_layers
    config = {**case.config, "num_hidden_layers": count + 1}
    if "layer_types" in config:
        config["layer_types"] = [*config["layer_types"], "full_attention"]
    longer = models_zoo.build(replace(case, config=config))
    longer.load_state_dict(of_drafts.model.state_dict(), strict=False)
    longer.model.layers[count].load_state_dict(of_drafts.layer.state_dict())
    plus = 0 if of_drafts.is_later_layer else 1  # of Qwen's norms, as in every file of these

    class WithDrafts(gguf.GGUFWriter):  # type: ignore[misc]
        def write_header_to_file(self, *arguments: Any) -> None:
            self.add_nextn_predict_layers(1)
            for tensor, module, more in (
                ("enorm", of_drafts.embedding_norm, plus),
                ("hnorm", of_drafts.hidden_norm, plus),
                ("eh_proj", of_drafts.project, 0),
                ("shared_head_norm", of_drafts.norm, plus),
            ):
                weight = module.weight.detach().float().numpy() + more
                self.add_tensor(f"blk.{count}.nextn.{tensor}.weight", weight)
            super().write_header_to_file(*arguments)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gguf_files.gguf, "GGUFWriter", WithDrafts)
        return gguf_files.write(models_zoo._root / f"{name}-mtp.gguf", longer)


@functools.cache
def oracle(name: str) -> Oracle:
    """The layer of models_zoo's model of that name."""
    return Oracle(name)


@functools.cache
def folder(name: str) -> Path:
    """A model folder of CASES[name] with its layer for drafts."""
    return save(oracle(name), models_zoo._root / f"{name}-mtp")
