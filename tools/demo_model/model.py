"""The network: a Llama written for quick training on few cores, with the weight names Hugging Face expects."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as functional
from torch import Tensor, nn


@dataclass(frozen=True)
class Shape:
    """The sizes of the network."""

    vocabulary: int = 2048
    hidden: int = 256
    layers: int = 6
    heads: int = 4
    kv_heads: int = 2
    head: int = 64
    intermediate: int = 704
    positions: int = 2048
    theta: float = 10000.0
    epsilon: float = 1e-6


DRAFT = Shape(hidden=96, layers=2, heads=2, kv_heads=1, intermediate=256)
"""A model of less than a tenth of the size, which drafts what the other one will say."""


class Block(nn.Module):
    """One transformer layer; projections that read the same input are one matrix, which is faster."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape = shape
        self.widths = [shape.heads * shape.head, shape.kv_heads * shape.head, shape.kv_heads * shape.head]
        self.attention_norm = nn.RMSNorm(shape.hidden, shape.epsilon)
        self.qkv = nn.Linear(shape.hidden, sum(self.widths), bias=False)
        self.out = nn.Linear(self.widths[0], shape.hidden, bias=False)
        self.mlp_norm = nn.RMSNorm(shape.hidden, shape.epsilon)
        self.gate_up = nn.Linear(shape.hidden, 2 * shape.intermediate, bias=False)
        self.down = nn.Linear(shape.intermediate, shape.hidden, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, future: Tensor) -> Tensor:
        """Apply attention and the gated feed-forward network."""
        rows, length, _ = x.shape
        shape = self.shape
        queries_keys, values = self.qkv(self.attention_norm(x)).split((sum(self.widths[:2]), self.widths[2]), -1)
        first, second = queries_keys.view(rows, length, shape.heads + shape.kv_heads, shape.head).chunk(2, -1)
        turned = torch.cat((first * cos - second * sin, second * cos + first * sin), -1).transpose(1, 2)
        values = values.view(rows, length, shape.kv_heads, shape.head).transpose(1, 2)
        share = shape.heads // shape.kv_heads
        queries, keys = turned[:, : shape.heads], turned[:, shape.heads :].repeat_interleave(share, 1)
        # Spelled out, because the fused attention of PyTorch is slow to differentiate on CPUs and rows are short.
        scores = (queries * shape.head**-0.5) @ keys.transpose(2, 3) + future
        mixed = scores.float().softmax(-1).to(values.dtype) @ values.repeat_interleave(share, 1)
        x = x + self.out(mixed.transpose(1, 2).reshape(rows, length, -1))
        gate, up = self.gate_up(self.mlp_norm(x)).chunk(2, -1)
        return x + self.down(functional.silu(gate) * up)


class Llama(nn.Module):
    """Embedding, layers, final norm; the head is the embedding again."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape = shape
        self.embedding = nn.Embedding(shape.vocabulary, shape.hidden)
        self.blocks = nn.ModuleList(Block(shape) for _ in range(shape.layers))
        self.norm = nn.RMSNorm(shape.hidden, shape.epsilon)
        angles = torch.arange(shape.positions)[:, None] * shape.theta ** (-torch.arange(0, shape.head, 2) / shape.head)
        self.register_buffer("cos", angles.cos()[:, None], persistent=False)
        self.register_buffer("sin", angles.sin()[:, None], persistent=False)
        for name, parameter in self.named_parameters():
            if parameter.dim() == 2:
                residual = name.endswith(("out.weight", "down.weight"))
                nn.init.normal_(parameter, std=0.02 / (2 * shape.layers) ** 0.5 if residual else 0.02)

    def forward(self, tokens: Tensor) -> Tensor:
        """Return the final hidden states, cast to the working type of the layers."""
        return self.states(self.embedding(tokens))

    def states(self, x: Tensor) -> Tensor:
        """Return the final hidden states of embeddings ``[rows, length, hidden]``."""
        length = x.shape[1]
        kind = torch.get_autocast_dtype(x.device.type) if torch.is_autocast_enabled(x.device.type) else x.dtype
        cos, sin = self.get_buffer("cos")[:length].to(kind), self.get_buffer("sin")[:length].to(kind)
        future = torch.full((length, length), float("-inf"), dtype=kind, device=x.device).triu(1)
        for block in self.blocks:
            x = block(x, cos, sin, future)
        hidden: Tensor = self.norm(x)
        return hidden

    def loss(self, tokens: Tensor, targets: Tensor) -> Tensor:
        """Return the mean cross-entropy over the targets that are not negative."""
        wanted = targets >= 0
        return functional.cross_entropy(self.logits(self(tokens)[wanted]), targets[wanted])

    def logits(self, hidden: Tensor) -> Tensor:
        """Return the logits, in float32, of final hidden states."""
        return functional.linear(hidden, self.embedding.weight).float()

    def load_hugging_face_weights(self, weights: dict[str, Tensor]) -> None:
        """Take the weights of such a folder."""
        with torch.no_grad():
            self.embedding.weight.copy_(weights["model.embed_tokens.weight"])
            self.norm.weight.copy_(weights["model.norm.weight"])
            for number, block in enumerate(self.blocks):
                assert isinstance(block, Block)
                at = f"model.layers.{number}."
                block.qkv.weight.copy_(torch.cat([weights[f"{at}self_attn.{name}_proj.weight"] for name in "qkv"]))
                block.out.weight.copy_(weights[at + "self_attn.o_proj.weight"])
                gate_up = [weights[f"{at}mlp.{name}_proj.weight"] for name in ("gate", "up")]
                block.gate_up.weight.copy_(torch.cat(gate_up))
                block.down.weight.copy_(weights[at + "mlp.down_proj.weight"])
                block.attention_norm.weight.copy_(weights[at + "input_layernorm.weight"])
                block.mlp_norm.weight.copy_(weights[at + "post_attention_layernorm.weight"])

    def hugging_face_weights(self) -> dict[str, Tensor]:
        """Return the weights in bfloat16 under the names of ``LlamaForCausalLM`` (the tied head is left out)."""
        named = {"model.embed_tokens.weight": self.embedding.weight, "model.norm.weight": self.norm.weight}
        for number, block in enumerate(self.blocks):
            assert isinstance(block, Block)
            at = f"model.layers.{number}."
            query, key, value = block.qkv.weight.split(block.widths)
            gate, up = block.gate_up.weight.chunk(2)
            named |= {
                at + "self_attn.q_proj.weight": query,
                at + "self_attn.k_proj.weight": key,
                at + "self_attn.v_proj.weight": value,
                at + "self_attn.o_proj.weight": block.out.weight,
                at + "mlp.gate_proj.weight": gate,
                at + "mlp.up_proj.weight": up,
                at + "mlp.down_proj.weight": block.down.weight,
                at + "input_layernorm.weight": block.attention_norm.weight,
                at + "post_attention_layernorm.weight": block.mlp_norm.weight,
            }
        return {name: weight.detach().to("cpu", torch.bfloat16).contiguous() for name, weight in named.items()}
